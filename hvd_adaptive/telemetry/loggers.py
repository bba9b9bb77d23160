"""Experiment trackers: Weights & Biases, and MLflow. Neither is a dependency."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from hvd_adaptive.planning.plan import Plan
from hvd_adaptive.telemetry.sinks import Sink, make_folder

__all__ = ["LOGGERS", "MlflowSink", "SinkFactory", "WandbSink"]

SinkFactory: TypeAlias = Callable[[str], Sink]
"""Makes a sink of a `logdir`: a class of one's own, for example."""


class WandbSink:
    """Weights & Biases: the run that is active, or else a new one in the project `hvd_adaptive`.

    Numbers are drawn over `hvd_adaptive/step`, so that a script may log its own by any other steps.
    The settings become the run's configuration; a plan becomes its bytes and a table. What wandb reads
    from its environment counts (`WANDB_PROJECT`, `WANDB_MODE=offline`). A run that was active stays
    open.

    Raises:
        ModuleNotFoundError: wandb is not installed.
    """

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        wandb = _imported("wandb")
        self._wandb = wandb
        self._mine = wandb.run is None
        self._run: Any = wandb.run
        if self._mine:
            project = os.environ.get("WANDB_PROJECT", "hvd_adaptive")
            self._run = wandb.init(project=project, dir=str(make_folder(logdir)))
        self._run.define_metric("hvd_adaptive/step", hidden=True)
        self._run.define_metric("*", step_metric="hvd_adaptive/step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "hvd_adaptive/step": step})

    def text(self, tag: str, text: str, step: int) -> None:
        if tag == "configuration":
            self._run.config.update(_settings(text), allow_val_change=True)
        else:
            self._run.summary[tag] = text

    def plan(self, plan: Plan, step: int) -> None:
        columns = ["layer", "compressor", "level", "scheme", "wire_bytes", "dense_bytes"]
        rows = [[getattr(row, column) for column in columns] for row in plan]
        table = self._wandb.Table(columns=columns, data=rows)
        self._run.log(
            {"plan/wire_bytes": plan.wire_bytes, "plan/table": table, "hvd_adaptive/step": step}
        )

    def flush(self) -> None:
        """Nothing: wandb writes in a process of its own."""

    def close(self) -> None:
        if self._mine:
            self._run.finish()


class MlflowSink:
    """MLflow: the run that is active, or else a new one.

    Numbers are metrics, without those that are not finite; the settings are tags; texts and plans are
    artifacts. What MLflow reads from its environment counts (`MLFLOW_TRACKING_URI`). A run that was
    active stays open.

    Raises:
        ModuleNotFoundError: MLflow is not installed.
    """

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        make_folder(logdir)
        self._mlflow = _imported("mlflow")
        self._mine = self._mlflow.active_run() is None
        run = self._mlflow.start_run() if self._mine else self._mlflow.active_run()
        self._run = run.info.run_id
        self._client = self._mlflow.MlflowClient()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        finite = {_metric(tag): value for tag, value in values.items() if math.isfinite(value)}
        if finite:
            self._mlflow.log_metrics(finite, step=step, run_id=self._run)

    def text(self, tag: str, text: str, step: int) -> None:
        if tag == "configuration":
            for key, value in _settings(text).items():
                self._client.set_tag(self._run, _metric(key), value)
        self._mlflow.log_text(text, f"{tag}_{step}.md", run_id=self._run)

    def plan(self, plan: Plan, step: int) -> None:
        self._mlflow.log_metrics({"plan/wire_bytes": plan.wire_bytes}, step=step, run_id=self._run)
        self._mlflow.log_dict(plan.record(), f"plan/step_{step}.json", run_id=self._run)

    def flush(self) -> None:
        """Nothing: MLflow writes at once."""

    def close(self) -> None:
        if self._mine:
            self._mlflow.end_run()


LOGGERS: Final[dict[str, SinkFactory]] = {"wandb": WandbSink, "mlflow": MlflowSink}
"""By the names that `Telemetry(loggers=)` takes."""


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"telemetry to {name} needs a package that is not installed ({error}): "
            f"pip install {name}, or leave {name!r} out of Telemetry(loggers=...)"
        ) from error


def _metric(tag: str) -> str:
    """A name that MLflow accepts."""
    return "".join(each if each.isalnum() or each in "_-./ " else "_" for each in tag)


def _settings(table: str) -> dict[str, str]:
    """The rows of a Markdown table of two columns."""
    rows = (line.strip("| ").split(" | ", 1) for line in table.splitlines()[2:])
    return {row[0]: row[-1].replace(r"\|", "|") for row in rows}
