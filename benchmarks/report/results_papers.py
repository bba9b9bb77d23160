"""RESULTS.md, first of all: what each paper claims, and how much of it was seen here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.report.old_defaults import note, of_cells
from benchmarks.report.report import RESULTS
from benchmarks.report.results_markdown import load, section, span, table


@dataclass(frozen=True)
class Claim:
    """What a paper says, and what was measured here.

    Args:
        paper: its method.
        claim: in a few words.
        theirs: the least of the paper's figures, and the greatest.
        ours: all of ours.
        form: of a figure.
        why: why it is not reproduced; said only then.
        heading: of RESULTS.md, where the figures are.
        better: whether more is better than less.
    """

    paper: str
    claim: str
    theirs: tuple[float, float]
    ours: tuple[float, ...]
    form: str
    why: str
    heading: str
    better: str = "more"

    @property
    def verdict(self) -> str:
        """Reproduced where all figures are as good as the paper's worst; partly where some are.

        Weaker where none is, and yet something is gained in all.

        Example:
            >>> Claim("GraVAC", "less time", (2.0, 6.0), (2.7, 1.5), ".1f", "", "").verdict
            'partly'
        """
        least, most = self.theirs
        good = [each >= least if self.better == "more" else each <= most for each in self.ours]
        gained = [each > 1 if self.better == "more" else each < 1 for each in self.ours]
        if all(good):
            return "reproduced"
        return "partly" if any(good) else "weaker" if all(gained) else "not"


SHORT_RUNS = "most bytes are those of the dense start, the first 5 % of steps, which both share"


LGRECO = {
    "topk": ("top-k", (2.67, 3.78)),
    "qsgd": ("QSGD", (1.10, 1.41)),
    "powersgd": ("PowerSGD", (1.44, 1.85)),
}
"""Families as the paper names them, and how many times fewer bytes it sends."""


def _of_lgreco() -> Iterator[Claim]:
    from benchmarks.accuracy.long_runs import ABLATION, outcomes

    models = load("allocation")["models"]
    for setting in ("topk:density=0.01", "qsgd:bits=4", "powersgd:rank=4"):
        name, theirs = LGRECO[setting.partition(":")[0]]
        yield Claim(
            "L-GreCo",
            f"times fewer bytes at no more error, {name}",
            theirs,
            tuple(found[setting]["fewer"] for found in models.values()),
            ".2f",
            "the plans are at the optimum: models of few layers have little to shift between them",
            "Bytes at no more error",
        )
    if not (RESULTS / "long_runs.json").exists():
        return
    runs = outcomes(load("long_runs")["cases"])
    found = [each for (_, method), each in runs.items() if method == "lgreco"]
    others = [each.later for (_, method), each in runs.items() if method in ABLATION and each.later]
    later = "as further above"
    if others:
        later += (
            f"; by other measures of the error it is {min(others):.2f} to {max(others):.2f} (ResNet)"
        )
    for claim, ratios, why in (
        ("the same over whole training runs", [each.fewer for each in found], SHORT_RUNS),
        ("the same after their dense start", [each.later for each in found], later),
    ):
        measured = tuple(each for each in ratios if each is not None)
        if measured:
            where = "Dense, one level for all layers, and planners"
            yield Claim("L-GreCo", claim, LGRECO["topk"][1], measured, ".2f", why, where)
    if (RESULTS / "calibrated.json").exists():
        yield from _of_lgreco_over_calibrated()


def _of_lgreco_over_calibrated() -> Iterator[Claim]:
    from benchmarks.accuracy.calibrated import known_parts

    known = known_parts(load("calibrated")["cases"])
    for family, (name, theirs) in LGRECO.items():
        measured = tuple(parts.compressed for (_, of), parts in known.items() if of == family)
        if measured:
            yield Claim(
                "L-GreCo",
                f"over levels that keep accuracy, of what a plan can spare, {name}",
                theirs,
                measured,
                ".2f",
                "as above; and below 3 bits and rank 2 there is hardly a level",
                "What a plan can spare",
            )


def _of_kimad() -> Iterator[Claim]:
    from benchmarks.network.bandwidth_trace import seconds_ratio

    figures = load("bandwidth_trace")
    theirs = figures["paper"]["seconds"]
    yield Claim(
        "Kimad",
        "mean step, of EF21's at equal bytes",
        (theirs, theirs),
        (seconds_ratio(figures["cells"]),),
        ".2f",
        "probably for the lag of the estimate of the rate, and the fixed costs of operations",
        "Steps within their time",
        "less",
    )
    if not (RESULTS / "kimad_tables.json").exists():
        return
    from benchmarks.accuracy.kimad_tables import best_ratio, of_times, ratio

    cases = load("kimad_tables")["cases"]
    simulated = [case for _, case in of_times(cases)]
    best = min(map(best_ratio, simulated))
    yield Claim(
        "Kimad",
        "the same on simulated links, for four times of transfers",
        (theirs, theirs),
        tuple(ratio(case) for case in simulated),
        ".2f",
        f"as above; one that knew each rate would take {best:.2f} at least on these links",
        "Seconds of a step at equal bytes",
        "less",
    )
    yield from _of_kimads_accuracy(cases)


def _of_kimads_accuracy(cases: Mapping[str, Any]) -> Iterator[Claim]:
    """Its table 2."""
    from benchmarks.accuracy.kimad_tables import EF21, SGDM, WORKERS, of_workers

    theirs = [round(kimad / ef21, 3) for ef21, kimad in WORKERS.values()]
    stale = "its estimates are too old where a rate is low, and follow the noise of small batches"
    for feedback, claim, why in (
        (EF21, "accuracy for four numbers of workers, of EF21's", stale),
        (SGDM, "the same with momentum before compression", "a little of the same is left"),
    ):
        found = [case for _, case in of_workers(cases, feedback)]
        ours = [
            case["kimad"]["score"]["accuracy"] / case["ef21"]["score"]["accuracy"] for case in found
        ]
        if ours:
            where = "Accuracy by number of workers"
            limits = (min(theirs), max(theirs))
            yield Claim("Kimad", claim, limits, tuple(ours), ".3f", why, where)


IN_ADAPTIVE: dict[str, dict[str, tuple[float, float]]] = {
    "gravac": {"static 10x": (1.95, 6.67), "accordion": (1.94, 5.63)},
    "accordion": {},
}
"""Rows of adaptive.json that are among the claims: with what each is compared, and what is claimed."""


def _of_gravac() -> Iterator[Claim]:
    found = load("adaptive")["summary"]
    for other, theirs in IN_ADAPTIVE["gravac"].items():
        yield Claim(
            "GraVAC",
            f"times less time than {other}",
            theirs,
            (found[other]["seconds"] / found["gravac"]["seconds"],),
            ".2f",
            "one short run of one model",
            "Time and accuracy of a short run",
        )
    yield Claim(
        "GraVAC",
        "multi-level compression: times faster than compressing twice",
        (1.1, 1.83),
        *_multi_level_speedups(),
    )


GRAVACS_SCORES = (80.2 / 80, 90.48 / 90, 22 / 21.25)
"""Of dense training's, in its table 2: two accuracies and, upside down, a perplexity."""


