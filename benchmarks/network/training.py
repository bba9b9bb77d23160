"""Step time and time to accuracy of whole trainings: 4 hosts, links of several rates, every method.

    sudo -E python -m benchmarks.network.training          # hours; tables, results/training.json
    sudo -E python -m benchmarks.network.training --only model=lstm,rate=200mbit --minutes 5
    python -m benchmarks.network.training --show           # the tables of what has been measured
    python -m benchmarks.network.training --check          # and exit code 1 if a target is missed
    sudo -E python -m benchmarks.network.training --quick  # seconds; a smoke run that writes no file

There are two kinds of grid points. Each is stored as soon as it is measured, with its machine, and not
measured again; steps of two machines are not compared.

*steps* trains for some dozens of steps on 4 hosts (launch/netlab.sh) and takes the median step after
the first ones; of quick steps the least of two launches or more. The method ``alone`` is 4 runs of one
rank that exchange nothing, at the same time on the same 4 hosts: what a step costs when communication
and compression cost nothing. Stock Horovod and ``none`` use Open MPI's ring allreduce, which is made
for large tensors; ``-default`` is what Open MPI chooses by itself.

*training runs* (``course`` in stored keys) train on 4 ranks for as many steps with each method and
evaluate regularly, from 3 seeds. What they reach after so many steps does not depend on the network, so
they are run once, without one (shared memory), and

    seconds to target = steps to target x median step at that rate

where the steps of the dense warm-up that a method may begin with cost what those of ``none`` cost.
A planner's steps count as those that it settles at. GraVAC's never settle: its mean payload in the
training run counts, between the steps of ``topk`` and of ``none``.
Dense gradients learn as those of stock fp32, also in fp16, and have no training runs of their own. The
target is what stock fp32 ends with, less half a point of accuracy or plus 1 % of perplexity, and it is
the mean over the seeds that has to reach it. Training runs of Kimad and of ``auto`` do depend on the
rate: they are run on the slow network, and their own clock counts. How many dense steps a method begins
with was chosen from another seed (``--only seed=7 --out tune.json``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import lab
from benchmarks.harness.command_line import quick_or_check
from benchmarks.network import training_tables as tables
from benchmarks.network.training_tables import COMPUTE_ONLY, DENSE, FP16, SAME, SIGNS, TOPK
from benchmarks.report import report

HOSTS = 4
UNSHAPED = "unshaped"
# The first is that of the targets.
RATES = {"200mbit": "200mbit", "100mbit": "100mbit", "1gbit": "1gbit", UNSHAPED: lab.UNSHAPED}
SLOW = ("100mbit", "200mbit")
SEEDS = (0, 1, 2)
TUNE_SEED = 7


@dataclass(frozen=True)
class Model:
    """What is trained.

    Args:
        preset: of launch/train.py.
        steps: of a training run.
        eval_every: steps between two evaluations of a training run.
        kimad_seconds: the step time that Kimad is asked to keep.
        options: of train.py, in training runs.
        launches: in which quick steps are measured, at least; of their medians the least counts,
            because the machine is slower for a while at times.
        slow_at: rates at which a step with dense gradients takes seconds.
    """

    preset: str
    steps: int
    eval_every: int
    kimad_seconds: float
    options: tuple[str, ...] = ()
    launches: int = 2
    slow_at: tuple[str, ...] = ()


MODELS = {
    # At the preset's rate of 10 dense training, too, gets stuck from some seeds.
    "lstm": Model("lstm-sotu", 300, 20, 0.4, ("--eval-examples", "400", "--lr", "5"), slow_at=SLOW),
    "mlp": Model("mlp-fashion", 468, 36, 0.25, slow_at=SLOW),
    # Without clipping, where dense training ends depends on chance: of seeds 5, 7, 11 and 12 (none of
    # which is reported) 78.2, 81.8, 84.6 and 80.0 %; the last three with clipping 85.2, 85.2, 85.6 %.
    "resnet": Model("resnet-fashion", 468, 52, 0.15, ("--clip", "1")),
    "transformer": Model("transformer-sotu", 300, 20, 0.25, ("--eval-examples", "400")),
    "digits": Model("mlp-digits", 40, 8, 0.1, launches=1),
}
"""The last is for --quick only."""


@dataclass(frozen=True)
class Method:
    """How gradients are sent.

    Args:
        options: of train.py.
        warmup: share of a training run's steps that are dense, at its start.
        settle: steps until it continues as it then stays; those are not counted in step times.
        heavy: the models with which it sends dense gradients, so that few steps take long on a slow
            network.
        environment: of the ranks.
        models: that it is run on.
    """

    options: tuple[str, ...]
    warmup: float = 0.0
    settle: int = 8
    heavy: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: lab.RING)
    models: tuple[str, ...] = tuple(MODELS)

    @property
    def is_stock(self) -> bool:
        return "horovod" in self.options

    @property
    def follows_rate(self) -> bool:
        """Whether what is sent depends on the network."""
        return tables.AUTO in self.options or any("{seconds}" in option for option in self.options)


def _stock(compression: str, environment: Mapping[str, str] = lab.RING, **more: Any) -> Method:
    options = ("--distributed", "horovod", "--compression", compression)
    return Method(options, settle=3, heavy=tuple(MODELS), environment=environment, **more)


def _own(compression: str, *options: str, planner: str = "", **more: Any) -> Method:
    planned = ("--planner", planner) if planner else ()
    # It settles when the first plans are in force; training runs begin with its first levels.
    usual = {"settle": 65, "warmup": WARMUP} if planner else {}
    return Method(("--compression", compression, *options, *planned), **{**usual, **more})


WARMUP = 0.05
INT8, ONE_BIT = (f"topk:density=0.01,values={values}" for values in ("int8", "sign"))
METHODS = {
    COMPUTE_ONLY: Method(("--distributed", "horovod")),
    FP16: _stock("fp16"),
    DENSE: _stock("none"),
    "none": _own("none", settle=3, heavy=tuple(MODELS)),
    "fp16": _own("fp16", settle=3, heavy=tuple(MODELS)),
    TOPK: _own(INT8, warmup=WARMUP),
    SIGNS: _own(ONE_BIT, "--override", f"*bias*={ONE_BIT}", warmup=WARMUP, models=("lstm",)),
    "powersgd": _own("powersgd:rank=4", warmup=0.02),
    "qsgd": _own("qsgd:bits=4"),
    tables.AUTO: _own(tables.AUTO, settle=120),
    "lgreco": _own(INT8, planner="lgreco:period=50"),
    "kimad": _own(INT8, planner="kimad:seconds={seconds}"),
    # 10x keeps too little of the MLP's gradient: from scratch it stays dense.
    "gravac": _own(INT8, planner="gravac:window=25", heavy=("mlp",)),
    "accordion": _own(INT8, planner="accordion:period=25"),
    "kimad+": _own(INT8, planner="kimad+:seconds={seconds},period=10"),
    "lgreco-time": _own(INT8, planner="lgreco-time:period=50"),
    "accordion+lgreco": _own(INT8, planner="accordion+lgreco:period=25"),
    "gravac+lgreco": _own(INT8, planner="gravac+lgreco:window=25", heavy=("mlp",)),
    "cgx": _own(INT8, planner="cgx:period=50"),
    "stock-fp32-default": _stock("none", lab.DEFAULT_ALLREDUCE, models=("lstm",)),
    "stock-fp16-default": _stock("fp16", lab.DEFAULT_ALLREDUCE, models=("lstm",)),
}

# --- grid points --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridPoint:
    """One measurement: ``steps`` have a rate, a training run (``course``) a seed, or both."""

    kind: str
    model: str
    method: str
    rate: str = ""
    seed: str = ""

    @property
    def key(self) -> str:
        return "/".join(filter(None, (self.kind, self.model, self.method, self.rate, self.seed)))

    @property
    def launches(self) -> int:
        """How often it is measured."""
        is_quick = self.kind == "steps" and not self.is_slow
        return MODELS[self.model].launches if is_quick else 1

    @property
    def is_slow(self) -> bool:
        """Whether a step takes seconds, most of them on the network."""
        heavy = self.model in METHODS[self.method].heavy
        return heavy and self.rate in MODELS[self.model].slow_at

    @property
    def warmup(self) -> int:
        """Dense steps at the start."""
        steps = MODELS[self.model].steps if self.kind == "course" else 0
        return round(METHODS[self.method].warmup * steps)

    def arguments(self) -> list[str]:
        """Of train.py."""
        model, method = MODELS[self.model], METHODS[self.method]
        options = [option.format(seconds=model.kimad_seconds) for option in method.options]
        if not method.is_stock:
            options += ["--dense-steps", str(self.warmup)]
        length = self._run(model) if self.kind == "course" else self._steps(method)
        return ["--preset", model.preset, *options, *length]

    def _run(self, model: Model) -> list[str]:
        every = ["--steps", str(model.steps), "--eval-every", str(model.eval_every)]
        return [*every, *model.options, "--seed", self.seed]

    def _steps(self, method: Method) -> list[str]:
        # The machine is slower for seconds at times: many quick steps, or few slow ones.
        counted = 8 if self.is_slow else 48
        if self.method == COMPUTE_ONLY:
            counted = 112  # of which half counts
        # Losses are averaged over the ranks at the end only: that is no part of a step.
        return ["--steps", str(method.settle + counted), "--log-every", "100000",
                "--eval-examples", "64"]  # fmt: skip


def points() -> Iterator[GridPoint]:
    """All of them, the most important first: those that a target is about, then the models in turn."""
    with_target = ("lstm", "mlp")
    for model in with_target:
        yield from _step_points(model, "200mbit", (COMPUTE_ONLY, FP16, DENSE, "none", TOPK, "powersgd"))
    for seed in SEEDS:
        for model in with_target:
            yield from _run_points(model, seed, (DENSE, TOPK, "powersgd"))
    for rate in RATES:
        for model in MODELS:
            yield from _step_points(model, rate, METHODS)
    for seed in (*SEEDS, TUNE_SEED):
        for model in MODELS:
            yield from _run_points(model, seed, METHODS)


def _step_points(model: str, rate: str, methods: Iterable[str]) -> Iterator[GridPoint]:
    for name in methods:
        if model in METHODS[name].models:
            # Without exchange, all rates are one.
            yield GridPoint("steps", model, name, "" if name == COMPUTE_ONLY else rate)


def _has_run(name: str) -> bool:
    """Not where the same gradients are sent in another way."""
    return name not in (COMPUTE_ONLY, *SAME) and METHODS[name].environment == lab.RING


def _run_points(model: str, seed: int, methods: Iterable[str]) -> Iterator[GridPoint]:
    for name in methods:
        if _has_run(name) and model in METHODS[name].models:
            rate = "200mbit" if METHODS[name].follows_rate else ""
            yield GridPoint("course", model, name, rate, str(seed))


STORED_AS = {"run": "course", "compute-only": COMPUTE_ONLY}
"""Today's words for what has an older one in the keys of stored results."""


