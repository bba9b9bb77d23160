"""The parts of RESULTS.md on what is foreseen, and on what auto makes of it."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.report.results_markdown import load, missed, of_rows, section, source, span


def auto_against_all(points: dict[str, Any]) -> tuple[str, str, str, list[list[object]]]:
    """A part of the section on training: heading, question, answer and table."""
    from benchmarks.network import training_tables as tables

    rate, said = tables.TARGET_RATE, []
    for model in tables.names(points, 1, "course"):
        name, best = tables.best_static(points, model, rate)
        own = tables.seconds_to_target(points, model, tables.AUTO, rate)
        if tables.outcome(points, model, tables.AUTO, rate) is None:
            said.append(f"{model} was not measured")
        elif math.isnan(own):
            said.append(f"{model} does not reach it")
        elif math.isnan(best):
            said.append(f"{model} was trained on another machine than static methods' steps were")
        else:
            said.append(f"{model} {own / best:.2f} (`{name}`)")
    return (
        "auto and the best static method",
        f"How much longer does `auto` take to the target than the best static choice at {rate}?",
        f"So many times as long: {'; '.join(said)}. The static choice is made in hindsight, of all "
        "methods that do the same in every step.",
        tables.auto_rows(points, rate),
    )


def automatic() -> str:
    """Steps of auto, of dense training and of fixed choices."""
    from benchmarks.network.automatic import (
        AUTO,
        CASES,
        DENSE,
        FAST,
        FIXED,
        LIKE,
        NEAR,
        accurate,
        near,
        rows,
        shares,
    )

    figures = load("automatic")
    cases = figures["cases"]
    said = []
    for method in (AUTO, FAST):
        if found := shares(cases, method):
            of_dense = span((each.of_dense for each in found.values()), ".2f")
            of_fastest = sum(each.of_fastest <= NEAR for each in found.values())
            said.append(
                f"`{method}` takes {of_dense} of the best dense step, and is within {NEAR:g} of the "
                f"fastest choice that keeps accuracy in {near(cases, method)} of {len(found)} cases, "
                f"of the fastest of all in {of_fastest}"
            )
    kept = "; ".join(
        f"{preset}: {', '.join(FIXED[each] for each in accurate(preset)) or 'none'}" for preset in LIKE
    )
    return section(
        "The automatic choice",
        "Presets on hosts with slow links, one rank on each, all on 2 cores; stock Horovod in single "
        "and half precision, fixed compressors and `auto`, in turn in one job; the slowest rank's "
        f"median step. {source('automatic', figures)}",
        (
            "auto, dense and fixed choices",
            "Is `auto` never slower than the best dense training, and near the best fixed choice?",
            f"{'; '.join(said)} ({len(CASES)} are planned). So early in a run it may withhold little. "
            f"Beside {' and '.join(DENSE)}, what keeps accuracy in a long run of a model of the kind "
            f"is, for {kept}.",
            of_rows(rows(cases)),
        ),
        end=missed(figures),
    )


def whole_runs() -> str:
    """Whole trainings in time, of auto and of methods that do the same in every step."""
    from benchmarks.network.whole_runs import HOSTS, RATE, against_best, rows

    figures = load("whole_runs")
    return section(
        "Whole trainings on a slow network",
        f"Models, lengths and levels of the long runs below, trained on {HOSTS} hosts with links of "
        f"{RATE}, all methods in turn within one job, from one seed. "
        f"{source('whole_runs', figures)}",
        (
            "Time to the target of dense training",
            "How much longer does `auto` take than the best static choice, and than stock fp16?",
            f"So many times as long: {against_best(figures['cases'])}. The static choice is made in "
            "hindsight; the target is what dense training ends with in the long runs, the mean of its "
            "seeds, less half a point of accuracy or plus 1 % of perplexity.",
            of_rows(rows(figures["cases"])),
        ),
        end=missed(figures),
    )


def auto_grid() -> str:
    """What auto plans on simulated clusters, against dense steps and static choices."""
    from benchmarks.network.auto_grid import AT_STEP, CORES, RANKS, SLOWER, rows, slower

    figures = load("auto_grid")
    points = list(figures["cells"].values())
    regrets = sorted(point["of static"] for point in points)
    near = sum(each <= 1.05 for each in regrets) / len(regrets)
    return section(
        "Auto on simulated clusters",
        "Nothing is timed: gradients of presets, networks and compressors of stated costs, "
        f"{' and '.join(map(str, CORES))} cores per rank, {RANKS[0]} to {RANKS[-1]:,} ranks, and the "
        f"model of a step by which `auto` plans, {AT_STEP:,} steps into training. `auto` is misled "
        "where what it measured of network and compressors is off by half, in opposite directions, and "
        f"only its dense steps are right. {source('auto_grid', figures)}",
        (
            "Plans of auto, dense steps and static choices",
            "Is what `auto` chooses ever slower than dense, and how near is it to the best static one?",
            f"It takes over {SLOWER:.0%} more than the fastest dense step at "
            f"{slower(points, 'of dense')} of {len(points)} grid points, and at "
            f"{slower(points, 'misled, of dense')} where it is misled. At {near:.0%} it is within "
            "1.05 x of the fastest static choice that keeps its limits; at worst it takes "
            f"{regrets[-1]:.2f} x as long.",
            of_rows(rows(figures["cells"])),
        ),
        end=missed(figures),
    )


def prediction() -> str:
    """Predicted steps against measured ones."""
    from benchmarks.network.prediction import (
        CASES,
        NEAR,
        SEEN_RATE,
        crowd_was_traced,
        rows,
        unseen,
    )

    figures = load("prediction")
    cases = figures["cases"]
    near = []
    for traced in (True, False):
        mine = {each: found for each, found in cases.items() if crowd_was_traced(each) == traced}
        errors = [abs(each) for each in unseen(mine)]
        within = f"{sum(each <= NEAR for each in errors)} of {len(errors)} are within {NEAR:.0%}"
        near.append(f"{within}, the worst is off by {max(errors):.0%}" if errors else "none was made")
    return section(
        "Predicted and measured steps",
        f"`{figures['preset']}`: dense steps on hosts with links of {SEEN_RATE} were traced, and "
        "others predicted from them, as `hva predict` does; the hosts share 2 cores, with which "
        f"computing is scaled. {source('prediction', figures)}",
        (
            "Steps on other ranks and links",
            "How near are predictions to steps that they have not seen?",
            f"Where the trace has ranks that share cores, or those predicted share none: {near[0]}. "
            f"Where only those predicted share cores: {near[1]}. {len(cases)} of {len(CASES)} cases "
            "were measured.",
            of_rows(rows(cases)),
        ),
        end=missed(figures),
    )
