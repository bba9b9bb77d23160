"""Whole trainings in time: what counts as reaching the target, and which targets are missed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.network import whole_runs
from launch.training import options as command_line


@pytest.fixture(autouse=True)
def _long_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What dense training ends with there: 90 % on average, which stock Horovod does not do here."""
    ends = {"dense seed 1": 0.88, "dense seed 2": 0.91, "dense seed 3": 0.91, "auto seed 1": 0.5}
    cases = {f"mlp {title}": {"score": {"accuracy": end}} for title, end in ends.items()}
    monkeypatch.setattr(whole_runs, "load", lambda name: {"cases": cases})
    whole_runs.dense_score.cache_clear()
    yield
    whole_runs.dense_score.cache_clear()


def run(*scores: tuple[float, float]) -> list[dict[str, float]]:
    """A run of accuracies at seconds."""
    return [{"step": 10, "seconds": at, "accuracy": score} for at, score in scores]


def cases(auto: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "mlp": {
            "stock fp16": run((50, 0.8), (90, 0.896), (100, 0.909)),
            "auto": auto,
            "topk": run((5, 0.7), (10, 0.893)),
            "qsgd": run((20, 0.85), (40, 0.9)),
            "powersgd": run((20, 0.85), (60, 0.9)),
        }
    }


def test_the_target_is_that_of_dense_training_less_half_a_point() -> None:
    found = cases(run((9, 0.85), (18, 0.897)))
    assert whole_runs.seconds_to_target("mlp", found["mlp"]["stock fp16"]) == 90
    assert whole_runs.seconds_to_target("mlp", found["mlp"]["auto"]) == 18
    assert whole_runs.best_static("mlp", found["mlp"]) == ("qsgd", 40)  # top-k never reaches it
    assert whole_runs.rows(found)[2][1:] == ["auto", "89.70%", "18", "0.18", "18", "0.20", "0.45"]
    assert whole_runs.rows(found)[3][1:] == ["topk", "89.30%", "10", "0.10", "-", "-", "-"]
    assert whole_runs.against_best(found) == "mlp 0.45 (`qsgd`), 0.20 (stock fp16)"


def test_slow_runs_and_runs_below_the_target_miss_it() -> None:
    good, slow, far = (cases(run(each)) for each in ((18, 0.9), (50, 0.9), (18, 0.8)))
    left = "3 of 4 models were not trained"
    assert whole_runs.missed(good) == [left]
    assert whole_runs.missed(slow) == [
        "mlp: auto takes 1.25 of qsgd, target 1.1",
        "mlp: auto takes 0.56 of stock fp16, target 0.2",
        left,
    ]
    assert whole_runs.missed(far) == ["mlp: auto is not at the target", left]
    longer = cases(run((18, 0.9), (103, 0.9)))
    assert whole_runs.missed(longer) == ["mlp: auto's run takes 1.03 of stock fp16, target 1.02", left]
    assert whole_runs.against_best(far) == "mlp does not reach it"
    del far["mlp"]["auto"]
    assert whole_runs.against_best(far) == "mlp was not trained by its limits of today"
    assert whole_runs.missed(far) == ["4 of 4 models were not trained"]


def test_every_method_trains_the_same_model_from_the_same_seed() -> None:
    for model in whole_runs.CASES:
        each = [
            command_line.parse(whole_runs.arguments(model, method, 2000))
            for method in whole_runs.ROUTES
        ]
        assert len({(one.model, one.width, one.batch_size, one.lr, one.seed) for one in each}) == 1
        stock, auto, topk, *_ = each
        assert (stock.distributed, auto.distributed) == ("horovod", "adaptive")
        assert (auto.dense_steps, topk.dense_steps) == (0, 100)
