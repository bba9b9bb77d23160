"""Pictures of a run, from a trace that a meter wrote."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import lab
from hvd_adaptive.planning.plan import LayerPlan, Plan
from hvd_adaptive.telemetry import Meter, Telemetry


def plot(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*lab.module("report.plot_trace"), folder],
        cwd=lab.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_run_with_a_planner_has_four_pictures(tmp_path: Path) -> None:
    with Meter(Telemetry(str(tmp_path), tensorboard=False, every=1)) as meter:
        for step in range(8):
            if step in (0, 4):
                row = LayerPlan("w", (8, 8), "topk", 0.1, "allgather", 8 * (1 + step), 256)
                meter.plan(Plan((row,), version=step, step=step), step)
            meter.bucket(0, compress=0.1, exposed=0.2, decompress=0.1, payload=8)
            for tag in ("plan/throughput_10x", "plan/throughput_20x", "plan/max_bytes"):
                meter.scalar(tag, step, step)
            meter.scalar("forecast/predicted_bytes", 8.0, step)
            meter.scalar("forecast/measured_bytes", 8.5, step)
            meter.end_step(step)
    done = plot(tmp_path)
    assert done.returncode == 0, done.stderr
    made = [Path(line) for line in done.stdout.split()]
    assert [path.name for path in made] == ["levels.png", "costs.png", "forecast.png", "planner.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def test_a_run_without_a_planner_has_no_pictures_of_one(tmp_path: Path) -> None:
    layer = {"layer": "w", "dense_bytes": 256, "wire_bytes": 8}
    record = {"step": 3, "time": 0.0, "plan": {"layers": [layer]}}
    (tmp_path / "telemetry.jsonl").write_text(json.dumps(record) + "\n")
    done = plot(tmp_path)
    assert [Path(line).name for line in done.stdout.split()] == ["levels.png"], done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no trace"),
        ("{}\n", "line 1 is no record"),
        ('{"step": 1}\n[]\n', "line 2 is no record"),
        ("", "nothing that could be drawn"),
    ],
)
def test_what_is_no_trace_is_said(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "telemetry.jsonl").write_text(content)
    done = plot(tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_planners_picture_leaves_out_what_is_always_zero_and_costs_the_last_few_steps(
    tmp_path: Path,
) -> None:
    from benchmarks.report import plot_trace
    from hvd_adaptive.telemetry.recorded import read

    lines = [
        json.dumps({"step": step, "scalars": {
            **{f"time/{part}_ms": 1.0 for part in plot_trace.PARTS},
            "bytes/payload": 200e3 if step < 32 else 1.0, "bytes/dense": 400e3,
            "plan/bytes": 5.0, "plan/max_bytes": 9.0, "plan/ideal": 0.0, "plan/shortfall": 0.0,
        }}) + "\n"
        for step in (10, 20, 30, 32)
    ]  # fmt: skip
    run = read(lines)
    planner = plot_trace.planner(run)
    assert planner is not None
    assert [axes.get_ylabel() for axes in planner.axes] == ["bytes"]
    costs = plot_trace.costs(run)
    assert costs is not None
    below = costs.axes[1]
    assert max(line.get_xdata().max() for line in below.lines) == 30
    costs.canvas.draw()
    low, high = below.get_ylim()
    ticks = zip(below.get_yticks(), below.get_yticklabels(), strict=True)
    words = [label.get_text() for at, label in ticks if low <= at <= high]
    assert "200k" in words
    assert all(re.fullmatch(r"[\d.]+k", word) for word in words)


def test_the_picture_to_choose_by_has_every_method_with_its_bytes_and_time() -> None:
    from benchmarks.network import training_tables as tables
    from benchmarks.report import plots

    points = json.loads((lab.ROOT / "benchmarks/results/training.json").read_text())["cells"]
    for model in tables.names(points, 1, "course"):
        found = plots.ends(points, model)
        methods = {*tables.names(points, 2, "course"), tables.FP16}
        assert {method for method in methods if tables.outcome(points, model, method)} <= found.keys()
        known = [end for end in found.values() if end["payload"] > 0 and end["seconds"] > 0]
        assert len(known) >= len(found) - 2, model
        front = plots.best_front([(end["seconds"], end["score"]) for end in known], "accuracy")
        assert front == sorted(front)
