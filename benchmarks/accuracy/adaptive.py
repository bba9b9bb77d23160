"""What planners gain: GraVAC against fixed factors and Accordion, L-GreCo against uniform levels.

An LSTM of 2.8 million parameters on text, 4 ranks, links of 100 Mbit/s (launch/netlab.sh), top-k with
error feedback, the same number of steps and the same data in the same order for all. The dense run
trains without the slow network, because its accuracy does not depend on it; a few steps on the network
tell its step time.

    sudo -E python -m benchmarks.accuracy.adaptive          # 10 minutes a seed; tables, JSON, a picture
    sudo -E python -m benchmarks.accuracy.adaptive --only gravac,accordion --seeds 3
    python -m benchmarks.accuracy.adaptive --check          # 1 if a stored target is missed
    sudo -E python -m benchmarks.accuracy.adaptive --quick  # a smoke run; writes no file

GraVAC has the paper's two thresholds of the gain, 0.7 and 0.9.

What the file holds already is not measured again without --redo. The speed of a run is that of
its last third, in which GraVAC's search is over.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import command_line, lab
from benchmarks.report import report

HOSTS = 4
RATE = "100mbit"
STEPS = 250
WINDOW = 40
FACTORS = (10, 20, 40, 160, 1000)
"""That GraVAC's exponential policy names, from 10x with a cap of 1000x (section IV-B1)."""

ACCURACY_TARGET = 0.01
SPEED_TARGET = 0.95

PAPER = (
    ("gravac", "static 10x", "seconds", "less time", "ResNet-101 4.32, VGG-16 1.95, LSTM 6.67"),
    ("gravac", "accordion", "seconds", "less time", "ResNet-101 1.94, VGG-16 5.63, LSTM 2.06"),
    ("lgreco", "static 100x", "payload", "fewer bytes", "top-k 2.6 to 5.2"),
)
"""What is better than what, in what, and how many times: GraVAC's section IV-B1 and table 4, L-GreCo's
table 2."""


@dataclass(frozen=True)
class PlannerPoint:
    """One training.

    Args:
        compression: of all layers, and the planner's default.
        planner: what changes it, if anything.
        steps: fewer than all only tell the step time.
        network: whether it runs on the slow network.
    """

    compression: str
    planner: str = ""
    steps: int = STEPS
    network: bool = True

    def arguments(self, seed: int) -> list[str]:
        """Of train.py."""
        planner = ["--planner", self.planner] if self.planner else []
        chosen = ["--compression", self.compression, *planner]
        return [*MODEL, *chosen, "--steps", str(self.steps), "--seed", str(seed)]


MODEL = ["--preset", "lstm-sotu", "--width", "128", "--log-every", "100000"]
POINTS = {
    "dense": PlannerPoint("none", network=False),
    "dense steps": PlannerPoint("none", steps=16),
    "static 10x": PlannerPoint("topk:density=0.1"),
    "static 100x": PlannerPoint("topk:density=0.01"),
    "static 1000x": PlannerPoint("topk:density=0.001"),
    "gravac": PlannerPoint("topk:density=0.01", f"gravac:window={WINDOW},period=10"),
    "gravac 0.9": PlannerPoint("topk:density=0.01", f"gravac:window={WINDOW},period=10,epsilon=0.9"),
    "accordion": PlannerPoint("topk:density=0.01", "accordion:period=30,low=10,high=0.1"),
    "lgreco": PlannerPoint("topk:density=0.01", "lgreco:period=30"),
}
"""Accordion goes to and fro between GraVAC's bounds, 10x and 1000x. L-GreCo's uniform default is
``static 100x``."""


# --- measuring ----------------------------------------------------------------------------------------


