"""One rank that is stopped and resumed, with whatever can be wrong then; for torchrun.

    torchrun --nproc-per-node 2 resume_rank.py FOLDER

Each rank writes FOLDER/rank-N.json: what it found, by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_adaptive as hva
from hvd_adaptive.resume import Checkpoints, Position, RunError, StopVote, require_equal

STEPS = 200
SIGNALED = 20


def main(folder: Path) -> None:
    hva.init()
    rank = torch.distributed.get_rank()
    found = {
        "whole": train(folder / "whole", rank),
        "stopped": train(folder / "stopped", rank, signaled=SIGNALED),
        "resumed": train(folder / "stopped", rank),
        "hooked": hooked(folder / "hooked"),
        "other identity": error_of(lambda: checkpoints(folder / "whole", model="another").restore()),
        "no checkpoint": error_of(lambda: checkpoints(folder / "none").restore(required=True)),
        "other options": error_of(lambda: require_equal("options", {"rate": 0.1 * (1 + rank)})),
    }
    if rank == 1:
        file = folder / "whole" / f"step-{STEPS:09d}.rank-1.pt"
        file.write_bytes(file.read_bytes()[:-1])
    found["damaged"] = error_of(lambda: checkpoints(folder / "whole").restore())
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def checkpoints(folder: Path, model: str = "small") -> Checkpoints:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = hva.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9),
        named_parameters=network.named_parameters(),
        compression="topk:density=0.05",
    )
    return Checkpoints(folder, {"model": model}, network, optimizer)


def train(folder: Path, rank: int, signaled: int = -1) -> dict[str, Any]:
    saved = checkpoints(folder)
    stop = StopVote()
    start = saved.restore() or Position()
    for step in range(start.step, STEPS):
        if stop.poll():
            saved.save(Position(step))
            return {"from": start.step, "step": step, "status": stop.exit_code}
        if rank == 1 and step == signaled:
            os.kill(os.getpid(), signal.SIGUSR1)
        take_step(saved, step)
        time.sleep(0.005)
    saved.save(Position(STEPS))
    stop.close()
    return {"from": start.step, "step": STEPS, "status": stop.exit_code, "weights": digest(saved)}


def take_step(saved: Checkpoints, step: int) -> None:
    # The same draws in each run, and others on each rank.
    torch.manual_seed(1000 * step + saved.rank)
    inputs = torch.randn(16, 64)
    saved.optimizer.zero_grad()
    (saved.model(inputs) - inputs[:, :1]).square().mean().backward()
    saved.optimizer.step()


def hooked(folder: Path) -> dict[str, Any]:
    """A model of DDP, whose hook has the compression state; steps after a restart are as before it."""

    def make() -> Checkpoints:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        hook = hva.ddp_comm_hook(model, "topk:density=0.05", optimizer=optimizer)
        return Checkpoints(folder, {}, model, optimizer, compression=hook)

    first = make()
    for step in range(3):
        take_step(first, step)
    first.save(Position(3))
    take_step(first, 3)
    second = make()
    position = second.restore()
    assert position is not None
    take_step(second, position.step)
    return {"first": digest(first), "second": digest(second)}


def digest(saved: Checkpoints) -> str:
    values = torch.cat([value.detach().flatten() for value in saved.model.parameters()])
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except RunError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
