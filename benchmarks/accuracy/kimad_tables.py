"""Kimad's tables 1 and 2 in form: time of a step at equal bytes, and accuracy, by time and by workers.

    python -m benchmarks.accuracy.kimad_tables                    # an hour on two cores; resumable
    python -m benchmarks.accuracy.kimad_tables --only "mlp 0.1 of dense 4 workers seed 1"
    python -m benchmarks.accuracy.kimad_tables --quick            # a smoke run; writes no file
    python -m benchmarks.accuracy.kimad_tables --check            # 1 if a stored target is missed

As the paper's, these are simulations: virtual ranks train (virtual_training.py), each with a link of
its own that swings from 30 to 330 Mbit/s, a squared sine with noise, and a step takes what computing
and its transfers take at the rates of that time. Top-k with EF21 in both directions (*two_shot*: the
owners of slices are the paper's server), the first 5 % of the steps dense, equally many steps for all.
*kimad* chooses one density for all layers, so that transfers keep their time; *kimad+* one for each.
*ef21* has one density throughout, with which as many bytes are sent in all. All of it again *with
momentum*: that of ``ef21-sgdm``, before compression, in the place of the optimizer's, with the same
factor and learning rate. The paper's times for
communication, from 1 to 0.1 s, carry from 50 to 5 % of its ResNet18 at the mean rate; here they are the
same shares of the time of a dense step. The learning rate, the same for any number of workers, was
chosen on seed 11 with 4 of them, of 0.04 and 0.08 and 0.2: at the highest, EF21 diverged.

How much Kimad can gain is known before (:func:`at_best`): where transfers take most of a step, both
keep the links busy and so need equally long for equal bytes; where computing does, they hardly count.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.accuracy.long_runs import MLP
from benchmarks.accuracy.seeds import lost, recorded
from benchmarks.harness import command_line
from benchmarks.network.bandwidth_trace import HIGH, LOW, TOPK, density_of

STEPS, DENSE_SHARE = 1400, 0.05
MODELS = {"mlp": (*MLP, "--lr", "0.04", "--lr-scaling", "none")}
PERIOD = 10.0
"""Seconds: some hundred steps."""
COMPUTE_SECONDS = 0.02
SHARES = {0.5: (486.1, 385.2), 0.25: (360.6, 285.2), 0.1: (284.2, 225.2), 0.05: (258.0, 205.2)}
"""Of a dense step's communication at the mean rate; and seconds by EF21 and Kimad, table 1."""
WORKERS = {2: (79.70, 79.34), 4: (79.59, 79.75), 8: (79.23, 78.74), 16: (77.97, 77.97)}
"""And top-5 accuracy by EF21 and Kimad after 100 epochs, table 2."""
FEW, SHARE = 4, 0.1
"""Workers of the first table, and what the second one's steps have."""
SEEDS = (1,)
METHODS = ("ef21", "kimad", "kimad+")
"""The last one in the first table only, as in the paper."""
EF21, SGDM = "ef21", "ef21-sgdm"
FEEDBACKS = {EF21: ("", ()), SGDM: (" with momentum", ("--momentum", "0"))}
"""What a case's title ends with, and options of train.py."""
CASES = {
    f"{model} {share:g} of dense {workers} workers seed {seed}{ending}": (
        model, share, workers, seed, feedback
    )
    for feedback, (ending, _) in FEEDBACKS.items()
    for seed in SEEDS
    for model in MODELS
    for share, workers in [*((share, FEW) for share in SHARES), *((SHARE, each) for each in WORKERS)]
}  # fmt: skip
"""Model, share of a dense step's transfers, workers, seed and feedback, by title."""
PLANNER = "{method}:seconds={seconds:.5g},period=5,warmup=10,share=0"
"""``share=0`` keeps no part of the time free, as the paper."""
FASTER, EQUAL, BYTES = 0.8, 0.005, 0.05
"""Targets: Kimad's seconds, of EF21's; what it may lose of EF21's accuracy; and how equal bytes are."""


