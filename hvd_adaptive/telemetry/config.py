"""What the user asks to be recorded, checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_adaptive.telemetry.loggers import LOGGERS, SinkFactory

__all__ = ["Telemetry"]

_TRACED = (10, 20)
"""Steps that ``trace=True`` records."""


@dataclass(frozen=True)
class Telemetry:
    """What the user asks to be recorded.

    Args:
        logdir: folder for the files of rank 0 (and the traces of all ranks), created where missing;
            None writes nothing (the meter still counts, so that a summary can be had).
        tensorboard: write TensorBoard event files.
        jsonl: write `telemetry.jsonl`, one JSON object per line.
        every: write every this many steps; what is written is the mean over them.
        samples_per_step: training samples that all ranks together consume in one step; without it
            throughput is in steps per second only.
        trace: record when each hook, compression, collective and wait of some steps ran, on every rank,
            in `trace.rank*.json` of the `logdir`: True for steps 10 to 19 of this process, or
            (first, end) as in `range`. See :class:`hvd_adaptive.telemetry.Trace`.
        loggers: where rank 0 also writes: `"wandb"`, `"mlflow"`, or a function (a class) that takes
            the `logdir` and returns a :class:`hvd_adaptive.telemetry.Sink`.

    Raises:
        TypeError, ValueError: for a field of a wrong type or value, saying what to write instead.

    Example:
        >>> Telemetry.parse("runs/first") == Telemetry(logdir="runs/first")
        True
        >>> Telemetry("runs/first", trace=True).traced_steps
        (10, 20)
    """

    logdir: str | None = None
    tensorboard: bool = True
    jsonl: bool = True
    every: int = 10
    samples_per_step: int | None = None
    trace: bool | tuple[int, int] = False
    loggers: Sequence[str | SinkFactory] = ()

    def __post_init__(self) -> None:
        if self.logdir is not None:
            object.__setattr__(self, "logdir", _folder_name(self.logdir))
        for name in ("tensorboard", "jsonl"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"Telemetry.{name} is {value!r}: write {name}=True or {name}=False")
        _require_positive("every", self.every, "the number of steps between two records")
        if self.samples_per_step is not None:
            _require_positive(
                "samples_per_step", self.samples_per_step, "batch size x number of ranks, or None"
            )
        object.__setattr__(self, "loggers", _checked_loggers(self.loggers))
        _require_steps(self.trace)
        if self.logdir is None and (self.trace or self.loggers):
            option = "trace" if self.trace else "loggers"
            raise ValueError(f"Telemetry({option}=...) needs a folder: write logdir='runs/first', too")
        nothing = not (self.tensorboard or self.jsonl or self.trace or self.loggers)
        if self.logdir is not None and nothing:
            raise ValueError(
                f"Telemetry(logdir={self.logdir!r}, tensorboard=False, jsonl=False) would write "
                "nothing: turn one of them on, or write logdir=None"
            )

    @property
    def traced_steps(self) -> tuple[int, int] | None:
        """The first step that is traced, and the first after it that is not; None without a trace."""
        if isinstance(self.trace, bool):
            return _TRACED if self.trace else None
        return self.trace

    @classmethod
    def parse(cls, value: str | os.PathLike[str] | Telemetry | None) -> Telemetry:
        """Accepts what a user may pass as `telemetry=`: nothing, a folder, or a `Telemetry`."""
        if isinstance(value, Telemetry):
            return value
        if value is None:
            return cls()
        if isinstance(value, str | os.PathLike):
            return cls(logdir=_folder_name(value))
        raise TypeError(
            f"telemetry={value!r}: write the name of a folder, such as telemetry='runs/first', "
            "or telemetry=Telemetry(logdir='runs/first', every=10), or None"
        )


def _folder_name(value: object) -> str:
    name = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(name, str):
        raise TypeError(f"logdir={value!r}: write the folder's name as a str or a Path")
    if not name.strip():
        raise ValueError("logdir is empty: write the name of a folder ('.' for this one), or None")
    if "\0" in name:
        raise ValueError(f"logdir={name!r} holds a NUL: write the name of a folder, or None")
    return name


def _checked_loggers(loggers: Any) -> tuple[str | SinkFactory, ...]:
    valid = f"{', '.join(map(repr, LOGGERS))}, or a class of your own"
    if isinstance(loggers, str) or not isinstance(loggers, Sequence):
        raise TypeError(f"Telemetry.loggers is {loggers!r}: write a list of {valid}")
    for each in loggers:
        if isinstance(each, str) and each not in LOGGERS:
            raise ValueError(f"Telemetry.loggers names {each!r}: write {valid}")
        if not (isinstance(each, str) or callable(each)):
            raise TypeError(
                f"Telemetry.loggers holds {each!r}: write {valid} (the class, or a function of the "
                "logdir, not an instance: only rank 0 opens one)"
            )
    return tuple(loggers)


def _require_steps(trace: Any) -> None:
    if isinstance(trace, bool):
        return
    what = "write True, or (first, end) with 0 <= first < end, as in trace=(10, 20)"
    if not (isinstance(trace, tuple) and len(trace) == 2 and all(type(each) is int for each in trace)):
        raise TypeError(f"Telemetry.trace is {trace!r}: {what}")
    if not 0 <= trace[0] < trace[1]:
        raise ValueError(f"Telemetry.trace is {trace!r}: {what}")


def _require_positive(name: str, value: object, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Telemetry.{name} is {value!r}: write an int of at least 1 ({meaning})")
    if not 1 <= value < 1 << 63:
        bound = "of at least 1" if value < 1 else "below 2**63"
        raise ValueError(f"Telemetry.{name} is {value}: write an int {bound} ({meaning})")