def measure(hosts: lab.Lab, point: PlannerPoint, seed: int) -> dict[str, Any]:
    """One training; what is stored of it."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*point.arguments(seed), "--logdir", folder]
        if point.network:
            found = hosts.train(arguments, seconds=900)
        else:
            found = lab.train_here(hosts.hosts, arguments, seconds=900)
        lines = (Path(folder) / "telemetry.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {
        "setting": setting(point, seed),
        "date": report.machine()["date"],
        "held_out": found["held_out"],
        "payload": found["costs"]["payload_bytes"],
        "traffic": found["costs"]["traffic_bytes"],
        "compute": found["costs"]["compute"],
        "samples_per_step": found["samples_per_step"],
        "step_seconds": [round(seconds, 4) for seconds in found["step_seconds"]],
        "factors": factors_sent(records) if point.planner else [],
        "candidates": scalars(records, "plan/theta"),
        "ideal": next((value for _, value in reversed(scalars(records, "plan/ideal"))), 0.0),
        "gains": last_of(records, "plan/gain_"),
        "throughputs": last_of(records, "plan/throughput_"),
    }


def setting(point: PlannerPoint, seed: int) -> str:
    """What makes two measurements of a grid point comparable."""
    return f"{' '.join(point.arguments(seed))} at {RATE if point.network else 'no network'}"


def scalars(records: Iterable[Mapping[str, Any]], tag: str) -> list[tuple[int, float]]:
    """Step and value of each record."""
    return [(row["step"], row["scalars"][tag]) for row in records if tag in row.get("scalars", {})]


def last_of(records: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, float]:
    """The last value of each figure whose name begins so."""
    found = {}
    for row in records:
        for tag, value in row.get("scalars", {}).items():
            if tag.startswith(prefix):
                found[tag.removeprefix(prefix)] = value
    return found


def factors_sent(records: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """From which step on the largest layer was compressed how much; 1 is dense."""
    found = []
    for row in records:
        if "plan" in row:
            layer = max(row["plan"]["layers"], key=lambda each: each["dense_bytes"])
            dense = layer["compressor"] == "none"
            found.append((row["step"], 1.0 if dense else round(1 / layer["level"], 3)))
    return found


# --- what it shows ------------------------------------------------------------------------------------


def speed(figures: Mapping[str, Any]) -> float:
    """Samples per second in the last third."""
    seconds = figures["step_seconds"]
    return float(figures["samples_per_step"] / statistics.median(seconds[-len(seconds) // 3 :]))


def summary(points: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Means over the seeds; differences from dense, seed by seed."""
    rows = {}
    for name, point in POINTS.items():
        mine = {key.split("/")[1]: each for key, each in points.items() if key.split("/")[0] == name}
        if not mine or name == "dense steps":
            continue
        dense = [
            points[key]["held_out"]["accuracy"] for key in (f"dense/{s}" for s in mine) if key in points
        ]
        on_network = mine if point.network else _seeds_of(points, "dense steps")
        accuracy = statistics.mean(each["held_out"]["accuracy"] for each in mine.values())
        rows[name] = {
            "seeds": len(mine),
            "accuracy": accuracy,
            "loss": statistics.mean(each["held_out"]["loss"] for each in mine.values()),
            "difference": accuracy - statistics.mean(dense) if len(dense) == len(mine) else None,
            "samples_per_second": _mean(map(speed, on_network.values())),
            "seconds": _mean(_seconds(name, each) for each in on_network.values()),
            "traffic": statistics.mean(each["traffic"] for each in mine.values()),
            "payload": statistics.mean(each["payload"] for each in mine.values()),
        }
    return rows


def _seeds_of(points: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: each for key, each in points.items() if key.split("/")[0] == name}


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.mean(found) if found else None


