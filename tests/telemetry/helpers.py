"""A clock, a sink and readers of files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.planning.plan import LayerPlan, Plan
from hvd_adaptive.telemetry import Meter


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A sink that keeps what it gets, and fails on demand."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.texts: list[tuple[int, str, str]] = []
        self.plans: list[tuple[int, Plan]] = []
        self.closed = 0
        self.failure: Exception | None = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self.failure is not None:
            raise self.failure
        self.records.append((step, dict(values)))

    def text(self, tag: str, text: str, step: int) -> None:
        self.texts.append((step, tag, text))

    def plan(self, plan: Plan, step: int) -> None:
        self.plans.append((step, plan))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


def run_step(meter: Meter, clock: Clock, step: int, seconds: float, **bucket: Any) -> None:
    clock.now += seconds
    meter.bucket(0, **bucket)
    meter.end_step(step)


def tensorboard_scalars(logdir: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = tensorboard_events(logdir)
    tags = accumulator.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags}


def tensorboard_events(logdir: Path) -> Any:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = module.EventAccumulator(str(logdir), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def json_lines(logdir: Path) -> list[dict[str, Any]]:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (logdir / "telemetry.jsonl").read_text()
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


def plan_of(*wire_bytes: int, step: int = 0) -> Plan:
    rows = [
        LayerPlan(f"layer{index}", (8, 8), "topk", 0.1, "allgather", nbytes, 256, error=1.0, energy=4.0)
        for index, nbytes in enumerate(wire_bytes)
    ]
    return Plan(tuple(rows), version=step, step=step)
