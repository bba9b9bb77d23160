"""The file of --result: what a run cost and how good its model became, for other programs to read."""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .display import Costs
from .loop import Score, StepClock
from .options import TrainingOptions


@dataclass(frozen=True)
class Evaluation:
    """A score during the training.

    Args:
        step: optimizer steps done.
        seconds: that they took on this rank; evaluations and checkpoints are left out.
        score: on the held-out examples.
    """

    step: int
    seconds: float
    score: Score

    def as_dict(self) -> dict[str, float]:
        return {"step": self.step, "seconds": self.seconds} | self.score.scalars()


def describe(options: TrainingOptions, ranks: int, dense_bytes: int, costs: Costs) -> dict[str, Any]:
    """What was run, and what one of its steps costs."""
    return {
        "identity": options.identity(),
        "options": options.as_text(),
        "ranks": ranks,
        "samples_per_step": options.batch_size * options.accumulate * ranks,
        "dense_bytes": dense_bytes,
        "costs": asdict(costs) | {"compute": costs.compute},
    }


def course(clock: StepClock, train_loss: float, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """How the training went; the last of the evaluations is the one at its end."""
    last = evaluations[-1]
    return {
        "steps": last.step,
        "train_loss": train_loss,
        "held_out": last.score.scalars() | {"examples": last.score.examples},
        "evaluations": [each.as_dict() for each in evaluations],
        "seconds_per_step": spread(clock.warm()),
        # Of this run alone, also where it went on from a checkpoint.
        "step_seconds": clock.seconds,
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and 90th percentile; NaN without any."""
    if not seconds:
        return dict.fromkeys(("mean", "median", "p90"), math.nan)
    ordered = sorted(seconds)
    return {
        "mean": math.fsum(ordered) / len(ordered),
        "median": statistics.median(ordered),
        "p90": ordered[math.ceil(0.9 * len(ordered)) - 1],
    }


def check_writable(path: Path) -> None:
    """Before a long training finds at its end that its file cannot be written."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def write(path: Path, content: dict[str, Any]) -> None:
    """All of it or nothing: a reader never sees half a file. What is unknown (NaN) becomes null."""
    text = json.dumps(_without_nan(content), indent=1, allow_nan=False, default=str)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text + "\n")
    os.replace(part, path)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
