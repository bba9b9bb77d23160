"""The figures of a run, worked out of what it recorded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_adaptive.telemetry.recorded import Point, RecordedRun, whole_windows

PARTS = ("compute", "compress", "exposed", "decompress")


@dataclass(frozen=True)
class Run:
    """A run with a name.

    Args:
        name: shown for it, different from other runs'.
        recorded: what it recorded.
    """

    name: str
    recorded: RecordedRun

    def mean(self, tag: str) -> float:
        """The mean per step of a tag, without the first record (kernels compile in it); NaN if none."""
        points = self.recorded.series(tag)
        if len(points) < 2:
            return points[0].value if points else math.nan
        weights = [after.step - before.step for before, after in itertools.pairwise(points)]
        values = [point.value for point in points[1:]]
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    def last(self, *tags: str) -> float:
        """The last value of the first of these tags that there is; NaN if none is."""
        series = next((each for tag in tags if (each := self.recorded.series(tag))), [])
        return series[-1].value if series else math.nan

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds per step of each part."""
        return {part: self.mean(f"time/{part}_ms") for part in PARTS}

    @property
    def exposed_share(self) -> float:
        """Exposed communication in a step, from 0 to 1."""
        total = self.mean("time/step_ms")
        return self.mean("time/exposed_ms") / total if total else math.nan

    @property
    def score(self) -> tuple[str, float]:
        """The held-out score that was recorded last: its name and value."""
        for name in ("perplexity", "accuracy", "loss"):
            value = self.last(f"held_out/{name}")
            if not math.isnan(value):
                return name, value
        return "", math.nan

    @property
    def verdict(self) -> str:
        """What the run said at its end, or what its parts say."""
        said = self.recorded.texts.get("verdict")
        if said:
            return said[-1][1]
        share = self.exposed_share
        return "" if math.isnan(share) else f"{100 * share:.0f} % exposed (the run has not ended yet)"

    def over_steps(self, tag: str) -> list[tuple[float, float]]:
        """A tag's means over the steps, without that of a last record of few steps."""
        return pairs(whole_windows(self.recorded.series(tag)))

    def loss_over(self, seconds: bool) -> list[tuple[float, float]]:
        """The training loss over the steps, or over the seconds since the first record of a step."""
        series = self.recorded.series("train/loss") or self.recorded.series("loss/rank_0")
        if not seconds:
            return pairs(series)
        started = min((each[0].time for each in self.recorded.scalars.values() if each), default=0.0)
        return [(point.time - started, point.value) for point in series]


@dataclass(frozen=True)
class Decision:
    """A plan that took effect.

    Args:
        step: from which on it counts.
        version: its number.
        changed: layers that do something else than before.
        layers: how many there are.
        wire_bytes: of one rank in a step.
        ratio: dense bytes / these.
        reasons: why, in words.
        figures: what the planner reported with it.
    """

    step: int
    version: int
    changed: int
    layers: int
    wire_bytes: int
    ratio: float
    reasons: tuple[str, ...]
    figures: Mapping[str, float]


def decisions(run: RecordedRun) -> list[Decision]:
    """All plans of a run, in order."""
    said = dict(run.texts.get("plan/reasons", []))
    reported: dict[int, dict[str, float]] = {}
    for name, series in run.under("plan/").items():
        for point in series:
            reported.setdefault(point.step, {})[name] = point.value
    found: list[Decision] = []
    before: dict[str, tuple[Any, ...]] = {}
    for step, plan in run.plans:
        now = {row["layer"]: _does(row) for row in plan["layers"]}
        wire = sum(row["wire_bytes"] for row in plan["layers"])
        dense = sum(row["dense_bytes"] for row in plan["layers"])
        reasons = [*plan.get("reasons", []), *said.get(step, "").split("; ")]
        reasons.append(_occasion(run, step, reported.get(step, {})))
        found.append(
            Decision(
                step,
                int(plan.get("version", 0)),
                sum(before.get(name) != does for name, does in now.items()),
                len(now),
                wire,
                dense / max(1, wire),
                tuple(dict.fromkeys(reason for reason in reasons if reason)),
                reported.get(step, {}),
            )
        )
        before = now
    return found


def _occasion(run: RecordedRun, step: int, figures: Mapping[str, float]) -> str:
    """What led to a plan, as far as the step and the planner's figures tell."""
    dense_steps = int(run.configuration.get("dense_steps") or 0)
    if not figures:
        if step == dense_steps and step > 0:
            return "the dense steps have ended"
        return "dense steps" if step < dense_steps else "as configured" if step == 0 else ""
    bounds = []
    for name, limit in (("error", "max_error"), ("bytes", "max_bytes")):
        value, most = figures.get(name, math.nan), figures.get(limit, math.nan)
        if most > 0 and value >= 0.95 * most:
            bounds.append(f"{name} at {min(value / most, 1):.1%} of what is allowed")
    return ", ".join(bounds)


def pairs(series: list[Point]) -> list[tuple[float, float]]:
    """Steps and values."""
    return [(point.step, point.value) for point in series]


def _does(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a layer does: the same as before or not."""
    return row.get("compressor"), row.get("level"), row.get("scheme")
