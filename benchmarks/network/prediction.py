"""How near are predictions to steps that they have not seen: other ranks, other rates, compressed?

    sudo -E python -m benchmarks.network.prediction            # 30 minutes; resumable
    sudo -E python -m benchmarks.network.prediction --only "4 x 200mbit"
    sudo -E python -m benchmarks.network.prediction --quick    # a smoke run; writes no file
    python -m benchmarks.network.prediction --check            # 1 if a stored target is missed

Some dense steps of the LSTM on 2 hosts with links of 200 Mbit/s are traced, as ``hva predict`` does,
and steps predicted for more hosts and other rates: dense, and two compressors by two schemes. Then
those are measured, in turn in one job for each case. All hosts share 2 cores, so that the computing of
``n`` ranks, and their compressors, take ``n / 2`` times as long: with that the trace is scaled.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import command_line, lab, turns
from benchmarks.harness.turns import CORES
from hvd_adaptive.adaptation.prediction import Predictor
from hvd_adaptive.adaptation.step_trace import StepTrace

PRESET = "lstm-sotu"
SEEN = (2, "200mbit")
CASES = {
    f"{ranks} x {rate}": (ranks, rate)
    for ranks, rate in ((2, "200mbit"), (4, "200mbit"), (8, "200mbit"), (4, "100mbit"), (4, "1gbit"))
}
RATES = {"100mbit": 1e8, "200mbit": 2e8, "1gbit": 1e9}
METHODS = {
    "fp16 allgather": ("fp16", 0.0, None),
    "qsgdinf:bits=4 allgather": ("qsgdinf", 4.0, "allgather"),
    "qsgdinf:bits=4 two_shot": ("qsgdinf", 4.0, "two_shot"),
    "topk:density=0.01,values=int8 allgather": ("topk:values=int8", 0.01, "allgather"),
    "topk:density=0.01,values=int8 two_shot": ("topk:values=int8", 0.01, "two_shot"),
}
"""By what a worker is told: compressor, level and scheme of the prediction."""
BLOCKS, STEPS = 3, 12
NEAR, SHARE = 0.10, 0.9
"""Targets: so near must so many predictions of what was not seen be."""


def crowded(trace: StepTrace, ranks: int) -> StepTrace:
    """The trace, had so many ranks shared the cores."""
    slower = max(1.0, ranks / CORES) / max(1.0, trace.ranks / CORES)
    exposed = [a - b for a, b in zip(trace.dense.seconds, trace.dense.computing, strict=True)]
    computing = [slower * each for each in trace.dense.computing]
    dense = replace(
        trace.dense,
        seconds=deque(a + b for a, b in zip(computing, exposed, strict=True)),
        computing=deque(computing),
        launches=deque([slower * each for each in row] for row in trace.dense.launches),
    )
    return replace(trace, dense=dense, measured=trace.measured.with_slower_codecs(slower))


def predicted(trace: StepTrace, case: str) -> dict[str, dict[str, float]]:
    """Seconds of each method, and their range."""
    ranks, rate = CASES[case]
    predictor = Predictor(crowded(trace, ranks), None if rate == SEEN[1] else RATES[rate])
    found = {}
    for method, (spec, level, scheme) in METHODS.items():
        dense = [each.choice for each in predictor.methods if each.name == f"{spec} (dense)"]
        choice = dense[0] if dense else predictor.uniform(spec, level)
        cell = predictor.seconds(choice, ranks, scheme)
        found[method] = {"seconds": cell.seconds, "low": cell.low, "high": cell.high}
    return found


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Trace, and then predict and measure each case."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    if not wanted:
        return
    with lab.Lab(*SEEN) as hosts:
        (traced,) = hosts.module("workers.trace_rank", ["--preset", PRESET]).results()
    trace = StepTrace.from_dict(traced)
    words = ["--preset", PRESET, "--blocks", str(1 if quick else BLOCKS), "--steps", str(STEPS)]
    for case in wanted:
        taken = turns.take(*CASES[case], tuple(METHODS), words, seconds=1200.0)
        seen = {each: statistics.median(turns.block_steps(ranks)) for each, ranks in taken.items()}
        foreseen = predicted(trace, case)
        found = {
            method: {
                "measured": float(f"{seen[method]:.4g}"),
                **{key: float(f"{value:.4g}") for key, value in foreseen[method].items()},
            }
            for method in METHODS
        }
        command_line.keep(cases, case, found, rows, missed, out, preset=PRESET)


def error(cell: dict[str, float]) -> float:
    """By how much a prediction is off, relative to what was measured."""
    return cell["seconds"] / cell["measured"] - 1


def rows(cases: dict[str, Any]) -> list[list[object]]:
    """A table: one row a case and method."""
    found: list[list[object]] = [["hosts", "method", "measured", "predicted", "range", "off by"]]
    for case, methods in cases.items():
        for method, cell in methods.items():
            low, high = (f"{1e3 * cell[key]:.0f}" for key in ("low", "high"))
            found.append(
                [
                    case,
                    "fp16" if method.startswith("fp16") else method,
                    f"{1e3 * cell['measured']:.0f} ms",
                    f"{1e3 * cell['seconds']:.0f} ms",
                    f"{low} to {high} ms",
                    f"{100 * error(cell):+.0f} %",
                ]
            )
    return found


def unseen(cases: dict[str, Any]) -> list[float]:
    """Errors of the predictions of what was not traced."""
    seen = f"{SEEN[0]} x {SEEN[1]}"
    return [
        error(cell)
        for case, methods in cases.items()
        for method, cell in methods.items()
        if (case, method.partition(" ")[0]) != (seen, "fp16")
    ]


def missed(cases: dict[str, Any]) -> list[str]:
    """The targets that are missed."""
    errors = unseen(cases)
    problems = [f"{case} was not measured" for case in CASES if case not in cases]
    near = sum(abs(each) <= NEAR for each in errors)
    if errors and near < SHARE * len(errors):
        problems.append(
            f"{near} of {len(errors)} predictions are within {NEAR:.0%}, target {SHARE:.0%}"
        )
    return problems


def main() -> int:
    """Command line."""
    return command_line.cases(__doc__, "prediction", CASES, measure, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
