"""Experiment trackers: the real ones offline where they are installed, and what is called of them."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.telemetry import JsonLinesSink, Meter, MlflowSink, Telemetry, WandbSink
from tests.telemetry.helpers import Recorder, plan_of


class Calls:
    """A stand-in for a package: every attribute is one, and calls are written down."""

    def __init__(self, name: str = "", calls: list[tuple[str, Any, Any]] | None = None) -> None:
        self._name = name
        self.calls: list[tuple[str, Any, Any]] = [] if calls is None else calls

    def __getattr__(self, name: str) -> Calls:
        return Calls(f"{self._name}.{name}".lstrip("."), self.calls)

    def __setitem__(self, key: str, value: Any) -> None:
        self.calls.append((self._name, (key, value), {}))

    def __call__(self, *args: Any, **kwargs: Any) -> Calls:
        self.calls.append((self._name, args, kwargs))
        return Calls(f"{self._name}()", self.calls)

    def of(self, name: str) -> list[Any]:
        return [args[0] if args else kwargs for called, args, kwargs in self.calls if called == name]


def write(folder: Path, *loggers: Any) -> None:
    """A short run with these loggers alone."""
    telemetry = Telemetry(str(folder), tensorboard=False, jsonl=False, every=2, loggers=loggers)
    with Meter(telemetry) as meter:
        meter.configuration({"compression": "topk", "ranks": 2})
        for step in range(5):
            meter.bucket(0, payload=10, dense=40)
            meter.end_step(step)
        meter.scalar("not/finite", math.nan, 4)
        meter.plan(plan_of(8, 256), 3)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_an_error_that_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install {name}, or leave '{name}' out"):
        Meter(Telemetry(str(tmp_path), loggers=[name]))


def test_importing_telemetry_imports_no_tracker() -> None:
    assert {"wandb", "mlflow"}.isdisjoint(sys.modules) or "PYTEST_XDIST_WORKER" in os.environ


def test_wandb_gets_numbers_over_the_steps_settings_and_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = Calls()
    wandb.run = None  # type: ignore[method-assign, assignment]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write(tmp_path, "wandb")
    logged = wandb.of("init().log")
    assert [each["hvd_adaptive/step"] for each in logged if "bytes/payload" in each] == [2, 4]
    assert wandb.of("init().config.update") == [{"compression": "topk", "ranks": "2"}]
    assert [each["plan/wire_bytes"] for each in logged if "plan/wire_bytes" in each] == [264]
    assert len(wandb.of("init().finish")) == 1


def test_a_wandb_run_that_was_active_is_used_and_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = Calls()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write(tmp_path, "wandb")
    assert wandb.of("init") == []
    assert wandb.of("run.finish") == []
    assert any("bytes/payload" in each for each in wandb.of("run.log"))


def test_mlflow_gets_finite_numbers_settings_texts_and_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = Calls()
    mlflow.active_run = lambda: None  # type: ignore[method-assign, assignment]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    write(tmp_path, "mlflow")
    steps = [kwargs["step"] for name, _, kwargs in mlflow.calls if name == "log_metrics"]
    assert sorted(steps) == [2, 3, 4]
    assert not any("not/finite" in each for each in mlflow.of("log_metrics"))
    tags = [args[1:] for name, args, _ in mlflow.calls if name == "MlflowClient().set_tag"]
    assert tags == [("compression", "topk"), ("ranks", "2")]
    assert [each["version"] for each in mlflow.of("log_dict")] == [0]
    assert len(mlflow.of("end_run")) == 1


def test_a_sink_of_ones_own_is_made_with_the_folder_on_rank_0_alone(tmp_path: Path) -> None:
    made: list[str] = []

    def mine(logdir: str) -> Recorder:
        made.append(logdir)
        return Recorder()

    write(tmp_path, mine, JsonLinesSink)
    assert made == [str(tmp_path)]
    assert (tmp_path / "telemetry.jsonl").exists()
    Meter(Telemetry(str(tmp_path), loggers=[mine]), rank=1)
    assert made == [str(tmp_path)]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    # Its service needs more than the default of 30 s to start on a busy machine.
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "120")
    # A database would need packages that mlflow-skinny does not bring.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    return lambda name: pytest.importorskip(name, reason=f"{name} is not installed")


def test_wandb_itself_takes_a_run_offline(tmp_path: Path, offline: Callable[[str], Any]) -> None:
    offline("wandb")
    write(tmp_path, WandbSink)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"bytes/payload" in file.read_bytes()


def test_mlflow_itself_keeps_metrics_and_plans(tmp_path: Path, offline: Callable[[str], Any]) -> None:
    mlflow = offline("mlflow")
    write(tmp_path, MlflowSink)
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert run.data.metrics["bytes/payload"] == 10
    assert run.data.metrics["plan/wire_bytes"] == 264
    assert run.data.tags["compression"] == "topk"
    kept = mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/plan/step_3.json")
    assert len(json.loads(kept)["layers"]) == 2
