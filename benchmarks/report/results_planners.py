"""The sections of RESULTS.md on what the planners' papers say of searches, times and levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.report.results_markdown import load, missed, of_rows, section, source, span


def gravac_search() -> str:
    """Where GraVAC's search ends."""
    from benchmarks.accuracy.gravac_search import (
        CASES,
        COMPUTE_SECONDS,
        MBIT,
        RANKS,
        WINDOW,
        faults,
        rows,
    )

    figures = load("gravac_search")
    cases = figures["cases"]
    sound = sum(not faults(case, CASES[title].recipe()) for title, case in cases.items())
    kept = [case["kept"] for case in cases.values() if case["kept"] is not None]
    ends = f", at {span(kept, 'g')}x" if kept else ""
    return section(
        "GraVAC's search",
        f"Presets trained with the gradients of {RANKS} virtual ranks, window {WINDOW}, epsilon as in "
        "a run's name, exponential policy or *geometric*. Gains are real; a step's time is assumed: "
        f"{COMPUTE_SECONDS:g} s and the plan's bytes at {MBIT} Mbit/s. "
        f"{source('gravac_search', figures)}",
        (
            "Factors tried and kept",
            "Does the search visit its factors, leave dense steps behind, and keep the factor with the "
            "best compression throughput of those whose gain suffices?",
            f"In {sound} of {len(cases)} runs{ends} ({len(CASES)} are planned).",
            of_rows(rows(cases)),
        ),
        end=missed(figures),
    )


def bucket_times() -> str:
    """Steps of lgreco-time and of lgreco."""
    from benchmarks.network.bucket_times import CASES, clearly, rows

    figures = load("bucket_times")
    cases = figures["cases"]
    found = {title: clearly(methods) for title, methods in cases.items()}
    each = "; ".join(f"{mean:.2f} ± {error:.2f} ({title})" for title, (mean, error) in found.items())
    return section(
        "L-GreCo by time",
        "Models whose backward pass hides the first buckets, on hosts with slow links, one rank each, "
        "all on 2 cores; one level for all layers, `lgreco`, and `lgreco-time` after its trials, in "
        "turn in one job; the slowest rank's median step. *On a device*: the backward pass waits as "
        "for an accelerator, and the core is free meanwhile; else it computes or communicates. "
        f"{source('bucket_times', figures)}",
        (
            "lgreco-time and lgreco",
            "Is a step faster where plans spare the buckets that training waits for?",
            f"A step of `lgreco-time` takes so much of one of `lgreco` (mean of the blocks, ± two "
            f"standard errors): {each}. "
            f"{len(CASES)} cases are planned.",
            of_rows(rows(cases)),
        ),
        end=missed(figures),
    )


def multi_level() -> str:
    """GraVAC's table 3."""
    from benchmarks.micro.multi_level import TARGET, rows, speedups

    figures = load("multi_level")
    found = [speedups(row) for methods in figures["models"].values() for row in methods.values()]
    further, summary = zip(*found, strict=True)
    enough = sum(max(both) >= TARGET for both in found)
    return section(
        "GraVAC's table 3",
        "Layers of the shapes of the paper's models, on one thread; the paper's times are of GPUs. To "
        f"factor 10, and to factor 1,000. {source('multi_level', figures)}",
        (
            "Direct and multi-level compression",
            "How much faster is it to compress a payload further than to compress the gradient again, "
            "or to learn both gains from one summary and compress once, as training does by default?",
            f"Multi-level {span(further, '.2f')} times as fast, one summary {span(summary, '.2f')} "
            f"times; the faster of the two reaches the paper's least speedup of {TARGET:g} in {enough} "
            f"of {len(found)} rows.",
            of_rows(rows(figures["models"])),
        ),
        end=missed(figures),
    )


def three_bits() -> str:
    """Accuracy of quantizers with few bits."""
    from benchmarks.accuracy.seeds import losses
    from benchmarks.accuracy.three_bits import CASES, RANKS, best, grid_rows, rows

    figures = load("three_bits")
    cases = figures["cases"]
    found = []
    for model in dict.fromkeys(CASES[title][0] for title in cases):
        pair = best(cases, model)
        if pair is not None:
            means = (f"`{each}` {100 * fmean(losses(cases, model, each)):+.2f} pp" for each in pair)
            found.append(f"{model}: {' and '.join(means)}")
    return section(
        "Accuracy at 3 bits",
        f"Models trained with the gradients of {RANKS} virtual ranks, all quantizers with blocks of "
        "8,192 elements, without a dense start; the learning rate falls in two steps. "
        f"{source('three_bits', figures)}",
        (
            "Quantizers of 3 bits",
            "Do levels that are learned keep more accuracy than fixed ones?",
            "What the best learned and the best fixed levels lose against dense training, "
            f"{'; '.join(found)}. {len(cases)} of {len(CASES)} runs were made.",
            of_rows(rows(cases)),
        ),
        (
            "Bits and blocks",
            "At how many bits, and for which blocks, does it matter how levels are placed?",
            "What the MLP loses against dense training, on one seed.",
            of_rows(grid_rows(cases)),
        ),
        end=missed(figures),
    )


