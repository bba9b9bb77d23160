"""Tables of what benchmarks/network/training.py has measured, and the targets that it must meet.

All functions take the stored cells: a dictionary from "steps/MODEL/METHOD/RATE" or
"course/MODEL/METHOD/SEED" (with a rate before the seed where a training run was made on a slow network)
to figures. A *course* in a stored key is a training run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report import report

Points = Mapping[str, Any]

COMPUTE_ONLY, DENSE, FP16, TOPK = "alone", "stock-fp32", "stock-fp16", "topk"
SIGNS = "topk-sign"  # one bit a value, biases, too: all that a step sends is one allgather
AUTO = "auto"
STATIC = (TOPK, SIGNS, "powersgd", "qsgd", DENSE, FP16, "none", "fp16")
"""Methods that do the same in every step."""
SAME = (FP16, "none", "fp16")
"""Dense gradients too, which learn as those of :data:`DENSE`: fp16 rounds far below their noise."""
SEARCHING = ("gravac", "gravac+lgreco")
"""Vary throughout a training run, at times to dense gradients: no single step represents them."""
RATES = ("100mbit", "200mbit", "1gbit", "unshaped")
TARGET_RATE = "200mbit"

ACCURACY_SLACK, PERPLEXITY_SLACK = 0.005, 1.01
COMPUTE_ONLY_TARGET, SPEED_TARGET, TIME_TARGET = 1.3, 4.0, 1 / 3
REGRET_TARGET, AUTO_TARGET = 1.1, 1 / 5
"""Of ``auto``'s seconds to the target: to those of the best static method, and on models of which most
of a step is communication to those of :data:`FP16`."""


# --- derived figures ----------------------------------------------------------------------------------


def step_of(points: Points, model: str, method: str, rate: str) -> Mapping[str, Any] | None:
    """The figures of one step; those of ``alone`` hold at every rate."""
    key = f"steps/{model}/{method}" if method == COMPUTE_ONLY else f"steps/{model}/{method}/{rate}"
    found: Mapping[str, Any] | None = points.get(key)
    return found


def runs_of(points: Points, model: str, method: str, rate: str = "") -> dict[str, Mapping[str, Any]]:
    """A method's training runs by seed; with a rate, those made at that rate."""
    method = DENSE if method in SAME else method
    start = "/".join(filter(None, ("course", model, method, rate))) + "/"
    return {
        key.removeprefix(start): run
        for key, run in points.items()
        if key.startswith(start) and key.removeprefix(start).isdigit()
    }


def ratio(points: Points, model: str, rate: str, method: str, other: str) -> float:
    """A method's median step in those of another; NaN unless both were measured on one machine."""
    one, two = (step_of(points, model, each, rate) for each in (method, other))
    if not (one and two and one.get("place") == two.get("place")):
        return math.nan
    return float(one["median"] / two["median"])


def metric(run: Mapping[str, Any]) -> str:
    """What counts of a score."""
    return "perplexity" if "perplexity" in run["held_out"] else "accuracy"


def reaches(score: Mapping[str, float], dense: Mapping[str, float]) -> bool:
    """Whether a score is as good as the dense one, within the slack."""
    if "perplexity" in dense:
        return score["perplexity"] <= PERPLEXITY_SLACK * dense["perplexity"]
    return score["accuracy"] >= dense["accuracy"] - ACCURACY_SLACK


@dataclass(frozen=True)
class Outcome:
    """A method's training runs, compared with the dense ones of the same seeds.

    Args:
        score: mean of what they end with.
        loss: how much worse that is than dense: of accuracy the difference, of perplexity the share.
        seeds: compared.
        by_themselves: how many of them reach what dense training reaches from their own seed.
        steps: until the mean over the seeds reaches that of dense training; NaN if it does not.
        seconds: the same, by the training runs' own clock.
        warmup: dense steps at the start.
        payload: bytes that a rank hands to the collectives in a step, mean; NaN where not known.
    """

    score: float
    loss: float
    seeds: int
    by_themselves: int
    steps: float
    seconds: float
    warmup: int
    payload: float


