"""Does L-GreCo keep the accuracy, with fewer bytes, of one level that was chosen with care?

    python -m benchmarks.accuracy.calibrated                          # hours; resumable
    python -m benchmarks.accuracy.calibrated --only "mlp qsgd seed 1,mlp qsgd lgreco seed 1"
    python -m benchmarks.accuracy.calibrated --quick                  # a smoke run; writes no file
    python -m benchmarks.accuracy.calibrated --check                  # 1 if a stored target is missed

As in the paper (Markov et al., section 4): the reference is, for each model, the strongest level of a
family that keeps the accuracy of dense training (calibration.py found it, on a seed that is not used
here), and L-GreCo starts from it. Models, steps, seeds and dense runs are those of long_runs.py; a run
that has the same level there is taken from there. Models come up as far as their levels are known.

Two tables explain the savings: of which parts a reference's bytes are, of which a plan can spare one;
and what other gradients and another metric of errors save, on one seed.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy import calibration, long_runs
from benchmarks.accuracy.seeds import (
    DENSE,
    SEEDS,
    all_bytes,
    by_seed,
    losses,
    pairs_of,
    ranked,
    signed,
    times_fewer,
)
from benchmarks.harness import command_line
from benchmarks.report.results_markdown import load

FEWER = {
    each.reference: each.fewer
    for each in long_runs.METHODS.values()
    if each.options[-2:] == long_runs.LGRECO
}
"""How many times fewer bytes than its reference L-GreCo is asked for, by family."""
PLANNED = {f"{family} lgreco": family for family in FEWER}
METHODS = {method: family for planned, family in PLANNED.items() for method in (family, planned)}
"""Families, by method."""
ABLATION = {
    f"topk lgreco {name}": ("--planner", f"lgreco:{option}")
    for name, option in {
        "relative": "metric=relative",
        "residual": "residual=true",
        "single steps": "accumulate=false",
    }.items()
}
"""L-GreCo with another error, by method: all over top-k, and on one seed."""
LEAST = "least"
"""What is sent where of all layers that are compressed next to nothing is."""
CASES = {
    f"{model} {method} seed {seed}": (model, method, seed)
    for seed in SEEDS
    for model in calibration.MODELS
    for method in (*METHODS, *((*ABLATION, LEAST) if seed == SEEDS[0] else ()))
}


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Add those of ``wanted`` whose levels are known: one at a time on each core."""
    titles = [title for title in wanted if quick or level_of(title) is not None]
    work = functools.partial(train, steps=3 if quick else None)
    for title, found in command_line.side_by_side(work, titles, len(os.sched_getaffinity(0))):
        command_line.keep(cases, title, found, rows, missed, out)


def level_of(title: str) -> str | None:
    """The reference's level; None where it is not known, or no level keeps accuracy."""
    model, method, _ = CASES[title]
    if method == LEAST:
        return "topk:density=0.000001"
    return calibration.strongest(stored("calibration"), model, family_of(method))


def family_of(method: str) -> str:
    """The family of a method's levels."""
    return METHODS.get(method, "topk")


def train(title: str, steps: int | None = None) -> dict[str, Any]:
    """One run: its score, its losses, the bytes that a rank sends, as they change, and the level."""
    model, method, seed = CASES[title]
    usual = long_runs.METHODS[family_of(method)]
    level = level_of(title) or usual.options[1]
    if method == LEAST:
        sparse = long_runs.Method(("--compression", level))
        return {"level": level, **long_runs.trained(long_runs.SETUPS[model], sparse, seed, steps=1)}
    planner = ABLATION.get(method, () if method in FEWER else long_runs.LGRECO)
    wanted = long_runs.Method(("--compression", level, *planner), withholds=usual.withholds)
    run = None if steps else _trained_already(model, wanted.options, seed)
    return {"level": level, **(run or long_runs.trained(long_runs.SETUPS[model], wanted, seed, steps))}


def _trained_already(model: str, options: tuple[str, ...], seed: int) -> dict[str, Any] | None:
    """The run of these options among the long ones."""
    same = [name for name, method in long_runs.METHODS.items() if method.options == options]
    return next((by_seed(stored("long_runs"), model, name).get(seed) for name in same), None)


@functools.cache
def stored(name: str) -> dict[str, Any]:
    """The cases that a file of results holds."""
    found: dict[str, Any] = load(name)["cases"]
    return found


def rows(cases: Mapping[str, Any]) -> list[list[object]]:
    """A row for each model and method, with its level, and how many times fewer bytes L-GreCo sends."""
    known = with_dense(cases)
    heading, *found = ranked(known, calibration.MODELS, [DENSE, *METHODS])
    table: list[list[object]] = [[*heading, "level", "than its reference"]]
    for model, method, *rest in found:
        level, fewer = "-", None
        if method != DENSE:
            level = next(iter(by_seed(cases, str(model), str(method)).values()))["level"]
            fewer = fewer_than_reference(cases, str(model), str(method))
        table.append([model, method, *rest, level, "-" if fewer is None else f"{fewer:.2f}"])
    return table