def select(only: str) -> list[GridPoint]:
    """The grid points that fit, each once.

    Args:
        only: ``model=lstm,kind=run`` or ``method=topk/compute-only``; what is only for --quick or for
            tuning must be named.

    Raises:
        ValueError: a name or a value that no grid point has.
    """
    wanted: dict[str, set[str]] = {}
    for part in filter(None, only.split(",")):
        name, _, listed = part.partition("=")
        wanted[name.strip()] = {STORED_AS.get(value, value) for value in listed.strip().split("/")}
    everything = list(dict.fromkeys(points()))
    for name, values in wanted.items():
        if name not in GridPoint.__dataclass_fields__:
            raise ValueError(
                f"no grid point has a {name!r}: write {', '.join(GridPoint.__dataclass_fields__)}"
            )
        known = {getattr(point, name) for point in everything}
        if values - known:
            raise ValueError(
                f"no {name} {', '.join(sorted(values - known))}: there are {', '.join(sorted(known))}"
            )
    wanted.setdefault("model", set(MODELS) - {"digits"})
    wanted.setdefault("seed", {str(seed) for seed in SEEDS})
    return [
        point
        for point in everything
        # What needs no rate fits every rate.
        if all(getattr(point, name) in values | {""} for name, values in wanted.items())
    ]