# --- measuring ----------------------------------------------------------------------------------------


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Add each case's runs to ``cases``, by method: one case at a time on each core."""
    work = functools.partial(train, steps=20 if quick else STEPS)
    for title, found in command_line.side_by_side(work, wanted, len(os.sched_getaffinity(0))):
        command_line.keep(cases, title, found, rows, missed, out)


def train(title: str, steps: int) -> dict[str, Any]:
    """The runs of all methods: EF21's after Kimad's, whose bytes it sends."""
    model, share, workers, seed, feedback = CASES[title]
    dense_steps = int(DENSE_SHARE * steps)
    words = ["--virtual-ranks", str(workers), "--seed", str(seed), "--scheme", "two_shot"]
    words += ["--swing", f"{LOW:g}", f"{HIGH:g}", f"{PERIOD:g}", *MODELS[model]]
    words += ["--feedback", feedback, *FEEDBACKS[feedback][1]]
    words += ["--compute-seconds", f"{COMPUTE_SECONDS:g}", "--dense-steps", str(dense_steps)]
    seconds = COMPUTE_SECONDS + share * dense_seconds(model, workers)
    found: dict[str, Any] = {"asked": seconds}
    for method in METHODS[1:] if workers == FEW else METHODS[1:2]:
        planner = PLANNER.format(method=method, seconds=seconds)
        options = ["--compression", TOPK.format(density=0.03), "--planner", planner]
        found[method] = recorded([*words, *options], steps)
    dense = dense_steps * link_bytes(model, workers, "none")
    wanted = (found["kimad"]["traffic"] - dense) / max(1, steps - dense_steps)
    density = density_of(wanted, functools.partial(topk_bytes, model, workers))
    found["ef21"] = recorded([*words, "--compression", TOPK.format(density=density)], steps)
    return found | {"density": density}


def link_bytes(model: str, workers: int, compression: str) -> float:
    """Planned bytes on each link in one direction, in a step."""
    from hvd_adaptive import VirtualRanks  # needs Horovod, which tables do not
    from hvd_adaptive.collectives import planned_link_bytes

    parameters = _built(model).named_parameters()
    ranks = VirtualRanks(workers, parameters, compression, feedback="ef21", scheme="two_shot")
    return sum(planned_link_bytes(row.wire_bytes, row.scheme, workers) for row in ranks.plan.layers)


def topk_bytes(model: str, workers: int, density: float) -> float:
    """Of top-k at a density."""
    return link_bytes(model, workers, TOPK.format(density=density))


@functools.cache
def _built(model: str) -> Any:
    """It is trained on Fashion-MNIST."""
    from launch.training import models
    from launch.training.options import parse

    options = parse([*MODELS[model]])
    return models.build(options.model, (1, 28, 28), 10, models.Sizes(options.width, options.layers))


def dense_seconds(model: str, workers: int) -> float:
    """Of a dense step's communication at the mean rate."""
    from hvd_adaptive.comm.link_costs import seconds_of_byte

    return link_bytes(model, workers, "none") * seconds_of_byte(1e6 * (LOW + HIGH) / 2)


# --- what it shows ------------------------------------------------------------------------------------


def later_seconds(run: Mapping[str, Any]) -> float:
    """Mean seconds of a step after the dense ones, which are the same by all methods."""
    blocks = run["seconds"]
    return float(statistics.mean(blocks[math.ceil(DENSE_SHARE * len(blocks)) :] or blocks))


def ratio(case: Mapping[str, Any]) -> float:
    """Kimad's seconds of a step, of EF21's."""
    return later_seconds(case["kimad"]) / later_seconds(case["ef21"])


def at_best(transfers: float, computing: float = COMPUTE_SECONDS) -> float:
    """The same ratio for a Kimad that knows each rate, on links that swing slowly against a step.

    EF21 makes ``1 / (computing + transfers * mean / rate)`` steps in a second; this is their mean over
    a wave, by the integral of ``1 / (a + b sin^2)``. Equal bytes are those of the mean rate.

    Args:
        transfers: seconds that Kimad's transfers always take in a step.
        computing: seconds that the rest of a step takes.
    """
    work = transfers * (LOW + HIGH) / 2
    at_ends = (computing * LOW + work) * (computing * HIGH + work)
    return (computing + transfers) / computing * (1 - work / math.sqrt(at_ends))


