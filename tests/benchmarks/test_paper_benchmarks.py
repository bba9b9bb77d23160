"""The benchmarks of what the planners' papers claim: what they make of numbers, and what pages say."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.accuracy import (
    calibrated,
    calibration,
    gravac_search,
    kimad_tables,
    long_runs,
    seeds,
    static_factors,
    three_bits,
)
from benchmarks.harness import lab
from benchmarks.micro import multi_level
from benchmarks.network import bucket_times
from benchmarks.report import (
    old_defaults,
    plots_long_runs,
    report,
    results_long_runs,
    results_planners,
    results_sections,
)
from hvd_adaptive.compressors import parse
from hvd_adaptive.planning import StepMeasurements
from launch.training import options as command_line

MACHINE = {"date": "2030-01-01", "cpu": "X", "cores": 2, "torch": "2"}


# ------------------------------------------------------------------------------------ GraVAC's search


def search(kept: float | None = 160.0, **others: Any) -> dict[str, Any]:
    """A sound one, but for what is given."""
    return {
        "steps": 1000,
        "sent": [[0, 1.0], [8, 20.0], [700, 160.0]],
        "candidates": [[0, 20.0], [200, 40.0], [400, 160.0], [600, 1000.0]],
        "kept": kept,
        "gain": {"10": 1.0, "20": 1.0, "40": 0.95, "160": 0.8, "1000": 0.5},
        "throughput": {"1": 1.0, "20": 5.0, "40": 6.0, "160": 8.0, "1000": 9.0},
        **others,
    }


@pytest.mark.parametrize(
    ("case", "epsilon", "fault"),
    [
        (search(), 0.7, None),
        (search(None, sent=[[0, 1.0]]), 0.7, "no factor was kept in 1000 steps"),
        (search(1000.0, sent=[[0, 1000.0]]), 0.7, "kept 1000x, whose gain does not suffice"),
        (search(), 0.9, "kept 160x, whose gain does not suffice"),
        (search(40.0, sent=[[0, 40.0]]), 0.7, "kept 40x, but 160x has a higher throughput"),
        (search(sent=[[0, 1.0], [200, 160.0]]), 0.7, "sent 200 dense steps one after the other"),
        (search(sent=[[0, 160.0], [999, 1.0]]), 0.7, "kept 160x, but sends at 1x"),
        (search(candidates=[[0, 20.0], [200, 160.0]]), 0.7, "tried [20.0, 160.0], not [20.0, 40.0,"),
        (search(candidates=[[0, 20.0], [200, 40.0]]), 0.7, "tried [20.0, 40.0], not [20.0, 40.0,"),
        (
            search(20.0, candidates=[[0, 20.0], [200, 40.0]], sent=[[0, 40.0], [9, 20.0]])
            | {"throughput": {"20": 5.0, "40": 5.04}},
            0.7,
            None,  # within omega: saturated, and the smaller one is kept
        ),
    ],
)
def test_what_must_hold_of_a_search_is_checked(
    case: dict[str, Any], epsilon: float, fault: str | None
) -> None:
    found = gravac_search.faults(case, gravac_search.Case("mlp", epsilon, 1).recipe())
    assert (found == []) if fault is None else any(each.startswith(fault) for each in found), found


def test_the_planner_that_is_observed_is_the_cases() -> None:
    recipe = gravac_search.CASES["resnet geometric 0.7 seed 1"].recipe(window=20)
    assert recipe.candidate_factors() == (10, 20, 40, 80, 160, 320, 640, 1000)
    observed, _ = gravac_search.observed(recipe)
    assert vars(observed) == vars(recipe)
    assert observed.candidate_factors() == recipe.candidate_factors()


def test_a_search_is_recorded_until_its_factor_is_kept_and_again_where_it_starts_again() -> None:
    seen = gravac_search.Search()
    figures = {"theta": 20.0, "ideal": 0.0, "gain_20x": 0.8, "throughput_20x": 3.0}
    kept = {**figures, "ideal": 20.0}
    for step, each in enumerate([figures, {**figures, "theta": 40.0}, kept, kept, kept]):
        seen.add(StepMeasurements(step, factor=1.0 if step < 2 else 20.0), each)
    assert (seen.held, seen.figures()["kept"]) == (2, 20.0)
    assert seen.figures()["sent"] == [[0, 1.0], [2, 20.0]]
    assert seen.figures()["candidates"] == [[0, 20.0], [1, 40.0]]
    assert (seen.figures()["gain"], seen.figures()["throughput"]) == ({"20": 0.8}, {"20": 3.0})
    seen.add(StepMeasurements(5, factor=20.0), figures)
    assert (seen.held, seen.figures()["kept"], seen.figures()["gain"]) == (0, None, {})


# ------------------------------------------------------------------------------------- times of buckets


def turns(uniform: float, lgreco: float, by_time: float, reason: str) -> dict[str, Any]:
    times = {"uniform": uniform, "lgreco": lgreco, "lgreco-time": by_time}
    return {
        name: {"blocks": [each / 1e3] * 3, "received": 1e6 * each, "reasons": [reason]}
        for name, each in times.items()
    }


LEARNED = "times of buckets explain 0.9: seconds per MB 1±0.1, 2±0.1"


def test_lgreco_time_must_not_be_slower_anywhere_and_faster_somewhere() -> None:
    first, *others = bucket_times.CASES
    good = {first: turns(110, 100, 90, LEARNED)} | dict.fromkeys(others, turns(110, 100, 101, LEARNED))
    assert bucket_times.missed(good) == []
    assert bucket_times.rows(good)[1:4] == [
        [first, "uniform", "110 ms", "1.10", "110.00 MB", "1.10", ""],
        [first, "lgreco", "100 ms", "1.00", "100.00 MB", "1.00", ""],
        [first, "lgreco-time", "90 ms", "0.90", "90.00 MB", "0.90", LEARNED],
    ]
    slower, unlearned, nowhere, left = bucket_times.missed({first: turns(110, 100, 110, "bytes count")})
    assert slower == f"{first}: lgreco-time takes 1.10 of lgreco's step"
    assert unlearned == f"{first}: lgreco-time has learned no times of buckets"
    assert nowhere == "lgreco-time is faster than lgreco by two standard errors in no case"
    assert left == f"{len(others)} of {len(bucket_times.CASES)} cases were not measured"


@pytest.mark.slow
@pytest.mark.distributed
def test_planners_take_turns_on_two_hosts_after_their_plans_are_made() -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    if reason := lab.why_not():
        pytest.skip(reason)
    before = {path.name: path.read_bytes() for path in report.RESULTS.glob("bucket_times.json")}
    done = subprocess.run(
        [*lab.module("network.bucket_times"), "--quick"],
        cwd=lab.ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f" {name} " in done.stdout for name in bucket_times.methods_of(1, 1, 6))
    (last,) = {line.strip() for line in done.stdout.splitlines() if " lgreco-time " in line}
    assert "trial" not in last, "the trials were not over"
    assert before == {path.name: path.read_bytes() for path in report.RESULTS.glob("bucket_times.json")}


# -------------------------------------------------------------------------------------------- table 3


def test_models_of_table_3_have_the_sizes_of_the_papers_ones() -> None:
    """Published numbers of parameters; the paper's table 1 has megabytes: 170, 528 and 252."""
    sizes = {name: sum(layers()) for name, layers in multi_level.MODELS.items()}
    assert (sizes["ResNet101"], sizes["VGG16"]) == (44_549_160, 138_357_544)
    assert sizes["LSTM"] * 4 / 2**20 == pytest.approx(252, rel=0.01)


