"""Draws what benchmarks/network/training.py has measured.

    python -m benchmarks.report.plots    # results/training_{overview,steps,accuracy,choice}.png

The first picture compares the steps of four models at 200 Mbit/s, the second shows where a step of the
LSTM spends its time, the third how the LSTM and the MLP get better with the seconds of training, the
fourth what every compressor and planner ends with, against its bytes and its time: what one chooses by.
Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.network import training_tables as tables
from benchmarks.network.training_tables import COMPUTE_ONLY, DENSE, FP16, TOPK
from benchmarks.report import report

MODEL, RATE = "lstm", tables.TARGET_RATE
COLORS = {
    "compute": "#8c8c8c",
    "compress": "#dd8452",
    "communicate": "#4c72b0",
    "decompress": "#937860",
}
MEANINGS = {"communicate": "exposed communication"}
SHADES = {
    FP16: "#7f7f7f", "powersgd": "#8172b3", "qsgd": "#55a868", TOPK: "#c44e52", tables.SIGNS: "#dd8452",
    "lgreco": "#1f77b4", "lgreco-time": "#17becf", "kimad": "#2ca02c", "kimad+": "#bcbd22",
    "gravac": "#9467bd", "gravac+lgreco": "#e377c2", "accordion": "#8c564b",
    "accordion+lgreco": "#d62728", "cgx": "#ff7f0e", tables.AUTO: "#000000",
}  # fmt: skip
LINES = {DENSE: "#4c72b0", FP16: "#55a868", TOPK: "#c44e52", "powersgd": "#8172b3"}


def steps(points: Mapping[str, Any], path: Path) -> bool:
    """Stacked bars: the parts of a step of each method.

    Returns:
        Whether there was anything to draw.
    """
    compute_only = tables.step_of(points, MODEL, COMPUTE_ONLY, RATE)
    found = {
        name: tables.step_of(points, MODEL, name, RATE) for name in tables.names(points, 2, "steps")
    }
    bars = {
        name: tables.parts_of(step, tables.ratio(points, MODEL, RATE, name, COMPUTE_ONLY))
        for name, step in found.items()
        if step and name != COMPUTE_ONLY
    }
    if not bars or compute_only is None:
        return False
    figure, axes = _axes(1)
    left = dict.fromkeys(bars, 0.0)
    for part, color in COLORS.items():
        # Horovod's own optimizer reports no compression: no bar.
        widths = {name: 1e3 * times[part] for name, times in bars.items() if times[part] > 0}
        axes[0].barh(
            list(widths),
            list(widths.values()),
            left=[left[name] for name in widths],
            color=color,
            label=MEANINGS.get(part, part),
        )
        for name, width in widths.items():
            left[name] += width
    axes[0].axvline(1e3 * compute_only["median"], color="black", linestyle=":", label="compute-only")
    axes[0].invert_yaxis()
    axes[0].set_xlabel("milliseconds per step")
    axes[0].set_title(f"{MODEL}, 4 hosts, links of {RATE}: median step")
    axes[0].legend()
    return _save(figure, path)


def overview(points: Mapping[str, Any], path: Path) -> bool:
    """The steps of every model: compute-only, stock fp16, 4-bit codes, and the fastest at the target.

    Returns:
        Whether there was anything to draw.
    """
    models = [name for name in tables.names(points, 1, "steps") if best(points, name)]
    if not models:
        return False
    pyplot = report.pyplot()
    figure, axes = pyplot.subplots(1, len(models), figsize=(2.9 * len(models), 2.3), squeeze=False)
    for place, model in zip(axes[0], models, strict=True):
        rows = dict.fromkeys((FP16, "qsgd", best(points, model)))
        found = {name: tables.step_of(points, model, name, RATE) for name in rows}
        steps = {
            f"stock {name[6:]}" if name == FP16 else name: each for name, each in found.items() if each
        }
        for number, (name, step) in enumerate(steps.items()):
            color = COLORS["communicate"] if number == 0 else LINES[TOPK]
            bar = place.barh(name, 1e3 * step["median"], color=color)
            place.bar_label(bar, fmt="{:,.0f}", padding=2, fontsize=8)
        compute_only = tables.step_of(points, model, COMPUTE_ONLY, RATE)
        if compute_only is not None:
            place.axvline(1e3 * compute_only["median"], color="black", linestyle=":")
        place.invert_yaxis()
        place.margins(x=0.18)
        place.set(title=model, xlabel="ms per step")
    return _save(figure, path)


def best(points: Mapping[str, Any], model: str) -> str:
    """The compressor or planner that reaches the target first at the rate; "" if none does."""
    ours = [
        name
        for name in tables.names(points, 2, "course")
        if not name.startswith("stock") and tables.seconds_to_target(points, model, name, RATE) > 0
    ]
    return min(ours, key=lambda name: tables.seconds_to_target(points, model, name, RATE), default="")


def accuracy(points: Mapping[str, Any], path: Path) -> bool:
    """Score over the seconds of training at the rate, mean of the seeds.

    Returns:
        Whether there was anything to draw.
    """
    models = [each for each in ("lstm", "mlp") if curves(points, each)]
    if not models:
        return False
    figure, axes = _axes(len(models))
    for place, model in zip(axes, models, strict=True):
        for method, (seconds, scores) in curves(points, model).items():
            place.plot(seconds, scores, color=LINES[method], marker=".", label=method)
        name = tables.metric(next(iter(tables.runs_of(points, model, DENSE).values())))
        place.set(xlabel="seconds of training", ylabel=f"held-out {name}", title=f"{model}, {RATE}")
        if name == "perplexity":
            place.set_yscale("log")
        place.legend()
    return _save(figure, path)


def choice(points: Mapping[str, Any], path: Path) -> bool:
    """The score that each method ends with over its bytes per step, and over its seconds of training.

    Returns:
        Whether there was anything to draw.
    """
    models = [each for each in tables.names(points, 1, "course") if ends(points, each)]
    if not models:
        return False
    pyplot = report.pyplot()
    figure, axes = pyplot.subplots(
        len(models), 2, figsize=(11, 3.1 * len(models)), squeeze=False, sharey="row"
    )
    labels: dict[str, Any] = {}
    for (left, right), model in zip(axes, models, strict=True):
        found = ends(points, model)
        name = tables.metric(next(iter(tables.runs_of(points, model, DENSE).values())))
        for place, kind in ((left, "payload"), (right, "seconds")):
            known = {method: end for method, end in found.items() if end[kind] > 0}
            for method, end in known.items():
                labels[method] = place.scatter(end[kind], end["score"], zorder=3, **look(method))
            front = best_front([(end[kind], end["score"]) for end in known.values()], name)
            place.plot(*zip(*front, strict=True), color="#bbbbbb", zorder=1)
            place.axhline(found[DENSE]["score"], color="black", linestyle=":", linewidth=1)
            place.set_xscale("log")
            _readable(place.xaxis)
            place.grid(alpha=0.25)
        if name == "perplexity":
            left.invert_yaxis()  # as with accuracy, better is up
        left.set(ylabel=f"{model}: held-out {name}", xlabel="payload bytes per step and rank")
        right.set(xlabel=f"seconds of training, links of {RATE}")
    title = "Up and left is better; gray: nothing is better in both; dotted: dense training's score"
    figure.suptitle(title, fontsize=10)
    figure.legend(labels.values(), labels.keys(), loc="center right", fontsize=8)
    figure.tight_layout(rect=(0, 0, 0.84, 0.99))
    figure.savefig(path, dpi=110)
    print(f"written to {path}")
    return True


def _readable(axis: Any) -> None:
    """Round numbers on a logarithmic axis, also within one decade."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 100 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(EngFormatter(sep=""))
    axis.set_minor_formatter(NullFormatter())