def kimad_tables() -> str:
    """Kimad's tables 1 and 2."""
    from benchmarks.accuracy.kimad_tables import (
        CASES,
        EF21,
        SGDM,
        STEPS,
        best_ratio,
        of_times,
        of_workers,
        ratio,
        rows,
        worker_rows,
    )
    from benchmarks.accuracy.seeds import lost
    from benchmarks.network.bandwidth_trace import HIGH, LOW

    figures = load("kimad_tables")
    cases = figures["cases"]
    ratios = [ratio(case) for _, case in of_times(cases)]
    best = [best_ratio(case) for _, case in of_times(cases)]
    less = {
        feedback: [100 * lost(case["kimad"], case["ef21"]) for _, case in of_workers(cases, feedback)]
        for feedback in (EF21, SGDM)
    }
    return section(
        "Kimad's tables 1 and 2",
        f"Virtual ranks on simulated links that swing from {LOW:g} to {HIGH:g} Mbit/s, top-k with EF21 "
        f"in both directions, {STEPS:,} steps of which 5 % are dense. One density sends as many bytes "
        f"as `kimad` did. `ef21-sgdm` has momentum before compression, `ef21` in the optimizer. "
        f"{len(cases)} of {len(CASES)} cases were made. "
        f"{source('kimad_tables', figures)}",
        (
            "Seconds of a step at equal bytes",
            "How much faster is Kimad than EF21 where rates vary, as in Kimad's table 1?",
            f"Its step takes {span(ratios, '.2f')} of EF21's (paper: 0.79 to 0.80). One that knew each "
            f"rate would take {span(best, '.2f')}, by a closed form.",
            of_rows(rows(cases)),
        ),
        (
            "Accuracy by number of workers",
            "Does Kimad keep EF21's accuracy at any number of workers, as in its table 2?",
            f"It loses {span(less[EF21], '+.2f')} pp against EF21 (paper: -0.16 to +0.49, top-5 "
            f"accuracy)"
            + (f"; with `ef21-sgdm`, {span(less[SGDM], '+.2f')} pp." if less[SGDM] else "."),
            of_rows(worker_rows(cases)),
        ),
        end=missed(figures),
    )


def static_factors() -> str:
    """GraVAC's table 2."""
    from benchmarks.accuracy.seeds import losses
    from benchmarks.accuracy.static_factors import (
        CASES,
        GRAVAC,
        MODELS,
        RANKS,
        REFERENCE,
        fewer_than_reference,
        rows,
    )

    figures = load("static_factors")
    cases = figures["cases"]
    said = []
    for model in MODELS:
        fewer, found = fewer_than_reference(cases, model, GRAVAC), losses(cases, model, GRAVAC)
        if fewer is not None and found:
            unit = "% of perplexity" if model == "lstm" else "pp"
            said.append(
                f"{model}: {fewer:.2f} times fewer bytes than `{REFERENCE}`, {100 * fmean(found):+.2f} "
                f"{unit} lost against dense training"
            )
    return section(
        "GraVAC's table 2",
        f"Models trained with the gradients of {RANKS} virtual ranks, without a dense start. The "
        "paper's GraVAC takes 4.32 (ResNet101), 1.95 (VGG16) and 6.67 times (LSTM) less time than "
        "top-k 10x, at +0.2 pp, +0.48 pp and 0.75 less perplexity against dense training; its top-k "
        "1000x loses 3.6 pp, gains 0.68 pp, and loses 4.78 of perplexity. Here bytes stand for time. "
        f"{source('static_factors', figures)}",
        (
            "Static factors, GraVAC and Accordion",
            "Does GraVAC keep the accuracy of 10x and send as little as 1,000x?",
            f"{'; '.join(said)}. {len(cases)} of {len(CASES)} runs were made.",
            of_rows(rows(cases)),
        ),
        end=missed(figures),
    )