def levels(direct: float, further: float, summary: float) -> dict[str, Any]:
    row = {"direct": direct, "multi-level": further, "summary": summary}
    return {model: dict.fromkeys(methods, row) for model, methods in multi_level.PAPER.items()}


def test_table_3_stands_beside_what_was_measured() -> None:
    assert multi_level.missed({"models": levels(100, 50, 200)}) == []
    assert multi_level.rows(levels(100, 50, 200))[1] == [
        "ResNet101", "`topk`", "100 ms", "50 ms", "2.00", "200 ms", "0.50", "606 ms", "332 ms", "1.83",
    ]  # fmt: skip
    problems = multi_level.missed({"models": levels(100, 95, 100)})
    assert len(problems) == 12
    assert problems[0] == "ResNet101, topk: the faster way is 1.05 x as fast, target 1.1"
    assert multi_level.papers_span("redsync") == pytest.approx((1.1, 1.5), abs=0.02)


# --------------------------------------------------------------------------------- GraVAC's table 2


def factored(gravac: tuple[float, float], reference: tuple[float, float]) -> dict[str, Any]:
    """Runs of one seed of the MLP: accuracy, and bytes of a step."""
    runs = {"dense": (0.90, 100.0), "topk 10x": reference, "gravac 0.7": gravac}
    return {
        f"mlp {method} seed 1": {
            "score": {"accuracy": accuracy}, "losses": [], "bytes": [[0, nbytes]], "steps": 10,
        }
        for method, (accuracy, nbytes) in runs.items()
    }  # fmt: skip


