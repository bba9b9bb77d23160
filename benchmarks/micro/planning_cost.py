"""What a planner costs a training: L-GreCo every 200 steps, and auto, against training without one.

Trainings run in the same processes, in turn, a block of steps each: one with a planner, and two
without, whose difference tells how well runs can be compared. The steps of the one with a planner are
of three kinds: those in which gradients are measured, those around a change of plan, and all others.
What the first two take longer than others near them under the same plan (by the median of the measured
ones that come first after a change, of those that follow, and of the sums around changes), times how
often each occurs, is their share of the training's time, and both together are what planning costs. The
other steps are compared with those without a planner: they differ by the plan's levels, of which some
take longer to compress, and by noise. What auto has counted of its own decisions, by a clock, is told
beside it.

    python -m benchmarks.micro.planning_cost          # starts its own ranks; results/planning_cost.json
    python -m benchmarks.micro.planning_cost --check  # measures nothing; exit code 1 if one is over 1 %
    python -m benchmarks.micro.planning_cost --only "ResNet, topk" --fresh
    python -m benchmarks.micro.planning_cost --quick  # one small model; no target, no file

Cases that the file already holds are not repeated, so an interrupted benchmark continues where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import command_line, lab
from benchmarks.report import report

TARGET = 0.01
OF_AUTO = 0.005
"""What ``auto``'s decisions may take: it is there for those who do not want to think of it."""
BEFORE, AFTER = 7, 3
"""Steps around the last one under the old plan: averages, the planner's thread, the change."""
NEAR = 40
"""Steps before and after one with which it is compared: plans differ, and phases of the machine."""


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        preset: arguments of train.py.
        compression: of both runs.
        periods: plans that are made.
        period: steps from one to the next.
        planner: that makes them.
    """

    preset: tuple[str, ...]
    compression: str
    periods: int
    period: int = 200
    planner: str = "lgreco"

    @property
    def setting(self) -> dict[str, Any]:
        """As JSON; without what files of earlier versions do not hold, where it is the default."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {key: value for key, value in found.items() if (key, value) != ("planner", "lgreco")}

    @property
    def target(self) -> float:
        """Share of the time that planning may take."""
        return OF_AUTO if self.planner == "auto" else TARGET

    @property
    def with_planner(self) -> dict[str, Any]:
        """Arguments of the optimizer that plans."""
        planner = f"{self.planner}:period={self.period}"
        if self.planner == "auto":
            return {"compression": planner}
        return {"compression": self.compression, "planner": planner}


CASES = {
    "ResNet, topk": Case(("--preset", "resnet-fashion"), "topk:density=0.01", 12),
    "LSTM, topk": Case(("--preset", "lstm-sotu"), "topk:density=0.01", 2),
    "LSTM, qsgd": Case(("--preset", "lstm-sotu"), "qsgd:bits=4", 2),
    "transformer, powersgd": Case(("--preset", "transformer-sotu"), "powersgd:rank=4", 2),
    "ResNet, auto": Case(("--preset", "resnet-fashion"), "fp16", 12, 100, "auto"),
    "LSTM, auto": Case(("--preset", "lstm-sotu"), "fp16", 4, 100, "auto"),
    # its first plans come all the same, and then fewer
    "LSTM, auto, 2,000 steps": Case(("--preset", "lstm-sotu"), "fp16", 19, 100, "auto"),
}
QUICK = {
    "MLP, topk": Case(("--preset", "mlp-digits", "--width", "64"), "topk:density=0.05", 2, period=32)
}


# --- on every rank ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Times:
    """Seconds of each step, the steps in which gradients are measured, and the last of each plan."""

    seconds: list[float] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)
    counted: float = 0.0
    """Share of the time since its first plan that the planner itself has counted."""


