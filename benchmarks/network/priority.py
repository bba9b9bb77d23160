"""What a lower priority of Horovod's thread is worth where there is no core to spare for it.

    sudo -E python -m benchmarks.network.priority          # minutes; a table, results/priority.json
    sudo -E python -m benchmarks.network.priority --quick  # a smoke run that writes no file
    python -m benchmarks.network.priority --check          # 1 if a stored target is missed

Trains the LSTM on hosts with links of 1 Gbit/s (launch/netlab.sh) that share two cores: a rank a core,
and two ranks a core. ``hvd.init()`` (niceness 0) and ``hvd_adaptive.init()`` take turns, launch by
launch, because some launches are slow from their first step to the last: where ranks share a core,
those that wait take time from those that compute. Median, fastest and slowest launch are shown.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import command_line, lab
from benchmarks.report import report

CORES = 2
RATE = "1gbit"
RANKS = {"a rank a core": CORES, "two ranks a core": 2 * CORES}
NICENESS = {"hvd.init()": 0, "hva.init()": 10}
PRESET = ("--preset", "lstm-sotu", "--log-every", "100000", "--eval-examples", "64")
METHODS = {
    "stock-fp16": ("--distributed", "horovod", "--compression", "fp16", "--steps", "18"),
    "topk": ("--compression", "topk:density=0.01,values=int8", "--steps", "48"),
}
SETTLE = 8
LAUNCHES = 4
# Where it cannot help, it must not harm: the median launch, of that of hvd.init().
TARGET = 1.03


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Add to ``cases`` each launch's median step, in seconds, by method and start.

    A case is stored when all of its launches are done.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    for title in wanted:
        steps: dict[str, dict[str, list[float]]] = {
            method: {start: [] for start in NICENESS} for method in METHODS
        }
        with lab.Lab(RANKS[title], RATE) as hosts:
            for number in range(1 if quick else LAUNCHES):
                for start, niceness in NICENESS.items():
                    words = [*PRESET, "--niceness", str(niceness)]
                    runs = hosts.train_each([[*words, *each] for each in METHODS.values()])
                    for method, result in zip(METHODS, runs, strict=True):
                        step = statistics.median(result["step_seconds"][SETTLE:])
                        steps[method][start].append(step)
                        print(
                            f"{title}, {number + 1}, {start}, {method}: {1e3 * step:.0f} ms", flush=True
                        )
        cases[title] = steps
        if out is not None:
            report.write(out.stem, {"rate": RATE, "cases": cases}, out.parent)


def gain(starts: dict[str, list[float]]) -> float:
    """How many times faster the median launch became."""
    before, after = (statistics.median(starts[name]) for name in NICENESS)
    return before / after


def rows(cases: dict[str, Any]) -> list[list[object]]:
    """A table: one row a case and method."""
    found: list[list[object]] = [["LSTM, 2 cores", "method", *NICENESS, "median x faster"]]
    for title, methods in cases.items():
        for method, starts in methods.items():
            steps = [_spread(starts[name]) for name in NICENESS]
            found.append([title, method, *steps, f"{gain(starts):.2f}"])
    return found


def _spread(seconds: list[float]) -> str:
    median, least, most = statistics.median(seconds), min(seconds), max(seconds)
    return f"{1e3 * median:.0f} ({1e3 * least:.0f} to {1e3 * most:.0f}) ms"


def missed(cases: dict[str, Any]) -> list[str]:
    """Where it harms."""
    return [
        f"{title}, {method}: hva.init() takes {1 / gain(starts):.2f} x the step of hvd.init()"
        for title, methods in cases.items()
        for method, starts in methods.items()
        if gain(starts) * TARGET < 1
    ]


def main() -> int:
    """Command line."""
    return command_line.cases(__doc__, "priority", RANKS, measure, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
