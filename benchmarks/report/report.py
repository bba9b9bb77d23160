"""What every benchmark does with its figures: a table on the terminal and a JSON file."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows as text: the first is the heading, the first column is left-aligned."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def show(rows: Sequence[Sequence[object]]) -> None:
    """Print a table as soon as it is there, and an empty line."""
    print(table(rows), end="\n\n", flush=True)


def pyplot() -> Any:
    """Matplotlib's, drawing into files; imported here, for a table needs none."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def write(name: str, figures: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write ``figures`` with what they were measured on to ``results/NAME.json``; return its path.

    All or nothing: a Ctrl-C leaves the file as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {"machine": machine(), **figures}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(part, path)
    return path


def machine() -> dict[str, object]:
    """Where and when, and with which versions."""
    import numba
    import torch

    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
    }


def place(machine: Mapping[str, object]) -> str:
    """What of a machine must be equal for seconds to be comparable, in words."""
    return f"{machine['cores']} cores {machine['cpu']}, torch {machine['torch']}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")


def _cell(value: object) -> str:
    return f"{value:,.3g}" if isinstance(value, float) else str(value)
