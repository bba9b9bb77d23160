"""Does Kimad keep its time on a network whose bandwidth changes, and does its monitor see the changes?

An MLP on Fashion-MNIST, 4 hosts (launch/netlab.sh), top-k of 0.3 % to 30 % with EF21 as feedback.

* ``monitor``: the estimate of the bandwidth against the shaped rate, which is changed during the run.
  (On two cores, links of 300 Mbit/s are too fast for that: copying what they carry counts, too.)
* ``uneven``: the same where one of the four links is four times slower.
* ``kimad``, ``kimad+``: with a time for each step that lies between computing alone and a dense step,
  while all links follow the paper's pattern, a squared sine from 30 to 330 Mbit/s, with noise.
* ``ef21``: a fixed density that sends in all as much as ``kimad`` sent, under the same pattern.

    sudo -E python -m benchmarks.network.bandwidth_trace          # 12 minutes; a table, JSON, a picture
    sudo -E python -m benchmarks.network.bandwidth_trace --only monitor,uneven
    python -m benchmarks.network.bandwidth_trace --check          # 1 if a stored target is missed
    sudo -E python -m benchmarks.network.bandwidth_trace --quick  # a smoke run; writes no file

What the file holds already is not measured again without --redo. TCP gets 95 % of a shaped rate, the
rest are headers: estimates are compared with that.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import command_line, lab
from benchmarks.report import report

HOSTS = 4
TCP_SHARE = 0.95
SECONDS = 0.4
"""The time of a step that Kimad is asked for: computing takes some 0.15 s, and a dense step at the mean
rate of the pattern some 0.7 s."""
LOW, HIGH, PERIOD, NOISE = 30, 330, 60.0, 0.05
"""Of the pattern, in Mbit/s and seconds, as in Kimad's section 4.2."""
TRACE = f"sin2 --low {LOW}mbit --high {HIGH}mbit --period {PERIOD:g} --noise {NOISE:g}"
SETTLE = 30
"""Steps until the first plans are in force; they are not counted."""
FOLLOW = 20
"""Steps within which the monitor must follow a change."""

SHARE_TARGET = 0.9
ERROR_TARGET = 0.15
TRAFFIC_TARGET = 0.05

TOPK = "topk:density={density:.6g},values=fp32"
KIMAD = f"seconds={SECONDS:g},period=5,warmup=10"
PAPER = {"seconds": 0.80}
"""Kimad's time over EF21's in table 1 (385.2 / 486.1, 285.2 / 360.6, 225.2 / 284.2, 205.2 / 258.0)."""


@dataclass(frozen=True)
class TracePoint:
    """One training.

    Args:
        planner: None sends a fixed density.
        rates: of the links at the start, in Mbit/s, one for all or one per host.
        changes: of all links: after so many steps, to so many Mbit/s.
        pattern: whether the links follow :data:`TRACE`.
        steps: of the training.
    """

    planner: str | None
    rates: tuple[int, ...] = (200,)
    changes: Mapping[int, int] = field(default_factory=dict)
    pattern: bool = False
    steps: int = 200


POINTS = {
    "monitor": TracePoint(f"kimad:{KIMAD},share=0", changes={60: 60, 110: 200}, steps=160),
    "uneven": TracePoint(f"kimad:{KIMAD},share=0", rates=(200, 200, 200, 50), steps=90),
    "kimad": TracePoint(f"kimad:{KIMAD}", pattern=True, steps=450),
    "ef21": TracePoint(None, pattern=True, steps=650),
    "kimad+": TracePoint(f"kimad+:{KIMAD}", pattern=True, steps=450),
}
WIDTH = 1024
MODEL = ["--preset", "mlp-fashion", "--width", str(WIDTH), "--lr", "0.01", "--feedback", "ef21"]
MODEL += ["--log-every", "100000"]


# --- measuring ----------------------------------------------------------------------------------------


