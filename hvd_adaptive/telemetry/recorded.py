"""A run as its `telemetry.jsonl` tells it."""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvd_adaptive.telemetry.tags import modern

__all__ = ["Point", "RecordedRun", "load", "read", "whole_windows"]


class Point(NamedTuple):
    """A number, the step that it is of, and when it was written (seconds since the epoch)."""

    step: int
    value: float
    time: float


@dataclass
class RecordedRun:
    """What telemetry.jsonl holds, by today's tags.

    A run that was resumed repeats steps: the later record of a step counts, and those after it that
    were written before are dropped.

    Args:
        scalars: by tag; a null is left out.
        texts: by tag: steps and texts.
        plans: steps and plans, as ``Plan.record()`` makes them.
    """

    scalars: dict[str, list[Point]] = field(default_factory=lambda: defaultdict(list))
    texts: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    plans: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def under(self, prefix: str) -> dict[str, list[Point]]:
        """The scalars whose tags begin so, without it."""
        return {
            tag.removeprefix(prefix): series
            for tag, series in sorted(self.scalars.items())
            if tag.startswith(prefix)
        }

    def series(self, tag: str) -> list[Point]:
        """A tag's numbers; empty where there are none."""
        return self.scalars.get(tag, [])

    @property
    def configuration(self) -> dict[str, str]:
        """The run's settings."""
        tables = self.texts.get("configuration")
        if not tables:
            return {}
        rows = (line.strip("| ").split(" | ", 1) for line in tables[-1][1].splitlines()[2:])
        return {
            row[0].rstrip(" |"): row[1].replace(r"\|", "|") if len(row) == 2 else "" for row in rows
        }

    @property
    def last_step(self) -> int:
        """The last step of which anything is recorded."""
        ends = [series[-1].step for series in self.scalars.values() if series]
        return max([*ends, *(step for step, _ in self.plans[-1:])], default=0)

    def add(self, record: dict[str, Any]) -> None:
        """One line of the file, parsed."""
        step, time = int(record["step"]), float(record.get("time", 0.0))
        for old, number in record.get("scalars", {}).items():
            if number is not None:
                tag, value = modern(old, number)
                series = self.scalars[tag]
                while series and series[-1].step >= step:
                    series.pop()
                series.append(Point(step, value, time))
        for tag, text in record.get("texts", {}).items():
            self.texts[tag].append((step, text))
        if "plan" in record:
            while self.plans and self.plans[-1][0] >= step:
                self.plans.pop()
            self.plans.append((step, record["plan"]))


def whole_windows(series: list[Point]) -> list[Point]:
    """A series of means without a last one of less than half as many steps as the others.

    A run that ends between two records writes what it has: the mean of a step or two, which looks like
    a cliff beside the means of ten.

    Example:
        >>> means = [Point(step, 1.0, 0.0) for step in (10, 20, 30, 32)]
        >>> [point.step for point in whole_windows(means)]
        [10, 20, 30]
    """
    steps = [after.step - before.step for before, after in itertools.pairwise(series)]
    if len(steps) > 1 and 2 * steps[-1] < statistics.median(steps[:-1]):
        return series[:-1]
    return series


def read(lines: Iterable[str]) -> RecordedRun:
    """Parse a file; a last line without its end, of a run that is being written, is left out.

    Raises:
        ValueError: names the line that is no record.
    """
    run = RecordedRun()
    for number, line in enumerate(lines, start=1):
        try:
            run.add(json.loads(line))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            if not line.endswith("\n"):
                break
            raise ValueError(f"line {number} is no record of a trace: {error!r}") from error
    return run


def load(run: str | os.PathLike[str]) -> RecordedRun:
    """Read a run's folder, or its telemetry.jsonl.

    Raises:
        OSError: there is none.
        ValueError: it is none.
    """
    path = Path(run)
    file = path / "telemetry.jsonl" if path.is_dir() or not path.suffix else path
    with file.open(encoding="utf-8") as lines:
        return read(lines)
