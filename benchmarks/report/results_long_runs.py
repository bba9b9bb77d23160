"""The section of RESULTS.md on long runs, and their place in L-GreCo's tables."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy.seeds import DENSE, by_seed, pairs_of, ratios, shares_of_steps
from benchmarks.report.old_defaults import Measured, note
from benchmarks.report.results_markdown import load, missed, of_rows, section, source


@dataclass(frozen=True)
class Theirs:
    """A model's rows in a table of the paper.

    Args:
        title: model and data.
        dense: mean and deviation of its score: accuracy in percent, or perplexity.
        rows: by compressor: the level that all layers have, its score and compression ratio, and those
            of L-GreCo.
    """

    title: str
    dense: tuple[float, float]
    rows: Mapping[str, tuple[str, tuple[float, float, float], tuple[float, float, float]]]


@dataclass(frozen=True)
class Form:
    """One of the paper's tables, and which models stand in it here.

    Args:
        number: in the paper.
        of: what the models do.
        theirs: the paper's models.
        ours: names of long_runs.py.
    """

    number: int
    of: str
    theirs: tuple[Theirs, ...]
    ours: tuple[str, ...]


FORMS = (
    Form(
        2,
        "images",
        (
            Theirs(
                "ResNet18, CIFAR-100",
                (76.60, 0.40),
                {
                    "qsgd": ("4 bit", (76.80, 0.40, 7.8), (76.46, 0.21, 8.6)),
                    "topk": ("1 %", (75.73, 0.46, 48.1), (75.66, 0.35, 182.0)),
                    "powersgd": ("rank 4", (76.36, 0.28, 72.2), (76.43, 0.37, 133.9)),
                },
            ),
            Theirs(
                "ResNet50, ImageNet",
                (76.88, 0.16),
                {
                    "qsgd": ("4 bit", (77.38, 0.10, 7.7), (76.77, 0.25, 11.0)),
                    "topk": ("1 %", (76.85, 0.06, 45.6), (77.04, 0.27, 122.0)),
                    "powersgd": ("rank 4", (76.50, 0.37, 66.5), (76.33, 0.27, 96.2)),
                },
            ),
        ),
        ("resnet", "mlp"),
    ),
    Form(
        3,
        "language",
        (
            Theirs(
                "Transformer-XL, WikiText-103",
                (23.82, 0.10),
                {
                    "qsgd": ("4 bit", (23.82, 0.10, 7.8), (24.11, 0.09, 9.1)),
                    "topk": ("10 %", (24.13, 0.14, 4.9), (24.19, 0.13, 12.8)),
                    "powersgd": ("rank 32", (24.08, 0.12, 14.0), (24.09, 0.15, 20.8)),
                },
            ),
            Theirs(
                "Transformer-LM, WikiText-103",
                (29.34, 0.12),
                {
                    "qsgd": ("4 bit", (29.39, 0.10, 7.8), (30.03, 0.16, 9.9)),
                    "topk": ("10 %", (29.29, 0.09, 4.9), (29.08, 0.20, 25.6)),
                    "powersgd": ("rank 32", (29.98, 0.09, 15.0), (30.19, 0.09, 26.5)),
                },
            ),
        ),
        ("lstm", "transformer"),
    ),
)
"""L-GreCo (Markov et al.), tables 2 and 3."""
ALGORITHMS = {
    "powersgd": ("one level for all", 14.1, 72),
    "powersgd lgreco": ("L-GreCo", 23.5, 150),
    "accordion": ("Accordion", 23.9, 107),
    "cgx": ("CGX, k-means", 21.6, 112),
    "accordion lgreco": ("L-GreCo + Accordion", 36.9, 176),
}
"""Table 4, of Transformer-XL with PowerSGD: compression ratio, and thousands of tokens a second on
several nodes. Here all of them start from top-k 2 %."""
HERE = {"powersgd": "topk", "powersgd lgreco": "lgreco"}
TABLE_4 = ("mlp", "resnet")
PLANNED = {"qsgd": "qsgd lgreco", "topk": "lgreco", "powersgd": "powersgd lgreco"}
"""L-GreCo's runs, by the reference that each starts from."""
PLANNERS = ("lgreco", "accordion", "accordion lgreco", "cgx", "gravac", "auto")
"""Those that change what a step sends while a model trains."""
PLOTTED = ("resnet", "mlp", "lstm", "transformer")
BOUNDS = (1.5, 3.0, 10.0, 30.0, 100.0)
"""Of compression ratios: half precision is between the first two."""
STRONG = 30.0
LEVELS = {"qsgd": "4 bit", "topk": "2 %", "powersgd": "rank 4"}


