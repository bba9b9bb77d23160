"""What a byte of each bucket costs: random plans, and a fit of the synchronization time.

On hosts with slow links, a job trains with the planner ``lgreco-time``, which first tries random plans.
Of each step it records the bytes of every bucket and the seconds from the start of the first bucket to
the end of the last; five steps after a change of plan do not count. The medians of each plan's steps
are fitted by non-negative least squares: ``seconds = intercept + sum_b coefficient_b * bytes_b``.

    sudo -E python -m benchmarks.micro.bucket_costs      # 4 hosts at 200 Mbit/s; writes JSON
    python -m benchmarks.micro.bucket_costs --check      # measures nothing; 1 if it explains under 0.9
    python -m benchmarks.micro.bucket_costs --from FILE  # fits what was recorded: CSV, or that JSON
    python -m benchmarks.micro.bucket_costs --quick      # two ranks, few steps, no lab: for the tests

A CSV file has the columns ``plan``, ``seconds`` and ``bucket 0``, ``bucket 1``, ... (bytes), and a row
a step; ``--rows FILE`` keeps the run's, ``--logdir DIR`` its TensorBoard and JSON logs.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import command_line, lab
from benchmarks.report import report
from hvd_adaptive.planning import REGISTRY, LGreCoTime, StepMeasurements
from hvd_adaptive.planning.budgets import Budget, StaticBudget
from hvd_adaptive.planning.costs import OnlineCosts, fit_bucket_costs

TARGET = 0.9
SETTLING = 5
"""Steps after a change of plan that do not count."""
JOB = ("--preset", "lstm-sotu", "--width", "192", "--vocabulary", "5000")
"""The decoder, two layers, and the embedding: four buckets of a megabyte or more."""
COMPRESSION = "qsgd:bits=4"
BUCKET_CAP_MB = 1.0
HOSTS, RATE = 4, "200mbit"
QUICK = ("--preset", "mlp-digits", "--width", "128")


@dataclass(frozen=True)
class Rows:
    """Recorded steps, or medians over the steps of each plan.

    Args:
        plans: ``int64[M]``.
        nbytes: ``float64[M, B]``.
        seconds: ``float64[M]``.
    """

    plans: np.ndarray
    nbytes: np.ndarray
    seconds: np.ndarray

    def medians(self) -> Rows:
        """One row a plan: delays by something else than bytes do not move a median."""
        plans = np.unique(self.plans)
        chosen = [self.plans == plan for plan in plans]
        return Rows(
            plans,
            np.array([np.median(self.nbytes[each], axis=0) for each in chosen]),
            np.array([np.median(self.seconds[each]) for each in chosen]),
        )


# --- files --------------------------------------------------------------------------------------------


def read(path: Path) -> Rows:
    """Rows of a file.

    Raises:
        ValueError: it holds none, or not these columns.
    """
    if path.suffix == ".json":
        plans = json.loads(path.read_text())["plans"]
        table = [[row["plan"], row["seconds"], *row["bytes"]] for row in plans]
    else:
        with path.open(newline="") as file:
            lines = list(csv.reader(file))
        if not lines or lines[0][:2] != ["plan", "seconds"]:
            raise ValueError(f"{path}: the first line must be plan,seconds,bucket 0,bucket 1,...")
        # a run that was ended may have left half a line
        table = [[float(point) for point in line] for line in lines[1:] if len(line) == len(lines[0])]
    if len(table) < 2:
        raise ValueError(f"{path}: {len(table)} rows, a fit needs at least 2")
    numbers = np.array(table, dtype=np.float64)
    return Rows(numbers[:, 0].astype(np.int64), numbers[:, 2:], numbers[:, 1])


def plans_of(path: Path) -> int:
    """How many plans a recorded CSV file has whole rows of; it may be empty, or not there."""
    if not path.exists() or path.read_text().count("\n") < 3:
        return 0
    return len(np.unique(read(path).plans))


class Recorder:
    """Writes what the planner is given about the steps that count: those of a random plan at work.

    Args:
        path: of the CSV file.
        plans: how many random plans there are.
    """

    def __init__(self, path: Path, plans: int) -> None:
        self._file = path.open("w", newline="", buffering=1)
        self._rows = csv.writer(self._file)
        self._plans = plans
        self._header = False
        self.switches: list[int] = []
        """The last step before each plan."""

    def observe(self, facts: StepMeasurements) -> None:
        """A step has ended, up to some steps ago."""
        if facts.bucket_bytes is None or facts.sync_seconds is None:
            return
        plan = sum(step < facts.step for step in self.switches)
        if not 1 <= plan <= self._plans or facts.step <= self.switches[plan - 1] + SETTLING:
            return
        if not self._header:
            names = [f"bucket {index}" for index in range(len(facts.bucket_bytes))]
            self._rows.writerow(["plan", "seconds", *names])
            self._header = True
        self._rows.writerow([plan, facts.sync_seconds, *facts.bucket_bytes.tolist()])


# --- the experiment, on every rank --------------------------------------------------------------------

_recorder: Recorder | None = None


class RecordingBudget(StaticBudget):
    """L-GreCo's budget; hands on what it observes."""

    def observe(self, facts: StepMeasurements) -> None:
        """To the recorder, on the rank that plans."""
        if _recorder is not None:
            _recorder.observe(facts)