def _of_gravacs_table_2() -> Iterator[Claim]:
    """Whole runs, without a dense start."""
    from benchmarks.accuracy.seeds import DENSE, by_seed, pairs_of
    from benchmarks.accuracy.static_factors import GRAVAC, MODELS, REFERENCE, fewer_than_reference

    cases = load("static_factors")["cases"]
    fewer = (fewer_than_reference(cases, model, GRAVAC) for model in MODELS)
    runs = [pairs_of(*(by_seed(cases, model, each) for each in (DENSE, GRAVAC))) for model in MODELS]
    scores = (fmean(_share_of_score(*pair) for pair in pairs) for pairs in runs if pairs)
    where = "Static factors, GraVAC and Accordion"
    yield Claim(
        "GraVAC",
        f"times fewer bytes than {REFERENCE} in whole runs (theirs: less time)",
        (1.95, 6.67),
        tuple(each for each in fewer if each is not None),
        ".2f",
        "",
        where,
    )
    yield Claim(
        "GraVAC",
        "the score of these runs, of dense training's",
        (round(min(GRAVACS_SCORES), 3), round(max(GRAVACS_SCORES), 3)),
        tuple(scores),
        ".3f",
        "the MLP loses as much by a threshold of 0.9; the LSTM's loss is within chance",
        where,
    )


