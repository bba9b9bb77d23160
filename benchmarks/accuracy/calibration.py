"""Which is the strongest level of each family that keeps the accuracy of dense training?

    python -m benchmarks.accuracy.calibration                          # hours; resumable
    python -m benchmarks.accuracy.calibration --only "lstm dense,lstm qsgd:bits=4"
    python -m benchmarks.accuracy.calibration --quick                  # a smoke run; writes no file
    python -m benchmarks.accuracy.calibration --check                  # 1 if a stored target is missed

A planner is compared with one level for all layers, and that is fair where this level is neither too
mild nor loses accuracy: the papers choose it by hand for each model. Here the models of long_runs.py
are trained at whole length with a seed that is in no other table. Levels are tried by halves, because
more bytes lose less: of five, two or three are trained. One seed differs from the next by up to 1 %
itself, so a level may be one step off. Top-k begins where density * steps is 50.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.accuracy.long_runs import ACCURACY, METHODS, PERPLEXITY, SETUPS, trained
from benchmarks.accuracy.seeds import DENSE, all_bytes, lost, signed
from benchmarks.harness import command_line

SEED = 11
FAMILIES = {
    "topk": tuple(f"topk:density={density}" for density in (0.02, 0.05, 0.1, 0.25, 0.5)),
    "qsgd": tuple(f"qsgd:bits={bits}" for bits in (3, 4, 5, 6, 8)),
    "powersgd": tuple(f"powersgd:rank={rank}" for rank in (2, 4, 8, 16, 32)),
}
"""Levels, the strongest first."""
MODELS = tuple(name for name, setup in SETUPS.items() if not setup.ends)
CASES = {
    f"{model} {level}": (model, level)
    for model in MODELS
    for level in (DENSE, *(level for levels in FAMILIES.values() for level in levels))
}


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Add the runs of ``wanted`` that are needed: one at a time on each core."""
    work = functools.partial(train, steps=3 if quick else None)
    while titles := [title for title in due(cases) if title in wanted]:
        for title, found in command_line.side_by_side(work, titles, len(os.sched_getaffinity(0))):
            command_line.keep(cases, title, found, rows, missed, out)


def train(title: str, steps: int | None = None) -> dict[str, Any]:
    """One run: its score, its losses, and the bytes that a rank sends, as they change."""
    model, level = CASES[title]
    method = METHODS[level.partition(":")[0]]
    if level != DENSE:
        method = replace(method, options=("--compression", level))
    return trained(SETUPS[model], method, SEED, steps)


def due(cases: Mapping[str, Any]) -> Iterator[str]:
    """The runs that come next: dense training, and of each family the one that halves what is open."""
    for model in MODELS:
        if f"{model} {DENSE}" not in cases:
            yield f"{model} {DENSE}"
            continue
        for family in FAMILIES:
            first, last = open_levels(cases, model, family)
            if first < last:
                yield f"{model} {FAMILIES[family][(first + last) // 2]}"


def open_levels(cases: Mapping[str, Any], model: str, family: str) -> tuple[int, int]:
    """(first, last): the strongest level that keeps accuracy is one of these numbers.

    They are equal once it is known; ``last`` is the number of levels as long as none has kept accuracy.
    """
    levels = FAMILIES[family]
    kept = {number: keeps(cases, model, level) for number, level in enumerate(levels)}
    first = max((number + 1 for number, each in kept.items() if each is False), default=0)
    enough = [number for number, each in kept.items() if each and number >= first]
    return first, min(enough, default=len(levels))


def keeps(cases: Mapping[str, Any], model: str, level: str) -> bool | None:
    """Whether a level keeps the accuracy of dense training; None where that is not known."""
    run, dense = cases.get(f"{model} {level}"), cases.get(f"{model} {DENSE}")
    if run is None or dense is None:
        return None
    return lost(run, dense) <= (PERPLEXITY if "perplexity" in run["score"] else ACCURACY)


def strongest(cases: Mapping[str, Any], model: str, family: str) -> str | None:
    """The level that was looked for; None where it is not known, or there is none."""
    first, last = open_levels(cases, model, family)
    return FAMILIES[family][first] if first == last < len(FAMILIES[family]) else None


def rows(cases: Mapping[str, Any]) -> list[list[object]]:
    """A row for each run; the strongest level that keeps accuracy is marked."""
    heading = ("model", "level", "score", "lost against dense", "times fewer bytes", "strongest")
    table: list[list[object]] = [[*heading]]
    for title, (model, level) in CASES.items():
        if title not in cases:
            continue
        run, dense = cases[title], cases.get(f"{model} {DENSE}")
        family = level.partition(":")[0]
        best = family in FAMILIES and level == strongest(cases, model, family)
        against = ("-", "-") if dense is None else _against(run, dense)
        table.append([model, level, _score(run), *against, "yes" if best else ""])
    return table


def _score(run: Mapping[str, Any]) -> str:
    score = run["score"]
    return f"{score['perplexity']:.2f}" if "perplexity" in score else f"{score['accuracy']:.2%}"


def _against(run: Mapping[str, Any], dense: Mapping[str, Any]) -> tuple[str, str]:
    """What a run loses against the dense one, and how many times fewer bytes it sends."""
    lost_text = signed(lost(run, dense), "perplexity" in run["score"])
    return lost_text, f"{all_bytes(dense) / all_bytes(run):.1f}"


def missed(cases: Mapping[str, Any]) -> list[str]:
    """Families of which no level keeps accuracy, and those that are not through."""
    problems, open_ones = [], 0
    for model in MODELS:
        for family, levels in FAMILIES.items():
            first, last = open_levels(cases, model, family)
            open_ones += first < last or f"{model} {DENSE}" not in cases
            if first == len(levels):
                problems.append(f"{model}: no level of {family} is within 1 % of dense training")
    if open_ones:
        problems.append(f"{open_ones} of {len(MODELS) * len(FAMILIES)} families are not through")
    return problems


def main() -> int:
    """Command line."""
    return command_line.cases(__doc__, "calibration", CASES, measure, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