def steps_of(case: Case, arguments: dict[str, Any], times: Times) -> Iterator[None]:
    """Train; each turn is a step."""
    import horovod.torch as hvd

    import hvd_adaptive as hva
    from benchmarks.workers.presets import prepare
    from launch.training import loop

    preset = prepare(case.preset)
    optimizer: Any = hva.DistributedOptimizer(
        preset.rule,
        named_parameters=preset.model.named_parameters(),
        **arguments,
    )
    hvd.broadcast_parameters(preset.model.state_dict(), root_rank=0)
    total = case.period * (case.periods + 1)
    with loop.spared_from_collection():
        for step, batch in enumerate(preset.forever()):
            preset.set_rate(step, total)
            reducer = optimizer._reducer
            outlook = reducer.controller.outlook
            plans = 0 if outlook is None else outlook.plans
            if reducer.controller.observes(reducer.rounds):
                times.measured.append(step)
            started = time.perf_counter()
            preset.step(optimizer, batch)
            times.seconds.append(time.perf_counter() - started)
            if outlook is not None:
                times.counted = outlook.deciding_share
                if outlook.plans != plans:
                    times.changes.append(step)
            with optimizer.meter.paused():  # while the other runs have their turn
                yield


def work(case: Case) -> dict[str, Any]:
    """The runs in turn; two without a planner, which tell how well two runs can be compared."""
    import horovod.torch as hvd
    import torch

    import hvd_adaptive as hva
    from hvd_adaptive.adaptation.schedule import SAMPLES

    hva.init()
    torch.set_num_threads(1)
    times = {name: Times() for name in ("with", "without", "again")}
    runs = {
        "with": steps_of(case, case.with_planner, times["with"]),
        "without": steps_of(case, {"compression": case.compression}, times["without"]),
        "again": steps_of(case, {"compression": case.compression}, times["again"]),
    }
    block = case.period // SAMPLES
    # half a block to begin with: errors are then measured within a block, and not after its barrier
    for turn, steps in enumerate([block // 2, *[block] * (case.periods * SAMPLES)]):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            # an equal start: a rank that is ahead would charge its waiting to the other run
            hvd.barrier()
            for _ in range(steps):
                next(runs[name])
        if hvd.rank() == 0 and turn % SAMPLES == 1:
            print(f"  period {turn // SAMPLES + 1} of {case.periods}", file=sys.stderr, flush=True)
    figures = compare(times["with"], times["without"], block)
    usual, again = (np.median(times[name].seconds[block:]) for name in ("without", "again"))
    return {"ranks": hvd.size(), **figures, "two without": float(again / usual - 1)}


def compare(with_one: Times, without: Times, block: int) -> dict[str, Any]:
    """What each kind of step takes longer than one without a planner, as a share of all of them."""
    seconds = np.array(with_one.seconds)
    steps = np.arange(len(seconds))
    counted = steps >= block  # before that, kernels are compiled
    whole = range(block + BEFORE, len(steps) - AFTER)
    changes = [each for each in with_one.changes if each in whole]
    near = np.zeros(len(steps), np.bool_)
    for change in with_one.changes:
        near[max(0, change - BEFORE) : change + AFTER + 1] = True
    measured = np.zeros(len(steps), np.bool_)
    measured[with_one.measured] = True
    if measured.all():  # a sum is kept in every step; errors are those of its mean
        measured = steps % block == 0
    ordinary = counted & ~near & ~measured
    plain = float(np.median(seconds[ordinary]))
    longer = seconds - usual_near(seconds, ordinary, with_one.changes)
    usual = np.median(np.array(without.seconds)[counted])
    alone = np.flatnonzero(counted & ~near & measured)
    # errors are measured in the first step of a period, and energies in all
    first = np.isin(alone, [min(alone[alone > each], default=-1) for each in with_one.changes])
    kinds = [longer[each] for each in (alone[first], alone[~first]) if len(each)]
    around = [longer[each - BEFORE : each + AFTER + 1] for each in changes]
    # single steps are at times much longer than their median, also where nothing is decided
    width = BEFORE + AFTER + 1
    others = longer[ordinary]
    chance = float(np.median(others[: len(others) // width * width].reshape(-1, width).sum(1)))
    sums = [float(each.sum()) - chance for each in around]
    spent = {
        "measuring": sum(float(np.median(each)) * len(each) for each in kinds),
        "changing": float(np.median(sums)) * len(sums) if sums else 0.0,
    }
    shares = {name: each / (counted.sum() * usual) for name, each in spent.items()}
    return {
        "plans": len(with_one.changes),
        "steps": len(steps),
        "measured": len(with_one.measured),
        "step ms": 1e3 * float(usual),
        "measuring ms": 1e3 * spent["measuring"] / max(1, len(alone)),
        "changing ms": 1e3 * spent["changing"] / max(1, len(changes)),
        "around a change ms": {
            str(place): 1e3 * float(np.median(each))
            for place, each in zip(range(-BEFORE, AFTER + 1), np.array(around).T, strict=bool(around))
        },
        **{name: float(share) for name, share in shares.items()},
        "other steps": float(plain / usual - 1),
        "planning": float(shares["measuring"] + shares["changing"]),
        "counted": with_one.counted,
    }


def usual_near(
    seconds: npt.NDArray[np.float64], ordinary: npt.NDArray[np.bool_], changes: Sequence[int]
) -> npt.NDArray[np.float64]:
    """For each step the median of ordinary ones near it under its plan; of all where there are none.

    Example:
        >>> seconds = np.array([1.0, 1.0, 5.0, 3.0, 9.0, 3.0])
        >>> usual_near(seconds, seconds < 5, changes=[2]).tolist()
        [1.0, 1.0, 1.0, 3.0, 3.0, 3.0]
    """
    steps = np.arange(len(seconds))
    plans = np.searchsorted(changes, steps)
    usual = np.full(len(seconds), np.median(seconds[ordinary]))
    for step in steps:
        found = seconds[ordinary & (plans == plans[step]) & (abs(steps - step) <= NEAR)]
        if len(found):
            usual[step] = np.median(found)
    return usual


# --- the program --------------------------------------------------------------------------------------


def load() -> dict[str, Any]:
    """The cases that the file holds."""
    path = report.RESULTS / "planning_cost.json"
    cases: dict[str, Any] = json.loads(path.read_text())["cases"] if path.exists() else {}
    return cases


def show(cases: dict[str, Any]) -> None:
    """The table."""
    shares = ("measuring", "changing", "planning", "other steps", "two without")
    heading = ["share of the time without a planner", "step ms", "measuring ms", "a change ms", *shares]
    lines: list[list[object]] = [
        [
            name,
            *(f"{row[key]:.2f}" for key in ("step ms", "measuring ms", "changing ms")),
            *(f"{100 * row[key]:+.2f} %" for key in shares),
        ]
        for name, row in cases.items()
    ]
    print(report.table([heading, *lines]))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", help="one case, by name")
    parser.add_argument("--fresh", action="store_true", help="repeat what the file holds already")
    command_line.quick_or_check(parser)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = QUICK if options.quick else CASES
    names = [options.only] if options.only else list(cases)
    if unknown := set(names) - set(cases):
        parser.error(f"no case {', '.join(sorted(unknown))}: there are {', '.join(cases)}")
    if options.worker:
        import horovod.torch as hvd

        figures = work(cases[names[0]])
        if hvd.rank() == 0:
            options.worker.write_text(json.dumps(figures))
        return 0
    done = {} if options.quick else load()

    def measure() -> None:
        for name in names:
            setting = cases[name].setting
            if not options.fresh and done.get(name, {}).get("setting") == setting:
                continue
            print(name, file=sys.stderr, flush=True)
            words = ["--only", name, *(["--quick"] if options.quick else [])]
            found = lab.figures_here(options.ranks, "micro.planning_cost", words)
            done[name] = {"setting": setting, "date": report.machine()["date"], **found}
            if not options.quick:
                report.write("planning_cost", {"cases": done})

    return command_line.complete(
        measure,
        lambda: show(done),
        lambda: [] if options.quick else missed(done),  # few steps say nothing
        options.check,
    )


def cost_of(row: Mapping[str, Any]) -> float:
    """Share of the time that planning takes: as steps show it, or by its own clock if that is more."""
    return max(float(row["planning"]), float(row.get("counted", 0.0)))


def missed(cases: dict[str, Any]) -> list[str]:
    """Where planning takes more than the target."""
    return [
        f"{name}: {cost_of(row):.2%}, target {CASES[name].target:.1%}"
        for name, row in cases.items()
        if cost_of(row) > CASES[name].target
    ]


if __name__ == "__main__":
    sys.exit(main())
