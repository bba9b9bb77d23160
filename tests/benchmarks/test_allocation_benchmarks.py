"""The benchmarks of planning: that they run, and what they make of numbers."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks.harness import lab
from benchmarks.micro import bucket_costs
from benchmarks.report import report
from tests.harness.rank_launcher import without_launch

QUICK = {
    "accuracy.aggregate_error": ("both: times less", "MLP, 8 ranks, two shots"),
    "accuracy.allocation": ("times fewer bytes", "MLP, powersgd:rank=4"),
    "accuracy.gravac_search": ("next best that suffices", "20x, 40x, 160x, 1000x"),
    "accuracy.sensitivity": ("all together", "loss at the last level"),
    "micro.bucket_costs": ("intercept", "r2 of single steps"),
    "micro.multi_level": ("one summary", "VGG16  `redsync`"),
    "micro.planning_cost": ("other steps", "MLP, topk"),
}


@pytest.fixture
def planning_cost() -> ModuleType:
    pytest.importorskip("horovod.torch")
    return importlib.import_module("benchmarks.micro.planning_cost")


@pytest.fixture
def allocation() -> ModuleType:
    pytest.importorskip("horovod.torch")
    return importlib.import_module("benchmarks.accuracy.allocation")


@pytest.fixture
def sensitivity() -> ModuleType:
    pytest.importorskip("horovod.torch")
    return importlib.import_module("benchmarks.accuracy.sensitivity")


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_quick_run_prints_its_table_and_writes_no_file(name: str) -> None:
    result = report.RESULTS / f"{name.partition('.')[2]}.json"
    before = result.read_bytes() if result.exists() else None
    run = subprocess.run(
        [*lab.module(name), "--quick"],
        capture_output=True,
        text=True,
        check=False,
        cwd=lab.ROOT,
        env=without_launch(),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert all(text in run.stdout for text in QUICK[name])
    assert (result.read_bytes() if result.exists() else None) == before


def test_recorded_rows_are_fitted_again_from_csv_and_from_json(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = ["plan,seconds,bucket 0,bucket 1,bucket 2"]
    for plan in range(12):
        first, second = rng.uniform(1e5, 1e6, 2)
        seconds = 0.1 + 2e-7 * first + 5e-7 * second
        rows += [f"{plan},{seconds},{first},{second},4096"] * 3
        rows.append(f"{plan},{9 * seconds},{first},{second},4096")  # delayed by something else
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([*rows, "12,0.3"]))  # of a run that was ended
    figures = bucket_costs.fit(bucket_costs.read(path))
    assert len(figures["plans"]) == 12
    assert figures["r2"] == pytest.approx(1.0)
    assert figures["r2 of plans left out"] == pytest.approx(1.0)
    assert figures["intercept"] == pytest.approx(0.1)
    costs = [row.get("seconds a MB") for row in figures["buckets"]]
    assert costs[:2] == pytest.approx([0.2, 0.5])
    assert costs[2] is None  # its bytes never change: nobody can tell
    again = tmp_path / "rows.json"
    again.write_text(json.dumps(figures))
    assert bucket_costs.fit(bucket_costs.read(again))["intercept"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "text", ["", "seconds,plan,bucket 0\n1,2,3\n", "plan,seconds,bucket 0\n1,2,3\n"]
)
def test_a_file_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"rows\.csv"):
        bucket_costs.read(path)


@pytest.mark.parametrize(
    ("rows", "plans"), [("", 0), ("1,2,3\n", 0), ("1,2,3\n1,2,4\n2,", 1), ("1,2,3\n1,2,4\n2,3,4\n", 2)]
)
def test_the_plans_of_a_run_that_was_stopped_are_those_of_whole_rows(
    tmp_path: Path, rows: str, plans: int
) -> None:
    path = tmp_path / "rows.csv"
    assert bucket_costs.plans_of(path) == 0
    path.write_text(f"plan,seconds,bucket 0\n{rows}" if rows else "")
    assert bucket_costs.plans_of(path) == plans


def test_only_settled_steps_of_random_plans_are_recorded(tmp_path: Path) -> None:
    from hvd_adaptive.planning import StepMeasurements

    path = tmp_path / "rows.csv"
    recorder = bucket_costs.Recorder(path, plans=2)
    for step in range(40):
        if step in (9, 19, 29):  # after this step: two random plans, then one of the planner's own
            recorder.switches.append(step)
        # a step is told of when the one after it has ended
        nbytes = np.array([float(step)])
        recorder.observe(StepMeasurements(step - 1, bucket_bytes=nbytes, sync_seconds=1.0))
    rows = bucket_costs.read(path)
    assert rows.plans.tolist() == [1] * 5 + [2] * 5
    assert (rows.nbytes[:, 0] - 1).tolist() == [*range(15, 20), *range(25, 30)]


def test_planning_is_charged_for_its_own_steps_whatever_the_others_become(
    planning_cost: ModuleType,
) -> None:
    steps, block = 1000, 25
    seconds = np.full(steps, 0.1)
    seconds[::block] += 0.01  # energies are measured
    seconds[[0, 225, 425, 625, 825]] += 0.04  # and errors
    changes = [210, 410, 610, 810, 998]
    for change in changes:
        seconds[change - 2] += 0.05
        seconds[change + 1] += 0.03
    seconds[5] = 60.0  # kernels compile
    sampled = list(range(0, steps, block))
    with_one = planning_cost.Times(list(seconds), sampled, changes)
    without = planning_cost.Times([60.0, *[0.1] * (steps - 1)])
    found = planning_cost.compare(with_one, without, block)
    measuring = 35 * 0.01 + 4 * 0.05  # of the 40, without the first
    assert found["measuring"] == pytest.approx(measuring / (975 * 0.1))
    assert found["measuring ms"] == pytest.approx(1e3 * measuring / 39)
    assert found["changing"] == pytest.approx(4 * 0.08 / (975 * 0.1))
    assert found["around a change ms"]["-2"] == pytest.approx(50)
    assert found["other steps"] == pytest.approx(0.0, abs=1e-9)
    assert found["planning"] == pytest.approx(found["measuring"] + found["changing"])
    faster = planning_cost.Times(list(seconds * 0.9), sampled, changes)
    assert planning_cost.compare(faster, without, block)["planning"] > 0.005
    whole_gradients = planning_cost.Times(list(seconds), list(range(steps)), changes)
    assert planning_cost.compare(whole_gradients, without, block)["measuring"] == found["measuring"]


def test_a_plan_is_not_charged_for_the_slower_steps_of_the_one_before(
    planning_cost: ModuleType,
) -> None:
    seconds = np.full(800, 0.1)
    seconds[411:] = 0.07
    seconds[[200, 600]] += 0.02  # errors are measured
    seconds[408] += 0.05
    found = planning_cost.compare(
        planning_cost.Times(list(seconds), [200, 600], [410]), planning_cost.Times([0.1] * 800), 25
    )
    assert found["changing"] == pytest.approx(0.05 / (775 * 0.1))
    assert found["measuring"] == pytest.approx(0.04 / (775 * 0.1))


def test_zeros_of_a_gradient_cost_no_bytes_and_unequal_layers_are_worth_bits(
    allocation: ModuleType,
) -> None:
    from hvd_adaptive.layers import Layer

    layers = [Layer(0, "a", (64, 64)), Layer(1, "b", (64, 64)), Layer(2, "bias", (64,))]
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(layer.numel, generator=generator) for layer in layers]
    grads[0][410:] = 0.0  # a tenth of it remains, as of an embedding
    sizes = [
        allocation.table_for(allocation.rows_of(layers, "topk:density=0.1"), [grads]).sizes[index]
        for index in (0, 1)
    ]
    assert len(sizes) == 2  # the bias is sent dense
    assert sizes[0][0] == pytest.approx(sizes[1][90], rel=0.02)  # 100 % of it is 10 % of the other
    assert sizes[1][0] > 5 * sizes[0][0]

    grads[0] = grads[1] * 4  # 16 times its energy
    table = allocation.table_for(allocation.rows_of(layers, "qsgd:bits=4"), [grads])
    assert allocation.unequal_bits(table) == pytest.approx(0.5 * np.log2(8.5 / 4), rel=0.02)


def test_targets_count_what_is_really_sent(allocation: ModuleType) -> None:
    row = {"fewer": 9.0, "at best": 1.2, "really fewer": 1.2, "error": 1.0}
    settings = {each.compression: row for each in allocation.SETTINGS}
    found = allocation.missed({"models": {"LSTM": settings, "another": settings}})
    assert [line.split(":")[0] for line in found] == ["LSTM, topk", "LSTM, powersgd"]
    worse = {"models": {"LSTM": {key: {**row, "error": 1.01} for key in settings}}}
    assert sum("error" in line for line in allocation.missed(worse)) == len(settings)


# --- sensitivity ----------------------------------------------------------------------------------


def test_correlations_are_over_layers_and_over_levels(sensitivity: ModuleType) -> None:
    # three layers, two levels: the metric ranks layers as the loss does at the first level alone
    figures = {
        "sensitivity": [[1.0, 3.0], [2.0, 1.0], [3.0, 2.0]],
        "norm": [[10.0, 30.0], [20.0, 20.0], [30.0, 40.0]],
    }
    found = sensitivity.correlations([figures], "norm")
    assert found["at levels"] == pytest.approx([1.0, np.corrcoef([3, 1, 2], [30, 20, 40])[0, 1]])
    assert found["in layers"] == [pytest.approx(1.0), None, pytest.approx(-1.0)]
    everything = np.corrcoef([1, 3, 2, 1, 3, 2], [10, 30, 20, 20, 30, 40])[0, 1]
    assert found["all"] == pytest.approx(everything)
    opposite = {**figures, "norm": (-np.array(figures["norm"])).tolist()}
    assert sensitivity.correlations([figures, opposite], "norm")["all"] == pytest.approx(0.0)