def form_rows(form: Form, cases: Mapping[str, Any]) -> list[list[object]]:
    """A table in the paper's form: its models, and ours, where they were trained."""
    heading = ["compression", "levels", *(each.title for each in form.theirs)]
    table: list[list[object]] = [[*heading, *(f"{each}, here" for each in form.ours)]]
    dense = [_scored(*each.dense, 1.0) for each in form.theirs]
    table.append(["none", "-", *dense, *(_ours(cases, each, "dense") for each in form.ours)])
    for compressor, planned in PLANNED.items():
        rows = [each.rows[compressor] for each in form.theirs]
        uniform = [f"{_scored(*row[1])} ({row[0]})" for row in rows]
        adaptive = [_scored(*row[2], times=row[2][2] / row[1][2]) for row in rows]
        ours = [_ours(cases, each, compressor) for each in form.ours]
        levels = [f"{each} ({LEVELS[compressor]})" if each != "-" else each for each in ours]
        table.append([compressor, "one", *uniform, *levels])
        table.append(
            [compressor, "L-GreCo", *adaptive, *(_ours(cases, each, planned) for each in form.ours)]
        )
    return table


def _scored(mean: float, deviation: float | None, ratio: float, times: float | None = None) -> str:
    spread = "" if deviation is None else f" ± {deviation:.2f}"
    more = "" if times is None else f" [{times:.2f}]"
    return f"{mean:.2f}{spread}; {ratio:.1f}{more}"


def _ours(cases: Mapping[str, Any], model: str, method: str) -> str:
    """Mean and deviation of the scores, the ratio to dense, and how many times the reference's."""
    from benchmarks.accuracy.long_runs import outcomes

    scores = [run["score"] for run in by_seed(cases, model, method).values()]
    found = outcomes(cases).get((model, method))
    if found is None:
        return "-"
    numbers = [each["perplexity"] if found.perplexity else 100 * each["accuracy"] for each in scores]
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    times = found.fewer if method in PLANNED.values() else None
    return _scored(statistics.mean(numbers), deviation, found.ratio, times)


def table_4(cases: Mapping[str, Any]) -> list[list[object]]:
    """Adaptive algorithms on one reference, in the paper's form."""
    heading = ["algorithm", "Transformer-XL: ratio", "thousand tokens/s", *TABLE_4]
    table: list[list[object]] = [[*heading]]
    for method, (name, ratio, tokens) in ALGORITHMS.items():
        ours = [_ours(cases, model, HERE.get(method, method)) for model in TABLE_4]
        table.append([name, f"{ratio:.1f}", tokens, *ours])
    return table


def shares(cases: Mapping[str, Any], model: str, method: str) -> list[float]:
    """Of the steps of all seeds' runs, by :data:`BOUNDS`; none where nothing was run."""
    pairs = pairs_of(*(by_seed(cases, model, each) for each in (DENSE, method)))
    found = [shares_of_steps(ratios(run, dense), run["steps"], BOUNDS) for dense, run in pairs]
    return [statistics.mean(each) for each in zip(*found, strict=True)]


def ratio_rows(cases: Mapping[str, Any]) -> list[list[object]]:
    """How many of its steps each planner takes at which compression ratio."""
    between = (f"{low:g} to {high:g}" for low, high in itertools.pairwise(BOUNDS))
    heading = ["model", "planner", "seeds", "dense", *between, f"{BOUNDS[-1]:g} or more"]
    table: list[list[object]] = [[*heading]]
    for model in PLOTTED:
        for method in PLANNERS:
            found = shares(cases, model, method)
            if found:
                seeds = len(by_seed(cases, model, method))
                table.append([model, method, seeds, *(f"{100 * each:.0f} %" for each in found)])
    return table