def best_ratio(case: Mapping[str, Any]) -> float:
    """Of the time that a case's steps are to take."""
    return at_best(case["asked"] - COMPUTE_SECONDS)


def _cases_of(
    cases: Mapping[str, Any], feedback: str, wanted: Iterable[tuple[float, int]]
) -> list[tuple[str, Any]]:
    """The cases of a feedback with these shares and workers, in this order."""
    order = {pair: number for number, pair in enumerate(wanted)}
    found = [title for title in cases if CASES[title][1:3] in order and CASES[title][4] == feedback]
    return [(title, cases[title]) for title in sorted(found, key=lambda each: order[CASES[each][1:3]])]


def of_times(cases: Mapping[str, Any], feedback: str = EF21) -> list[tuple[str, Any]]:
    """Those of table 1."""
    return _cases_of(cases, feedback, ((share, FEW) for share in SHARES))


def of_workers(cases: Mapping[str, Any], feedback: str = EF21) -> list[tuple[str, Any]]:
    """Those of table 2."""
    return _cases_of(cases, feedback, ((SHARE, workers) for workers in WORKERS))


def rows(cases: Mapping[str, Any]) -> list[list[object]]:
    """The first table: a row for each time that transfers have."""
    heading = ["model", "feedback", "transfers, of dense", "a step is to take"]
    heading += ["one density", *METHODS[1:], "kimad, of one density", "at best", "in the paper"]
    heading += ["MB of one density, of kimad's", "accuracy"]
    table: list[list[object]] = [[*heading]]
    for title, case in [each for feedback in FEEDBACKS for each in of_times(cases, feedback)]:
        model, share, _, _, feedback = CASES[title]
        theirs = SHARES[share][1] / SHARES[share][0]
        took = [f"{1e3 * later_seconds(case[each]):.1f} ms" for each in METHODS]
        sent = case["ef21"]["traffic"] / case["kimad"]["traffic"]
        scores = ", ".join(f"{case[each]['score']['accuracy']:.2%}" for each in METHODS)
        asked = f"{1e3 * case['asked']:.1f} ms"
        ratios = [f"{each:.2f}" for each in (ratio(case), best_ratio(case), theirs, sent)]
        table.append([model, feedback, f"{share:.0%}", asked, *took, *ratios, scores])
    return table


def worker_rows(cases: Mapping[str, Any]) -> list[list[object]]:
    """The second table: a row for each number of workers."""
    heading = ["model", "feedback", "workers", "one density", "kimad", "difference"]
    heading += ["one density in the paper", "kimad in the paper", "its steps, of one density's"]
    table: list[list[object]] = [[*heading]]
    for title, case in [each for feedback in FEEDBACKS for each in of_workers(cases, feedback)]:
        model, _, workers, _, feedback = CASES[title]
        scores = [f"{case[each]['score']['accuracy']:.2%}" for each in METHODS[:2]]
        less = f"{-100 * lost(case['kimad'], case['ef21']):+.2f} pp"
        theirs = [f"{each:.2f} %" for each in WORKERS[workers]]
        table.append([model, feedback, workers, *scores, less, *theirs, f"{ratio(case):.2f}"])
    return table


def missed(cases: Mapping[str, Any]) -> list[str]:
    """The targets that are missed, and how many cases are."""
    problems = []
    for title, case in cases.items():
        if ratio(case) > FASTER:
            problems.append(f"{title}: kimad takes {ratio(case):.2f} of ef21, target {FASTER:g}")
        less = lost(case["kimad"], case["ef21"])
        if less > EQUAL:
            problems.append(f"{title}: kimad loses {100 * less:.2f} pp, target {100 * EQUAL:g}")
        sent = case["ef21"]["traffic"] / case["kimad"]["traffic"]
        if abs(sent - 1) > BYTES:
            problems.append(f"{title}: ef21 sent {sent:.2f} of kimad's bytes")
    return problems + command_line.left_out(CASES, cases, "cases are missing")


def main() -> int:
    """Command line."""
    return command_line.cases(__doc__, "kimad_tables", CASES, measure, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