def _share_of_score(dense: Mapping[str, Any], run: Mapping[str, Any]) -> float:
    """More is better: a perplexity stands upside down."""
    if "perplexity" in dense["score"]:
        return float(dense["score"]["perplexity"] / run["score"]["perplexity"])
    return float(run["score"]["accuracy"] / dense["score"]["accuracy"])


def _multi_level_speedups() -> tuple[tuple[float, ...], str, str, str]:
    """Of the paper's models where they were measured, else of one large layer; and where they are."""
    why = "exact top-k takes 2 memcpys here: there is less to save"
    if not (RESULTS / "multi_level.json").exists():
        levels = load("kernels")["multi_level"]
        found = tuple(row["speedup"] for row in levels.values())
        return found, ".2f", why, "Multi-level compression"
    from benchmarks.micro.multi_level import speedups

    models = load("multi_level")["models"]
    found = tuple(speedups(row)[0] for methods in models.values() for row in methods.values())
    return found, ".2f", why, "Direct and multi-level compression"


def _of_alq() -> Iterator[Claim]:
    for model, found in load("wire")["variance"].items():
        fixed = min(value for name, value in found.items() if not name.startswith(("ALQ", "AMQ")))
        learned = min(value for name, value in found.items() if name.startswith(("ALQ", "AMQ")))
        yield Claim(
            "ALQ, AMQ",
            f"variance of learned levels, of the best fixed ones' ({model})",
            (0.0, 1.0),
            (learned / fixed,),
            ".2f",
            "the gradient's distribution is as the fixed levels assume",
            "Variance of quantization levels",
            "less",
        )
    from benchmarks.accuracy.seeds import losses
    from benchmarks.accuracy.three_bits import MODELS, best

    cases = load("three_bits")["cases"]
    pairs = [(model, best(cases, model)) for model in MODELS]
    gained = tuple(
        100 * (fmean(losses(cases, model, pair[1])) - fmean(losses(cases, model, pair[0])))
        for model, pair in pairs
        if pair is not None
    )
    yield Claim(
        "ALQ, AMQ",
        "points of accuracy over the best fixed levels, at 3 bits",
        (1.0, 2.0),
        gained,
        ".2f",
        "fixed levels lose nothing either, where blocks are divided by their maximum",
        "Quantizers of 3 bits",
    )


CLAIMS: tuple[Callable[[], Iterator[Claim]], ...] = (
    _of_lgreco,
    _of_kimad,
    _of_gravac,
    _of_gravacs_table_2,
    _of_alq,
)


def papers(slug: Callable[[str], str]) -> str:
    """The section: a row for each claim."""
    rows = []
    for claim in (each for claims in CLAIMS for each in claims()):
        least, most = claim.theirs
        theirs = f"below {most:g}" if least == 0 else span(claim.theirs, "g")
        verdict = claim.verdict
        why = "" if verdict == "reproduced" else f": {claim.why}"
        ours = f"[{span(claim.ours, claim.form)}](#{slug(claim.heading)})"
        rows.append([claim.paper, claim.claim, theirs, ours, f"{verdict}{why}"])
    return section(
        "The papers",
        "All of it on small models and 2 cores. *Reproduced*: as good as the paper's weakest figure in "
        "all cases here; *partly*: in some; *weaker*: in none, though something is gained in all.",
        (
            "Claims and figures",
            "Which of the papers' claims were seen here?",
            ", ".join(
                f"{sum(row[-1].startswith(verdict) for row in rows)} {verdict}"
                for verdict in ("reproduced", "partly", "weaker", "not")
            )
            + f", of {len(rows)}.",
            table(["paper", "claim", "theirs", "here", "verdict"], rows),
        ),
        end=note(each for each in of_cells(load("adaptive")["cells"], 0) if each[0] in IN_ADAPTIVE),
    )