def _seconds(name: str, figures: Mapping[str, Any]) -> float:
    """Of all steps; those of the dense run by its median step on the network."""
    seconds = figures["step_seconds"]
    if name == "dense":
        return float(STEPS * statistics.median(seconds[len(seconds) // 2 :]))
    return float(sum(seconds))


def best_static(rows: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The fastest fixed factor that keeps accuracy."""
    keeps = [
        name
        for name, row in rows.items()
        if name.startswith("static") and row["difference"] is not None
        if row["difference"] >= -ACCURACY_TARGET
    ]
    return max(keeps, key=lambda name: rows[name]["samples_per_second"], default=None)


def visited(figures: Mapping[str, Any]) -> list[int]:
    """The factors that were candidates or the smallest, in the order in which they came."""
    candidates = [value for _, value in figures["candidates"]]
    return [int(value) for value in dict.fromkeys([float(FACTORS[0]), *candidates])]


def show(points: Mapping[str, Any]) -> None:
    """The tables, and the papers' numbers next to them."""
    rows = summary(points)
    table: list[list[object]] = [
        [
            *("", "accuracy", "accuracy difference (pp)", "loss", "samples/s, end", "seconds in all"),
            *("MB per step", "seeds"),
        ]
    ]
    for name, row in rows.items():
        table.append(
            [
                name,
                f"{row['accuracy']:.2%}",
                "-" if row["difference"] is None else f"{100 * row['difference']:+.2f}",
                f"{row['loss']:.3f}",
                "-" if row["samples_per_second"] is None else f"{row['samples_per_second']:.0f}",
                "-" if row["seconds"] is None else f"{row['seconds']:.0f}",
                f"{row['traffic'] / 1e6:.3f}",
                row["seeds"],
            ]
        )
    print(report.table(table) + "\n")
    for key, figures in (_seeds_of(points, "gravac") | _seeds_of(points, "gravac 0.9")).items():
        sent = " ".join(f"{factor:g}x@{step}" for step, factor in figures["factors"])
        kept = f"kept {figures['ideal']:g}x" if figures["ideal"] else "no factor kept at the end"
        print(f"{key}: candidates {visited(figures)}, {kept}; sent {sent}")
        for what in ("gains", "throughputs"):
            print("  " + what, " ".join(f"{at} {value:.3g}" for at, value in figures[what].items()))
    for text in compared(rows):
        print(text)


def compared(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Our figures next to the papers'."""
    found = []
    for mine, other, key, better, theirs in PAPER:
        if {mine, other} <= set(rows):
            times = rows[other][key] / rows[mine][key]
            found.append(f"{mine}: {times:.2f} times {better} than {other} (paper: {theirs})")
    return found


def missed(points: Mapping[str, Any]) -> list[str]:
    """The targets that are missed, in words."""
    rows = summary(points)
    found = [f"{name} was not measured" for name in POINTS if not _seeds_of(points, name)]
    for key, figures in _seeds_of(points, "gravac").items():
        if visited(figures) != list(FACTORS):
            found.append(f"{key} visited {visited(figures)}, not {list(FACTORS)}")
    gravac = rows.get("gravac")
    if gravac is None or gravac["difference"] is None:
        return found
    if gravac["difference"] < -ACCURACY_TARGET:
        found.append(f"gravac is {100 * gravac['difference']:+.2f} points of accuracy from dense")
    best = best_static(rows)
    if best and gravac["samples_per_second"] < SPEED_TARGET * rows[best]["samples_per_second"]:
        ratio = gravac["samples_per_second"] / rows[best]["samples_per_second"]
        found.append(f"gravac ends at {ratio:.2f} of the speed of {best}")
    return found


def draw(points: Mapping[str, Any], path: Path) -> None:
    """Accuracy against seconds, and GraVAC's factors over the steps."""
    plt = report.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for name, row in summary(points).items():
        if row["seconds"] is not None:
            left.plot(row["seconds"], 100 * row["accuracy"], "o")
            left.annotate(name, (row["seconds"], 100 * row["accuracy"]), fontsize=8)
    left.set(xlabel=f"seconds for {STEPS} steps", ylabel="accuracy, %", xscale="log")
    for key, figures in points.items():
        if figures["factors"] and key.split("/")[0] in ("gravac", "accordion"):
            steps, factors = zip(*figures["factors"], strict=True)
            right.step([*steps, STEPS], [*factors, factors[-1]], where="post", label=key)
    right.set(xlabel="step", ylabel="compression factor of the largest layer", yscale="log")
    if right.get_legend_handles_labels()[0]:
        right.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


# --- the program --------------------------------------------------------------------------------------


def content(points: Mapping[str, Any]) -> dict[str, Any]:
    """What the file holds."""
    settings = {"hosts": HOSTS, "rate": RATE, "steps": STEPS, "model": " ".join(MODEL)}
    settings |= {"cells": {name: asdict(point) for name, point in POINTS.items()}}
    rows = summary(points)
    return {"settings": settings, "summary": rows, "compared": compared(rows), "cells": dict(points)}


def measure_all(todo: Sequence[tuple[str, int]], points: dict[str, Any], out: Path) -> None:
    """Measures the grid points and stores each at once."""
    with lab.Lab(HOSTS, RATE) as hosts:
        for name, seed in todo:
            started = time.monotonic()
            points[f"{name}/{seed}"] = measure(hosts, POINTS[name], seed)
            report.write(out.stem, content(points), out.parent)
            print(f"{name}/{seed}: {time.monotonic() - started:.0f} s", flush=True)


def smoke() -> int:
    """A GraVAC run of some steps on two hosts; 1 if it tried no candidate."""
    point = PlannerPoint("topk:density=0.01", "gravac:window=8,period=5", steps=30)
    with lab.Lab(2, RATE) as hosts:
        figures = measure(hosts, point, 0)
    print(f"candidates {visited(figures)}, sent {figures['factors']}")
    return int(len(visited(figures)) < 2)


def _fits(key: str, figures: Mapping[str, Any]) -> bool:
    """Whether a measurement in the file is one of a grid point as it is now."""
    name, _, seed = key.rpartition("/")
    return name in POINTS and figures.get("setting") == setting(POINTS[name], int(seed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = command_line.parser(__doc__, POINTS, "adaptive")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args(arguments)
    names = command_line.chosen(parser, args.only, POINTS)
    if args.quick:
        return smoke()
    held = json.loads(args.out.read_text())["cells"] if args.out.exists() else {}
    points = {key: each for key, each in held.items() if _fits(key, each)}
    wanted = [(name, seed) for seed in range(args.seeds) for name in names]
    todo = [(name, seed) for name, seed in wanted if args.redo or f"{name}/{seed}" not in points]

    def tell() -> None:
        if points:
            show(points)
            draw(points, args.out.with_suffix(".png"))

    measure = partial(measure_all, todo, points, args.out) if todo else None
    return command_line.complete(measure, tell, lambda: missed(points), args.check)


if __name__ == "__main__":
    sys.exit(main())