class Log:
    """The lines of a run's telemetry, also while it is being written."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "telemetry.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        """Those that are complete."""
        if not self._path.exists():
            return []
        whole = self._path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def wait_for(self, step: int, job: lab.Job) -> None:
        """Until that many steps are done, or the job is."""
        while not any(line["step"] >= step for line in self.lines()) and job.running:
            time.sleep(0.2)

    def scalars(self, tag: str) -> list[tuple[int, float, float]]:
        """Step, time and value of each record."""
        return [
            (line["step"], line["time"], line["scalars"][tag])
            for line in self.lines()
            if tag in line.get("scalars", {})
        ]


def measure(hosts: lab.Lab, point: TracePoint, density: float) -> dict[str, Any]:
    """One training; what is stored of it."""
    planner = ["--planner", point.planner] if point.planner else []
    compression = ["--compression", TOPK.format(density=density)]
    rates = itertools.cycle(point.rates)
    for number, rate in zip(range(hosts.hosts), rates, strict=False):
        hosts.set_rate(f"{rate}mbit", f"h{number + 1}")
    with tempfile.TemporaryDirectory() as folder:
        log, set_rates = Log(Path(folder)), Path(folder) / "rates.csv"
        steps = ["--steps", str(point.steps), "--logdir", folder]
        job = hosts.start([*MODEL, *compression, *planner, *steps], seconds=500)
        log.wait_for(0, job)
        changes = []
        if point.pattern:
            with hosts.trace(TRACE, set_rates):
                found = job.results()[0]
        else:
            for step, rate in point.changes.items():
                log.wait_for(step, job)
                hosts.set_rate(f"{rate}mbit")
                changes.append((time.time(), rate))
            found = job.results()[0]
        figures = _figures(found, log, changes, _rates_of(set_rates))
        return {"setting": setting(point), "density": density, **figures}


def setting(point: TracePoint) -> str:
    """What makes two measurements of a grid point comparable."""
    return f"{point} {TRACE} {' '.join(MODEL)}"


def _figures(
    found: Mapping[str, Any],
    log: Log,
    changes: Sequence[tuple[float, int]],
    rates: Sequence[tuple[float, float]],
) -> dict[str, Any]:
    ends = _ends(found["step_seconds"], log)
    # a plan's figures are written when it takes effect; they were estimated LAG steps before
    estimates = [(step - _lag(), value) for step, _, value in log.scalars("plan/bandwidth_up")]
    return {
        "held_out": found["held_out"],
        "traffic": found["costs"]["traffic_bytes"],
        "compute": found["costs"]["compute"],
        "step_seconds": [round(seconds, 4) for seconds in found["step_seconds"]],
        "estimates": estimates,
        "margins": [(step, value) for step, _, value in log.scalars("plan/margin")],
        "changes": [(sum(end < moment for end in ends), rate) for moment, rate in changes],
        "rates": [(round(moment - ends[0], 2), rate) for moment, rate in rates],
    }


@functools.cache
def _lag() -> int:
    from hvd_adaptive.adaptation.controller import LAG

    return LAG


def _ends(step_seconds: Sequence[float], log: Log) -> list[float]:
    """When each step ended, by the clock of the machine."""
    step, moment, _ = log.scalars("time/step_ms")[-1]
    ends = list(itertools.accumulate(step_seconds))
    return [moment - ends[min(step, len(ends) - 1)] + end for end in ends]


def _rates_of(file: Path) -> list[tuple[float, float]]:
    """Of the first host: when, and how many bit per second."""
    if not file.exists():
        return []
    with file.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["host"] == "h1"]
    return [(float(row["unix_time"]), float(row["bit_per_second"])) for row in rows]


def density_of(traffic: float, traffic_at: Callable[[float], float]) -> float:
    """The density at which all layers together put so many bytes on a rank's link in a step.

    Args:
        traffic: that many.
        traffic_at: how many they are at a density.

    Example:
        >>> round(density_of(3.0, lambda density: 100 * density), 6)
        0.03
    """
    low, high = 1e-4, 1.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if traffic_at(middle) < traffic else (low, middle)
    return low


def _traffic_at(density: float) -> float:
    from hvd_adaptive.compressors import parse

    compressor = parse(TOPK.format(density=density))
    total = 0.0
    for shape in _shapes():
        numel = functools.reduce(lambda a, b: a * b, shape)
        if len(shape) < 2 or numel < 1024:
            total += 4.0 * numel * 2 * (HOSTS - 1) / HOSTS
        else:
            total += (HOSTS - 1) * compressor.wire_bytes(numel, compressor.level, shape=shape)
    return total


@functools.cache
def _shapes() -> list[tuple[int, ...]]:
    from launch.training import models
    from launch.training.options import PRESETS

    preset = PRESETS["mlp-fashion"]
    sizes = models.Sizes(WIDTH, preset["layers"])
    return [tuple(each.shape) for each in models.build("mlp", (1, 28, 28), 10, sizes).parameters()]


# --- what it shows ------------------------------------------------------------------------------------


def tcp(rate: float) -> float:
    """Bytes per second that TCP gets of so many Mbit/s."""
    return TCP_SHARE * rate * 1e6 / 8


def followed(estimates: Sequence[Sequence[float]], rate: float, start: int, end: int) -> dict[str, Any]:
    """How well estimates fit a rate that held from one step to another.

    Returns:
        ``steps`` until the first estimate within the target, ``error`` of the median and ``worst`` of
        all estimates from :data:`FOLLOW` steps after the start.
    """
    errors = [(step - start, value / tcp(rate) - 1) for step, value in estimates if start <= step < end]
    near = [steps for steps, error in errors if abs(error) <= ERROR_TARGET]
    late = [error for steps, error in errors if steps >= FOLLOW]
    return {
        "rate": rate,
        "steps": near[0] if near else None,
        "error": statistics.median(late) if late else None,
        "worst": max(late, key=abs, default=None),
        "estimates": len(errors),
    }


def segments(name: str, figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rates of a run in turn, and how its estimates fit them; the slowest link counts."""
    slowest = min(POINTS[name].rates)
    starts = [(0, slowest), *figures["changes"]]
    ends = [step for step, _ in starts[1:]] + [len(figures["step_seconds"])]
    return [
        followed(figures["estimates"], rate, start, end)
        for (start, rate), end in zip(starts, ends, strict=True)
    ]