@dataclass(frozen=True)
class RecordedLGreCoTime(LGreCoTime):
    """``lgreco-time``, and a record of the steps."""

    def budget(self, ranks: int = 1) -> Budget:
        """Its own."""
        del ranks
        return RecordingBudget()


def work(options: argparse.Namespace) -> None:
    """Train until the random plans have been tried and the first real plan is at work."""
    import horovod.torch as hvd
    import torch

    import hvd_adaptive as hva
    from benchmarks.workers.presets import prepare

    global _recorder  # noqa: PLW0603 - the planner is made by the library: this is the way in
    REGISTRY["lgreco-time-recorded"] = RecordedLGreCoTime  # a plan names its planner by this
    hva.init()
    torch.set_num_threads(1)
    preset = prepare(QUICK if options.quick else JOB)
    # errors, which trials do not use but every plan waits for, are measured once a trial
    length = SETTLING + options.steps
    recipe = RecordedLGreCoTime(
        trials=options.plans,
        trial_steps=length,
        trial_plans="levels",
        period=8 * length,
        accumulate=False,
    )
    optimizer: Any = hva.DistributedOptimizer(
        preset.rule,
        named_parameters=preset.model.named_parameters(),
        compression=COMPRESSION,
        planner=recipe,
        bucket_cap_mb=0.02 if options.quick else BUCKET_CAP_MB,
        telemetry=str(options.logdir) if options.logdir else None,
    )
    hvd.broadcast_parameters(preset.model.state_dict(), root_rank=0)
    switches: list[int] = []
    if hvd.rank() == 0:
        _recorder = Recorder(options.rows, options.plans)
        switches = _recorder.switches
    version: int | None = None
    for step, batch in enumerate(preset.forever()):
        preset.step(optimizer, batch)
        before, version = version, optimizer.plan.version
        if before is None or version == before:
            continue
        switches.append(step)
        if len(switches) > options.plans:
            break  # the planner has made a plan of its own
        if hvd.rank() == 0:
            print(f"step {step}: random plan {len(switches)} of {options.plans}", flush=True)
    optimizer.meter.close()


# --- the program --------------------------------------------------------------------------------------


def run(options: argparse.Namespace, rows: Path) -> None:
    """Start the ranks, in a lab or here; what they have recorded stays when they are interrupted."""
    arguments = [*lab.module("micro.bucket_costs"), "--worker", "--rows", str(rows)]
    arguments += ["--plans", str(options.plans), "--steps", str(options.steps)]
    arguments += ["--quick"] if options.quick else []
    arguments += ["--logdir", str(options.logdir)] if options.logdir else []
    environment = {**lab.THREADS, **lab.RING, **os.environ}
    if options.quick:
        command = [*lab.horovodrun(2), *arguments]
        subprocess.run(command, cwd=lab.ROOT, env=environment, check=True)
        return
    with lab.Lab(HOSTS, RATE) as hosts:
        print(hosts.netlab("probe"))
        command = [*lab.NETLAB, "--name", hosts.name, "mpirun", *arguments]
        subprocess.run(command, cwd=lab.ROOT, env=environment, check=True)


