"""Images per second on random data; imports the optimizer by name. Knows nothing of hvd_adaptive."""

from __future__ import annotations

import argparse
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from horovod.torch import DistributedOptimizer
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--num-iters", type=int, default=3)
parser.add_argument("--num-batches-per-iter", type=int, default=4)
parser.add_argument("--save")
args = parser.parse_args()

hvd.init()
torch.manual_seed(7)
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(784, 100)
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

torch.manual_seed(100 + hvd.rank())
data = torch.randn(args.batch_size, 3, 32, 32)
target = torch.randint(100, (args.batch_size,))


def benchmark_step() -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()


rates = []
for _ in range(args.num_iters):
    started = time.perf_counter()
    for _ in range(args.num_batches_per_iter):
        benchmark_step()
    rates.append(args.num_batches_per_iter * args.batch_size / (time.perf_counter() - started))
if hvd.rank() == 0:
    print(f"images/s on {hvd.size()} ranks: {hvd.size() * max(rates):.0f}")
    if args.save:
        torch.save(model.state_dict(), args.save)
