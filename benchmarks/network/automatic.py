"""Is compression="auto" never slower than the best dense training, and near the best fixed choice?

    sudo -E python -m benchmarks.network.automatic                 # an hour; resumable
    sudo -E python -m benchmarks.network.automatic --only "lstm-sotu 4 x 200mbit"
    sudo -E python -m benchmarks.network.automatic --quick         # a smoke run; writes no file
    python -m benchmarks.network.automatic --check                 # 1 if a stored target is missed

Every preset on hosts with slow links (launch/netlab.sh), one rank on each: stock Horovod in single and
in half precision, fixed compressors, and ``auto`` by its default limits and by those of
``accuracy=fast``, in turn within one job, every other block in reverse. Medians of the slowest rank's
steps. The fixed ones are not held to any limit: ``topk`` withholds four steps, which the default limits
admit from step 1,333 on and the fast ones from step 333; turns begin with step 120. So ``auto`` is
compared with those that keep accuracy in the end, as long_runs.py finds on a model of the kind.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accuracy import long_runs
from benchmarks.harness import command_line, lab, turns
from benchmarks.harness.turns import share, step
from benchmarks.report.results_markdown import load
from hvd_adaptive.planning.explanation import chosen_by
from launch.training.options import PRESETS

AUTO, FAST = "auto", "auto:accuracy=fast"
DENSE = ("stock none", "stock fp16")
FIXED = {
    "qsgdinf:bits=4 auto": "qsgdinf 4 bit",
    "qsgdinf:bits=8 auto": "qsgdinf 8 bit",
    "topk:density=0.25,values=int8 auto": "topk 25 %",
}
"""With a scheme; and as tables and long_runs.py call them."""
METHODS = (*DENSE, *FIXED, AUTO, FAST)
TURNS = 6, 3
"""Blocks, and steps of each method in one: many short turns, because machines have slow phases."""
SHORT, SHORT_TURNS = ("resnet-fashion", "mlp-digits"), (24, 8)
"""Their steps take tens of milliseconds: turns of three would be noise."""
LONG, SLOW, LONG_TURNS = ("lstm-sotu", "mlp-fashion"), ("200mbit", "100mbit"), (4, 2)
"""Where a dense step takes seconds."""
SETTLE = 120
"""Steps of auto before its first turn: it measures, plans, compares and changes over."""
OF_SCHEMES = ("bucket ", "network of ", "hierarchical ")
"""How reasons begin that are not of ``auto``."""
SLOWER, NEAR, MOST = 1.02, 1.05, 0.9
"""Targets: of auto to the best dense; to the fastest that keeps accuracy, in this share of cases."""
LIKE = {
    "mlp-fashion": "mlp",
    "mlp-digits": "mlp",
    "resnet-fashion": "resnet",
    "lstm-sotu": "lstm",
    "transformer-sotu": "transformer",
}
"""The model of long_runs.py that tells what keeps accuracy."""


@dataclass(frozen=True)
class Case:
    """A preset of launch/train.py on so many hosts with links of a rate."""

    preset: str
    hosts: int
    rate: str


RATES = ("200mbit", "1gbit", "100mbit", lab.UNSHAPED)
CASES = {
    f"{preset} {hosts} x {rate}": Case(preset, hosts, rate)
    for rate in RATES
    for hosts in (4, 2, 8)
    for preset in PRESETS
}


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Add each case's figures to ``cases``, by method."""
    for title in wanted:
        case, settle = CASES[title], 3 if quick else SETTLE
        blocks, steps = (1, 3) if quick else turns_of(case)
        words = ["--preset", case.preset, "--blocks", str(blocks), "--plans-after", str(settle)]
        words += ["--steps", str(steps)]
        taken = turns.take(case.hosts, case.rate, METHODS, words)
        found = {method: _summary(ranks) for method, ranks in taken.items()}
        command_line.keep(cases, title, found, rows, missed, out)


def turns_of(case: Case) -> tuple[int, int]:
    """How many blocks, and steps of each method in one."""
    if case.preset in SHORT:
        return SHORT_TURNS
    return LONG_TURNS if case.preset in LONG and case.rate in SLOW else TURNS


def _summary(ranks: turns.Turns) -> dict[str, Any]:
    """The steps of each block, and what ``auto`` says of its last plan."""
    said = [line for line in ranks[0][-1]["reasons"] if not line.startswith(OF_SCHEMES)]
    return {"blocks": turns.rounded(turns.block_steps(ranks)), "reasons": said}


class Shares(NamedTuple):
    """What a step of an automatic choice takes."""

    of_dense: float
    """Of the best dense step."""
    of_accurate: float
    """Of the fastest one by what keeps accuracy, dense or fixed."""
    of_fastest: float
    """Of the fastest one by anything else."""


def shares(cases: dict[str, Any], method: str) -> dict[str, Shares]:
    """What an automatic choice takes, by case."""
    return {
        title: Shares(
            share(methods, method, DENSE),
            share(methods, method, (*DENSE, *accurate(CASES[title].preset))),
            share(methods, method, (*DENSE, *FIXED)),
        )
        for title, methods in cases.items()
        if method in methods
    }


@functools.cache
def accurate(preset: str) -> tuple[str, ...]:
    """The fixed choices that keep accuracy on a model of the preset's kind, or were not trained."""
    cases, model = load("long_runs")["cases"], LIKE[preset]
    return tuple(each for each, name in FIXED.items() if long_runs.keeps_accuracy(cases, model, name))


def rows(cases: dict[str, Any]) -> list[list[object]]:
    """A table: one row a case and automatic choice."""
    names = ("fp32", "fp16", *FIXED.values())
    last = ("limits", "auto", "of the best dense", "of the fastest accurate", "of the fastest")
    found: list[list[object]] = [["case", *names, *last, "chosen"]]
    for method, limits in ((AUTO, "balanced"), (FAST, "fast")):
        for title, every in shares(cases, method).items():
            times = [_ms(cases[title], each) for each in (*DENSE, *FIXED)]
            chosen = chosen_by(cases[title][method]["reasons"]).split(";")[0]
            taken = [_ms(cases[title], method), *(f"{each:.2f}" for each in every)]
            found.append([title, *times, limits, *taken, chosen])
    return found


def _ms(methods: dict[str, Any], method: str) -> str:
    return f"{1e3 * step(methods, method):.0f} ms"


def near(cases: dict[str, Any], method: str) -> int:
    """In how many cases an automatic choice is near the fastest that keeps accuracy."""
    return sum(each.of_accurate <= NEAR for each in shares(cases, method).values())


def missed(cases: dict[str, Any]) -> list[str]:
    """The targets that are missed."""
    problems = []
    for method in (AUTO, FAST):
        found = shares(cases, method)
        for title, each in found.items():
            if each.of_dense > SLOWER:
                problems.append(f"{title}: {method} takes {each.of_dense:.2f} of the best dense")
        if near(cases, method) < MOST * len(found):
            problems.append(
                f"{method} is within {NEAR:g} of the fastest accurate choice in "
                f"{near(cases, method)} of {len(found)} cases, target {MOST:.0%}"
            )
    left = len(CASES) - len(shares(cases, AUTO))
    return problems + [f"{left} of {len(CASES)} cases were not measured"] * (left > 0)


def main() -> int:
    """Command line."""
    return command_line.cases(__doc__, "automatic", CASES, measure, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