def ends(points: Mapping[str, Any], model: str) -> dict[str, dict[str, float]]:
    """Score, payload bytes per step and seconds of training, by method; NaN where not measured."""
    found = {}
    for method in dict.fromkeys([DENSE, FP16, *tables.names(points, 2, "course")]):
        direct = tables.outcome(points, model, method, RATE)
        end = direct or tables.outcome(points, model, method)
        if end is None:
            continue
        runs = list(tables.runs_of(points, model, method, RATE if direct else "").values())
        steps, payload = runs[0]["steps"], end.payload
        if direct is not None:
            seconds = tables.mean_curve(runs)[-1]["seconds"]
        elif method in tables.SEARCHING:
            seconds = steps * tables.seconds_of_payload(points, model, RATE, payload)
        else:
            seconds = tables.seconds_of_steps(points, model, method, RATE, steps, end.warmup)
        step = tables.step_of(points, model, method, RATE)
        if not payload > 0 and step is not None:
            payload = tables.payload_of(method, step)
        found[method] = {"score": end.score, "payload": payload, "seconds": seconds}
    return found if DENSE in found else {}


def best_front(ends: list[tuple[float, float]], metric: str) -> list[tuple[float, float]]:
    """The points than which none is better in both, cheapest first.

    Example:
        >>> best_front([(3, 0.9), (1, 0.5), (2, 0.4)], "accuracy")
        [(1, 0.5), (3, 0.9)]
    """
    sign = -1 if metric == "accuracy" else 1
    front: list[tuple[float, float]] = []
    for cost, score in sorted(ends, key=lambda end: (end[0], sign * end[1])):
        if not front or sign * score < sign * front[-1][1]:
            front.append((cost, score))
    return front


