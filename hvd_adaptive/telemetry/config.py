"""What the user asks to be recorded, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Telemetry"]


@dataclass(frozen=True)
class Telemetry:
    """What the user asks to be recorded.

    Args:
        logdir: folder for the files of rank 0, created where missing; None writes nothing (the
            meter still counts, so that a summary can be had).
        tensorboard: write TensorBoard event files.
        jsonl: write `telemetry.jsonl`, one JSON object per line.
        every: write every this many steps; what is written is the mean over them.
        samples_per_step: training samples that all ranks together consume in one step; without it
            no throughput is reported.

    Raises:
        TypeError, ValueError: for a field of a wrong type or value, saying what to write instead.

    Example:
        >>> Telemetry.parse("runs/first") == Telemetry(logdir="runs/first")
        True
    """

    logdir: str | None = None
    tensorboard: bool = True
    jsonl: bool = True
    every: int = 10
    samples_per_step: int | None = None

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
        if self.logdir is not None and not (self.tensorboard or self.jsonl):
            raise ValueError(
                f"Telemetry(logdir={self.logdir!r}, tensorboard=False, jsonl=False) would write "
                "nothing: turn one of them on, or write logdir=None"
            )

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


def _require_positive(name: str, value: object, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Telemetry.{name} is {value!r}: write an int of at least 1 ({meaning})")
    if not 1 <= value < 1 << 63:
        bound = "of at least 1" if value < 1 else "below 2**63"
        raise ValueError(f"Telemetry.{name} is {value}: write an int {bound} ({meaning})")