def counted(figures: Mapping[str, Any]) -> list[float]:
    """Seconds of the steps in whole periods of the pattern, so that all runs see the same rates."""
    seconds: list[float] = figures["step_seconds"][SETTLE:]
    whole = sum(seconds) // PERIOD * PERIOD
    return [
        each for each, end in zip(seconds, itertools.accumulate(seconds), strict=True) if end <= whole
    ]


def kept(figures: Mapping[str, Any]) -> float:
    """The share of the steps within the time."""
    return statistics.mean(seconds <= SECONDS for seconds in counted(figures))


def rows_of(points: Mapping[str, Any]) -> list[list[object]]:
    """The table of the runs under the pattern."""
    rows: list[list[object]] = [
        ["", f"steps within {SECONDS:g} s", "mean step", "median step", "MB per step", "accuracy after"]
    ]
    for name in (name for name in points if POINTS[name].pattern):
        figures = points[name]
        seconds = counted(figures)
        rows.append(
            [
                name if POINTS[name].planner else f"{name} at {figures['density']:.2%}",
                f"{kept(figures):.1%}",
                f"{1e3 * statistics.mean(seconds):.0f} ms",
                f"{1e3 * statistics.median(seconds):.0f} ms",
                f"{figures['traffic'] / 1e6:.2f}",
                f"{figures['held_out']['accuracy']:.2%} ({len(figures['step_seconds'])} steps)",
            ]
        )
    return rows


def monitor_rows(points: Mapping[str, Any]) -> list[list[object]]:
    """The table of what was estimated where rates are known."""
    rows: list[list[object]] = [["", "slowest link", "followed after", "error, median", "error, worst"]]
    for name in (name for name in points if not POINTS[name].pattern):
        for part in segments(name, points[name]):
            rows.append(
                [
                    name,
                    f"{part['rate']} Mbit/s",
                    "never" if part["steps"] is None else f"{part['steps']} steps",
                    *("-" if part[key] is None else f"{part[key]:+.1%}" for key in ("error", "worst")),
                ]
            )
    return rows


def show(points: Mapping[str, Any]) -> None:
    """Both tables, and the paper's numbers beside."""
    for rows in (monitor_rows(points), rows_of(points)):
        if len(rows) > 1:
            print(report.table(rows) + "\n")
    if {"kimad", "ef21"} <= set(points):
        ratio = seconds_ratio(points)
        print(f"Kimad's mean step is {ratio:.2f} of EF21's (paper: {PAPER['seconds']:.2f})")


def seconds_ratio(points: Mapping[str, Any]) -> float:
    """Kimad's mean step over EF21's."""
    kimad, ef21 = (statistics.mean(counted(points[name])) for name in ("kimad", "ef21"))
    return float(kimad / ef21)