# --- measuring ----------------------------------------------------------------------------------------


class Bench:
    """Measures grid points on a lab that is made when the first of them needs one."""

    def __init__(self, hosts: int = HOSTS) -> None:
        self._hosts = hosts
        self._stack = ExitStack()
        self._lab: lab.Lab | None = None
        self._rate = ""

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def measure(self, group: Sequence[GridPoint]) -> Iterator[tuple[GridPoint, dict[str, Any]]]:
        """A grid point and what is stored of it, as soon as it is measured; all are of one place.

        Steps are measured in several launches, but for slow ones. Every other launch goes backwards:
        who comes first in a process finds its memory cold.
        """
        for number in range(max(point.launches for point in group)):
            again = [point for point in group if point.launches > number]
            yield from self._launch(again if number % 2 == 0 else again[::-1])

    def _launch(self, group: Sequence[GridPoint]) -> Iterator[tuple[GridPoint, dict[str, Any]]]:
        first = group[0]
        trainings = [point.arguments() for point in group]
        if first.method == COMPUTE_ONLY:
            yield first, _compute_only(self._hosts_at("200mbit").train_compute_only(trainings[0]))
            return
        if first.rate:
            hosts = self._hosts_at(RATES[first.rate])
            found = hosts.train_each(trainings, METHODS[first.method].environment, seconds=600)
        else:
            found = lab.train_each_here(self._hosts, trainings, seconds=600)
        for point, result in zip(group, found, strict=True):
            yield point, _run(point, result) if point.kind == "course" else _steps(point, result)

    def _hosts_at(self, rate: str) -> lab.Lab:
        if self._lab is None:
            self._lab = self._stack.enter_context(lab.Lab(self._hosts, rate))
        elif rate != self._rate:
            self._lab.set_rate(rate)
        self._rate = rate
        return self._lab


