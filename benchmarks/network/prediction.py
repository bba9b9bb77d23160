"""How near are predictions to steps that they have not seen: other ranks, other rates, compressed?

    sudo -E python -m benchmarks.network.prediction            # 20 minutes; resumable
    sudo -E python -m benchmarks.network.prediction --only "4 x 200mbit"
    sudo -E python -m benchmarks.network.prediction --quick    # a smoke run; writes no file
    python -m benchmarks.network.prediction --check            # 1 if a stored target is missed

Some dense steps of the LSTM on hosts with links of 200 Mbit/s are traced, as ``hva predict`` does, and
steps predicted for other rates and more hosts: dense, and two compressors by two schemes. Then those
are measured, in turn in one job for each place. All hosts share 2 cores, so that the computing of ``n``
ranks, and their compressors, take ``n / 2`` times as long: with that the trace is scaled. What else is
slower where 4 or 8 ranks share them, Horovod's threads and the kernel's, is in no trace of 2. So what
is predicted from 2 hosts for 2, where each rank has a core to itself as on a cluster, and from 4 for 4
or 8, whose trace has it, stands apart from what is predicted from 2 for 4 or 8.
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
from benchmarks.network.auto_grid import QUANTIZER, TOPK
from hvd_adaptive.adaptation.prediction import Predictor
from hvd_adaptive.adaptation.step_trace import StepTrace

PRESET = "lstm-sotu"
RATES = {"50mbit": 5e7, "100mbit": 1e8, "200mbit": 2e8, "1gbit": 1e9}
SEEN_RATE = "200mbit"
SHARED = ((4, "200mbit"), (4, "100mbit"), (4, "1gbit"), (8, "200mbit"))
PLACES = {2: ((2, "200mbit"), (2, "50mbit"), (2, "100mbit"), (2, "1gbit"), *SHARED), 4: SHARED}
"""By the hosts on which steps were traced: hosts and rates for which they are predicted."""
CASES = {
    f"{ranks} x {rate} from {seen} hosts": (seen, ranks, rate)
    for seen, places in PLACES.items()
    for ranks, rate in places
}
METHODS = {
    "fp16 allgather": ("fp16", 0.0, None),
    "qsgdinf:bits=4 allgather": (QUANTIZER, 4.0, "allgather"),
    "qsgdinf:bits=4 two_shot": (QUANTIZER, 4.0, "two_shot"),
    "topk:density=0.01,values=int8 allgather": (TOPK, 0.01, "allgather"),
    "topk:density=0.01,values=int8 two_shot": (TOPK, 0.01, "two_shot"),
}
"""By what a worker is told: compressor, level and scheme of the prediction. What was traced is the
families of ``auto``, whose quantizer takes as long as that of a worker."""
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
    _, ranks, rate = CASES[case]
    other = None if rate == SEEN_RATE else RATES[rate]
    predictor = Predictor(crowded(trace, ranks), other, RATES[SEEN_RATE])
    found = {}
    for method, (spec, level, scheme) in METHODS.items():
        dense = [each.choice for each in predictor.methods if each.name == f"{spec} (dense)"]
        choice = dense[0] if dense else predictor.uniform(spec, level)
        cell = predictor.seconds(choice, ranks, scheme)
        found[method] = {"seconds": cell.seconds, "low": cell.low, "high": cell.high}
    return found


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Trace, and measure each place and predict for it."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    traces = {seen: traced(seen) for seen in sorted({CASES[case][0] for case in wanted})}
    words = ["--preset", PRESET, "--blocks", str(1 if quick else BLOCKS), "--steps", str(STEPS)]
    for place in dict.fromkeys(CASES[case][1:] for case in wanted):
        taken = turns.take(*place, tuple(METHODS), words, seconds=1200.0)
        took = {each: statistics.median(turns.block_steps(ranks)) for each, ranks in taken.items()}
        for case in (case for case in wanted if CASES[case][1:] == place):
            found = compared(predicted(traces[CASES[case][0]], case), took)
            command_line.keep(cases, case, found, rows, missed, out, preset=PRESET)


def traced(hosts: int) -> StepTrace:
    """Dense steps on so many of them."""
    with lab.Lab(hosts, SEEN_RATE) as made:
        (found,) = made.module("workers.trace_rank", ["--preset", PRESET]).results()
    return StepTrace.from_dict(found)


def compared(
    foreseen: dict[str, dict[str, float]], took: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Each method's seconds as they were predicted, and as they were."""
    return {
        method: {
            key: float(f"{value:.4g}") for key, value in {"measured": took[method], **cell}.items()
        }
        for method, cell in foreseen.items()
    }


def error(cell: dict[str, float]) -> float:
    """By how much a prediction is off, relative to what was measured."""
    return cell["seconds"] / cell["measured"] - 1


def rows(cases: dict[str, Any]) -> list[list[object]]:
    """A table: one row a case and method."""
    heading = ("traced on", "hosts", "method", "measured", "predicted", "range", "off by")
    found: list[list[object]] = [[*heading]]
    for case, methods in cases.items():
        seen, ranks, rate = CASES[case]
        for method, cell in methods.items():
            low, high = (f"{1e3 * cell[key]:.0f}" for key in ("low", "high"))
            found.append(
                [
                    seen,
                    f"{ranks} x {rate}",
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
    return [
        error(cell)
        for case, methods in cases.items()
        for method, cell in methods.items()
        if not (CASES[case][1:] == (CASES[case][0], SEEN_RATE) and method.startswith("fp16"))
    ]


def crowd_was_traced(case: str) -> bool:
    """Whether ranks share cores in the trace, or do not in what is predicted either."""
    seen, ranks, _ = CASES[case]
    return seen > CORES or ranks <= CORES


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