FACTORED = factored((0.897, 2.5), (0.899, 10.0))


def test_gravac_stands_beside_static_factors() -> None:
    heading, _, reference, gravac = static_factors.rows(FACTORED)
    assert heading[-1] == "than topk 10x"
    assert reference[1:] == ["topk 10x", 1, "89.90 %", "+0.10 pp", "-", "10.0", "1.00"]
    assert gravac[1:] == ["gravac 0.7", 1, "89.70 %", "+0.30 pp", "-", "40.0", "4.00"]
    left = f"{len(static_factors.CASES) - 3} of {len(static_factors.CASES)} runs are missing"
    assert static_factors.missed(FACTORED) == [left]
    assert static_factors.missed(factored((0.89, 8.0), (0.899, 10.0))) == [
        "mlp: gravac 0.7 loses 1.00, target 0.5",
        "mlp: gravac 0.7 sends 1.25 times fewer bytes than topk 10x, target 1.9",
        left,
    ]


@pytest.mark.parametrize("method", static_factors.METHODS)
def test_every_static_factor_is_one_that_train_py_knows(method: str) -> None:
    options = command_line.parse(["--preset", "mlp-fashion", *static_factors.METHODS[method]])
    assert parse(options.compression)
    assert (options.planner is not None) == (method in static_factors.ADAPTIVE)


# -------------------------------------------------------------------------------------- calibration


def tried(**accuracy: float) -> dict[str, Any]:
    """Runs of the MLP, 90 % by dense training, each with the accuracy of its level of top-k."""
    found = {"mlp dense": finished(0.9, 100.0)}
    for number, score in accuracy.items():
        level = calibration.FAMILIES["topk"][int(number.removeprefix("level"))]
        found[f"mlp {level}"] = finished(score, 10.0)
    return found


def finished(accuracy: float, nbytes: float) -> dict[str, Any]:
    return {"score": {"accuracy": accuracy}, "bytes": [[0, nbytes]], "steps": 100, "losses": []}


@pytest.mark.parametrize(
    ("trained", "open_ones"),
    [
        ({}, (0, 5)),
        ({"level2": 0.899}, (0, 2)),
        ({"level2": 0.80}, (3, 5)),
        ({"level2": 0.899, "level1": 0.80}, (2, 2)),
        ({"level2": 0.80, "level4": 0.899, "level3": 0.80}, (4, 4)),
        ({"level2": 0.80, "level4": 0.80}, (5, 5)),
        ({"level1": 0.899, "level2": 0.80}, (3, 5)),  # luck: more bytes have lost more
    ],
)
def test_levels_are_tried_by_halves(trained: dict[str, float], open_ones: tuple[int, int]) -> None:
    cases = tried(**trained)
    assert calibration.open_levels(cases, "mlp", "topk") == open_ones
    first, last = open_ones
    title = f"mlp {calibration.FAMILIES['topk'][(first + last) // 2]}" if first < last else None
    assert [each for each in calibration.due(cases) if each.startswith("mlp topk")] == (
        [title] if title else []
    )


def test_the_strongest_level_that_keeps_accuracy_is_marked() -> None:
    cases = tried(level2=0.895, level1=0.80)
    assert calibration.strongest(cases, "mlp", "topk") == "topk:density=0.1"
    assert calibration.strongest(cases, "mlp", "qsgd") is None
    _, dense, worse, best = calibration.rows(cases)
    assert dense == ["mlp", "dense", "90.00%", "+0.00 pp", "1.0", ""]
    assert worse == ["mlp", "topk:density=0.05", "80.00%", "+10.00 pp", "10.0", ""]
    assert best == ["mlp", "topk:density=0.1", "89.50%", "+0.50 pp", "10.0", "yes"]
    none = tried(level2=0.80, level4=0.80)
    assert calibration.missed(none) == [
        "mlp: no level of topk is within 1 % of dense training",
        f"{3 * len(calibration.MODELS) - 1} of {3 * len(calibration.MODELS)} families are not through",
    ]