def with_dense(cases: Mapping[str, Any]) -> dict[str, Any]:
    """With the dense runs of the same models and seeds."""
    models = {CASES[title][0] for title in cases}
    dense = {f"{model} {DENSE} seed {seed}" for model in models for seed in SEEDS}
    return {title: run for title, run in stored("long_runs").items() if title in dense} | dict(cases)


def fewer_than_reference(cases: Mapping[str, Any], model: str, method: str) -> float | None:
    """How many times fewer bytes than its reference; None for one, and where no seed has both."""
    reference = family_of(method)
    if method == reference:
        return None
    return times_fewer(pairs_of(*(by_seed(cases, model, each) for each in (reference, method))))


@dataclass(frozen=True)
class Parts:
    """Of what the bytes of a whole run are, in shares of a reference's.

    Args:
        start: dense gradients at the start of the run.
        small: layers that are always dense, later on.
        spared: what a plan can spare.
        fewer: how many times fewer bytes L-GreCo sends in the whole run.
        later: the same without the dense start.
        compressed: the same without that and the layers that are always dense.
    """

    start: float
    small: float
    spared: float
    fewer: float
    later: float
    compressed: float

    @property
    def most(self) -> float:
        """How many times fewer bytes the whole run would send if a plan left nothing of its part."""
        return 1 / (1 - self.spared)


def parts_of(cases: Mapping[str, Any], model: str, method: str) -> Parts | None:
    """Of L-GreCo's runs and their references', where both and a model's least bytes are known."""
    pairs = pairs_of(*(by_seed(cases, model, each) for each in (family_of(method), method)))
    least = by_seed(cases, model, LEAST).get(SEEDS[0])
    if not pairs or least is None:
        return None
    reference = pairs[0][0]  # all of them send the same
    since = long_runs.dense_steps(long_runs.METHODS[family_of(method)], reference["steps"])
    small = least["bytes"][0][1] * (reference["steps"] - since)
    whole, after = (all_bytes(reference, each) for each in (0, since))
    spared = statistics.mean((after - small) / (all_bytes(run, since) - small) for _, run in pairs)
    fewer, later = (times_fewer(pairs, each) or 1.0 for each in (0, since))
    return Parts(1 - after / whole, small / whole, (after - small) / whole, fewer, later, spared)


def known_parts(cases: Mapping[str, Any]) -> dict[tuple[str, str], Parts]:
    """By model and family, as far as L-GreCo's savings can be explained."""
    found = {
        (model, family): parts_of(cases, model, method)
        for model in calibration.MODELS
        for method, family in PLANNED.items()
    }
    return {key: parts for key, parts in found.items() if parts is not None}


def parts_rows(cases: Mapping[str, Any]) -> list[list[object]]:
    """A row for each model and family of which L-GreCo's savings can be explained."""
    heading = ("model", "family", "dense start", "small layers", "what a plan can spare")
    fewer = ("times fewer bytes at most", "L-GreCo", "after the dense start", "of what it can spare")
    table: list[list[object]] = [[*heading, *fewer]]
    for names, found in known_parts(cases).items():
        shares = (f"{100 * each:.0f} %" for each in (found.start, found.small, found.spared))
        times = (found.most, found.fewer, found.later, found.compressed)
        table.append([*names, *shares, *(f"{each:.2f}" for each in times)])
    return table


def ablation_rows(cases: Mapping[str, Any]) -> list[list[object]]:
    """A row for each model and error of L-GreCo's, of the seed that has them all."""
    later = ("times fewer than its reference", "after the dense start", "of what it can spare")
    table: list[list[object]] = [["model", "method", "lost against dense", *later]]
    ends = f" seed {SEEDS[0]}"
    one = {title: run for title, run in with_dense(cases).items() if title.endswith(ends)}
    for model in calibration.MODELS:
        if not any(by_seed(one, model, each) for each in ABLATION):
            continue
        for method in ("topk lgreco", *ABLATION):
            found, lost = parts_of(one, model, method), losses(one, model, method)
            if found and lost:
                times = (found.fewer, found.later, found.compressed)
                worse = signed(lost[0], of_text(cases, model))
                table.append([model, method, worse, *(f"{each:.2f}" for each in times)])
    return table


def of_text(cases: Mapping[str, Any], model: str) -> bool:
    """Whether a model's score is perplexity."""
    return any("perplexity" in run["score"] for title, run in cases.items() if CASES[title][0] == model)


def missed(cases: Mapping[str, Any]) -> list[str]:
    """The targets that are missed, and how many runs are."""
    problems, known = [], with_dense(cases)
    for model in calibration.MODELS:
        for method in METHODS:
            found = losses(known, model, method)
            if not found:
                continue
            limit = long_runs.PERPLEXITY if of_text(cases, model) else long_runs.ACCURACY
            lost = statistics.mean(found)
            if lost > limit:
                problems.append(f"{model}, {method}: loses {100 * lost:.2f}, target {100 * limit:g}")
            fewer, least = fewer_than_reference(cases, model, method), FEWER[METHODS[method]]
            if fewer is not None and fewer < least:
                problems.append(f"{model}, {method}: {fewer:.2f} times fewer bytes, target {least:g}")
    return problems + command_line.left_out(CASES, cases, "runs are missing")


def main() -> int:
    """Command line."""
    return command_line.cases(__doc__, "calibrated", CASES, measure, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
