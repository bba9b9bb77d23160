"""What bandwidth_trace.py and adaptive.py find in runs that were made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.accuracy import adaptive
from benchmarks.network import bandwidth_trace


def test_an_estimate_is_compared_with_what_tcp_gets() -> None:
    rate = 0.95 * 60e6 / 8
    estimates = [(60, 3 * rate), (72, 2 * rate), (84, 1.1 * rate), (96, 1.04 * rate), (108, 0.9 * rate)]
    found = bandwidth_trace.followed(estimates, 60, start=70, end=120)
    assert found["steps"] == 14
    assert (found["error"], found["worst"]) == pytest.approx((-0.03, -0.1))
    assert bandwidth_trace.followed(estimates, 600, start=70, end=120)["steps"] is None


def run_of(late: float, traffic: float, steps: int = 240) -> dict[str, Any]:
    """A run of which so large a share of the steps is late."""
    seconds = [
        bandwidth_trace.SECONDS * (1.5 if step % 100 < 100 * late else 0.8) for step in range(steps)
    ]
    return {"step_seconds": seconds, "traffic": traffic, "held_out": {"accuracy": 0.8}}


@pytest.mark.parametrize(
    ("kimad", "ef21", "traffic", "words"),
    [
        (0.05, 0.4, 1.0, []),
        (0.2, 0.4, 1.0, ["kimad kept"]),
        (0.05, 0.05, 1.0, ["ef21 kept"]),
        (0.05, 0.4, 1.1, ["ef21 did not send as much"]),
    ],
)
def test_kimad_must_keep_its_time_where_a_fixed_density_does_not(
    kimad: float,
    ef21: float,
    traffic: float,
    words: list[str],
) -> None:
    points = {"kimad": run_of(kimad, 1e6), "ef21": run_of(ef21, traffic * 1e6)}
    missed = [line for line in bandwidth_trace.missed(points) if "was not measured" not in line]
    assert len(missed) == len(words)
    assert all(line.startswith(word) for line, word in zip(missed, words, strict=True))


def test_a_density_is_found_for_any_traffic() -> None:
    for density in (0.001, 0.03, 0.2):
        sent = bandwidth_trace._traffic_at
        assert bandwidth_trace.density_of(sent(density), sent) == pytest.approx(density, rel=0.01)


def training(accuracy: float, seconds: float, **more: Any) -> dict[str, Any]:
    figures = {
        "held_out": {"accuracy": accuracy, "loss": 6.0},
        "traffic": 1e6,
        "payload": 1e6,
        "samples_per_step": 256,
        "step_seconds": [seconds] * 30,
    }
    return (
        figures | {"candidates": [], "factors": [], "gains": {}, "throughputs": {}, "ideal": 0} | more
    )


@pytest.mark.parametrize(
    ("accuracy", "seconds", "candidates", "words"),
    [
        (0.79, 0.1, [20, 40, 160, 1000], []),
        (0.78, 0.1, [20, 40, 160, 1000], ["gravac is"]),
        (0.80, 0.11, [20, 40, 160, 1000], ["gravac ends at 0.91 of the speed of static 100x"]),
        (0.80, 0.1, [20, 40], ["gravac/0 visited"]),
    ],
)
def test_gravac_is_held_against_dense_and_the_best_factor_that_keeps_accuracy(
    accuracy: float,
    seconds: float,
    candidates: list[int],
    words: list[str],
) -> None:
    points = {
        "dense/0": training(0.795, 0.05),
        "dense steps/0": training(0.1, 1.0),
        "static 10x/0": training(0.795, 0.2),
        "static 100x/0": training(0.79, 0.1),
        "static 1000x/0": training(0.7, 0.05),  # fast, and of no use
        "gravac/0": training(accuracy, seconds, candidates=list(enumerate(candidates))),
    }
    missed = [line for line in adaptive.missed(points) if "was not measured" not in line]
    assert len(missed) == len(words)
    assert all(line.startswith(word) for line, word in zip(missed, words, strict=True))
    rows = adaptive.summary(points)
    assert rows["dense"]["seconds"] == adaptive.STEPS * 1.0  # of the steps on the network


def test_factors_are_those_of_the_largest_layer() -> None:
    layers = [
        {"dense_bytes": 8, "compressor": "none", "level": 32},
        {"dense_bytes": 80, "compressor": "topk:density=0.01", "level": 0.05},
    ]
    dense = [{**layers[1], "compressor": "none", "level": 32}]
    records = [
        {"step": 0, "plan": {"layers": dense}},
        {"step": 3, "scalars": {"plan/theta": 20.0}},
        {"step": 9, "plan": {"layers": layers}},
    ]
    assert adaptive.factors_sent(records) == [(0, 1.0), (9, 20.0)]
    assert adaptive.scalars(records, "plan/theta") == [(3, 20.0)]