@pytest.mark.parametrize("level", [each for levels in calibration.FAMILIES.values() for each in levels])
def test_every_level_is_one_that_there_is(level: str) -> None:
    assert parse(level).name in calibration.FAMILIES


# ------------------------------------------------------------------------------------ over calibrated


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k 10 % keeps the MLP's accuracy, and so do 4 bits; its dense training of seed 1 is known."""
    files = {
        "calibration": tried(level2=0.895, level1=0.80)
        | {"mlp qsgd:bits=5": finished(0.9, 5.0), "mlp qsgd:bits=4": finished(0.9, 4.0)}
        | {"mlp qsgd:bits=3": finished(0.8, 3.0)},
        "long_runs": {
            "mlp dense seed 1": finished(0.9, 100.0),
            "mlp qsgd seed 1": finished(0.897, 12.0),
        },
    }
    monkeypatch.setattr(calibrated, "stored", files.__getitem__)


@pytest.mark.usefixtures("known")
def test_only_models_are_trained_whose_levels_are_known() -> None:
    assert calibrated.level_of("mlp topk lgreco seed 2") == "topk:density=0.1"
    assert calibrated.level_of("mlp powersgd seed 2") is None
    kept: dict[str, Any] = {}
    calibrated.measure(["mlp powersgd seed 2", "lstm topk seed 1"], kept, None, quick=False)
    assert not kept


@pytest.mark.usefixtures("known")
def test_a_run_of_the_same_level_is_taken_from_the_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[long_runs.Method] = []

    def train(setup: object, method: long_runs.Method, seed: int, steps: object) -> dict[str, Any]:
        trained.append(method)
        return finished(0.9, 1.0)

    monkeypatch.setattr(long_runs, "trained", train)
    assert calibrated.train("mlp qsgd seed 1") == {"level": "qsgd:bits=4", **finished(0.897, 12.0)}
    assert not trained
    assert calibrated.train("mlp topk lgreco seed 1")["level"] == "topk:density=0.1"
    assert calibrated.train("mlp qsgd lgreco seed 1")["level"] == "qsgd:bits=4"  # is not there
    assert [each.options for each in trained] == [
        ("--compression", "topk:density=0.1", "--planner", "lgreco"),
        ("--compression", "qsgd:bits=4", "--planner", "lgreco"),
    ]


OVER_CALIBRATED = {
    "mlp topk seed 1": {"level": "topk:density=0.1", **finished(0.898, 12.0)},
    "mlp topk lgreco seed 1": {"level": "topk:density=0.1", **finished(0.88, 10.0)},
}


@pytest.mark.usefixtures("known")
def test_a_planner_stands_beside_the_level_that_it_starts_from() -> None:
    heading, dense, uniform, planned = calibrated.rows(OVER_CALIBRATED)
    assert heading[-2:] == ["level", "than its reference"]
    assert dense[1:] == ["dense", 1, "90.00 %", "+0.00 pp", "-", "1.0", "-", "-"]
    assert uniform[1:] == ["topk", 1, "89.80 %", "+0.20 pp", "-", "8.3", "topk:density=0.1", "-"]
    assert planned[1] == "topk lgreco"
    assert planned[-1] == "1.20"
    assert calibrated.missed(OVER_CALIBRATED) == [
        "mlp, topk lgreco: loses 2.00, target 1",
        "mlp, topk lgreco: 1.20 times fewer bytes, target 1.5",
        f"{len(calibrated.CASES) - 2} of {len(calibrated.CASES)} runs are missing",
    ]


def level(nbytes: Sequence[Sequence[float]], accuracy: float = 0.9) -> dict[str, Any]:
    """A run of 100 steps, of which 5 are dense where top-k is at work."""
    return {**finished(accuracy, 0.0), "bytes": [*nbytes], "level": "topk:density=0.1"}


EXPLAINED = {
    "mlp topk seed 1": level([[0, 100.0], [5, 20.0]]),
    "mlp topk lgreco seed 1": level([[0, 100.0], [5, 20.0], [10, 12.0]]),
    "mlp topk lgreco relative seed 1": level([[0, 100.0], [5, 11.0]], accuracy=0.89),
    "mlp least seed 1": {**level([[0, 10.0]]), "steps": 1},
}


