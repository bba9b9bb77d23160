"""How long do whole trainings take on a slow network: auto, dense gradients, and one level for all?

    sudo -E python -m benchmarks.network.whole_runs            # an hour; resumable
    sudo -E python -m benchmarks.network.whole_runs --only "mlp auto,mlp stock fp16"
    sudo -E python -m benchmarks.network.whole_runs --quick    # a smoke run; writes no file
    python -m benchmarks.network.whole_runs --check            # 1 if a stored target is missed

Models, lengths, levels and dense starts are those of long_runs.py: long enough that error feedback can
keep accuracy; but the learning rate falls to 0 here. 4 real ranks train on 4 hosts with links of
200 Mbit/s (launch/netlab.sh), and the run's own clock counts, with all that a method measures, plans
and tries, without evaluations. The target is what stock Horovod in half precision ends with from the
same seed, less half a point of accuracy or plus 1 % of perplexity. The best static method is chosen in
hindsight. One seed: what is compared is time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.accuracy.long_runs import AUTO, METHODS, SETUPS, dense_steps
from benchmarks.harness import command_line, lab
from benchmarks.network.training_tables import metric, reaches

HOSTS, RATE = 4, "200mbit"
SEED = 1
EVALUATIONS = 20
"""In a run."""
FP16 = "stock fp16"
STATIC = ("topk", "qsgd", "powersgd")
ROUTES = (FP16, AUTO, *STATIC)
CASES = {
    f"{model} {method}": (model, method)
    for model in ("mlp", "resnet", "lstm", "transformer")
    for method in ROUTES
}
OF_BEST, OF_FP16 = 1.1, 0.2
"""Targets: ``auto``'s seconds to the target, of the best static method's, and of stock fp16's."""
SLOW_MODELS = ("lstm", "mlp")
"""Those that the second is for: nearly all of their dense step is communication."""


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Add each run to ``cases``."""
    if not wanted:
        return
    with lab.Lab(2 if quick else HOSTS, RATE) as hosts:
        for title in wanted:
            words = arguments(title, steps=3 if quick else None)
            [run] = hosts.train_each([words], seconds=1800)
            kept = {name: run[name] for name in ("steps", "held_out", "evaluations")}
            command_line.keep(cases, title, kept, rows, missed, out)


def arguments(title: str, steps: int | None = None) -> list[str]:
    """Of train.py."""
    model, method = CASES[title]
    setup = SETUPS[model]
    count = steps or setup.steps
    words = ["--steps", str(count), "--eval-every", str(max(1, count // EVALUATIONS))]
    words += ["--seed", str(SEED), *setup.options]
    if method == FP16:
        return [*words, "--distributed", "horovod", "--compression", "fp16"]
    start = dense_steps(METHODS[method], count)
    return [*words, *METHODS[method].options, "--dense-steps", str(start)]


def seconds(run: Mapping[str, Any]) -> float:
    """Of a whole run."""
    return float(run["evaluations"][-1]["seconds"])


def seconds_to_target(cases: Mapping[str, Any], model: str, method: str) -> float:
    """NaN where the target is not reached, or a run is missing."""
    dense, run = (cases.get(f"{model} {each}") for each in (FP16, method))
    if dense is None or run is None:
        return math.nan
    met = (each["seconds"] for each in run["evaluations"] if reaches(each, dense["held_out"]))
    return float(next(met, math.nan))


def best_static(cases: Mapping[str, Any], model: str) -> tuple[str, float]:
    """The static method that is first at the target, and its seconds; NaN if none is."""
    found = {name: seconds_to_target(cases, model, name) for name in STATIC}
    known = {name: each for name, each in found.items() if not math.isnan(each)}
    name = min(known, key=lambda each: known[each], default="")
    return name, known.get(name, math.nan)


def rows(cases: Mapping[str, Any]) -> list[list[object]]:
    """A table: one row a run."""
    times = ("seconds of the run", "of stock fp16", "seconds to the target", "of stock fp16")
    table: list[list[object]] = [["model", "method", "score", *times, "of the best static"]]
    for title, run in cases.items():
        model, method = CASES[title]
        name = metric(run)
        score = run["held_out"][name]
        dense = cases.get(f"{model} {FP16}")
        share = seconds(run) / seconds(dense) if dense else math.nan
        to_target = seconds_to_target(cases, model, method)
        of_fp16 = to_target / seconds_to_target(cases, model, FP16)
        of_best = to_target / best_static(cases, model)[1]
        shown = f"{score:.2f}" if name == "perplexity" else f"{score:.2%}"
        numbers = [_number(seconds(run), "{:,.0f}"), _number(share), _number(to_target, "{:,.0f}")]
        table.append([model, method, shown, *numbers, _number(of_fp16), _number(of_best)])
    return table


def _number(value: float, form: str = "{:.2f}") -> str:
    return "-" if math.isnan(value) else form.format(value)


def against_best(cases: Mapping[str, Any]) -> str:
    """In words: ``auto`` beside the best static method and stock fp16, by model."""
    said = []
    for model in dict.fromkeys(CASES[title][0] for title in cases):
        own = seconds_to_target(cases, model, AUTO)
        name, best = best_static(cases, model)
        of_best = f"{own / best:.2f} (`{name}`)" if best > 0 else "no static one reaches it"
        of_fp16 = f"{own / seconds_to_target(cases, model, FP16):.2f} (stock fp16)"
        said.append(f"{model} {of_best}, {of_fp16}" if own > 0 else f"{model} does not reach it")
    return "; ".join(said)


def missed(cases: Mapping[str, Any]) -> list[str]:
    """The targets that are missed, and how many runs are."""
    problems = []
    for model in dict.fromkeys(CASES[title][0] for title in cases):
        own = seconds_to_target(cases, model, AUTO)
        name, best = best_static(cases, model)
        if math.isnan(own):
            problems.append(f"{model}: auto is not at the target")
            continue
        if own > OF_BEST * best:
            problems.append(f"{model}: auto takes {own / best:.2f} of {name}, target {OF_BEST:g}")
        of_fp16 = own / seconds_to_target(cases, model, FP16)
        if model in SLOW_MODELS and of_fp16 > OF_FP16:
            problems.append(f"{model}: auto takes {of_fp16:.2f} of {FP16}, target {OF_FP16:g}")
    left = len(CASES) - len(cases)
    return problems + [f"{left} of {len(CASES)} runs are missing"] * (left > 0)


def main() -> int:
    """Command line."""
    return command_line.cases(__doc__, "whole_runs", CASES, measure, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
