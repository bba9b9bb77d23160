"""Pictures of one run, from the trace that it left: what was decided, and what came of it.

    launch/run.sh --planner lgreco:period=100 --logdir runs/first
    python -m benchmarks.report.plot_trace runs/first        # writes runs/first/*.png

* ``levels.png``: compression of every layer over time, with names.
* ``costs.png``: seconds of a step by part, and bytes of a step.
* ``forecast.png``: what plans were expected to cost, next to what was measured.
* ``planner.png``: everything that the planner reported: bounds, bandwidths, factors, throughputs.

A picture of which the trace holds nothing is left out. Needs matplotlib: pip install matplotlib
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Series = list[tuple[int, float]]

PARTS = ("compute", "compress", "communicate", "decompress")


@dataclass
class RecordedRun:
    """What telemetry.jsonl holds.

    Args:
        scalars: by tag: steps and values; a null is left out.
        plans: steps and plans, as ``Plan.record()`` makes them.
    """

    scalars: dict[str, Series] = field(default_factory=lambda: defaultdict(list))
    plans: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def under(self, prefix: str) -> dict[str, Series]:
        """The scalars whose tags begin so, without it."""
        return {
            tag.removeprefix(prefix): series
            for tag, series in sorted(self.scalars.items())
            if tag.startswith(prefix)
        }


def read(lines: Iterable[str]) -> RecordedRun:
    """Parse a trace; ValueError names the line that is none."""
    trace = RecordedRun()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} is no record of a trace: {error!r}") from error
        for tag, value in record.get("scalars", {}).items():
            if value is not None:
                trace.scalars[tag].append((step, value))
        if "plan" in record:
            trace.plans.append((step, record["plan"]))
    return trace


def levels(trace: RecordedRun) -> Figure | None:
    """Layers x time; the color is dense over sent bytes, on a logarithmic scale."""
    if not trace.plans:
        return None
    names = list(dict.fromkeys(row["layer"] for _, plan in trace.plans for row in plan["layers"]))
    starts = [step for step, _ in trace.plans]
    last = max([step for series in trace.scalars.values() for step, _ in series] + [starts[-1] + 1])
    ratios = np.full((len(names), len(starts)), np.nan)
    for column, (_, plan) in enumerate(trace.plans):
        for row in plan["layers"]:
            ratios[names.index(row["layer"]), column] = row["dense_bytes"] / max(1, row["wire_bytes"])
    figure, axes = plt.subplots(figsize=(10, 1.5 + 0.22 * len(names)), layout="constrained")
    # plans that fell into one step: the last one counts
    edges = np.maximum.accumulate([*starts, max(last, starts[-1] + 1)])
    strongest = max(10.0, float(np.nanmax(ratios)))
    norm = mpl.colors.LogNorm(1, strongest)
    mesh = axes.pcolormesh(edges, np.arange(len(names) + 1), ratios, cmap="viridis_r", norm=norm)
    axes.set_yticks(np.arange(len(names)) + 0.5, names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("step")
    figure.colorbar(mesh, label="times smaller than dense")
    return figure


def costs(trace: RecordedRun) -> Figure | None:
    """Where a step's time goes, and its bytes."""
    parts = {part: trace.scalars.get(f"step_time/{part}", []) for part in PARTS}
    if not all(parts.values()):
        return None
    figure, (above, below) = plt.subplots(2, 1, figsize=(10, 6), sharex=True, layout="constrained")
    steps = [step for step, _ in parts["compute"]]
    above.stackplot(
        steps, [[1e3 * value for _, value in series] for series in parts.values()], labels=PARTS
    )
    above.set_ylabel("ms per step")
    above.set_ylim(bottom=0)
    above.legend(loc="upper right", fontsize=8)
    _line(below, "payload", trace.scalars.get("compression/bytes_per_step", []))
    below.set_ylabel("bytes per step and rank")
    below.set_yscale("log")
    below.set_xlabel("step")
    return figure


def forecast(trace: RecordedRun) -> Figure | None:
    """Predicted and measured, one plot a quantity."""
    measured = trace.under("forecast/measured_")
    if not measured:
        return None
    figure, plots = _plots(len(measured))
    for axes, (name, series) in zip(plots, measured.items(), strict=True):
        _line(axes, "predicted", trace.scalars[f"forecast/predicted_{name}"])
        _line(axes, "measured", series)
        axes.set_ylabel(name.replace("_", " "))
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    return figure


def planner(trace: RecordedRun) -> Figure | None:
    """Every figure that the planner reported; those that differ by a number share a plot."""
    groups: dict[str, dict[str, Series]] = defaultdict(dict)
    for name, series in trace.under("plan/").items():
        groups[re.sub(r"_[\d.]+x?$", "", name)][name] = series
    if not groups:
        return None
    figure, plots = _plots(len(groups))
    for axes, (group, members) in zip(plots, groups.items(), strict=True):
        for name, series in members.items():
            _line(axes, name.removeprefix(group).strip("_"), series)
        axes.set_ylabel(group.replace("_", " "), fontsize=7)
        if len(members) > 1:
            axes.legend(fontsize=7, ncols=4)
    return figure


PICTURES: dict[str, Callable[[RecordedRun], Figure | None]] = {
    "levels": levels,
    "costs": costs,
    "forecast": forecast,
    "planner": planner,
}


def _plots(count: int) -> tuple[Figure, list[Axes]]:
    """A column of plots over the steps."""
    figure, plots = plt.subplots(
        count, 1, figsize=(10, 1 + 1.4 * count), sharex=True, squeeze=False, layout="constrained"
    )
    plots[-1, 0].set_xlabel("step")
    return figure, list(plots[:, 0])


def _line(axes: Axes, label: str, series: Series) -> None:
    if series:
        axes.plot(*zip(*series, strict=True), marker=".", label=label)


def draw(folder: Path, out: Path) -> list[Path]:
    """Make all pictures of a run.

    Args:
        folder: the run's ``logdir``.
        out: where the PNGs go.

    Raises:
        FileNotFoundError, ValueError: there is no trace, or it is none.
    """
    with (folder / "telemetry.jsonl").open(encoding="utf-8") as lines:
        trace = read(lines)
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for name, make in PICTURES.items():
        figure = make(trace)
        if figure is not None:
            path = out / f"{name}.png"
            figure.savefig(path, dpi=110)
            plt.close(figure)
            made.append(path)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description="Pictures of one run, from its trace.")
    parser.add_argument("logdir", type=Path, help="folder that holds telemetry.jsonl")
    parser.add_argument("--out", type=Path, help="folder of the PNGs (the same)")
    arguments = parser.parse_args()
    try:
        made = draw(arguments.logdir, arguments.out or arguments.logdir)
    except FileNotFoundError as error:
        hint = "was it run with --logdir (telemetry=), and with jsonl=True?"
        print(f"plot_trace.py: no trace: {error}; {hint}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"plot_trace.py: {arguments.logdir / 'telemetry.jsonl'}: {error}", file=sys.stderr)
        return 1
    if not made:
        print("plot_trace.py: the trace holds nothing that could be drawn yet", file=sys.stderr)
        return 1
    for path in made:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