def fit(rows: Rows) -> dict[str, Any]:
    """Coefficients, and what they explain of plans, of plans left out, and of single steps.

    Buckets whose bytes never change have none: what they cost is part of the intercept.
    """
    medians = rows.medians()
    spread = medians.nbytes.max(axis=0) - medians.nbytes.min(axis=0)
    varied = np.flatnonzero(spread)
    x = medians.nbytes[:, varied]
    costs = fit_bucket_costs(x, medians.seconds)
    online = OnlineCosts()
    for nbytes, seconds in zip(rows.nbytes[:, varied], rows.seconds, strict=True):
        online.observe(nbytes, float(seconds))
    going_on = online.fit()
    buckets: list[dict[str, Any]] = [
        {"bytes": float(nbytes), "least to most": float(each)}
        for nbytes, each in zip(medians.nbytes.mean(axis=0), spread, strict=True)
    ]
    for place, bucket in enumerate(varied):
        buckets[bucket]["seconds a MB"] = 1e6 * float(costs.coefficients[place])
        if np.isfinite(costs.errors[place]):
            buckets[bucket]["standard error"] = 1e6 * float(costs.errors[place])
        if going_on is not None:
            buckets[bucket]["online"] = 1e6 * float(going_on.coefficients[place])
    return {
        "r2": costs.r2,
        "r2 of plans left out": _left_out(x, medians.seconds),
        "r2 of single steps": fit_bucket_costs(rows.nbytes[:, varied], rows.seconds).r2,
        "intercept": costs.intercept,
        "buckets": buckets,
        "steps": len(rows.seconds),
        "plans": [
            {"plan": int(plan), "seconds": float(seconds), "bytes": nbytes.tolist()}
            for plan, nbytes, seconds in zip(
                medians.plans, medians.nbytes, medians.seconds, strict=True
            )
        ],
    }


def _left_out(nbytes: np.ndarray, seconds: np.ndarray) -> float | None:
    """Share of the variance that is predicted by fits without the plan in question."""
    variance = float(((seconds - seconds.mean()) ** 2).sum())
    if len(seconds) < 3 or variance == 0:
        return None
    errors = []
    for index in range(len(seconds)):
        others = np.arange(len(seconds)) != index
        costs = fit_bucket_costs(nbytes[others], seconds[others])
        errors.append(seconds[index] - costs.intercept - costs.coefficients @ nbytes[index])
    return 1.0 - float(np.square(errors).sum()) / variance


def show(figures: dict[str, Any]) -> None:
    """Print the coefficients and what they explain."""
    keys = ("bytes", "least to most", "seconds a MB", "standard error", "online")
    lines: list[Sequence[object]] = [
        [f"bucket {index}", *(row.get(key, "-") for key in keys)]
        for index, row in enumerate(figures["buckets"])
    ]
    report.show([["", *keys], *lines])
    print(f"intercept {figures['intercept']:.4f} s, {len(figures['plans'])} plans, ", end="")
    print(f"{figures['steps']} steps")
    for key in ("r2", "r2 of plans left out", "r2 of single steps"):
        print(f"{key:22}" + ("-" if figures[key] is None else f"{figures[key]:.3f}"))


def missed(figures: dict[str, Any]) -> list[str]:
    """The target, if it is not met."""
    r2 = figures["r2"]
    return [] if r2 >= TARGET else [f"the fit explains {r2:.3f} of the variance, target {TARGET}"]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="fit recorded rows")
    parser.add_argument("--plans", type=int, default=24, help="random plans (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each (%(default)s)")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="keep the recorded rows as CSV")
    parser.add_argument("--logdir", type=Path, metavar="DIR", help="TensorBoard and JSON logs")
    command_line.quick_or_check(parser, "two ranks, few steps; no target, no file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        return command_line.check("bucket_costs", missed)
    if options.quick and not options.worker:
        options.plans, options.steps = 3, 3
    if options.worker:
        work(options)
        return 0
    if options.source:
        show(fit(read(options.source)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = options.rows or Path(folder) / "rows.csv"
        status = 0
        try:
            run(options, rows)
        except KeyboardInterrupt:
            status = 130
            print("\nstopped; no file has changed")
            if plans_of(rows) < 2:
                return status
            print("the fit of what was recorded until then:")
        figures = fit(read(rows))
    show(figures)
    if options.quick or status:
        return status
    job = {"job": " ".join(JOB), "compression": COMPRESSION, "hosts": HOSTS, "rate": RATE}
    print(f"written: {report.write('bucket_costs', {**job, **figures})}")
    command_line.tell(missed(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
