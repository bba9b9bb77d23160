"""The benchmarks: which grid points are chosen, what is derived from them, real runs, Ctrl-C."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import long_runs, many_ranks, seeds
from benchmarks.harness import command_line
from benchmarks.micro import overhead
from benchmarks.network import automatic, priority, schemes, training
from benchmarks.network import training_tables as tables
from benchmarks.report import plots, report
from launch.training import options
from tests.harness.rank_launcher import without_launch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RUN_ALL = BENCHMARKS / "run_all.sh"


# ---------------------------------------------------------------------------------------- grid points


def keys(only: str) -> list[str]:
    return [point.key for point in training.select(only)]


def test_each_grid_point_is_there_once_and_the_most_important_first() -> None:
    everything = keys("")
    assert len(everything) == len(set(everything))
    assert everything[0] == "steps/lstm/alone"
    assert set(everything[:12]) >= {"steps/lstm/topk/200mbit", "steps/lstm/stock-fp16/200mbit"}
    assert not any("digits" in key for key in everything)


def test_a_selection_keeps_what_needs_no_rate_or_seed() -> None:
    chosen = keys("model=mlp,method=compute-only/topk,rate=1gbit,kind=steps")
    assert chosen == ["steps/mlp/alone", "steps/mlp/topk/1gbit"]
    assert keys("model=lstm,method=topk,kind=run,seed=1") == ["course/lstm/topk/1"]
    assert keys("model=lstm,method=kimad,kind=course,seed=1") == ["course/lstm/kimad/200mbit/1"]


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("model=vgg", "no model vgg: there are digits, lstm"),
        ("size=3", "no grid point has a 'size'"),
        ("rate=3mbit", "no rate 3mbit"),
    ],
)
def test_a_selection_of_nothing_is_refused(only: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training.select(only)


def test_help_names_every_point_whatever_its_name_is() -> None:
    shown = command_line.parser("Which?", ["topk 25 %", "dense"], "some").format_help()
    assert "topk 25 %, dense" in " ".join(shown.split())


def test_a_small_run_is_not_compared_with_targets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training.main(["--quick", "--check"])
    with pytest.raises(SystemExit):
        command_line.parser("A benchmark.", [], "adaptive").parse_args(["--check", "--quick"])
    assert capsys.readouterr().err.count("not allowed with argument") == 2


def test_every_grid_point_is_a_command_line_that_train_py_accepts() -> None:
    for point in training.points():
        parsed = options.parse(point.arguments())
        assert parsed.steps > training.METHODS[point.method].settle or point.kind == "course", point
        assert (parsed.distributed == "horovod") == training.METHODS[point.method].is_stock, point


def test_a_stored_grid_point_is_measured_again_only_with_other_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = training.select("model=mlp,method=topk/stock-fp16,rate=200mbit,kind=steps")
    done = {point.key: {"setting": training.setting(point)} for point in chosen[:1]}
    assert training.missing(chosen, done) == chosen[1:]
    name = chosen[0].method
    changed = training._own("topk:density=0.5")
    monkeypatch.setitem(training.METHODS, name, changed)
    assert training.missing(chosen, done) == chosen


def fake_measure(*events: Any) -> Any:
    """In place of Bench.measure: for each grid point of each launch a median, or what is raised."""
    left = list(events)

    def measure(bench: Any, group: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
        launches = range(max(each.launches for each in group))
        for point in [each for number in launches for each in group if each.launches > number]:
            event = left.pop(0)
            if isinstance(event, BaseException):
                raise event
            yield point, {"median": event}

    return measure


def test_each_grid_point_is_stored_as_soon_as_it_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen = training.select("model=mlp,method=alone/stock-fp16/topk/qsgd,rate=200mbit,kind=steps")
    broken = training.lab.JobError("broke")
    # alone; then the group of the others, in two launches of which slow ones need only the first
    events = [broken, 0.5, 0.25, 1.0, 0.125, KeyboardInterrupt()]
    monkeypatch.setattr(training.Bench, "measure", fake_measure(*events))
    out = tmp_path / "training.json"
    with pytest.raises(KeyboardInterrupt):
        training.measure_all(chosen, {}, out, 2, minutes=1)
    stored = training.load(out)
    assert {key: each["median"] for key, each in stored.items()} == {
        chosen[1].key: 0.5,
        chosen[2].key: 0.125,
        chosen[3].key: 1.0,
    }
    # the last was to be measured once more
    assert training.missing(chosen, stored) == [chosen[0], chosen[3]]


def test_of_more_launches_the_fastest_counts_and_redo_forgets_the_earlier_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen = training.select("model=mlp,method=topk/qsgd,rate=1gbit,kind=steps")
    out = tmp_path / "training.json"

    def medians(*events: float, more: bool) -> list[tuple[float, int]]:
        monkeypatch.setattr(training.Bench, "measure", fake_measure(*events))
        done = training.load(out)
        assert training.measure_all(chosen, done, out, 2, minutes=1, more=more) == []
        stored = training.load(out)
        return [(stored[point.key]["median"], stored[point.key]["launches"]) for point in chosen]

    assert medians(0.5, 0.25, 0.75, 0.5, more=False) == [(0.5, 2), (0.25, 2)]
    assert medians(0.75, 0.5, 0.25, 0.75, more=True) == [(0.25, 4), (0.25, 4)]
    assert medians(0.5, 0.5, 0.5, 0.75, more=False) == [(0.5, 2), (0.5, 2)]


def test_no_grid_point_is_started_when_the_time_is_up(tmp_path: Path) -> None:
    chosen = training.select("model=mlp,rate=200mbit,kind=steps")
    assert training.measure_all(chosen, {}, tmp_path / "training.json", 2, minutes=0) == chosen


def test_ranks_are_started_once_for_neighbors_of_one_rate_and_environment() -> None:
    chosen = training.select("model=lstm,method=alone/topk/qsgd/stock-fp16-default,rate=200mbit/1gbit")
    steps = [point for point in chosen if point.kind == "steps"]
    found = [[(point.method, point.rate) for point in group] for group in training.groups(steps)]
    assert found == [
        [("alone", "")],
        [("topk", "200mbit"), ("qsgd", "200mbit")],
        [("stock-fp16-default", "200mbit")],
        [("topk", "1gbit"), ("qsgd", "1gbit")],
        [("stock-fp16-default", "1gbit")],
    ]


# ------------------------------------------------------------------------------------------ tables


def step(median: float, communicate: float | None = None) -> dict[str, Any]:
    known = dict.fromkeys(("compute", "compress", "decompress"), 0.01)
    costs = {**known, "communicate": communicate, "total": 2 * median, "payload_bytes": 50.0}
    return {"median": median, "samples_per_step": 8, "dense_bytes": 1000, "costs": costs}


def run(
    scores: dict[int, float], warmup: int = 0, name: str = "accuracy", seconds: float = 2.0
) -> dict[str, Any]:
    evaluations = [{"step": at, "seconds": seconds * at, name: score} for at, score in scores.items()]
    last = evaluations[-1]
    return {"steps": last["step"], "warmup": warmup, "evaluations": evaluations, "held_out": last}


POINTS = {
    "steps/mlp/alone": step(0.1),
    "steps/mlp/stock-fp32/200mbit": step(2.0),
    "steps/mlp/stock-fp16/200mbit": step(1.0),
    "steps/mlp/none/200mbit": step(2.0, 1.5),
    "steps/mlp/topk/200mbit": step(0.2, 0.1),
    "course/mlp/stock-fp32/0": run({10: 0.5, 20: 0.8, 30: 0.85}),
    "course/mlp/topk/0": run({10: 0.7, 20: 0.849, 30: 0.84}, warmup=5),
    "course/mlp/kimad/200mbit/0": run({10: 0.7, 20: 0.8, 30: 0.86}),
    "course/mlp/qsgd/0": run({10: 0.1, 20: 0.1, 30: 0.1}),
}


def test_seconds_to_target_are_steps_to_target_at_their_median() -> None:
    seconds = {
        method: tables.seconds_to_target(POINTS, "mlp", method, "200mbit")
        for method in ("stock-fp16", "topk", "kimad", "qsgd")
    }
    assert seconds["stock-fp16"] == pytest.approx(30 * 1.0)
    # Of its 20 steps, 5 are dense.
    assert seconds["topk"] == pytest.approx(5 * 2.0 + 15 * 0.2)
    # Run at the rate itself: its own clock counts.
    assert seconds["kimad"] == 60.0
    assert math.isnan(seconds["qsgd"])


def test_a_training_run_that_goes_up_and_down_takes_what_its_mean_payload_takes() -> None:
    dense = {**POINTS["steps/mlp/none/200mbit"]["costs"], "payload_bytes": 1050.0}
    searched = {**run({10: 0.86, 20: 0.86}), "payload_bytes": 300.0}
    points = {
        **POINTS,
        "steps/mlp/none/200mbit": {**step(2.2), "costs": dense},
        "steps/mlp/gravac/200mbit": step(0.001),  # of its last steps: no measure of the training run
        "course/mlp/gravac/0": searched,
    }
    # a quarter of the way from topk's 50 bytes and 0.2 s to 1,050 bytes and 2.2 s
    assert tables.seconds_to_target(points, "mlp", "gravac", "200mbit") == pytest.approx(10 * 0.7)
    del searched["payload_bytes"]
    assert math.isnan(tables.seconds_to_target(points, "mlp", "gravac", "200mbit"))


def test_the_target_is_reached_by_the_mean_over_the_seeds() -> None:
    points = {
        "course/mlp/stock-fp32/0": run({10: 0.8, 20: 0.9}),
        "course/mlp/stock-fp32/1": run({10: 0.8, 20: 0.8}),
        "course/mlp/topk/0": run({10: 0.7, 20: 0.892}),
        "course/mlp/topk/1": run({10: 0.8, 20: 0.802}),
    }
    found = tables.outcome(points, "mlp", "topk")
    assert (found.seeds, found.by_themselves) == (2, 1)
    assert (found.steps, found.seconds) == (20, 40.0)
    assert found.loss == pytest.approx(0.003)
    points["course/mlp/topk/1"] = run({10: 0.8, 20: 0.79})
    assert math.isnan(tables.outcome(points, "mlp", "topk").steps)


def test_perplexity_is_better_the_lower() -> None:
    points = {
        "course/lstm/stock-fp32/0": run({10: 300.0, 20: 200.0}, name="perplexity"),
        "course/lstm/topk/0": run({10: 201.9, 20: 203.0}, name="perplexity"),
    }
    found = tables.outcome(points, "lstm", "topk")
    assert found.steps == 10
    assert found.loss == pytest.approx(0.015)


def test_horovods_own_waiting_is_what_it_takes_longer_than_compute_only() -> None:
    stock = tables.parts_of(POINTS["steps/mlp/stock-fp16/200mbit"], 10.0)
    assert (stock["compute"], stock["communicate"]) == pytest.approx((0.1, 0.9))
    own = tables.parts_of(POINTS["steps/mlp/topk/200mbit"], 2.0)
    assert own["communicate"] == pytest.approx(0.1 * 0.2 / 0.4)


def test_the_tables_show_every_grid_point_and_what_is_not_known_as_a_dash() -> None:
    text = tables.show(POINTS)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["qsgd"][-2:] == ["-", "-"]
    assert rows["topk"][1:3] == ["84.00%", "-1.00"]
    assert "mlp, 200mbit" in text
    assert "200 ms" in text
    assert tables.show({}) == ""


def test_steps_at_several_rates_stand_side_by_side() -> None:
    assert tables.rates_rows(POINTS) == [["median step (x compute-only)", *tables.RATES]]
    more = {**POINTS, "steps/mlp/topk/1gbit": step(0.15), "steps/lstm/topk/1gbit": step(0.3)}
    assert tables.rates_rows(more)[1:] == [
        ["mlp, compute-only", *["100 ms (1.00)"] * 4],
        ["mlp, stock-fp32", "-", "2,000 ms (20.00)", "-", "-"],
        ["mlp, stock-fp16", "-", "1,000 ms (10.00)", "-", "-"],
        ["mlp, none", "-", "2,000 ms (20.00)", "-", "-"],
        ["mlp, topk", "-", "200 ms (2.00)", "150 ms (1.50)", "-"],
    ]


def test_steps_of_two_machines_are_not_compared() -> None:
    here = {key: {"place": "here", **each} for key, each in POINTS.items()}
    heading = ["measured on", "steps", "training runs"]
    assert tables.places_rows(here) == [heading, ["here", "mlp", "mlp"]]
    topk = "steps/mlp/topk/200mbit"
    mixed = {**here, topk: {**here[topk], "place": "there"}}
    assert tables.places_rows(mixed)[1:] == [
        ["here", "mlp (compute-only, stock-fp32, stock-fp16, none)", "mlp"],
        ["there", "mlp (topk)", "-"],
    ]
    assert math.isnan(tables.ratio(mixed, "mlp", "200mbit", "topk", "alone"))
    assert tables.steps_rows(mixed, "mlp", "200mbit")[-1][:3] == ["topk", "200 ms", "-"]
    # its first steps would be those of another machine
    assert math.isnan(tables.seconds_to_target(mixed, "mlp", "topk", "200mbit"))
    slower, faster = ({"place": "here", "median": each} for each in (2.0, 1.0))
    assert training.fastest(faster, slower)["median"] == 1.0
    assert training.fastest({**faster, "place": "there"}, slower) == {**slower, "launches": 1}


def test_what_is_not_measured_has_not_met_its_target() -> None:
    missed = "\n".join(tables.missed(POINTS))
    assert "lstm, 200mbit: a step of topk is nan x compute-only" in missed
    assert "lstm: no training runs" in missed
    # 13 s of 30 s, and one point worse than dense; qsgd is farther off, and never gets there
    assert "mlp, 200mbit: topk takes 0.43 x stock-fp16's time" in missed
    assert "mlp: topk ends 1.00 % worse than dense (1 seeds)" in missed


def test_targets_that_are_met_are_not_named() -> None:
    points: dict[str, Any] = {}
    for model, name, score in (("lstm", "perplexity", 100.0), ("mlp", "accuracy", 0.9)):
        points[f"steps/{model}/alone"] = step(0.1)
        points[f"steps/{model}/stock-fp16/200mbit"] = step(1.0)
        points[f"steps/{model}/topk/200mbit"] = step(0.13)
        for seed in range(3):
            for method in ("stock-fp32", "topk"):
                points[f"course/{model}/{method}/{seed}"] = run({10: score}, name=name)
            points[f"course/{model}/auto/200mbit/{seed}"] = run({10: score}, 0, name, 0.14)
    assert tables.missed(points) == []
    assert tables.auto_rows(points)[1] == ["lstm", "1", "10", "0.14", "topk", "1", "1.08"]
    # of both forms of top-k the faster
    points["steps/lstm/topk/200mbit"], points["steps/lstm/topk-sign/200mbit"] = step(0.14), step(0.13)
    assert tables.missed(points) == []
    # one method is enough
    for seed in range(3):
        points[f"course/mlp/qsgd/{seed}"] = run({10: 0.1})
    assert tables.missed(points) == []


def test_auto_is_held_against_the_best_static_method_and_stock_fp16() -> None:
    points = dict(POINTS)
    assert "mlp, 200mbit: auto was not trained" in tables.missed(points)
    assert tables.best_static(points, "mlp", "200mbit") == ("topk", pytest.approx(13.0))
    points["course/mlp/auto/200mbit/0"] = run({10: 0.7, 20: 0.85}, seconds=1.0)
    missed = "\n".join(tables.missed(points))
    assert "auto takes 1.54 x the time of topk" in missed
    assert "auto takes 0.67 x stock-fp16's time" in missed
    points["course/mlp/auto/200mbit/0"] = run({10: 0.7, 20: 0.8}, seconds=0.1)  # never gets there
    assert "mlp, 200mbit: auto does not reach the target score" in tables.missed(points)
    # nor is it held against another machine's steps
    elsewhere = run({10: 0.7, 20: 0.85}, seconds=1.0) | {"place": "there"}
    points["course/mlp/auto/200mbit/0"] = elsewhere
    assert "mlp, 200mbit: no static method's steps are of auto's machine" in tables.missed(points)


# ---------------------------------------------------------------------------------------- priority


def test_a_priority_that_harms_the_median_launch_misses_its_target() -> None:
    quicker = {"hvd.init()": [0.3, 0.2, 0.2], "hva.init()": [0.1, 0.5, 0.1]}
    slower = {"hvd.init()": [0.100, 0.1, 0.1], "hva.init()": [0.104, 0.104, 0.1]}
    cases = {"a rank a core": {"topk": quicker, "stock-fp16": slower}}
    heading, *found = priority.rows(cases)
    assert heading[2:4] == ["hvd.init()", "hva.init()"]
    assert found == [
        ["a rank a core", "topk", "200 (200 to 300) ms", "100 (100 to 500) ms", "2.00"],
        ["a rank a core", "stock-fp16", "100 (100 to 100) ms", "104 (100 to 104) ms", "0.96"],
    ]
    [harmed] = priority.missed(cases)
    assert "stock-fp16: hva.init() takes 1.04 x the step" in harmed


# ----------------------------------------------------------------------------------------- schemes


def test_a_scheme_that_is_too_slow_or_not_measured_misses_its_target() -> None:
    def case(**milliseconds: float) -> dict[str, Any]:
        steps = {
            "stock fp16": 2000.0,
            **{f"qsgd:bits=4 {key}": each for key, each in milliseconds.items()},
        }
        steps |= {f"topk:density=0.01 {scheme}": 100.0 for scheme in schemes.FLAT}
        return {
            method: {"blocks": [each / 1e3] * 3, "received": 1e6, "schemes": ["two_shot"]}
            for method, each in steps.items()
        }

    good = {"12 x 200mbit": case(allgather=3000, two_shot=900, auto=920)}
    assert schemes.missed(good) == []
    assert schemes.rows(good)[4] == [
        "12 x 200mbit", "qsgd:bits=4 auto", "920 ms", "0.46", "1.00 MB", "1.00", "two_shot",
    ]  # fmt: skip
    bad = {
        "12 x 200mbit": case(allgather=3000, two_shot=1100, auto=3000),
        "4 x 200mbit": case(allgather=500, two_shot=600, auto=500),
    }
    auto, half, four = schemes.missed(bad)
    assert "auto takes 2.73 of the fastest one" in auto
    assert "4 bit in two shots takes 0.55 of stock fp16's step" in half
    assert "two_shot takes 1.20 of the allgather" in four
    assert schemes.missed({}) == ["12 x 200mbit was not measured"]


def test_two_shots_that_lose_more_than_their_target_or_were_not_trained_are_named() -> None:
    def case(metric: str, gathered: float, twice: float) -> dict[str, Any]:
        return {"allgather": {metric: gathered}, "two_shot": {metric: twice}}

    bad = {
        "resnet-fashion qsgd:bits=4 seed 1": case("accuracy", 0.90, 0.89),
        "resnet-fashion qsgd:bits=4 seed 2": case("accuracy", 0.90, 0.90),
        "lstm-sotu qsgd:bits=4 seed 1": case("perplexity", 200.0, 201.0),
    }
    assert many_ranks.rows(bad)[1:] == [
        ["resnet-fashion", "qsgd:bits=4", "two_shot", 2, "90.00 %", "89.50 %", "+0.50 pp", "0.50 pp"],
        ["lstm-sotu", "qsgd:bits=4", "two_shot", 1, "200.0", "201.0", "+0.50 %", "-"],
    ]
    lost, *left = many_ranks.missed(bad)
    assert lost == "resnet-fashion, qsgd:bits=4: two shots lose 0.50, target 0.3"
    assert len(left) == len(many_ranks.CASES) - len(bad)
    same = {"accuracy": 0.9, "perplexity": 200.0}
    good = {title: {"allgather": same, "two_shot": same} for title in many_ranks.CASES}
    assert many_ranks.missed(good) == []


def test_long_runs_are_compared_with_dense_ones_of_their_seed_and_with_their_reference() -> None:
    def run(accuracy: float, *payload: list[float]) -> dict[str, Any]:
        return {"score": {"accuracy": accuracy}, "losses": [], "bytes": list(payload), "steps": 100}

    cases = {
        "resnet dense seed 1": run(0.90, [0, 100.0]),
        "resnet dense seed 2": run(0.88, [0, 100.0]),
        "resnet topk seed 1": run(0.89, [0, 100.0], [10, 2.0]),
        "resnet topk seed 2": run(0.88, [0, 100.0], [10, 2.0]),
        "resnet lgreco seed 1": run(0.86, [0, 100.0], [10, 2.0], [50, 1.0]),
        "resnet auto seed 3": run(0.50, [0, 1.0]),
        "resnet lgreco squared seed 1": run(0.50, [0, 1.0]),
    }
    assert seeds.all_bytes(cases["resnet lgreco seed 1"]) == 10 * 100 + 40 * 2 + 50 * 1
    found = long_runs.outcomes(cases)
    assert ("resnet", "auto") not in found, "of its seed no dense training is known"
    topk = found["resnet", "topk"]
    assert topk.lost == pytest.approx((0.01, 0.0))
    # half of the interval: t with one degree of freedom, times the deviation over the root of 2
    assert topk.interval == pytest.approx(12.706 * 0.0070711 / 2**0.5, rel=1e-3)
    assert topk.ratio == pytest.approx(100 * 100 / 1180)
    assert found["resnet", "lgreco"].fewer == pytest.approx(1180 / 1130)
    # 5 of the 10 dense steps are within the first 5 % of the run
    assert found["resnet", "lgreco"].later == pytest.approx((1180 - 500) / (1130 - 500))
    assert [row[:3] for row in long_runs.rows(cases)[1:]] == [
        ["resnet", "dense", 2], ["resnet", "topk", 2], ["resnet", "lgreco", 1],
    ]  # fmt: skip
    assert [row[1:4] for row in long_runs.rows(cases, long_runs.ABLATION)[1:]] == [
        ["lgreco squared", 1, "50.00 %"]
    ]
    accuracy, fewer, left = long_runs.missed(cases)  # metrics that are compared have no targets
    assert accuracy == "resnet, lgreco: loses 4.00, target 1"
    assert fewer == "resnet, lgreco: 1.04 times fewer bytes than topk, target 1.5"
    assert left == f"{len(long_runs.CASES) - 7} of {len(long_runs.CASES)} runs are missing"


def test_an_automatic_choice_that_is_slow_or_not_measured_misses_its_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(automatic, "accurate", lambda preset: (*automatic.FIXED,))

    def case(dense: float, fixed: float, auto: float, fast: float) -> dict[str, Any]:
        steps = dict.fromkeys(automatic.FIXED, fixed) | dict.fromkeys(automatic.DENSE, dense)
        steps |= {automatic.AUTO: auto, automatic.FAST: fast}
        return {
            method: {"blocks": [each / 1e3] * 3, "reasons": ["auto: qsgd on 3 layers; a step of 1 ms"]}
            for method, each in steps.items()
        }

    good = {title: case(1000, 500, 520, 500) for title in automatic.CASES}
    assert automatic.missed(good) == []
    _, *rows = automatic.rows(good)
    assert len(rows) == 2 * len(good)
    assert rows[0][1:] == [
        *("1000 ms",) * 2, *("500 ms",) * 3, "balanced", "520 ms", "0.52", "1.04", "1.04",
        "qsgd on 3 layers",
    ]  # fmt: skip
    assert rows[-1][6:8] == ["fast", "500 ms"]
    title = next(iter(automatic.CASES))
    slow, far, left = automatic.missed({title: case(1000, 2000, 1100, 900)})
    assert slow == f"{title}: auto takes 1.10 of the best dense"
    assert far == "auto is within 1.05 of the fastest accurate choice in 0 of 1 cases, target 90%"
    assert left == f"{len(automatic.CASES) - 1} of {len(automatic.CASES)} cases were not measured"
    del good[title][automatic.AUTO]
    assert automatic.missed(good) == [f"1 of {len(good)} cases were not measured"]
    monkeypatch.setattr(automatic, "accurate", lambda preset: ("qsgdinf:bits=4 auto",))
    lossy = case(1000, 500, 500, 500)
    lossy["qsgdinf:bits=8 auto"] = {"blocks": [0.2] * 3}
    [found] = automatic.shares({title: lossy}, automatic.AUTO).values()
    assert found == pytest.approx((0.5, 1.0, 2.5)), "what loses accuracy is nothing to compare with"


def test_what_loses_more_than_auto_may_does_not_keep_accuracy() -> None:
    def run(accuracy: float) -> dict[str, Any]:
        return {"score": {"accuracy": accuracy}}

    cases = {"mlp dense seed 1": run(0.9), "mlp dense seed 2": run(0.9)}
    assert long_runs.keeps_accuracy(cases, "mlp", "qsgd"), "nobody knows better"
    cases |= {"mlp qsgd seed 1": run(0.892), "mlp qsgd seed 2": run(0.9)}
    assert long_runs.keeps_accuracy(cases, "mlp", "qsgd")
    cases["mlp qsgd seed 2"] = run(0.897)
    assert not long_runs.keeps_accuracy(cases, "mlp", "qsgd")
    cases = {"lstm dense seed 1": {"score": {"accuracy": 0.2, "perplexity": 50.0}}}
    cases["lstm qsgd seed 1"] = {"score": {"accuracy": 0.2, "perplexity": 50.4}}
    assert long_runs.keeps_accuracy(cases, "lstm", "qsgd")
    cases["lstm qsgd seed 1"] = {"score": {"accuracy": 0.2, "perplexity": 50.6}}
    assert not long_runs.keeps_accuracy(cases, "lstm", "qsgd")


# ---------------------------------------------------------------------------------------- pictures


def test_the_pictures_are_drawn_from_the_grid_points(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lstm = {key.replace("mlp", "lstm"): value for key, value in POINTS.items()}
    assert set(plots.curves(POINTS, "mlp")) == {"stock-fp32", "stock-fp16", "topk"}
    assert plots.curves(POINTS, "mlp")["topk"][0] == pytest.approx([11.0, 13.0, 15.0])
    for draw, points in ((plots.overview, POINTS), (plots.steps, lstm), (plots.accuracy, POINTS)):
        path = tmp_path / f"{draw.__name__}.png"
        assert draw(points, path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert not draw({}, tmp_path / "empty.png")


# ------------------------------------------------------------------------------------- run_all.sh


def run_all(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    return subprocess.run(
        [RUN_ALL, *words], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_run_all_lists_only_scripts_that_exist() -> None:
    shown = run_all("--list")
    assert shown.returncode == 0, shown.stderr
    listed = {line.partition(":")[0] for line in shown.stdout.splitlines() if line}
    assert {"kernels", "training"} <= listed
    assert all(len(list(BENCHMARKS.glob(f"*/{name}.py"))) == 1 for name in listed)
    assert "there is no benchmark 'nonsense'" in run_all("nonsense").stderr
    assert "unknown option '--quik'" in run_all("--quik").stderr


# -------------------------------------------------------------------------------------- a real run


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_quick_measures_on_a_real_netlab_and_does_not_repeat_itself(tmp_path: Path) -> None:
    reason = training.lab.why_not()
    if reason:
        pytest.skip(reason)
    out = tmp_path / "quick.json"
    only = "model=digits,seed=0,rate=200mbit,method=alone/stock-fp16/topk,kind=steps"
    words = ["--quick", "--only", only, "--out", str(out)]
    command = [*training.lab.module("network.training"), *words]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=without_launch(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["cells"]
    names = ["alone", "stock-fp16/200mbit", "topk/200mbit"]
    assert list(found) == [f"steps/digits/{name}" for name in names]
    assert found["steps/digits/topk/200mbit"]["costs"]["payload_bytes"] > 0
    assert all(0 < each["median"] < 5 for each in found.values())
    again = subprocess.run(
        [*command, "--list"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert again.stdout.strip() == ""
    left = hosts_of_labs()  # of this run, or of a test that runs beside this one and ends, too
    latest = time.monotonic() + 300
    while left & hosts_of_labs() and time.monotonic() < latest:
        time.sleep(1)
    assert not left & hosts_of_labs()


def hosts_of_labs() -> set[str]:
    """The network namespaces of benchmarks, whoever made them."""
    told = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in told.splitlines() if line.startswith("hva-bench-")}


# ------------------------------------------------------------------------------------------ Ctrl-C


def interrupted(name: str, *words: str, at: str) -> tuple[int, str]:
    """Run a benchmark, send it and what it has started a Ctrl-C when it prints ``at``."""
    job = subprocess.Popen(
        [*training.lab.module(name), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert job.stdout is not None
    shown = []
    for line in job.stdout:
        shown.append(line)
        if at in line:
            os.killpg(job.pid, signal.SIGINT)
            break
    rest, _ = job.communicate(timeout=60)
    return job.returncode, "".join(shown) + rest


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_after_a_ctrl_c_overhead_keeps_what_it_has_and_continues_from_there(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    words = ["--only", "calls of none,few large layers", "--out", str(out)]
    status, shown = interrupted("micro.overhead", *words, at="few large layers ...")
    assert status == 130
    assert "stopped; what was measured is kept" in shown
    assert "Traceback" not in shown
    found = json.loads(out.read_text())
    assert (list(found["calls"]), found["steps"]) == (["none"], {})
    cost = found["calls"]["none"]
    assert sum(cost["parts"].values()) == pytest.approx(cost["300 layers"])
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    again = subprocess.run(
        [*training.lab.module("micro.overhead"), "--only", "calls of none", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "calls of none ..." not in again.stdout


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_the_quick_overhead_runs_without_an_active_environment_and_writes_no_file() -> None:
    own = str(Path(sys.executable).parent)
    path = os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if each != own)
    before = (BENCHMARKS / "results" / "overhead.json").read_bytes()
    command = [*training.lab.module("micro.overhead"), "--quick"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(name in done.stdout for name in (*overhead.MODELS, "telemetry"))
    assert (BENCHMARKS / "results" / "overhead.json").read_bytes() == before


def test_an_overhead_above_its_target_is_missed_and_what_is_not_measured_is_not() -> None:
    part = dict.fromkeys(overhead.PARTS, 300.0)
    calls = {"topk": {"layer": 3.0, "bucket": 40.0, "300 layers": 900.0, "parts": part}}
    step = {"milliseconds": {"topk 1 %": 10.0}, "ratio": {"none": 1.04}}
    slow = {"ranks": 2, "steps": {"300 small layers": step}, "calls": calls}
    assert overhead.missed(slow) == [
        "300 small layers: none takes 1.040 x stock Horovod's step",
        "the calls of topk are 9.0% of the step",
    ]
    assert overhead.missed({"ranks": 2, "steps": {}, "calls": calls}) == []


def test_a_check_compares_the_file_with_the_targets_and_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missed(figures: dict[str, Any]) -> list[str]:
        return [] if figures["r2"] >= 0.9 else [f"r2 is {figures['r2']}"]

    assert command_line.check("costs", missed, tmp_path) == 1
    assert "costs.json is not there" in capsys.readouterr().out
    report.write("costs", {"r2": 0.95}, tmp_path)
    assert command_line.check("costs", missed, tmp_path) == 0
    report.write("costs", {"r2": 0.5}, tmp_path)
    assert command_line.check("costs", missed, tmp_path) == 1
    assert "r2 is 0.5" in capsys.readouterr().out


@pytest.mark.slow
def test_a_ctrl_c_ends_a_benchmark_of_tables_without_a_traceback() -> None:
    status, shown = interrupted("micro.wire", at="variance over energy")
    assert status == 130
    assert "stopped; the tables above are what was measured" in shown
    assert "Traceback" not in shown
