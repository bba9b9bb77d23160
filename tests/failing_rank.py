"""Trains until one rank fails: ``failing_rank.py HOW RANK FOLDER``; HOW is kill, raise or stall.

Every rank leaves a file with its process's number in FOLDER, the failing one the time of its failure.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import hvd_adaptive as hva

STEPS_BEFORE = 20


def fail(how: str, folder: Path) -> None:
    """What goes wrong."""
    (folder / "failed").write_text(str(time.time()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raise":
        raise ValueError("bad data")
    time.sleep(1e6)


def main() -> None:
    """Steps without end."""
    how, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    hvd.init()
    (folder / f"rank-{hvd.rank()}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    optimizer = hva.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression="topk:density=0.1",
    )
    step = 0
    while True:
        if step == STEPS_BEFORE and hvd.rank() == rank:
            fail(how, folder)
        optimizer.zero_grad()
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        step += 1


main()