@pytest.mark.usefixtures("known")
def test_savings_are_explained_by_what_a_plan_can_spare() -> None:
    # 500 of the 2400 bytes are dense, 950 of small layers, 950 a plan's
    _, topk = calibrated.parts_rows(EXPLAINED)
    planned = 5 * 10 + 90 * 2
    assert topk[:5] == ["mlp", "topk", "21 %", "40 %", "40 %"]
    assert topk[5:] == [
        f"{2400 / 1450:.2f}",
        f"{2400 / (1450 + planned):.2f}",
        f"{1900 / (950 + planned):.2f}",
        f"{950 / planned:.2f}",
    ]
    _, norm, relative = calibrated.ablation_rows(EXPLAINED)
    assert norm == ["mlp", "topk lgreco", "+0.00 pp", *topk[6:]]
    assert relative == ["mlp", "topk lgreco relative", "+1.00 pp", "1.55", "1.82", "10.00"]
    assert calibrated.parts_rows({}) == calibrated.parts_rows({})[:1]


def test_the_least_bytes_are_those_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[str, ...], int | None]] = []

    def train(setup: object, method: long_runs.Method, seed: int, steps: int | None) -> dict[str, Any]:
        asked.append((method.options, steps))
        return finished(0.1, 1.0)

    monkeypatch.setattr(long_runs, "trained", train)
    assert calibrated.train("mlp least seed 1")["level"] == "topk:density=0.000001"
    assert asked == [(("--compression", "topk:density=0.000001"), 1)]


# ----------------------------------------------------------------------------------- Kimad's tables


def simulated(accuracy: float, seconds: float, traffic: float = 100.0) -> dict[str, Any]:
    """One run: two blocks of dense steps, and what follows."""
    blocks = [1.0, 1.0, *[seconds] * 26]
    return {"score": {"accuracy": accuracy}, "seconds": blocks, "traffic": traffic, "losses": []}


def swung(title: str, kimad: tuple[float, float], sent: float = 100.0) -> dict[str, Any]:
    """A case whose EF21 has an accuracy of 80 % and steps of 40 ms."""
    ef21 = simulated(0.80, 0.04, sent)
    return {
        title: {
            "asked": 0.03,
            "kimad": simulated(*kimad),
            "kimad+": simulated(0.81, 0.03),
            "ef21": ef21,
        }
    }


SWUNG = swung("mlp 0.1 of dense 4 workers seed 1", (0.798, 0.03))


def test_kimad_stands_beside_ef21_at_equal_bytes() -> None:
    heading, row = kimad_tables.rows(SWUNG)
    assert dict(zip(heading, row, strict=True)) == {
        "model": "mlp",
        "feedback": "ef21",
        "transfers, of dense": "10%",
        "a step is to take": "30.0 ms",
        "one density": "40.0 ms",
        "kimad": "30.0 ms",
        "kimad+": "30.0 ms",
        "kimad, of one density": "0.75",
        "at best": "0.90",
        "in the paper": "0.79",
        "MB of one density, of kimad's": "1.00",
        "accuracy": "80.00%, 79.80%, 81.00%",
    }
    *_, row = kimad_tables.worker_rows(SWUNG)
    assert row == [
        "mlp", "ef21", 4, "80.00%", "79.80%", "-0.20 pp", "79.59 %", "79.75 %", "0.75",
    ]  # fmt: skip
    assert kimad_tables.missed(SWUNG) == ["13 of 14 cases are missing"]


def test_momentum_before_compression_has_rows_of_its_own() -> None:
    title = "mlp 0.1 of dense 4 workers seed 1"
    both = SWUNG | swung(f"{title} with momentum", (0.82, 0.03))
    _, *times = kimad_tables.rows(both)
    _, *workers = kimad_tables.worker_rows(both)
    assert [row[1] for row in times] == [row[1] for row in workers] == ["ef21", "ef21-sgdm"]
    assert [row[4] for row in workers] == ["79.80%", "82.00%"]