def outcome(points: Points, model: str, method: str, rate: str = "") -> Outcome | None:
    """None where no seed has both training runs."""
    dense = runs_of(points, model, DENSE)
    mine = runs_of(points, model, method, rate)
    seeds = sorted(set(dense) & set(mine))
    if not seeds:
        return None
    name = metric(dense[seeds[0]])
    ends = [statistics.mean(each[seed]["held_out"][name] for seed in seeds) for each in (mine, dense)]
    curve = mean_curve([mine[seed] for seed in seeds])
    first = next((each for each in curve if reaches(each, {name: ends[1]})), {})
    return Outcome(
        ends[0],
        ends[1] - ends[0] if name == "accuracy" else ends[0] / ends[1] - 1,
        len(seeds),
        sum(
            any(reaches(each, dense[seed]["held_out"]) for each in mine[seed]["evaluations"])
            for seed in seeds
        ),
        first.get("step", math.nan),
        first.get("seconds", math.nan),
        mine[seeds[0]]["warmup"],
        statistics.mean(mine[seed].get("payload_bytes") or math.nan for seed in seeds),
    )


def mean_curve(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The evaluations of several seeds: mean steps, seconds and scores."""
    figures = ("step", "seconds", metric(runs[0]))
    return [
        {name: statistics.mean(each[name] for each in several) for name in figures}
        for several in zip(*(run["evaluations"] for run in runs), strict=True)
    ]


def seconds_to_target(points: Points, model: str, method: str, rate: str) -> float:
    """NaN where the mean over the seeds does not reach it, or a step time is not measured.

    Training runs at this rate have a clock; for others it is steps to target x median step, or x the
    time that the run's mean payload takes.
    """
    direct = outcome(points, model, method, rate)
    if direct is not None:
        return direct.seconds
    indirect = outcome(points, model, method)
    if indirect is None or math.isnan(indirect.steps):
        return math.nan
    if method in SEARCHING:
        return indirect.steps * seconds_of_payload(points, model, rate, indirect.payload)
    return seconds_of_steps(points, model, method, rate, indirect.steps, indirect.warmup)


def seconds_of_steps(
    points: Points, model: str, method: str, rate: str, steps: float, warmup: int
) -> float:
    """So many median steps, of which the first ``warmup`` are dense; NaN where one is not measured."""
    step = step_of(points, model, method, rate)
    first = min(steps, warmup)
    if step is None:
        return math.nan
    dense = first * ratio(points, model, rate, "none", method) if first else 0.0
    return float(step["median"]) * (dense + steps - first)


def seconds_of_payload(points: Points, model: str, rate: str, payload: float) -> float:
    """A step that sends so many bytes, between those of :data:`TOPK` and ``none``; NaN if unknown."""
    small, dense = (step_of(points, model, method, rate) for method in (TOPK, "none"))
    if small is None or dense is None:
        return math.nan
    least, most = payload_of(TOPK, small), payload_of("none", dense)
    longer = ratio(points, model, rate, "none", TOPK) - 1
    return float(small["median"]) * (1 + longer * (payload - least) / (most - least))


# --- tables -------------------------------------------------------------------------------------------


def names(points: Points, position: int, kind: str = "") -> list[str]:
    """Kinds (0), models (1) or methods (2) of the stored grid points, in the order of these."""
    parts = [key.split("/") for key in points]
    return list(dict.fromkeys(each[position] for each in parts if not kind or each[0] == kind))


Rows = list[list[object]]

KINDS = {"steps": "steps", "course": "training runs"}
"""The headings of what is stored."""
DIFFERENCES = {"accuracy": "accuracy difference (pp)", "perplexity": "perplexity difference"}


def label_of(method: str) -> str:
    """A stored method's name in tables."""
    return "compute-only" if method == COMPUTE_ONLY else method


def show(points: Points) -> str:
    """All tables, as text."""
    steps = [steps_rows(points, model, rate) for model in names(points, 1, "steps") for rate in RATES]
    runs = [runs_rows(points, model) for model in names(points, 1, "course")]
    found = [places_rows(points), *steps, rates_rows(points), *runs]
    return "\n\n".join(report.table(rows) for rows in found if len(rows) > 1)


def places_rows(points: Points) -> Rows:
    """Which models' grid points were measured on which machine, and which methods if not all are."""
    places = dict.fromkeys(str(each.get("place", "?")) for each in points.values())
    kinds = names(points, 0)
    rows: Rows = [["measured on", *(KINDS[kind] for kind in kinds)]]
    for place in places:
        here = {key: each for key, each in points.items() if each.get("place", "?") == place}
        rows.append([place, *(_measured_in(here, points, kind) for kind in kinds)])
    return rows


def _measured_in(here: Points, points: Points, kind: str) -> str:
    """Models, with their methods where not all of these are here."""
    parts = []
    for model in names(here, 1, kind):
        start = f"{kind}/{model}/"
        mine, everyone = ({key for key in some if key.startswith(start)} for some in (here, points))
        methods = dict.fromkeys(key.split("/")[2] for key in here if key in mine)
        shown = ", ".join(map(label_of, methods))
        parts.append(model if mine == everyone else f"{model} ({shown})")
    return ", ".join(parts) or "-"


def steps_rows(points: Points, model: str, rate: str) -> Rows:
    """What a step costs with each method: the heading, and a row each."""
    heading: list[object] = [
        "median step",
        "x compute-only",
        "samples/s",
        *TITLES,
        "bytes sent",
        "compression ratio",
    ]
    rows: Rows = [[f"{model}, {rate}", *heading]]
    if rate not in _measured_rates(points, model):
        return rows
    for method in names(points, 2, "steps"):
        step = step_of(points, model, method, rate)
        if step is None:
            continue
        of_alone = ratio(points, model, rate, method, COMPUTE_ONLY)
        times = parts_of(step, of_alone)
        sent = payload_of(method, step)
        rows.append(
            [
                label_of(method),
                _milliseconds(step["median"]),
                number(of_alone, "{:.2f}"),
                number(step["samples_per_step"] / step["median"], "{:.0f}"),
                *(_milliseconds(times[name]) for name in PARTS),
                number(sent, "{:,.0f}"),
                number(step["dense_bytes"] / sent if sent else math.nan, "{:.1f}"),
            ]
        )
    return rows


def rates_rows(points: Points) -> Rows:
    """A step at every rate, absolute and relative to compute-only: the heading, and a row each.

    Only of models that were measured at two rates or more.
    """
    rows: Rows = [["median step (x compute-only)", *RATES]]
    for model in names(points, 1, "steps"):
        if len(_measured_rates(points, model)) < 2:
            continue
        for method in names(points, 2, "steps"):
            if any(step_of(points, model, method, rate) for rate in RATES):
                steps = [_step_and_ratio(points, model, method, rate) for rate in RATES]
                rows.append([f"{model}, {label_of(method)}", *steps])
    return rows


def _step_and_ratio(points: Points, model: str, method: str, rate: str) -> str:
    step = step_of(points, model, method, rate)
    if step is None:
        return "-"
    times = number(ratio(points, model, rate, method, COMPUTE_ONLY), "{:.2f}")
    return f"{_milliseconds(step['median'])} ({times})"


PARTS = ("compute", "compress", "communicate", "decompress")
TITLES = ("compute", "compress", "exposed communication", "decompress")


def parts_of(step: Mapping[str, Any], of_alone: float) -> dict[str, float]:
    """Of a step, seconds in each of :data:`PARTS`, scaled from the mean step to the median one.

    Horovod's own optimizer reports none: its exposed communication is the difference from compute-only,
    of which its step takes ``of_alone`` times; NaN where that is not known.
    """
    costs = step.get("costs")
    if costs is not None and costs["communicate"] is not None:
        scale = step["median"] / costs["total"]
        return {name: costs[name] * scale for name in PARTS}
    computing = step["median"] / of_alone
    unknown = dict.fromkeys(PARTS, math.nan)
    return {**unknown, "compute": computing, "communicate": step["median"] - computing}


def payload_of(method: str, step: Mapping[str, Any]) -> float:
    """Bytes that a rank hands to the collectives in one step."""
    if method == COMPUTE_ONLY:
        return 0.0
    if method.startswith("stock"):
        return float(step["dense_bytes"]) / (2 if "fp16" in method else 1)
    return float(step["costs"]["payload_bytes"])


def runs_rows(points: Points, model: str) -> Rows:
    """What each method reaches, and when: the heading, and a row each; no target without dense."""
    measured = _measured_rates(points, model)
    dense = next(iter(runs_of(points, model, DENSE).values()), None)
    if dense is None:
        return []
    rows: Rows = [
        [
            f"{model}, {dense['steps']} steps",
            metric(dense),
            DIFFERENCES[metric(dense)],
            "seeds",
            "seeds at the target",
            "steps to target",
            *(f"seconds to target, {rate}" for rate in measured),
        ]
    ]
    measured_steps = [name for name in SAME if any(step_of(points, model, name, r) for r in RATES)]
    for method in dict.fromkeys([*measured_steps, *names(points, 2, "course")]):
        runs = [
            outcome(points, model, method),
            *(outcome(points, model, method, rate) for rate in RATES),
        ]
        found = next((each for each in runs if each is not None), None)
        if found is None:
            continue
        percent = metric(dense) == "accuracy"
        seconds = [seconds_to_target(points, model, method, rate) for rate in measured]
        rows.append(
            [
                method,
                f"{found.score:.2%}" if percent else f"{found.score:.2f}",
                f"{-100 * found.loss:+.2f}" if percent else f"{100 * found.loss:+.2f} %",
                found.seeds,
                found.by_themselves,
                number(found.steps, "{:.0f}"),
                *(number(each, "{:,.0f}") for each in seconds),
            ]
        )
    return rows


def auto_rows(points: Points, rate: str = TARGET_RATE) -> Rows:
    """Seconds to the target of ``auto``, of stock fp16, and of the best static method in hindsight."""
    rows: Rows = [[f"seconds to target, {rate}", AUTO, FP16, "of it", "best static", "", "of it"]]
    for model in names(points, 1, "course"):
        own = seconds_to_target(points, model, AUTO, rate)
        fp16 = seconds_beside_auto(points, model, FP16, rate)
        name, best = best_static(points, model, rate)
        times = [number(each, "{:,.0f}") for each in (own, fp16, best)]
        of_fp16, of_best = (number(own / each, "{:.2f}") for each in (fp16, best))
        rows.append([model, times[0], times[1], of_fp16, name, times[2], of_best])
    return rows


def seconds_beside_auto(points: Points, model: str, method: str, rate: str) -> float:
    """Seconds to the target by steps of the machine that ``auto`` was trained on; NaN without any."""
    places = {run.get("place") for run in runs_of(points, model, AUTO, rate).values()}
    steps = step_of(points, model, method, rate)
    if steps is None or places - {steps.get("place")}:
        return math.nan
    return seconds_to_target(points, model, method, rate)


def best_static(points: Points, model: str, rate: str) -> tuple[str, float]:
    """The method of :data:`STATIC` that is first at the target, and its seconds; NaN if none is."""
    found = {name: seconds_beside_auto(points, model, name, rate) for name in STATIC}
    return first_of(found)


def first_of(seconds: Mapping[str, float]) -> tuple[str, float]:
    """Who takes the fewest seconds, and how many; NaN where all are NaN, as of who never gets there."""
    known = {name: each for name, each in seconds.items() if not math.isnan(each)}
    name = min(known, key=lambda each: known[each], default="-")
    return name, known.get(name, math.nan)


def _measured_rates(points: Points, model: str) -> list[str]:
    """The rates at which steps of a model were measured."""
    places = {(each[1], each[-1]) for each in (key.split("/") for key in points) if each[0] == "steps"}
    return [rate for rate in RATES if (model, rate) in places]


def number(value: float, form: str = "{:.2f}") -> str:
    """As text; a dash for NaN."""
    return "-" if math.isnan(value) else form.format(value)


def _milliseconds(seconds: float) -> str:
    return number(1e3 * seconds, "{:,.0f} ms")


# --- targets ------------------------------------------------------------------------------------------


def missed(points: Points) -> list[str]:
    """The targets that are missed; what is not measured is missed."""
    # Both send 1 %; how their values are coded is their own affair.
    faster = ratio(points, "lstm", TARGET_RATE, TOPK, SIGNS) > 1.0
    topk = SIGNS if faster else TOPK
    compute_only = ratio(points, "lstm", TARGET_RATE, topk, COMPUTE_ONLY)
    speed = ratio(points, "lstm", TARGET_RATE, FP16, topk)
    found = []
    if not compute_only <= COMPUTE_ONLY_TARGET:
        found.append(
            f"lstm, {TARGET_RATE}: a step of {topk} is {compute_only:.2f} x compute-only, "
            f"target {COMPUTE_ONLY_TARGET}"
        )
    if not speed >= SPEED_TARGET:
        found.append(
            f"lstm, {TARGET_RATE}: {topk} is {speed:.2f} x faster than {FP16}, target {SPEED_TARGET}"
        )
    for model in ("lstm", "mlp"):
        found += _missed_course(points, model)
    for model in names(points, 1, "course"):
        found += _missed_by_auto(points, model, model in ("lstm", "mlp"))
    return found


def _missed_by_auto(points: Points, model: str, heavy: bool) -> list[str]:
    own = seconds_to_target(points, model, AUTO, TARGET_RATE)
    if outcome(points, model, AUTO, TARGET_RATE) is None:
        return [f"{model}, {TARGET_RATE}: {AUTO} was not trained"]
    name, best = best_static(points, model, TARGET_RATE)
    if math.isnan(own):
        return [f"{model}, {TARGET_RATE}: {AUTO} does not reach the target score"]
    if math.isnan(best):
        return [f"{model}, {TARGET_RATE}: no static method's steps are of {AUTO}'s machine"]
    found = []
    if not own <= REGRET_TARGET * best:
        found.append(
            f"{model}, {TARGET_RATE}: {AUTO} takes {own / best:.2f} x the time of {name} to the target "
            f"score, target {REGRET_TARGET}"
        )
    fp16 = seconds_beside_auto(points, model, FP16, TARGET_RATE)
    if heavy and not own <= AUTO_TARGET * fp16:
        found.append(
            f"{model}, {TARGET_RATE}: {AUTO} takes {own / fp16:.2f} x {FP16}'s time to the target "
            f"score, target {AUTO_TARGET}"
        )
    return found


def _missed_course(points: Points, model: str) -> list[str]:
    """Nothing if one of our methods meets the targets; else what the nearest one misses."""
    ours = [name for name in names(points, 2, "course") if not name.startswith("stock")]
    ends = {name: outcome(points, model, name) for name in ours}
    found = [_missed_by(points, model, name, end) for name, end in ends.items() if end]
    return min(found, key=len, default=[f"{model}: no training runs to compare with {DENSE}"])


def _missed_by(points: Points, model: str, method: str, ends: Outcome) -> list[str]:
    found = []
    mine, other = (seconds_to_target(points, model, each, TARGET_RATE) for each in (method, FP16))
    if not mine <= TIME_TARGET * other:
        found.append(
            f"{model}, {TARGET_RATE}: {method} takes {mine / other:.2f} x {FP16}'s time to the target "
            f"score, target {TIME_TARGET:.2f}"
        )
    dense = next(iter(runs_of(points, model, DENSE).values()))
    slack = ACCURACY_SLACK if metric(dense) == "accuracy" else PERPLEXITY_SLACK - 1
    if ends.loss > slack or ends.seeds < 3:
        found.append(
            f"{model}: {method} ends {100 * ends.loss:.2f} % worse than dense ({ends.seeds} seeds), "
            f"target {100 * slack:.1f} % over 3 seeds"
        )
    return found
