"""Where records go: the contract of a sink, and files of JSON lines."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hvd_adaptive.planning.plan import Plan

__all__ = ["JsonLinesSink", "Sink", "make_folder"]


class Sink(Protocol):
    """Where records go. A sink that raises is disabled by the meter, with a warning."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, tag: str, text: str, step: int) -> None: ...

    def plan(self, plan: Plan, step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class JsonLinesSink:
    """One JSON object per line: `{"step": 20, "time": 1.7e9, "scalars": {...}}`, or "texts", or "plan".

    NaN and the infinities become null: JSON has no word for them. An existing file is continued,
    so a resumed job keeps one file. Each line is flushed, so that the file can be followed.
    """

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        path = make_folder(logdir) / "telemetry.jsonl"
        self._file = path.open("a", encoding="utf-8")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        finite = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        self._write(step, "scalars", finite)

    def text(self, tag: str, text: str, step: int) -> None:
        self._write(step, "texts", {tag: text})

    def plan(self, plan: Plan, step: int) -> None:
        self._write(step, "plan", plan.record())

    def _write(self, step: int, key: str, values: Mapping[str, Any]) -> None:
        line = json.dumps({"step": step, "time": time.time(), key: values}, allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def make_folder(logdir: str | os.PathLike[str]) -> Path:
    folder = Path(logdir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
