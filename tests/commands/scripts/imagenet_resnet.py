"""A residual network with accumulated passes, warmup, checkpoints and averaged metrics.

Gets the optimizer from Horovod's own module. Knows nothing of hvd_adaptive.
"""

from __future__ import annotations

import argparse
import os

import horovod.torch as hvd
import horovod.torch.optimizer
import torch
import torch.nn.functional as F
from made_data import images
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--warmup-epochs", type=float, default=1)
parser.add_argument("--checkpoint-format", default="")
parser.add_argument("--save")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Metric:
    """The mean over steps and ranks."""

    def __init__(self, name: str) -> None:
        self.name, self.sum, self.count = name, torch.tensor(0.0), 0

    def update(self, value: torch.Tensor) -> None:
        self.sum += hvd.allreduce(value.detach(), name=self.name)
        self.count += 1

    @property
    def mean(self) -> float:
        return float(self.sum) / self.count


def adjust_learning_rate(epoch: int, batch: int) -> None:
    done = epoch + (batch + 1) / len(loader)
    scale = min(1.0, done / args.warmup_epochs) * hvd.size() * args.batches_per_allreduce
    for group in optimizer.param_groups:
        group["lr"] = 0.005 * scale


def train(epoch: int) -> float:
    model.train()
    sampler.set_epoch(epoch)
    loss_of_epoch = Metric("loss")
    for batch, (data, target) in enumerate(loader):
        adjust_learning_rate(epoch, batch)
        optimizer.zero_grad()
        step = data.shape[0] // args.batches_per_allreduce
        for first in range(0, data.shape[0], step):
            loss = F.cross_entropy(model(data[first : first + step]), target[first : first + step])
            loss_of_epoch.update(loss)
            (loss / args.batches_per_allreduce).backward()
        optimizer.step()
    return loss_of_epoch.mean


hvd.init()
torch.manual_seed(3)
torch.set_num_threads(1)
resume_from = 0
if args.checkpoint_format:
    while os.path.exists(args.checkpoint_format.format(epoch=resume_from + 1)):
        resume_from += 1
resume_from = int(hvd.broadcast(torch.tensor(resume_from), root_rank=0, name="resume_from"))
data = images(256, 3, 16, 10, seed=4)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=16 * args.batches_per_allreduce, sampler=sampler)
model = nn.Sequential(
    nn.Conv2d(3, 12, 3, padding=1), Block(12), nn.AvgPool2d(2), Block(12),
    nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=5e-5)
optimizer = horovod.torch.optimizer.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.none,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Average,
)
if resume_from > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for epoch in range(resume_from, args.epochs):
    loss = train(epoch)
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss:.3f}")
        if args.checkpoint_format:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))
if hvd.rank() == 0 and args.save:
    torch.save(model.state_dict(), args.save)