def _run(point: GridPoint, result: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("steps", "train_loss", "held_out", "evaluations")
    payload = {"payload_bytes": result["costs"]["payload_bytes"]}  # mean, less the first five steps
    return {"warmup": point.warmup, **payload} | {name: result[name] for name in kept}


def _steps(point: GridPoint, result: Mapping[str, Any]) -> dict[str, Any]:
    settled = result["step_seconds"][METHODS[point.method].settle :]
    kept = ("costs", "samples_per_step", "dense_bytes")
    return _spread(settled) | {name: result[name] for name in kept}


def _compute_only(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The middle half of each run: all the others are training then, too."""
    middle = [
        seconds
        for each in results
        for seconds in each["step_seconds"][each["steps"] // 4 : each["steps"] * 3 // 4]
    ]
    samples = sum(each["samples_per_step"] for each in results)
    return _spread(middle) | {"samples_per_step": samples, "dense_bytes": results[0]["dense_bytes"]}


def _spread(seconds: list[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "p90": ordered[int(0.9 * (len(ordered) - 1))],
        "counted": len(ordered),
    }


def setting(point: GridPoint) -> list[str]:
    """What makes two measurements comparable; what a training run learns has no environment."""
    environment = {**lab.THREADS, **METHODS[point.method].environment} if point.rate else {}
    return [*point.arguments(), *(f"{name}={value}" for name, value in environment.items())]


def missing(chosen: Sequence[GridPoint], done: Mapping[str, Any]) -> list[GridPoint]:
    """Those that have not been measured with these settings, as often as they are to be."""
    return [point for point in chosen if done.get(point.key, {}).get("setting") != setting(point)]


def load(path: Path) -> dict[str, Any]:
    """The grid points that a file holds, without those that were measured with other settings."""
    from launch.training.options import renamed

    found: dict[str, Any] = json.loads(path.read_text())["cells"] if path.exists() else {}
    for figures in found.values():
        if "setting" in figures:  # which may be older than the names of train.py's options
            figures["setting"] = renamed(figures["setting"])[0]
    settings = {point.key: setting(point) for point in points()}
    return {
        key: figures
        for key, figures in found.items()
        if key in settings and figures.get("setting", settings[key]) == settings[key]
    }


def store(done: Mapping[str, Any], path: Path, hosts: int) -> None:
    """In the order of the tables, whatever was measured first."""
    places = {name: number for number, name in enumerate([*MODELS, *METHODS])}
    everything = sorted(
        set(points()), key=lambda each: (places[each.model], places[each.method], each.key)
    )
    kept = {point.key: done[point.key] for point in everything if point.key in done}
    report.write(path.stem, {"hosts": hosts, "cells": kept}, path.parent)


def fastest(before: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """The launch with the least median step; training runs have none: the latest counts.

    So it does where the others were on another machine.
    """
    if before.get("place") != figures.get("place"):
        before = {}
    slower = before.get("median", math.inf) <= figures.get("median", 0.0)
    kept = before if slower else figures
    return {**kept, "launches": before.get("launches", 0) + 1}


def measure_all(
    chosen: Sequence[GridPoint],
    done: dict[str, Any],
    out: Path | None,
    hosts: int,
    minutes: float,
    more: bool = False,
) -> list[GridPoint]:
    """Measures one grid point after the other and stores each at once.

    Args:
        chosen: what is measured.
        done: what is known by key; each new figure is put there.
        out: the file for all of it.
        hosts: how many there are to be.
        minutes: after which no grid point is started.
        more: these are launches in addition to those known, not in place of them.

    Returns:
        Those that are left: the time was up, or they failed.
    """
    end = time.monotonic() + 60 * minutes
    known: dict[str, Any] = dict(done) if more else {}
    machine = report.machine()
    here = {"place": report.place(machine), "date": machine["date"]}
    with Bench(hosts) as bench:
        for group in groups(chosen):
            started = time.monotonic()
            if started > end:
                break
            try:
                for point, figures in bench.measure(group):
                    best = fastest(known.get(point.key, {}), {**here, **figures})
                    if best["launches"] >= point.launches:
                        best["setting"] = setting(point)
                    known[point.key] = done[point.key] = best
                    if out is not None:
                        store(done, out, hosts)
                    took, started = time.monotonic() - started, time.monotonic()
                    print(f"{point.key}: {_brief(figures)}  ({took:.0f} s)", flush=True)
                    if started > end:
                        break
            except lab.JobError as error:
                # The others may still succeed; this one is tried again the next time.
                print(error, flush=True)
    return missing(chosen, done)


def groups(chosen: Sequence[GridPoint]) -> list[list[GridPoint]]:
    """Neighbors that the same ranks can measure one after the other."""
    return [list(group) for _, group in itertools.groupby(chosen, key=_place)]


def _place(point: GridPoint) -> object:
    if point.method == COMPUTE_ONLY:
        return point.key
    # Training runs without a rate run where nothing is sent over a network.
    return (point.rate, METHODS[point.method].environment) if point.rate else ""


def _brief(figures: Mapping[str, Any]) -> str:
    if "median" in figures:
        return f"{1e3 * figures['median']:.0f} ms per step"
    score = figures["held_out"]
    return ", ".join(f"{name} {value:.4g}" for name, value in score.items() if name != "examples")


# --- the program --------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with the chosen grid points."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", metavar="NAME=VALUE[/VALUE],...",
        help="cells to measure; names are kind, model, method, rate, seed")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=1e9, help="start no grid point after so many")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--redo", action="store_true", help="measure again what the file holds already")
    again.add_argument("--more", action="store_true",
        help="further launches of the same code: the fastest of all counts")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list what would be measured")
    parser.add_argument("--show", action="store_true", help="measure nothing, print the tables")
    quick_or_check(
        parser,
        "a smoke run with a tiny model on 2 hosts; writes a file only with --out",
        "as --show; exit with 1 if a target is missed",
    )
    parser.add_argument("--out", type=Path, help="(results/training.json)")
    args = parser.parse_args(arguments)
    if args.quick:
        args.only = (
            args.only or f"model=digits,seed=0,rate=200mbit,method={COMPUTE_ONLY}/{DENSE}/{TOPK}"
        )
    else:
        args.out = args.out or report.RESULTS / "training.json"
    try:
        args.points = select(args.only)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    args = parse(arguments)
    done = load(args.out) if args.out else {}
    todo = args.points if args.redo or args.more else missing(args.points, done)
    if args.list:
        print(*(point.key for point in todo), sep="\n")
        return 0
    status = 0
    if todo and not (args.show or args.check):
        # As Ctrl-C: hosts are removed, what was measured is shown.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            hosts = 2 if args.quick else HOSTS
            left = measure_all(todo, done, args.out, hosts, args.minutes, args.more)
            if left:
                print(f"{len(left)} grid points are left; the same command continues with them")
                status = 1
        except KeyboardInterrupt:
            print(f"interrupted; {len(done)} grid points are stored, the same command does the rest")
            status = 130
    print(tables.show(done))
    if not args.check:
        return status
    missed = tables.missed(done)
    print(*(f"target missed: {each}" for each in missed), sep="\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