@pytest.mark.parametrize("transfers", [1e-6, 0.003, 0.02, 0.5, 1e3])
def test_how_much_kimad_can_gain_is_what_a_wave_in_small_pieces_gives(transfers: float) -> None:
    phases = np.pi * (np.arange(10_000) + 0.5) / 10_000
    rates = 30 + 300 * np.sin(phases) ** 2
    steps_a_second = 1 / (0.02 + transfers * 180 / rates)  # those of EF21, which sends at the mean rate
    assert kimad_tables.at_best(transfers, 0.02) == pytest.approx(
        (0.02 + transfers) * steps_a_second.mean(), rel=1e-6
    )


def test_a_kimad_that_is_no_faster_or_less_accurate_misses_its_targets() -> None:
    title = "mlp 0.5 of dense 4 workers seed 1"
    slow, inaccurate, unequal, _ = kimad_tables.missed(swung(title, (0.78, 0.036), sent=90.0))
    assert slow == f"{title}: kimad takes 0.90 of ef21, target 0.8"
    assert inaccurate == f"{title}: kimad loses 2.00 pp, target 0.5"
    assert unequal == f"{title}: ef21 sent 0.90 of kimad's bytes"


def test_a_density_is_found_that_sends_so_many_bytes() -> None:
    sent = functools.partial(kimad_tables.topk_bytes, "mlp", 4)
    assert kimad_tables.density_of(sent(0.03), sent) == pytest.approx(0.03, rel=0.01)
    assert kimad_tables.dense_seconds("mlp", 4) == pytest.approx(
        1.5 * 4 * (784 * 256 + 256 * 256 + 256 * 10 + 522) / (0.95 * 180e6 / 8), rel=0.01
    )


# --------------------------------------------------------------------------------- L-GreCo's tables


def test_our_models_stand_beside_the_papers_in_its_own_form() -> None:
    def run(accuracy: float, nbytes: float) -> dict[str, Any]:
        return {"score": {"accuracy": accuracy}, "losses": [], "bytes": [[0, nbytes]], "steps": 100}

    cases = {
        "resnet dense seed 1": run(0.90, 100.0),
        "resnet dense seed 2": run(0.92, 100.0),
        "resnet qsgd seed 1": run(0.89, 12.5),
        "resnet qsgd lgreco seed 1": run(0.91, 10.0),
    }
    images, texts = results_long_runs.FORMS
    heading, dense, uniform, planned, *_ = results_long_runs.form_rows(images, cases)
    assert heading[-2:] == ["resnet, here", "mlp, here"]
    assert dense[2:] == [
        "76.60 ± 0.40; 1.0", "76.88 ± 0.16; 1.0", "91.00 ± 1.41; 1.0", "-",
    ]  # fmt: skip
    assert uniform[2:] == [
        "76.80 ± 0.40; 7.8 (4 bit)", "77.38 ± 0.10; 7.7 (4 bit)", "89.00; 8.0 (4 bit)", "-",
    ]  # fmt: skip
    assert planned[2:] == [
        "76.46 ± 0.21; 8.6 [1.10]", "76.77 ± 0.25; 11.0 [1.43]", "91.00; 10.0 [1.25]", "-",
    ]  # fmt: skip
    assert len(results_long_runs.form_rows(texts, {})) == 1 + 1 + 2 * 3
    first, second, *_ = results_long_runs.table_4({**cases, "resnet topk seed 1": run(0.9, 5.0)})[1:]
    assert first == ["one level for all", "14.1", 72, "-", "90.00; 20.0"]
    assert second == ["L-GreCo", "23.5", 150, "-", "-"]


@pytest.mark.parametrize("form", results_long_runs.FORMS)
def test_levels_and_models_of_the_forms_are_those_that_are_trained(
    form: results_long_runs.Form,
) -> None:
    assert set(form.ours) < set(long_runs.SETUPS)
    for compressor, planned in results_long_runs.PLANNED.items():
        assert long_runs.METHODS[planned].reference == compressor
    specs = " ".join(long_runs.METHODS[each].options[-1] for each in ("qsgd", "topk", "powersgd"))
    assert specs == "qsgd:bits=4 topk:density=0.02 powersgd:rank=4"
    assert results_long_runs.LEVELS == {"qsgd": "4 bit", "topk": "2 %", "powersgd": "rank 4"}


