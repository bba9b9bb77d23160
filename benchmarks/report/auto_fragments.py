"""What README.md and docs/auto.md say of ``auto``, from the JSON files under results/."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping

from benchmarks.accuracy import long_runs
from benchmarks.network import automatic, whole_runs
from benchmarks.report.results_markdown import load, span, table

TITLES = {
    "mlp": "MLP",
    "mlp of 16 ranks": "MLP, 16 ranks",
    "resnet": "ResNet",
    "resnet-adamw": "ResNet, AdamW",
    "lstm": "LSTM",
    "transformer": "transformer, AdamW",
}
"""The models of long_runs.py, as pages call them."""


@functools.cache
def _outcomes() -> Mapping[tuple[str, str], long_runs.Outcome]:
    return long_runs.outcomes(load("long_runs")["cases"])


def _difference(found: long_runs.Outcome) -> str:
    """From dense training: less accuracy is negative, more perplexity positive."""
    percent = 100 * statistics.mean(found.lost)
    if found.perplexity:
        return f"perplexity {percent:+.1f} %"
    return f"{0.0 - round(percent, 2):+.2f} pp"  # never -0.00


def accuracy() -> str:
    """Scores and bytes of whole trainings, by the default limits and by those of ``fast``."""
    rows = []
    for model, title in TITLES.items():
        row = [title]
        for method in (long_runs.AUTO, long_runs.FAST):
            found = _outcomes()[model, method]
            row += [_difference(found), f"{found.ratio:.0f} x fewer"]
        rows.append(row)
    return table(["model", "by the default limits", "bytes", "by those of `fast`", "bytes"], rows)


def _most_lost() -> str:
    """The most that any model loses by the default limits."""
    found = [_outcomes()[model, long_runs.AUTO] for model in TITLES]
    accuracies, perplexities = (
        [100 * statistics.mean(each.lost) for each in found if each.perplexity == of]
        for of in (False, True)
    )
    return f"{max(0, *accuracies):.2f} pp or {max(0, *perplexities):.1f} %"


def steps() -> str:
    """How many of the set-ups of automatic.py reach which target."""
    cases = load("automatic")["cases"]
    said = []
    for method, limits in ((automatic.AUTO, "the default limits"), (automatic.FAST, "those of `fast`")):
        found = automatic.shares(cases, method)
        near = {
            each: sum(getattr(shares, each) <= automatic.NEAR for shares in found.values())
            for each in ("of_fastest", "of_accurate")
        }
        slower = {
            title: each.of_dense for title, each in found.items() if each.of_dense > automatic.SLOWER
        }
        of_dense, of_fastest = (
            span((getattr(shares, each) for shares in found.values()), ".2f")
            for each in ("of_dense", "of_fastest")
        )
        said.append(
            f"* By {limits} a step takes {of_dense} of the best dense one, {_over(slower)}.\n"
            f"  Of the fastest fixed choice, which nobody holds to a limit, it takes {of_fastest}:\n"
            f"  at most {automatic.NEAR:g} in {near['of_fastest']} set-ups of {len(found)}.\n"
            "  Of the fastest one that keeps accuracy in long runs it takes at most that in "
            f"{near['of_accurate']}."
        )
    return "\n".join(said)


def _over(slower: Mapping[str, float]) -> str:
    """Which are slower than dense by more than the target allows."""
    most = f"{automatic.SLOWER - 1:.0%}".replace("%", " %")
    if not slower:
        return f"and none is slower by over {most}"
    named = ", ".join(f"{title} by {100 * (each - 1):.1f} %" for title, each in slower.items())
    return f"and more than {most} longer in {len(slower)} ({named})"


def whole() -> str:
    """Whole trainings on a slow network: of the best static method, and of stock Horovod."""
    return (
        "Of the time to the target of whichever is the fastest there, known in hindsight only,\n"
        f"`auto` takes {_by_model(_of_best)}.\n"
        "Of the whole run by stock fp16 it takes "
        f"{_by_model(functools.partial(_of_run, long_runs.AUTO))},\n"
        f"to the target {_by_model(_of_stock)};\n"
        f"top-k 2 % takes {_by_model(functools.partial(_of_run, 'topk'))} of the whole run.\n"
        f"What `auto` measures and decides is {_by_model(_deciding, '{:.1f} %')} of its run."
    )


def _of_best(model: str, runs: whole_runs.Runs) -> float:
    """NaN where no static method reaches the target."""
    best = whole_runs.best_static(model, runs)[1]
    return whole_runs.seconds_to_target(model, runs[long_runs.AUTO]) / best


def _of_stock(model: str, runs: whole_runs.Runs) -> float:
    """Seconds to the target; NaN where it is not reached."""
    own, stock = (
        whole_runs.seconds_to_target(model, runs[method])
        for method in (long_runs.AUTO, whole_runs.FP16)
    )
    return own / stock


def _of_run(method: str, model: str, runs: whole_runs.Runs) -> float:
    """Seconds of the whole run."""
    del model
    return float(runs[method][-1]["seconds"] / runs[whole_runs.FP16][-1]["seconds"])


def _deciding(model: str, runs: whole_runs.Runs) -> float:
    """Percent of the run, by its own clock."""
    del model
    return 100 * float(runs[long_runs.AUTO][-1]["deciding"])


def _by_model(ratio: Callable[[str, whole_runs.Runs], float], form: str = "{:.2f}") -> str:
    """The ratios that are known, each with its model."""
    cases = load("whole_runs")["cases"]
    found = {TITLES[model].partition(",")[0]: ratio(model, runs) for model, runs in cases.items()}
    known = {title: each for title, each in found.items() if not math.isnan(each)}
    return _listed(f"{form.format(each)} ({title})" for title, each in known.items())


def _listed(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def in_readme() -> str:
    """All three in a line, with links."""
    found = automatic.shares(load("automatic")["cases"], automatic.AUTO)
    of_dense = span((each.of_dense for each in found.values()), ".2f")
    of_best = [_of_best(model, runs) for model, runs in load("whole_runs")["cases"].items()]
    of_single = span((each for each in of_best if not math.isnan(each)), ".2f")
    page = "benchmarks/RESULTS.md"
    return (
        f"[{of_dense} of the fastest dense steps]({page}#auto-dense-and-fixed-choices) in {len(found)} "
        f"set-ups, [{_most_lost()} below dense at most]({page}#accuracy-of-long-runs); at dense "
        f"training's target in [{of_single} of the time of the best single level]"
        f"({page}#whole-trainings-on-a-slow-network)"
    )
