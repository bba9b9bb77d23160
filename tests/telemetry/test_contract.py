"""What every sink does: one row per member of ``MEMBERS``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_adaptive.telemetry import JsonLinesSink, Sink, TensorBoardSink
from tests.telemetry.helpers import Recorder, plan_of

MEMBERS: dict[str, Callable[[Path], Sink]] = {
    "JsonLinesSink": JsonLinesSink,
    "TensorBoardSink": TensorBoardSink,
    "Recorder": lambda folder: Recorder(),
}


@pytest.fixture(params=MEMBERS)
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Sink:
    return MEMBERS[request.param](tmp_path / "new" / "folder")


def test_a_sink_has_the_methods_of_the_contract_with_their_arguments(sink: Sink) -> None:
    for name, method in inspect.getmembers(Sink, inspect.isfunction):
        if not name.startswith("_"):
            wanted = [*inspect.signature(method).parameters][1:]
            assert [*inspect.signature(getattr(sink, name)).parameters] == wanted, name


def test_a_sink_takes_numbers_texts_and_plans_in_any_order_and_can_be_closed(sink: Sink) -> None:
    sink.plan(plan_of(8, 256), 3)
    sink.scalars(2, {"x": 1.0, "not finite": math.nan, "large": math.inf})
    sink.text("note", "a | b\nc", 1)
    sink.scalars(2, {})
    sink.flush()
    sink.plan(plan_of(8), 4)
    sink.flush()
    sink.close()