def test_steps_of_a_run_are_counted_and_drawn_by_how_hard_they_are_compressed(tmp_path: Path) -> None:
    def run(*changes: list[float]) -> dict[str, Any]:
        return {"score": {"accuracy": 0.9}, "losses": [], "bytes": [*changes], "steps": 100}

    cases = {
        "mlp dense seed 1": run([0, 100.0]),
        "mlp dense seed 2": run([0, 100.0]),
        "mlp gravac seed 1": run([0, 100.0], [20, 2.0]),
        "mlp gravac seed 2": run([0, 100.0], [40, 20.0], [90, 1.0]),
        "mlp auto seed 1": run([0, 50.0]),
        "lstm gravac seed 1": run([0, 10.0]),  # without a dense run
    }
    assert results_long_runs.ratio_rows(cases)[1:] == [
        ["mlp", "gravac", 2, "30 %", "0 %", "25 %", "0 %", "40 %", "5 %"],
        ["mlp", "auto", 1, "0 %", "100 %", "0 %", "0 %", "0 %", "0 %"],
    ]
    _, _, answer, table = results_long_runs.at_ratios(cases)
    assert "ones: 45 % (mlp)." in answer
    assert "(results/long_runs_ratio.png)" in table
    assert plots_long_runs.curves(cases, "mlp", 1)["gravac"] == ([0, 20, 100], [1.0, 50.0, 50.0])
    pytest.importorskip("matplotlib")
    path = tmp_path / "ratio.png"
    assert plots_long_runs.compression(cases, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not plots_long_runs.compression({}, tmp_path / "empty.png")
    assert set(results_long_runs.PLOTTED) < set(long_runs.SETUPS)
    assert all(map(long_runs.method_of, results_long_runs.PLANNERS))


# ------------------------------------------------------------------------------------------- three bits


def quantized(accuracies: dict[str, float], **grid: float) -> dict[str, Any]:
    """Runs of seeds 1 and 2 of the MLP, and others by title."""

    def run(accuracy: float, nbytes: float) -> dict[str, Any]:
        return {
            "score": {"accuracy": accuracy}, "losses": [], "bytes": [[0, nbytes]], "steps": 10,
        }  # fmt: skip

    return {
        f"mlp {method} seed {seed}": run(accuracy + 0.01 * seed, 32 if method == "dense" else 4)
        for method, accuracy in accuracies.items()
        for seed in (1, 2)
    } | {title: run(accuracy, 4) for title, accuracy in grid.items()}


QUANTIZED = quantized(
    {"dense": 0.90, "alq max": 0.88, "amq": 0.87, "qsgd": 0.80, "nuqsgd": 0.86},
    **{"mlp alq max of 2 bits in blocks of 8192": 0.86},
)


def test_quantizers_are_ranked_by_what_they_lose_to_dense_training_of_their_seed() -> None:
    _, *rows = three_bits.rows(QUANTIZED)
    assert [row[1] for row in rows] == ["dense", "alq max", "amq", "nuqsgd", "qsgd"]
    assert rows[1] == ["mlp", "alq max", 2, "89.50 %", "+2.00 pp", "± 0.00", "8.0"]
    assert three_bits.best(QUANTIZED, "mlp") == ("alq max", "nuqsgd")
    assert three_bits.best(QUANTIZED, "resnet") is None, "nothing was trained"
    heading, *of_grid = three_bits.grid_rows(QUANTIZED)
    assert heading[2:] == ["2 bits", "3 bits", "4 bits", "6 bits", "8 bits"]
    assert of_grid[1] == ["8,192", "alq max", "+5.00 pp", "+2.00 pp", "-", "-", "-"]


def test_learned_levels_that_lose_more_than_fixed_ones_miss_the_target() -> None:
    (left,) = three_bits.missed(QUANTIZED)
    assert (
        left == f"{len(three_bits.CASES) - len(QUANTIZED)} of {len(three_bits.CASES)} runs are missing"
    )
    worse, _ = three_bits.missed(quantized({"dense": 0.9, "alq": 0.80, "amq": 0.7, "qsgdinf": 0.89}))
    assert worse == "mlp: alq loses 10.00 pp, target at most that of qsgdinf, 1.00"


@pytest.mark.parametrize("method", [seeds.DENSE, *three_bits.COMPARED])
def test_every_quantizer_is_one_that_train_py_knows(method: str) -> None:
    if method == seeds.DENSE:
        assert three_bits.spec(method, 3, 8192) == "none"
        return
    made: Any = parse(three_bits.spec(method, 3, 8192))
    assert made.block == 8192
    assert method == "terngrad" or made.bits == 3


# ------------------------------------------------------------------------------------------ the page


@pytest.mark.parametrize(
    ("section", "figures", "answers"),
    [
        (
            results_planners.gravac_search,
            {"cases": {"mlp 0.7 seed 1": search(), "mlp 0.9 seed 1": search()}},
            "In 1 of 2 runs, at 160x (15 are planned).",
        ),
        (
            results_planners.bucket_times,
            {"cases": {"lstm 4 x 200mbit": turns(110, 100, 90, LEARNED)}},
            "two standard errors): 0.90 ± 0.00 (lstm 4 x 200mbit).",
        ),
        (
            results_planners.multi_level,
            {"models": levels(100, 50, 200)},
            "reaches the paper's least speedup of 1.1 in 12 of 12 rows.",
        ),
        (
            results_planners.static_factors,
            {"cases": FACTORED},
            "mlp: 4.00 times fewer bytes than `topk 10x`, +0.30 pp lost against dense training. 3 of",
        ),
        (
            results_planners.calibration,
            {"cases": tried(level2=0.895, level1=0.80)},
            "dense training?* mlp `topk:density=0.1`.",
        ),
        (
            results_planners.calibrated,
            {"cases": OVER_CALIBRATED},
            "many times fewer bytes (asked for: 1.5 (topk), 1.1 (qsgd), 1.3 (powersgd)), and so much "
            "lost against dense training: mlp, `topk lgreco`: 1.20 times, +2.00 pp. 2 of",
        ),
        (
            results_planners.kimad_tables,
            {"cases": SWUNG},
            "Its step takes 0.75 of EF21's (paper: 0.79 to 0.80).",
        ),
        (
            results_planners.three_bits,
            {"cases": QUANTIZED},
            "against dense training, mlp: `alq max` +2.00 pp and `nuqsgd` +4.00 pp. 11 of 123 runs",
        ),
    ],
)
@pytest.mark.usefixtures("known")
def test_their_sections_answer_from_their_figures(
    section: Callable[[], str],
    figures: dict[str, Any],
    answers: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = {"machine": MACHINE, "missed": ["something"], **figures}
    monkeypatch.setattr(results_planners, "load", lambda name: stored)
    text = section()
    assert answers in text
    assert text.endswith("Targets missed in this run: something.")
    assert section in results_sections.PARTS.values()


# ------------------------------------------------------------------------------------ changed defaults


def test_rows_of_old_defaults_are_named_until_they_are_measured_again() -> None:
    old: dict[str, Any] = {"setting": ["--planner", "lgreco-time:period=50", "--steps", "9"]}
    new = {**old, "date": "2026-11-26"}
    cells = {"steps/lstm/lgreco-time/1gbit": old, "steps/lstm/topk/1gbit": {"setting": ["--steps"]}}
    said = old_defaults.note(old_defaults.of_cells(cells, 2))
    assert said.startswith("Measured before defaults changed on 2026-11-25: `lgreco-time` (since then")
    assert "norms" in said
    assert "trial" in said
    assert "topk" not in said
    again = {**cells, "steps/lstm/lgreco-time/1gbit": new}
    assert old_defaults.note(old_defaults.of_cells(again, 2)) == ""
    assert old_defaults.note([("x", "gravac:gain=raw", {}), ("y", "kimad:seconds=1", {})]) == ""


@pytest.mark.parametrize("name", ["adaptive", "training", "planning_cost"])
def test_pages_say_so_of_every_stored_row(name: str) -> None:
    figures = results_sections.load(name)
    text = results_sections.PARTS[name]()
    said = [each for each in text.split("\n\n") if each.startswith("Measured before defaults changed")]
    if name == "planning_cost":
        old = [key for key, each in figures["cases"].items() if "date" not in each]
    else:
        planned = old_defaults.of_cells(figures["cells"], 0 if name == "adaptive" else 2)
        touched = {planner for change in old_defaults.CHANGES for planner in change.planners}
        old = [
            row
            for row, planner, each in planned
            if planner.partition(":")[0] in touched and "date" not in each
        ]
    assert all(f"`{row}`" in "".join(said) for row in old)
    assert bool(old) == bool(said)