def calibrated() -> str:
    """L-GreCo over levels that keep accuracy."""
    from benchmarks.accuracy.calibrated import (
        CASES,
        FEWER,
        ablation_rows,
        fewer_than_reference,
        of_text,
        parts_rows,
        rows,
        with_dense,
    )
    from benchmarks.accuracy.seeds import SEEDS, losses, signed

    figures = load("calibrated")
    cases = figures["cases"]
    said = []
    for model, method in dict.fromkeys(CASES[title][:2] for title in cases):
        fewer = fewer_than_reference(cases, model, method)
        found = losses(with_dense(cases), model, method)
        if fewer is not None and found:
            lost = signed(fmean(found), of_text(cases, model))
            said.append(f"{model}, `{method}`: {fewer:.2f} times, {lost}")
    by_error = ablation_rows(cases)
    asked = ", ".join(f"{least:g} ({family})" for family, least in FEWER.items())
    return section(
        "L-GreCo over levels that keep accuracy",
        "Each reference is the strongest level of its family that keeps accuracy (the section above); "
        "L-GreCo starts from it. Models, seeds and dense runs are those of the long runs. "
        f"{source('calibrated', figures)}",
        (
            "Calibrated references and L-GreCo",
            "Does L-GreCo send fewer bytes than a reference chosen with care, and keep accuracy?",
            f"So many times fewer bytes (asked for: {asked}), and so much lost against dense training: "
            f"{'; '.join(said) or 'none was run'}. {len(cases)} of {len(CASES)} runs were made.",
            of_rows(rows(cases)),
        ),
        (
            "What a plan can spare",
            "Why does L-GreCo save so little of the whole run?",
            f"{_out_of_reach(cases)} The dense start is the same with every plan, and so are small "
            "layers, which are always dense. The paper's ratios leave its dense start out: its top-k "
            "10 % counts as 4.9 times fewer bytes (table 3). On its transformer, too, the paper's "
            "L-GreCo loses more than 1 % of perplexity with quantization and low rank.",
            of_rows(parts_rows(cases)),
        ),
        (
            "Errors of other gradients",
            "Does L-GreCo save more if its errors are measured otherwise?",
            f"{_by_error(by_error)} "
            "`relative`: errors relative to a layer's energy; `residual`: errors of the gradient with "
            "what waits; `single steps`: errors of single gradients, not of their sum. All over top-k, "
            f"on seed {SEEDS[0]}, after which nothing was chosen.",
            of_rows(by_error),
        ),
        end=missed(figures),
    )


def _by_error(rows: Sequence[Sequence[object]]) -> str:
    """What each of L-GreCo's errors saves of its part, model by model, and what is lost."""
    found: dict[object, list[str]] = {}
    for model, method, lost, *_, spared in rows[1:]:
        found.setdefault(method, []).append(f"{model} {spared} ({lost})")
    return "".join(f"`{method}`: {', '.join(each)}. " for method, each in found.items()).strip()


def _out_of_reach(cases: Mapping[str, Any]) -> str:
    """Which targets no plan could reach, and what L-GreCo saves of its part."""
    from benchmarks.accuracy.calibrated import FEWER, known_parts

    known = known_parts(cases)
    beyond = [
        f"{model} `{family}` (at most {parts.most:.2f}, asked for {FEWER[family]:g})"
        for (model, family), parts in known.items()
        if parts.most < FEWER[family]
    ]
    least = min((parts.compressed for parts in known.values()), default=1.0)
    most = max((parts.compressed for parts in known.values()), default=1.0)
    return (
        f"No plan could reach what is asked for of {'; '.join(beyond) or 'none'}. Of what a plan can "
        f"spare L-GreCo sends {least:.2f} to {most:.2f} times fewer bytes."
    )


def calibration() -> str:
    """Levels that keep the accuracy of dense training, for comparisons to begin with."""
    from benchmarks.accuracy.calibration import FAMILIES, MODELS, SEED, open_levels, rows, strongest

    figures = load("calibration")
    cases = figures["cases"]
    said = []
    for model in MODELS:
        known = {each: strongest(cases, model, each) for each in FAMILIES}
        none = [each for each in FAMILIES if open_levels(cases, model, each)[0] == len(FAMILIES[each])]
        levels = [
            *(f"`{level}`" for level in known.values() if level),
            *(f"no `{each}`" for each in none),
        ]
        if levels:
            said.append(f"{model} {', '.join(levels)}")
    return section(
        "Levels that keep accuracy",
        "Models, lengths and ranks of the long runs, each level for all layers, trained with a seed "
        f"({SEED}) that is in no other table. {source('calibration', figures)}",
        (
            "Strongest levels that lose nothing",
            "Which is the strongest level of each family that is within 1 % of dense training?",
            f"{'; '.join(said) or 'None is known yet'}.",
            of_rows(rows(cases)),
        ),
        end=missed(figures),
    )
