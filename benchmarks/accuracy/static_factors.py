"""Does GraVAC keep the accuracy of 10x and send as little as 1,000x? Its table 2, on small models.

    python -m benchmarks.accuracy.static_factors                       # hours; resumable
    python -m benchmarks.accuracy.static_factors --only "mlp gravac seed 1"
    python -m benchmarks.accuracy.static_factors --quick               # a smoke run; writes no file
    python -m benchmarks.accuracy.static_factors --check               # 1 if a stored target is missed

As in the paper: four sparse compressors at a factor of 10 and of 1,000 throughout, without dense steps;
GraVAC between the same two, by both of its thresholds; and Accordion, with 10x where gradients change
much. Models train with the gradients of 4 virtual ranks (virtual_training.py), from the same seeds and
data by every method. Bytes stand in the place of the paper's time, of which they are the part that
compression is for; how long steps take, adaptive.py measures on a real network. Nothing was tuned.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.accuracy.long_runs import LSTM, MLP
from benchmarks.accuracy.seeds import (
    DENSE,
    SEEDS,
    by_seed,
    losses,
    pairs_of,
    ranked,
    recorded,
    times_fewer,
)
from benchmarks.harness import command_line

RANKS = 4
MODELS = {"mlp": (2800, MLP), "lstm": (3000, LSTM)}
"""Steps and options."""
MILD, STRONG = 10, 1000
STATIC = {
    f"{compressor} {factor}x": ("--compression", f"{compressor}:density={1 / factor:g}")
    for compressor in ("topk", "dgc", "redsync", "randomk")
    for factor in (MILD, STRONG)
}
GRAVAC, CAREFUL = "gravac 0.7", "gravac 0.9"
TOPK = ("--compression", "topk:density=0.01")
ADAPTIVE = {
    GRAVAC: (*TOPK, "--planner", f"gravac:theta_min={MILD},theta_max={STRONG},epsilon=0.7"),
    CAREFUL: (*TOPK, "--planner", f"gravac:theta_min={MILD},theta_max={STRONG},epsilon=0.9"),
    "accordion": (*TOPK, "--planner", "accordion:low=10,high=0.1"),
}
METHODS = {DENSE: ("--compression", "none"), **STATIC, **ADAPTIVE}
CASES = {
    f"{model} {method} seed {seed}": (model, method, seed)
    for seed in SEEDS
    for model in MODELS
    for method in METHODS
}
REFERENCE = f"topk {MILD}x"
ACCURACY, PERPLEXITY, FEWER = 0.005, 0.01, 1.9
"""Targets: what GraVAC may lose against dense training, and how many times fewer bytes than 10x."""


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Add each run to ``cases``: one at a time on each core."""
    work = functools.partial(train, short=quick)
    for title, found in command_line.side_by_side(work, wanted, len(os.sched_getaffinity(0))):
        command_line.keep(cases, title, found, rows, missed, out)


def train(title: str, short: bool = False) -> dict[str, Any]:
    """One run: its score, its losses, and the bytes that a rank sends, as they change."""
    model, method, seed = CASES[title]
    steps, options = MODELS[model]
    words = ["--virtual-ranks", str(RANKS), "--seed", str(seed), "--mbit", "100"]
    return recorded([*words, *options, *METHODS[method], "--dense-steps", "0"], 3 if short else steps)


def rows(cases: Mapping[str, Any]) -> list[list[object]]:
    """A row for each model and method, with how many times fewer bytes than 10x."""
    heading, *found = ranked(cases, MODELS, [*METHODS])
    table = [[*heading, f"than {REFERENCE}"]]
    for row in found:
        fewer = fewer_than_reference(cases, str(row[0]), str(row[1]))
        table.append([*row, "-" if fewer is None else f"{fewer:.2f}"])
    return table


def fewer_than_reference(cases: Mapping[str, Any], model: str, method: str) -> float | None:
    """How many times fewer bytes than 10x; None where no seed has both."""
    return times_fewer(pairs_of(*(by_seed(cases, model, each) for each in (REFERENCE, method))))


def missed(cases: Mapping[str, Any]) -> list[str]:
    """The targets that are missed, and how many runs are."""
    problems = []
    for model in MODELS:
        found = losses(cases, model, GRAVAC)
        fewer = fewer_than_reference(cases, model, GRAVAC)
        if not found or fewer is None:
            continue
        limit = PERPLEXITY if model == "lstm" else ACCURACY
        if statistics.mean(found) > limit:
            lost = 100 * statistics.mean(found)
            problems.append(f"{model}: {GRAVAC} loses {lost:.2f}, target {100 * limit:g}")
        if fewer < FEWER:
            problems.append(
                f"{model}: {GRAVAC} sends {fewer:.2f} times fewer bytes than {REFERENCE}, "
                f"target {FEWER:g}"
            )
    return problems + command_line.left_out(CASES, cases, "runs are missing")


def main() -> int:
    """Command line."""
    return command_line.cases(__doc__, "static_factors", CASES, measure, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
