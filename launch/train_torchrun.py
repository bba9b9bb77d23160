"""Training with compressed gradients under torchrun, on a machine without Horovod and MPI.

    pip install .
    torchrun --nproc-per-node 2 launch/train_torchrun.py

The model learns which of 10 random directions a point was moved along; every rank draws points of its
own. What a script of your own needs is marked with a star.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hvd_adaptive as hva

CLASSES, FEATURES = 10, 256


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points, and the classes that they belong to."""
    centers = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return centers[labels] / 4 + torch.randn(count, FEATURES, generator=generator), labels


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compression", default="qsgd:bits=4", help="as of DistributedOptimizer")
    parser.add_argument("--planner", help="as of DistributedOptimizer")
    parser.add_argument("--telemetry", help="folder for TensorBoard and JSON lines")
    parser.add_argument("--steps", type=int, default=300)
    return parser.parse_args()


def main() -> None:
    """Train, and say how well it went."""
    chosen = options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # * what compression="auto" decides
    hva.init()  # * or torch.distributed.init_process_group(), where a script does so already
    rank = dist.get_rank()
    torch.manual_seed(0)  # * the same weights on all ranks; a loaded model is sent by dist.broadcast
    model = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, CLASSES))
    optimizer: Any = hva.DistributedOptimizer(  # *
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=chosen.compression,
        planner=chosen.planner,
        telemetry=chosen.telemetry,
    )
    for step in range(chosen.steps):
        inputs, labels = points(64, seed=1 + step * dist.get_world_size() + rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    if rank == 0:
        inputs, labels = points(10_000, seed=2**40)
        score = (model(inputs).argmax(1) == labels).double().mean()
        print(optimizer.meter.summary().table())
        print(f"held-out accuracy {100 * score:.2f}% of {len(labels):,} points")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
