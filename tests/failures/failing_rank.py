"""Trains until one rank fails: ``failing_rank.py HOW RANK FOLDER [PLANNER]``; HOW is a key of FAILURES.

Every rank leaves a file with its process's number in FOLDER, the failing one the time of its failure.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

STEPS_BEFORE = 20


def _raise(message: str) -> None:
    raise ValueError(message)


FAILURES: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stall": lambda: time.sleep(1e6),
    "raise": lambda: _raise("bad data"),
    "leave 0": lambda: sys.exit(0),
    "leave 3": lambda: sys.exit(3),
    # the other ways need more than the moment: see train()
    "all raise": lambda: _raise("bad data everywhere"),
    "wrong argument": lambda: None,
    "wait in a channel": lambda: _raise("bad data"),
    "planner": lambda: None,
}


def train(
    how: str, failing: int, folder: Path, planner: str | None = None, steps: int = STEPS_BEFORE
) -> None:
    """Steps without end.

    Args:
        how: a key of FAILURES.
        failing: the rank.
        folder: for the files.
        planner: of the optimizer.
        steps: before the failure.
    """
    import horovod.torch as hvd
    import torch

    import hvd_adaptive as hva
    from tests.harness.eager import without_compiler

    without_compiler()
    hvd.init()
    (folder / f"rank-{hvd.rank()}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    if how == "wrong argument":
        _tell_the_time(folder)
    if how == "planner":
        _spoil(planner, folder)
    optimizer = hva.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression="topk:density=7" if how == "wrong argument" else "topk:density=0.1",
        scheme={"0.*": "two_shot", "*": "allgather"},
        planner=planner,
    )
    if how == "wait in a channel":
        _wait_in_a_channel(hvd.rank() == failing, folder)
    step = 0
    while True:
        if step == steps and how != "planner":
            _fail(how, hvd.rank() == failing, folder)
        optimizer.zero_grad()
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        step += 1


def _fail(how: str, here: bool, folder: Path) -> None:
    if here:
        _tell_the_time(folder)
    if here or how == "all raise":
        FAILURES[how]()


def _tell_the_time(folder: Path) -> None:
    (folder / "failed").write_text(str(time.time()))


def _wait_in_a_channel(here: bool, folder: Path) -> None:
    """Be in mpi4py when Horovod ends MPI."""
    import numpy as np

    from hvd_adaptive.comm.horovod_channel import MpiChannel

    channel = MpiChannel()
    channel.mean(np.ones(3))()
    _fail("wait in a channel", here, folder)
    channel.mean(np.ones(3))()


def _spoil(planner: str | None, folder: Path) -> None:
    """Let the planner fail when it plans."""
    from hvd_adaptive import planning

    def plan(self: object, facts: object) -> None:
        _tell_the_time(folder)
        raise ZeroDivisionError("nothing to divide")

    type(planning.parse(planner or "").planner(2)).plan = plan  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    how, failing, folder, *more = sys.argv[1:]
    train(how, int(failing), Path(folder), *more[:1], *map(int, more[1:]))