def missed(points: Mapping[str, Any]) -> list[str]:
    """The targets that are missed, in words."""
    found = [f"{name} was not measured" for name in POINTS if name not in points]
    for name in (name for name in points if not POINTS[name].pattern):
        for part in segments(name, points[name]):
            if part["error"] is None or abs(part["error"]) > ERROR_TARGET:
                found.append(f"{name}: the estimate at {part['rate']} Mbit/s is {part['error']} off")
    for part in segments("monitor", points["monitor"])[1:] if "monitor" in points else []:
        if part["steps"] is None or part["steps"] > FOLLOW:
            found.append(f"monitor: {part['rate']} Mbit/s were seen after {part['steps']} steps")
    if "kimad" in points and kept(points["kimad"]) < SHARE_TARGET:
        found.append(f"kimad kept its time in {kept(points['kimad']):.1%} of the steps")
    if {"kimad", "ef21"} <= set(points):
        if kept(points["ef21"]) >= SHARE_TARGET:
            found.append(f"ef21 kept the time in {kept(points['ef21']):.1%} of the steps, too")
        if abs(points["ef21"]["traffic"] / points["kimad"]["traffic"] - 1) > TRAFFIC_TARGET:
            found.append("ef21 did not send as much as kimad")
    return found


def draw(points: Mapping[str, Any], path: Path) -> None:
    """Step times and estimates under the pattern."""
    plt = report.pyplot()
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, constrained_layout=True)
    for name in ("ef21", "kimad"):
        if name in points:
            seconds = points[name]["step_seconds"]
            above.plot(list(itertools.accumulate(seconds)), seconds, ".", markersize=3, label=name)
    above.axhline(SECONDS, color="black", linewidth=0.8)
    above.set(ylabel="seconds of a step", yscale="log")
    above.legend()
    if "kimad" in points:
        moments, rates = zip(*points["kimad"]["rates"], strict=True)
        ends = list(itertools.accumulate(points["kimad"]["step_seconds"]))
        below.step(
            moments, [tcp(rate / 1e6) / 1e6 for rate in rates], where="post", label="TCP can get"
        )
        steps, values = zip(*points["kimad"]["estimates"], strict=True)
        below.plot([ends[step] for step in steps], [v / 1e6 for v in values], label="Kimad's estimate")
        below.legend()
    below.set(xlabel="seconds", ylabel="MB per second")
    figure.savefig(path, dpi=110)
    plt.close(figure)


# --- the program --------------------------------------------------------------------------------------


def measure_all(names: Sequence[str], points: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Measures the grid points and stores each at once."""
    with lab.Lab(2 if quick else HOSTS, "200mbit") as hosts:
        for name in names:
            density = 0.03
            if name == "ef21":
                density = density_of(points["kimad"]["traffic"], _traffic_at)
            started = time.monotonic()
            point = (
                TracePoint("kimad:seconds=0.5,period=5,warmup=5", steps=40) if quick else POINTS[name]
            )
            points[name] = measure(hosts, point, density)
            if out is not None:
                report.write(out.stem, content(points), out.parent)
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)


def content(points: Mapping[str, Any]) -> dict[str, Any]:
    """What the file holds: settings, figures, and the trainings themselves."""
    summary: dict[str, Any] = {
        name: {"kept": kept(points[name]), "mean step": statistics.mean(counted(points[name]))}
        for name in points
        if POINTS[name].pattern
    }
    summary |= {name: segments(name, points[name]) for name in points if not POINTS[name].pattern}
    if {"kimad", "ef21"} <= set(points):
        summary["kimad over ef21"] = seconds_ratio(points)
    settings = {"hosts": HOSTS, "seconds": SECONDS, "trace": TRACE, "model": " ".join(MODEL)}
    return {"settings": settings, "paper": PAPER, "summary": summary, "cells": dict(points)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = command_line.parser(__doc__, POINTS, "bandwidth_trace")
    args = parser.parse_args(arguments)
    names = command_line.chosen(parser, args.only, POINTS)
    if args.quick:
        return smoke()
    held = json.loads(args.out.read_text())["cells"] if args.out.exists() else {}
    fitting = {
        name: point
        for name, point in POINTS.items()
        if held.get(name, {}).get("setting") == setting(point)
    }
    points = {name: held[name] for name in fitting}
    todo = [name for name in names if args.redo or name not in points]
    if "ef21" in todo and "kimad" not in {*points, *todo}:
        todo.insert(0, "kimad")  # it sends as much as that

    def tell() -> None:
        if points:
            show(points)
            draw(points, args.out.with_suffix(".png"))

    measure = partial(measure_all, todo, points, args.out, quick=False) if todo else None
    return command_line.complete(measure, tell, lambda: missed(points), args.check)


def smoke() -> int:
    """A short run on two hosts; 1 if it estimated nothing."""
    points: dict[str, Any] = {}
    measure_all(["monitor"], points, None, quick=True)
    print(f"{len(points['monitor']['estimates'])} estimates")
    return 0 if points["monitor"]["estimates"] else 1


if __name__ == "__main__":
    sys.exit(main())