def look(method: str) -> dict[str, Any]:
    """Planners are diamonds, compressors circles, dense training stars; each has its color."""
    compressors = {FP16, *LINES, "qsgd", tables.SIGNS}
    marker = "*" if method in (DENSE, FP16) else "o" if method in compressors else "D"
    size = 150 if marker == "*" else 60
    return {"marker": marker, "s": size, "color": SHADES.get(method, "black"), "edgecolors": "white"}


def curves(points: Mapping[str, Any], model: str) -> dict[str, tuple[list[float], list[float]]]:
    """Of each method in :data:`LINES` with training runs and a step time: seconds and mean scores."""
    found = {}
    for method in LINES:
        runs = list(tables.runs_of(points, model, method).values())
        curve = tables.mean_curve(runs) if runs else []
        times = [
            tables.seconds_of_steps(points, model, method, RATE, each["step"], runs[0]["warmup"])
            for each in curve
        ]
        # A time that is not known is NaN, which is not more than 0.
        if times and all(time > 0 for time in times):
            name = tables.metric(runs[0])
            found[method] = (times, [each[name] for each in curve])
    return found


def _axes(columns: int) -> tuple[Any, Any]:
    pyplot = report.pyplot()
    figure, axes = pyplot.subplots(1, columns, figsize=(6.5 * max(columns, 1.4), 5), squeeze=False)
    return figure, axes[0]


def _save(figure: Any, path: Path) -> bool:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"written to {path}")
    return True


def chosen_results(description: str | None, name: str, script: str) -> tuple[Path, Any]:
    """The folder that the command line names, and what a benchmark's file there holds, if it is there.

    Args:
        description: of the program that draws: its first line is shown.
        name: of the file, without its ending.
        script: that writes it.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=report.RESULTS, help=f"folder of {name}.json")
    folder: Path = parser.parse_args().results
    file = folder / f"{name}.json"
    if not file.exists():
        print(f"{file} is missing: run {script}", file=sys.stderr)
        return folder, None
    return folder, json.loads(file.read_text())


def main() -> int:
    """Command line."""
    folder, found = chosen_results(__doc__, "training", "benchmarks/network/training.py")
    if found is None:
        return 1
    points = found["cells"]
    drawn = [
        overview(points, folder / "training_overview.png"),
        steps(points, folder / "training_steps.png"),
        accuracy(points, folder / "training_accuracy.png"),
        choice(points, folder / "training_choice.png"),
    ]
    if not all(drawn):
        print("not all is measured yet that the pictures show", file=sys.stderr)
    return int(not any(drawn))


if __name__ == "__main__":
    sys.exit(main())
