"""A user's training script, as docs/batch-jobs.md shows it: for Horovod's launchers and torchrun."""

import argparse
import sys
import time

import torch

import hvd_adaptive as hva
from hvd_adaptive.resume import Checkpoints, Position, StopVote

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-dir", required=True)
parser.add_argument("--resume", choices=("auto",), default="auto")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--compression", default="topk:density=0.05")
parser.add_argument("--pause", type=float, default=0.0, help="seconds per step, for tests")
options = parser.parse_args()

hva.init()
stop = StopVote()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = hva.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=options.compression,
)

checkpoints = Checkpoints(options.checkpoint_dir, {"model": "small"}, model, optimizer)
start = checkpoints.restore() or Position()
for step in range(start.step, options.steps):
    if stop.poll():
        checkpoints.save(Position(step))
        sys.exit(stop.exit_code)
    torch.manual_seed(1000 * step + checkpoints.rank)
    inputs = torch.randn(16, 64)
    optimizer.zero_grad()
    (model(inputs) - inputs[:, :1]).square().mean().backward()
    optimizer.step()
    if checkpoints.rank == 0 and step % 10 == 0:
        print(f"step {step} of {options.steps}, from {start.step}", flush=True)
    time.sleep(options.pause)
checkpoints.save(Position(options.steps))
stop.close()
