"""Which quantizer keeps most of dense training's accuracy at 3 bits? ALQ's comparison, at its settings.

    python -m benchmarks.accuracy.three_bits                       # an hour or two; resumable
    python -m benchmarks.accuracy.three_bits --only "mlp alq seed 1"
    python -m benchmarks.accuracy.three_bits --quick               # a smoke run; writes no file
    python -m benchmarks.accuracy.three_bits --check               # 1 if a stored target is missed

As in the paper's experiments, all quantizers have 3 bits (TernGrad has three levels by definition) and
blocks of 8,192 elements, no step is dense, and the learning rate falls to a tenth at half of the steps
and again at three quarters. ALQ and AMQ learn their levels at steps 100 and 2,000 and when the rate
falls, and *at once* after the first step, too, as is this library's default; *-n* weighs all blocks
alike. They and QSGD divide a block by its L2 norm, QSGDinf and TernGrad by its maximum, and so does
*alq max*, which else is *alq at once* and this library's default for ALQ. Models train with the
gradients of 4 virtual ranks (virtual_training.py), from the same seeds and data by every method. A
second grid has other bits and blocks, on one seed. Nothing was tuned but that levels are learned at
once: by the paper's updates AMQ diverged on the first seed.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.accuracy.long_runs import MLP
from benchmarks.accuracy.seeds import DENSE, SEEDS, by_seed, losses, lost, ranked, recorded
from benchmarks.harness import command_line

RANKS = 4
BITS, BLOCK = 3, 8192
STEPS = 2800
MODELS = {"mlp": MLP, "resnet": ("--preset", "resnet-fashion")}
FIXED = {each: each for each in ("qsgd", "qsgdinf", "nuqsgd", "natural", "terngrad")}
PAPERS = "norm=l2,updates=100/2000/10000"
LEARNED = {
    "alq": f"alq:{PAPERS}",
    "alq-n": f"alq:{PAPERS},weighting=normalized",
    "alq at once": "alq:norm=l2",
    "alq max": "alq",
    "amq": f"amq:{PAPERS}",
    "amq-n": f"amq:{PAPERS},weighting=normalized",
    "amq at once": "amq:norm=l2",
}
COMPARED = FIXED | LEARNED
GRID = ("qsgdinf", "nuqsgd", "alq at once", "alq max", "amq at once")
GRID_BITS, GRID_BLOCKS = (2, 3, 4, 6, 8), (512, 8192)
CASES: dict[str, tuple[str, str, int, int, int]] = {
    f"{model} {method} seed {seed}": (model, method, BITS, BLOCK, seed)
    for model in MODELS
    for seed in SEEDS
    for method in (DENSE, *COMPARED)
} | {
    f"mlp {method} of {bits} bits in blocks of {block}": ("mlp", method, bits, block, SEEDS[0])
    for block in GRID_BLOCKS
    for bits in GRID_BITS
    for method in GRID
    if (bits, block) != (BITS, BLOCK)
}
"""Model, method, bits, block and seed, by title."""


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Add each run to ``cases``: one at a time on each core."""
    work = functools.partial(train, steps=3 if quick else STEPS)
    for title, found in command_line.side_by_side(work, wanted, len(os.sched_getaffinity(0))):
        command_line.keep(cases, title, found, rows, missed, out)


def train(title: str, steps: int = STEPS) -> dict[str, Any]:
    """One run: its score, its losses, and the bytes that a rank sends."""
    model, method, bits, block, seed = CASES[title]
    words = ["--virtual-ranks", str(RANKS), "--seed", str(seed), "--lr-schedule", "step"]
    return recorded([*words, *MODELS[model], "--compression", spec(method, bits, block)], steps)


def spec(method: str, bits: int, block: int) -> str:
    """What --compression is.

    Example:
        >>> spec("alq-n", 3, 8192)
        'alq:norm=l2,updates=100/2000/10000,weighting=normalized,bits=3,block=8192'
    """
    if method == DENSE:
        return "none"
    name, _, options = COMPARED[method].partition(":")
    all_options = [options] * bool(options) + [f"bits={bits}"] * (name != "terngrad")
    return f"{name}:{','.join([*all_options, f'block={block}'])}"


def rows(cases: Mapping[str, Any]) -> list[list[object]]:
    """At the paper's settings."""
    return ranked(cases, MODELS, (DENSE, *COMPARED))


def grid_rows(cases: Mapping[str, Any]) -> list[list[object]]:
    """Of one seed: what each method loses at each number of bits; a row for each block."""
    heading: list[object] = ["elements of a block", "method", *(f"{bits} bits" for bits in GRID_BITS)]
    dense = by_seed(cases, "mlp", DENSE).get(SEEDS[0])
    table = [heading]
    for block in GRID_BLOCKS:
        for method in GRID:
            runs = [_of_grid(cases, method, bits, block) for bits in GRID_BITS]
            if dense is not None and any(runs):
                shown = [f"{100 * lost(run, dense):+.2f} pp" if run else "-" for run in runs]
                table.append([f"{block:,}", method, *shown])
    return table


def _of_grid(cases: Mapping[str, Any], method: str, bits: int, block: int) -> Any:
    wanted = ("mlp", method, bits, block, SEEDS[0])
    [title] = [title for title, case in CASES.items() if case == wanted]
    return cases.get(title)


def best(cases: Mapping[str, Any], model: str) -> tuple[str, str] | None:
    """The learned and the fixed levels that lose least; None where either was not trained.

    Example:
        >>> best({}, "mlp") is None
        True
    """
    found = []
    for group in (LEARNED, FIXED):
        known = {each: losses(cases, model, each) for each in group}
        means = {each: statistics.mean(values) for each, values in known.items() if values}
        if not means:
            return None
        found.append(min(means, key=means.__getitem__))
    return found[0], found[1]


def missed(cases: Mapping[str, Any]) -> list[str]:
    """The targets that are missed, and how many runs are."""
    problems = []
    for model in MODELS:
        pair = best(cases, model)
        if pair is None:
            continue
        learned, fixed = (statistics.mean(losses(cases, model, method)) for method in pair)
        if learned > fixed:
            problems.append(
                f"{model}: {pair[0]} loses {100 * learned:.2f} pp, target at most that of {pair[1]}, "
                f"{100 * fixed:.2f}"
            )
    return problems + command_line.left_out(CASES, cases, "runs are missing")


def main() -> int:
    """Command line."""
    return command_line.cases(__doc__, "three_bits", CASES, measure, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
