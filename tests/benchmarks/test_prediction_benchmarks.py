"""The grid of simulated clusters, and predictions against measured steps: what they count as missed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from benchmarks.micro import planning_cost  # noqa: E402
from benchmarks.network import auto_grid, prediction  # noqa: E402
from hvd_adaptive.adaptation.prediction import Predictor  # noqa: E402
from hvd_adaptive.comm.link_costs import seconds_of_byte  # noqa: E402
from tests.adaptation.test_prediction import trace_of  # noqa: E402

# ------------------------------------------------------------------------------------ the grid


@pytest.mark.parametrize("network", ["100 Mbit/s", "100 Gbit/s"])
def test_auto_is_no_slower_than_dense_where_its_costs_are_right(network: str) -> None:
    found = auto_grid.judge(
        trace_of(topk=auto_grid.TOPK, quantizer=auto_grid.QUANTIZER),
        0.05,
        auto_grid.Cluster(network, 1, 64),
    )
    assert found["of dense"] <= 1.0 + auto_grid.SLOWER
    assert found["compresses"] == (network == "100 Mbit/s")
    assert found["of static"] < 1.1
    assert found["misled, of dense"] < 1.1


def test_a_cluster_has_the_costs_that_are_stated() -> None:
    cluster = auto_grid.Cluster("1 Gbit/s", 4, 16)
    measured = cluster.measured().at(16)
    assert measured.link.allgather == pytest.approx(1e-3 + 4 * 1e-4)
    assert measured.link.allgather_byte == pytest.approx(seconds_of_byte(1e9))
    assert measured.codecs[auto_grid.QUANTIZER].compress == pytest.approx(
        auto_grid.CODECS[auto_grid.QUANTIZER].compress / 4
    )
    off = cluster.measured(2.0, 0.5)
    assert off.sums["float16"].link_byte == pytest.approx(2 * seconds_of_byte(1e9))
    assert off.codecs[auto_grid.QUANTIZER].compress == pytest.approx(
        0.5 * auto_grid.CODECS[auto_grid.QUANTIZER].compress / 4
    )


def test_static_choices_keep_the_limits() -> None:
    trace = trace_of()
    limits = Predictor(trace).auto(16, 1000).limits
    names = [name for name, _ in auto_grid.statics(trace, limits)]
    assert any(name.startswith("fp16") for name in names)
    for _, choice in auto_grid.statics(trace, limits):
        delay, noise = limits.weighed(choice)
        assert delay <= limits.max_delay
        assert noise <= limits.max_noise


def test_a_plan_slower_than_dense_misses_its_target() -> None:
    good: dict[str, Any] = {
        "of dense": 0.5, "of static": 1.01, "compresses": True, "misled, of dense": 1.5,
    }  # fmt: skip
    cells = {"mlp, 1 Gbit/s, 1 cores, 4 ranks": good}
    assert auto_grid.missed({"cells": cells}) == []
    assert auto_grid.rows(cells)[1][:4] == ["mlp", "1 Gbit/s", 1, 1]
    assert auto_grid.slower([good], "misled, of dense") == 1
    cells["mlp, 1 Gbit/s, 1 cores, 16 ranks"] = good | {"of dense": 1.03}
    [problem] = auto_grid.missed({"cells": cells})
    assert "16 ranks: auto takes 1.030 x the best dense step" in problem


# ------------------------------------------------------------------ predictions against measured steps


def test_ranks_that_share_cores_compute_longer_and_wait_as_long() -> None:
    trace = replace(trace_of(), measured=replace(trace_of().measured, ranks=2))
    two, eight = prediction.crowded(trace, 2), prediction.crowded(trace, 8)
    assert two.dense.to_dict() == trace.dense.to_dict()
    assert eight.dense.computing[0] == pytest.approx(4 * trace.dense.computing[0])
    waited = [each.seconds[0] - each.computing[0] for each in (trace.dense, eight.dense)]
    assert waited[0] == pytest.approx(waited[1])
    assert eight.measured.codecs["topk"].compress == 4 * trace.measured.codecs["topk"].compress


def test_each_method_is_predicted_for_each_case() -> None:
    seen = trace_of(topk=auto_grid.TOPK, quantizer=auto_grid.QUANTIZER)
    trace = replace(seen, measured=replace(seen.measured, ranks=2), hosts=2)
    for case in prediction.CASES:
        found = prediction.predicted(trace, case)
        assert set(found) == set(prediction.METHODS)
        assert all(0 < row["low"] <= row["seconds"] <= row["high"] for row in found.values())
    slow, fast = (
        prediction.predicted(trace, f"4 x {rate} from 2 hosts") for rate in ("100mbit", "1gbit")
    )
    assert slow["fp16 allgather"]["seconds"] > fast["fp16 allgather"]["seconds"]


def test_predictions_that_are_far_off_miss_their_target() -> None:
    def case(off: float) -> dict[str, dict[str, float]]:
        cell = {"measured": 0.1, "seconds": 0.1 * (1 + off), "low": 0.09, "high": 0.12}
        return dict.fromkeys(prediction.METHODS, cell)

    good = {name: case(0.05) for name in prediction.CASES}
    assert prediction.missed(good) == []
    assert prediction.rows(good)[1][-1] == "+5 %"
    assert len(prediction.unseen(good)) == 5 * len(prediction.CASES) - 2  # one of each trace was seen
    bad = good | {each: case(-0.3) for each in ("4 x 1gbit from 2 hosts", "8 x 200mbit from 4 hosts")}
    assert prediction.missed(bad) == ["48 of 58 predictions are within 10%, target 90%"]
    del bad["8 x 200mbit from 2 hosts"]
    assert "8 x 200mbit from 2 hosts was not measured" in prediction.missed(bad)


def test_predictions_stand_apart_by_whether_the_trace_knows_how_crowded_ranks_are() -> None:
    crowd = {name for name in prediction.CASES if not prediction.crowd_was_traced(name)}
    places = ("4 x 200mbit", "4 x 100mbit", "4 x 1gbit", "8 x 200mbit")
    assert crowd == {f"{place} from 2 hosts" for place in places}


# ---------------------------------------------------------------------------------- what deciding costs


def test_auto_is_held_to_its_own_target() -> None:
    cases = {name: {"planning": 0.008} for name in planning_cost.CASES}
    assert planning_cost.missed(cases) == [
        "ResNet, auto: 0.80%, target 0.5%",
        "LSTM, auto: 0.80%, target 0.5%",
        "LSTM, auto, 2,000 steps: 0.80%, target 0.5%",
    ]
    assert "planner" not in planning_cost.CASES["LSTM, topk"].setting
    assert planning_cost.CASES["LSTM, auto"].with_planner == {"compression": "auto:period=100"}
