"""How long do whole trainings take on a slow network: auto, dense gradients, and one level for all?

    sudo -E python -m benchmarks.network.whole_runs            # an hour; resumable
    sudo -E python -m benchmarks.network.whole_runs --only mlp,resnet
    sudo -E python -m benchmarks.network.whole_runs --quick    # a smoke run; writes no file
    python -m benchmarks.network.whole_runs --check            # 1 if a stored target is missed

Models, lengths, levels, learning rates and dense starts are those of long_runs.py: long enough that
error feedback can keep accuracy. Here 4 real ranks train on 4 hosts with links of 200 Mbit/s
(launch/netlab.sh), and seconds count, with all that a method measures, plans and tries, but without
evaluations and the loading of kernels. All methods train in turn within one job, 20 steps each, because
machines have slow phases. The target is what dense training ends with in long_runs.py, the mean of its
seeds, less half a point of accuracy or plus 1 % of perplexity: what stock Horovod ends with here may be
half a point more or less from one call to the next, as its sums are rounded in another order. The best
static method is chosen in hindsight. One seed: what is compared is time.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.long_runs import AUTO, RATE_FLOOR, SETUPS, dense_steps, method_of
from benchmarks.accuracy.seeds import DENSE, by_seed
from benchmarks.harness import command_line, lab
from benchmarks.network.training_tables import first_of, number, reaches
from benchmarks.report.results_markdown import load

HOSTS, RATE = 4, "200mbit"
SEED = 1
EVALUATIONS, TURN = 20, 20
"""In a run; and steps of one method in a row."""
FP16 = "stock fp16"
STATIC = ("topk", "qsgd", "powersgd")
ROUTES = (FP16, AUTO, *STATIC)
CASES = ("mlp", "resnet", "lstm", "transformer")
OF_BEST, OF_FP16 = 1.1, 0.2
"""Targets: ``auto``'s seconds to the target, of the best static method's, and of stock fp16's."""
NOT_SLOWER = 1.02
"""Target: of the whole run's, of stock fp16's: all that is measured and tried is in it."""
SLOW_MODELS = ("lstm", "mlp")
"""Those that the second is for: nearly all of their dense step is communication."""

Runs = Mapping[str, Any]
"""The evaluations of each method's run, with seconds."""


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Add the runs of each model to ``cases``, by method."""
    for title in wanted:
        steps = 3 if quick else SETUPS[title].steps
        words = ["--steps", str(steps), "--turn", str(TURN), "--floor", str(RATE_FLOOR)]
        words += ["--every", str(max(1, steps // EVALUATIONS))]
        trainings = [json.dumps(arguments(title, method, steps)) for method in ROUTES]
        with lab.Lab(2 if quick else HOSTS, RATE) as hosts:
            job = hosts.module("workers.whole_run_rank", [*words, *trainings], seconds=3600)
            (curves,) = job.results()
        command_line.keep(cases, title, dict(zip(ROUTES, curves, strict=True)), rows, missed, out)


def arguments(model: str, method: str, steps: int) -> list[str]:
    """Of train.py."""
    words = ["--seed", str(SEED), *SETUPS[model].options]
    if method == FP16:
        return [*words, "--distributed", "horovod", "--compression", "fp16"]
    found = method_of(method)
    return [*words, *found.options, "--dense-steps", str(dense_steps(found, steps))]


@functools.cache
def dense_score(model: str) -> Mapping[str, float]:
    """What dense training ends with in long_runs.py: the mean of its seeds."""
    scores = [run["score"] for run in by_seed(load("long_runs")["cases"], model, DENSE).values()]
    return {name: statistics.mean(score[name] for score in scores) for name in scores[0]}


def seconds_to_target(model: str, run: Sequence[Mapping[str, float]]) -> float:
    """NaN where the target is not reached, or nothing was trained."""
    met = (each["seconds"] for each in run if reaches(each, dense_score(model)))
    return float(next(met, math.nan))


def best_static(model: str, runs: Runs) -> tuple[str, float]:
    """The static method that is first at the target, and its seconds; NaN if none is."""
    return first_of({name: seconds_to_target(model, runs[name]) for name in STATIC})


def rows(cases: Mapping[str, Runs]) -> list[list[object]]:
    """A table: one row a run."""
    times = ("seconds of the run", "of stock fp16", "seconds to the target", "of stock fp16")
    table: list[list[object]] = [["model", "method", "score", *times, "of the best static"]]
    for model, runs in cases.items():
        whole, to_target = runs[FP16][-1]["seconds"], seconds_to_target(model, runs[FP16])
        best = best_static(model, runs)[1]
        for method, run in runs.items():
            own, end = seconds_to_target(model, run), run[-1]
            score = f"{end['perplexity']:.2f}" if "perplexity" in end else f"{end['accuracy']:.2%}"
            shares = (number(own / each) for each in (to_target, best))
            took = f"{end['seconds']:,.0f}", number(end["seconds"] / whole), number(own, "{:,.0f}")
            table.append([model, method, score, *took, *shares])
    return table


def against_best(cases: Mapping[str, Runs]) -> str:
    """In words: ``auto`` beside the best static method and stock fp16, by model."""
    said = []
    for model, runs in cases.items():
        own = seconds_to_target(model, runs.get(AUTO, ()))
        name, best = best_static(model, runs)
        of_best = f"{own / best:.2f} (`{name}`)" if best > 0 else "no static one reaches it"
        of_fp16 = f"{own / seconds_to_target(model, runs[FP16]):.2f} (stock fp16)"
        if AUTO not in runs:
            said.append(f"{model} was not trained by its limits of today")
        else:
            said.append(f"{model} {of_best}, {of_fp16}" if own > 0 else f"{model} does not reach it")
    return "; ".join(said)


def missed(cases: Mapping[str, Runs]) -> list[str]:
    """The targets that are missed, and how many models are."""
    problems = []
    done = {model: runs for model, runs in cases.items() if AUTO in runs}
    for model, runs in done.items():
        own, (name, best) = seconds_to_target(model, runs[AUTO]), best_static(model, runs)
        whole = runs[AUTO][-1]["seconds"] / runs[FP16][-1]["seconds"]
        if whole > NOT_SLOWER:
            problems.append(f"{model}: auto's run takes {whole:.2f} of {FP16}, target {NOT_SLOWER:g}")
        if math.isnan(own):
            problems.append(f"{model}: auto is not at the target")
            continue
        if own > OF_BEST * best:
            problems.append(f"{model}: auto takes {own / best:.2f} of {name}, target {OF_BEST:g}")
        of_fp16 = own / seconds_to_target(model, runs[FP16])
        if model in SLOW_MODELS and of_fp16 > OF_FP16:
            problems.append(f"{model}: auto takes {of_fp16:.2f} of {FP16}, target {OF_FP16:g}")
    return problems + command_line.left_out(CASES, done, "models were not trained")


def main() -> int:
    """Command line."""
    return command_line.cases(__doc__, "whole_runs", CASES, measure, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
