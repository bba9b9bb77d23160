"""Digits, as many Horovod scripts train on them: knows nothing of hvd_adaptive."""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from made_data import images
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--save")
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5)
        self.conv2 = nn.Conv2d(8, 16, 5)
        self.dropout = nn.Dropout2d()
        self.fc1 = nn.Linear(256, 48)
        self.fc2 = nn.Linear(48, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.dropout(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(epoch: int) -> None:
    model.train()
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        F.nll_loss(model(data), target).backward()
        optimizer.step()


def accuracy() -> float:
    model.eval()
    data, target = held_out.tensors
    with torch.no_grad():
        right = (model(data).argmax(1) == target).float().mean()
    return float(hvd.allreduce(right, name="accuracy"))


hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
train_set, held_out = images(512, 1, 28, 10, seed=2), images(256, 1, 28, 10, seed=3)
sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train_set, batch_size=32, sampler=sampler)
model = Net()
scale = 1 if args.use_adasum else hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)
for epoch in range(args.epochs):
    train(epoch)
reached = accuracy()
if hvd.rank() == 0:
    print(f"accuracy {reached:.3f}")
    if args.save:
        torch.save(model.state_dict(), args.save)