def at_ratios(cases: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """The picture and the table of the section."""
    from_there = BOUNDS.index(STRONG) + 1
    found = {model: shares(cases, model, "gravac")[from_there:] for model in PLOTTED}
    strong = [f"{100 * sum(each):.0f} % ({model})" for model, each in found.items() if each]
    said = f"GraVAC takes so many of its steps with at least {STRONG:g} times fewer bytes than dense "
    return (
        "Compression over the steps",
        "When do planners compress how hard?",
        f"{said}ones: {', '.join(strong)}. Shares of the steps, mean of the seeds; the picture, in the "
        "form of L-GreCo's figure 9, is of one seed.",
        of_rows(ratio_rows(cases))
        + "\n\n![Compression ratio over the steps of training](results/long_runs_ratio.png)",
    )


def in_form(form: Form, cases: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A table of the section."""
    return (
        f"L-GreCo's table {form.number}: {form.of}",
        "What do the paper's models and ours score, and how many times fewer bytes do they send?",
        "Score (accuracy in percent, or perplexity) and its deviation over the seeds; the compression "
        "ratio over the whole run, tensors included that are always dense; and in brackets how many "
        "times that of one level for all layers.",
        of_rows(form_rows(form, cases)),
    )


UNDATED = "2026-11-28"
"""Runs that hold no date were made on this day, or a day before it."""


def of_auto(cases: Mapping[str, Any]) -> Iterator[Measured]:
    """The runs whose planner is ``auto``, with the days on which they were made."""
    from benchmarks.accuracy.long_runs import AUTO, CASES

    for title, run in cases.items():
        model, method, _ = CASES[title]
        if method.partition(" ")[0] == AUTO:
            yield f"{model} {method}", AUTO, {"date": run.get("date", UNDATED)}


def long_runs() -> str:
    """Scores and bytes of runs that are long enough."""
    from benchmarks.accuracy.long_runs import ABLATION, AUTO, CASES, LIMITS, outcomes, rows
    from benchmarks.accuracy.seeds import SEEDS

    figures = load("long_runs")
    found = outcomes(figures["cases"])
    fewer = [
        f"`{method}` {each.fewer:.2f} ({model})"
        for (model, method), each in found.items()
        if method.endswith("lgreco") and each.fewer is not None
    ]
    planned = f" L-GreCo sends so many times fewer bytes than its reference: {', '.join(fewer)}."
    return section(
        "Accuracy of long runs",
        "Models trained with the gradients of 4 virtual ranks, or as many as their name says; "
        f"{len(SEEDS)} seeds are planned. {source('long_runs', figures)}",
        (
            "Dense, one level for all layers, and planners",
            "What do planners lose in runs that are long enough for error feedback, what do they save?",
            f"{len(figures['cases'])} of {len(CASES)} runs were made.{planned if fewer else ''}",
            of_rows(rows(figures["cases"])),
        ),
        (
            "What L-GreCo calls an error",
            "Which measure of a layer's error keeps accuracy, and which saves bytes?",
            f"{sum(method in ABLATION for _, method in found)} variants were run, on one seed; "
            "*residual*: errors are of the gradient with what waits. `lgreco` is `norm`.",
            of_rows(rows(figures["cases"], ("topk", "lgreco", *ABLATION))),
        ),
        (
            "Limits of auto",
            "What do stricter and laxer limits than the default ones lose and save?",
            "`auto` has the limits of `accuracy=balanced`.",
            of_rows(rows(figures["cases"], (AUTO, *LIMITS))),
        ),
        *(in_form(form, figures["cases"]) for form in FORMS),
        (
            "L-GreCo's table 4: adaptive algorithms",
            "What do other algorithms send that choose levels during training?",
            "Here from top-k 2 %: score and its deviation over the seeds, and the compression ratio "
            "over the whole run; no tokens a second, because these runs are not timed.",
            of_rows(table_4(figures["cases"])),
        ),
        at_ratios(figures["cases"]),
        end="\n\n".join(filter(None, (note(of_auto(figures["cases"])), missed(figures)))),
    )
