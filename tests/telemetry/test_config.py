"""Telemetry: what is accepted, and what an error says to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.telemetry import Telemetry


def test_parse_accepts_nothing_a_folder_and_a_telemetry(tmp_path: Path) -> None:
    mine = Telemetry(logdir="a", every=3)
    assert Telemetry.parse(None) == Telemetry()
    assert Telemetry.parse("a") == Telemetry(logdir="a")
    assert Telemetry.parse(tmp_path) == Telemetry(logdir=str(tmp_path))
    assert Telemetry.parse(mine) is mine


@pytest.mark.parametrize(
    ("value", "error", "advice"),
    [
        (7, TypeError, "write the name of a folder"),
        (True, TypeError, "write the name of a folder"),
        (b"runs", TypeError, "write the name of a folder"),
        ({"logdir": "a"}, TypeError, r"Telemetry\(logdir="),
        ("", ValueError, "write the name of a folder"),
        ("  ", ValueError, "write the name of a folder"),
    ],
)
def test_parse_rejects_anything_else_and_says_what_to_write(
    value: Any, error: type[Exception], advice: str
) -> None:
    with pytest.raises(error, match=advice):
        Telemetry.parse(value)


@pytest.mark.parametrize(
    ("fields", "error", "advice"),
    [
        ({"logdir": 3}, TypeError, "as a str or a Path"),
        ({"tensorboard": "yes"}, TypeError, "tensorboard=True or tensorboard=False"),
        ({"jsonl": 1}, TypeError, "jsonl=True or jsonl=False"),
        ({"every": 0}, ValueError, "an int of at least 1"),
        ({"every": 2.5}, TypeError, "an int of at least 1"),
        ({"every": True}, TypeError, "an int of at least 1"),
        ({"samples_per_step": -4}, ValueError, "batch size x number of ranks"),
        ({"samples_per_step": "64"}, TypeError, "batch size x number of ranks"),
        ({"samples_per_step": 10**400}, ValueError, r"an int below 2\*\*63"),
        ({"logdir": "a\0b"}, ValueError, r"'a\\x00b' holds a NUL"),
        ({"logdir": "a", "tensorboard": False, "jsonl": False}, ValueError, "write nothing"),
        ({"logdir": "a", "trace": 3}, TypeError, r"write True, or \(first, end\)"),
        ({"logdir": "a", "trace": (5, 5)}, ValueError, "with 0 <= first < end"),
        ({"logdir": "a", "trace": (1.0, 2)}, TypeError, r"write True, or \(first, end\)"),
        ({"trace": True}, ValueError, "trace.* needs a folder"),
        ({"logdir": "a", "loggers": "wandb"}, TypeError, "write a list of 'wandb', 'mlflow'"),
        ({"logdir": "a", "loggers": ["wandbb"]}, ValueError, "write 'wandb', 'mlflow'"),
        ({"logdir": "a", "loggers": [3]}, TypeError, "not an instance"),
        ({"loggers": ["wandb"]}, ValueError, "loggers.* needs a folder"),
    ],
)
def test_a_wrong_field_is_an_error_that_says_what_to_write(
    fields: dict[str, Any], error: type[Exception], advice: str
) -> None:
    with pytest.raises(error, match=advice):
        Telemetry(**fields)
