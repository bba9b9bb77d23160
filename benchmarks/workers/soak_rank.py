"""What soak.py runs on every rank: trains, and compares the ranks' parameters, until its time is up.

Rank 0 prints JSON lines: once the processes of all ranks, one for every comparison, and one at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
from torch import nn

import hvd_adaptive as hva
from hvd_adaptive.resume import EXIT_CODES, Position, StopVote
from launch.training import main as train
from launch.training import options as command_line
from launch.training.loop import train_step
from launch.training.options import TrainingOptions


class Switches:
    """Counts how often the levels of a plan change."""

    def __init__(self) -> None:
        self.count = 0
        self._version, self._levels = 0, ""

    def look(self, plan: Any) -> None:
        """After every step."""
        if plan.version == self._version:
            return
        self._version = plan.version
        levels = str([(row.compressor, row.level) for row in plan])
        self.count += levels != self._levels
        self._levels = levels


def checksum(model: nn.Module) -> str:
    """Of all parameters' bits."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().data)
    return digest.hexdigest()


def tell(record: dict[str, Any]) -> None:
    """From rank 0 to soak.py."""
    if hvd.rank() == 0:
        print(json.dumps(record), flush=True)


def soak(options: TrainingOptions, seconds: float, every: int) -> int:
    """Train until the first comparison after so long; returns the exit status."""
    vote = StopVote()
    train.set_threads(options.threads)
    task = train.load_data(options)
    model = train.make_model(options, task)
    optimizer, meter = train.make_optimizer(options, model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    batches = train.make_batches(options, task)
    schedule = train.make_schedule(options, batches.steps_per_epoch)
    tell({"processes": hvd.allgather_object(os.getpid(), name="soak.processes")})

    started, switches, asked = time.monotonic(), Switches(), False
    for position, parts in batches.forever(Position()):
        if vote.poll():
            break
        train.set_rate(optimizer, schedule.rate(position.step))
        loss = train_step(model, optimizer, parts, options.clip)
        switches.look(optimizer.plan)
        done = position.step + 1
        if done % every == 0:
            trained = time.monotonic() - started
            mine = {"parameters": checksum(model), "plan": optimizer.plan.digest}
            everyone = hvd.allgather_object(mine, name="soak.checksum")
            tell(
                {
                    "step": done,
                    "seconds": round(trained, 1),
                    "parameters": [each["parameters"] for each in everyone],
                    "plans": [each["plan"] for each in everyone],
                    "switches": switches.count,
                    "loss": round(loss, 4),
                    "payload_ratio": round(meter.summary().ratio_payload, 1),
                }
            )
            # Not before a comparison: steps that none follows count for nothing.
            if not asked and hvd.rank() == 0 and trained >= seconds:
                asked = True
                signal.raise_signal(signal.SIGUSR1)  # becomes a vote, so that all end at the same step
    tell({"ended": round(time.monotonic() - started, 1)})
    return 0 if vote.outcome == signal.SIGUSR1 else EXIT_CODES[vote.outcome]


def main(arguments: Sequence[str] | None = None) -> int:
    """Everything that is not known here is train.py's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--every", type=int, default=100, help="steps between two comparisons")
    mine, others = parser.parse_known_args(arguments)
    hva.init()
    return soak(command_line.parse(others), mine.seconds, mine.every)


if __name__ == "__main__":
    sys.exit(main())
