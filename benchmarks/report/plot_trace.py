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
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from hvd_adaptive.telemetry.recorded import Point, RecordedRun, load, whole_windows

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

Series = Sequence[Point]

PARTS = ("compute", "compress", "exposed", "decompress")
NAMES = {"exposed": "exposed communication"}
TOGETHER = {
    "max_bytes": "bytes",
    "dense_bytes": "bytes",
    "max_error": "error",
    "error_of_one_plan": "error",
    "theta_min": "theta",
}
"""What a planner reports of one quantity, by the name of its plot."""


def levels(trace: RecordedRun) -> Figure | None:
    """Layers x time; the color is dense over sent bytes, on a logarithmic scale."""
    if not trace.plans:
        return None
    names = list(dict.fromkeys(row["layer"] for _, plan in trace.plans for row in plan["layers"]))
    starts = [step for step, _ in trace.plans]
    last = max(trace.last_step, starts[-1] + 1)
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
    parts = {part: whole_windows(trace.series(f"time/{part}_ms")) for part in PARTS}
    if not all(parts.values()):
        return None
    figure, (above, below) = plt.subplots(2, 1, figsize=(10, 6), sharex=True, layout="constrained")
    steps = [point.step for point in parts["compute"]]
    labels = [NAMES.get(part, part) for part in PARTS]
    above.stackplot(
        steps, [[point.value for point in series] for series in parts.values()], labels=labels
    )
    above.set_ylabel("ms per step")
    above.set_ylim(bottom=0)
    above.legend(loc="upper right", fontsize=8)
    for name in ("dense", "payload"):
        _line(below, name, whole_windows(trace.series(f"bytes/{name}")))
    below.set_ylabel("bytes per step and rank")
    _readable_log(below)
    below.legend(fontsize=8)
    below.set_xlabel("step")
    return figure


def _readable_log(axes: Axes) -> None:
    """A logarithmic vertical axis with words such as 200k on every line, also within one decade."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    few = high / low < 100
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=12))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", alpha=0.3)


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
    """Every figure that the planner reported; those that differ by a number share a plot.

    What was 0 throughout, because it does not matter to this planner, has no plot.
    """
    groups: dict[str, dict[str, Series]] = defaultdict(dict)
    for name, series in trace.under("plan/").items():
        if any(point.value for point in series):
            group = re.sub(r"_[\d.]+x?$", "", name)
            groups[TOGETHER.get(group, group)][name] = series
    if not groups:
        return None
    figure, plots = _plots(len(groups))
    for axes, (group, members) in zip(plots, groups.items(), strict=True):
        for name, values in members.items():
            _line(
                axes, name.removeprefix(f"{group}_").replace("_", " "), values, drawstyle="steps-post"
            )
        if group == "bytes":
            _readable_log(axes)
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


def _line(axes: Axes, label: str, series: Series, **style: Any) -> None:
    if series:
        steps, values, _ = zip(*series, strict=True)
        axes.plot(steps, values, marker=".", label=label, **style)


def draw(folder: Path, out: Path) -> list[Path]:
    """Make all pictures of a run.

    Args:
        folder: the run's ``logdir``.
        out: where the PNGs go.

    Raises:
        FileNotFoundError, ValueError: there is no trace, or it is none.
    """
    trace = load(folder)
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
