"""One job of whole_runs.py: whole trainings in turn, some steps of one and then of the next.

    mpirun -np 4 python -m benchmarks.workers.whole_run_rank --steps 2800 --turn 20 --every 140 \\
        --floor 0.02 --result FILE '["--preset", "mlp-fashion", "--compression", "auto"]' ...

Each list holds the arguments of one training, as of launch/train.py; each has a model, data and a clock
of its own. The clock runs in its steps only, and holds all that they measure, plan and try; but not the
loading of kernels, which a process does once, whichever training comes first.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import horovod.torch as hvd
import torch

import hvd_adaptive as hva
from benchmarks.workers.presets import prepare
from hvd_adaptive.commands.precompile import precompile
from launch.training import data
from launch.training.main import make_optimizer


class Training:
    """One of them.

    Args:
        words: of train.py.
        steps: in all.
        floor: share of the highest learning rate at which it ends.
    """

    def __init__(self, words: Sequence[str], steps: int, floor: float) -> None:
        self._steps, self._floor = steps, floor
        preset = prepare(words)
        self._optimizer, self._meter = make_optimizer(preset.options, preset.model)
        if hasattr(self._optimizer, "set_horizon"):
            self._optimizer.set_horizon(steps)
        self._preset = replace(preset, rule=self._optimizer)
        self._batches = preset.forever()
        self._done, self._seconds = 0, 0.0
        self._away = ExitStack()
        self.evaluations: list[dict[str, float]] = []

    def turn(self, steps: int, every: int) -> None:
        """Train for so many steps, and see how good it is if that is due."""
        self._away.close()
        for _ in range(min(steps, self._steps - self._done)):
            started = perf_counter()
            self._preset.set_rate(self._done, self._steps, hvd.size(), self._floor)
            self._preset.step(self._optimizer, next(self._batches))
            self._seconds += perf_counter() - started
            self._done += 1
            if self._done % every == 0 or self._done == self._steps:
                at = {"step": self._done, "seconds": round(self._seconds, 3)}
                with self._meter.paused():
                    self.evaluations.append(at | self._preset.score() | self._deciding())
        self._away.enter_context(self._meter.paused())  # the time of the others is not its own

    def _deciding(self) -> dict[str, float]:
        """The share of the time that a planner has counted for its decisions, where one does."""
        reducer = getattr(self._optimizer, "_reducer", None)
        outlook = None if reducer is None else reducer.controller.outlook
        return {} if outlook is None else {"deciding": outlook.deciding_share}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, required=True, help="of each training")
    parser.add_argument("--turn", type=int, required=True, help="steps in a row of one training")
    parser.add_argument("--every", type=int, required=True, help="steps between evaluations")
    parser.add_argument("--floor", type=float, default=0.0, help="of the learning rate (%(default)s)")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("trainings", nargs="+", type=json.loads)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hva.init(hierarchical=True)
    precompile()
    # Cutting a text into words takes seconds.
    data.load = functools.cache(data.load)
    trainings = [Training(words, options.steps, options.floor) for words in options.trainings]
    for number in range(-(-options.steps // options.turn)):
        # what comes after what must not matter
        for training in trainings[:: -1 if number % 2 else 1]:
            training.turn(options.turn, options.every)
    if hvd.rank() == 0:
        options.result.write_text(json.dumps([each.evaluations for each in trainings]))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
