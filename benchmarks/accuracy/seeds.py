"""Trainings of several seeds on virtual ranks: what is kept of one, and differences within a seed.

Methods are compared with dense training from the same weights, on the same data in the same order: what
seeds differ by is larger than what methods do.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.report import report

SEEDS = (1, 2, 3)
DENSE = "dense"
T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Two-sided 95 % quantiles of Student's t, by the number of differences."""
MEAN_OF = 50
"""Steps of which the stored losses are means."""
Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Two runs of the same seed."""


def recorded(words: Sequence[str], steps: int) -> dict[str, Any]:
    """One training: its score, its losses, and the bytes that a rank sends, as they change.

    Of one on a simulated network also seconds of steps, and the bytes on a link in all.

    Args:
        words: arguments of virtual_training.py.
        steps: that it takes.
    """
    from benchmarks.accuracy import virtual_training  # needs Horovod, which tables do not

    run = virtual_training.apart([*words, "--steps", str(steps)])
    found = {
        "date": report.machine()["date"],
        "score": run["score"],
        "losses": _means(run["losses"]),
        "bytes": changes(run["payload_bytes"]),
        "steps": steps,
    }
    if "seconds" in run:
        found |= {"seconds": _means(run["seconds"]), "traffic": sum(run["traffic_bytes"])}
    return found


def _means(values: Sequence[float]) -> list[float]:
    """Of some steps each."""
    parts = (values[at : at + MEAN_OF] for at in range(0, len(values), MEAN_OF))
    return [float(f"{statistics.mean(each):.4g}") for each in parts]


def changes(values: Sequence[float]) -> list[list[float]]:
    """A sequence as the steps at which it changes, and what it is from then on.

    Example:
        >>> changes([8, 8, 2, 2, 2])
        [[0, 8], [2, 2]]
    """
    return [[step, value] for step, value in enumerate(values) if not step or value != values[step - 1]]


def all_bytes(case: Mapping[str, Any], since: int = 0) -> float:
    """What a rank sends in the whole run, or since a step."""
    starts = [max(since, step) for step, _ in case["bytes"]]
    lengths = [end - start for start, end in zip(starts, [*starts[1:], case["steps"]], strict=True)]
    return float(sum(length * value for length, (_, value) in zip(lengths, case["bytes"], strict=True)))


def ratios(case: Mapping[str, Any], dense: Mapping[str, Any]) -> list[tuple[int, float]]:
    """From which step on a rank sends how many times fewer bytes than in a step of a dense run.

    Example:
        >>> ratios({"bytes": [[0, 80], [20, 8]]}, {"bytes": [[0, 80]]})
        [(0, 1.0), (20, 10.0)]
    """
    full = dense["bytes"][0][1]
    return [(int(step), full / value) for step, value in case["bytes"]]


def shares_of_steps(
    found: Sequence[tuple[int, float]], steps: int, bounds: Sequence[float]
) -> list[float]:
    """Of a run's steps, those with a ratio below the first bound, between two, and from the last on.

    Example:
        >>> shares_of_steps([(0, 1.0), (20, 10.0)], 100, [2, 40])
        [0.2, 0.8, 0.0]
    """
    shares = [0.0] * (len(bounds) + 1)
    ends = [*(step for step, _ in found[1:]), steps]
    for (step, ratio), end in zip(found, ends, strict=True):
        shares[bisect.bisect_right(bounds, ratio)] += (end - step) / steps
    return shares


def lost(case: Mapping[str, Any], dense: Mapping[str, Any]) -> float:
    """Against the dense run of its seed: accuracy, or a share of perplexity; less than 0 is a gain."""
    if "perplexity" in dense["score"]:
        return float(case["score"]["perplexity"] / dense["score"]["perplexity"] - 1)
    return float(dense["score"]["accuracy"] - case["score"]["accuracy"])


def signed(difference: float, perplexity: bool) -> str:
    """What is lost, as tables show it: in percent of perplexity, or in points of accuracy.

    Example:
        >>> signed(0.012, perplexity=True), signed(-0.003, perplexity=False)
        ('+1.20 %', '-0.30 pp')
    """
    return f"{100 * difference:+.2f} {'%' if perplexity else 'pp'}"


def half_interval(differences: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean difference; None of fewer than two.

    Example:
        >>> round(half_interval([0.01, 0.0]), 4)  # 12.7 times the standard error
        0.0635
    """
    count = len(differences)
    return None if count < 2 else T[count] * statistics.stdev(differences) / math.sqrt(count)


def by_seed(cases: Mapping[str, Any], model: str, method: str) -> dict[int, Any]:
    """The runs that there are, of titles as "mlp topk seed 1"."""
    titles = {seed: f"{model} {method} seed {seed}" for seed in SEEDS}
    return {seed: cases[title] for seed, title in titles.items() if title in cases}


def pairs_of(reference: Mapping[int, Any], runs: Mapping[int, Any]) -> list[Pair]:
    """A reference's runs and others, of the seeds that both have."""
    return [(reference[seed], runs[seed]) for seed in sorted(set(reference) & set(runs))]


def times_fewer(pairs: Sequence[Pair], since: int = 0) -> float | None:
    """The mean ratio of references' bytes to those of runs, from a step on; None without a pair."""
    ratios = [all_bytes(reference, since) / all_bytes(run, since) for reference, run in pairs]
    return statistics.mean(ratios) if ratios else None


def losses(cases: Mapping[str, Any], model: str, method: str) -> list[float]:
    """What a method loses against dense training, of each seed that both have."""
    dense, runs = (by_seed(cases, model, each) for each in (DENSE, method))
    return [lost(run, reference) for reference, run in pairs_of(dense, runs)]


def ranked(
    cases: Mapping[str, Any], models: Iterable[str], methods: Sequence[str]
) -> list[list[object]]:
    """A table: a row for each model and method that was trained, those of the best score first."""
    heading = ("model", "method", "seeds", "score", "lost against dense", "95 %")
    table: list[list[object]] = [[*heading, "times fewer bytes than dense"]]
    for model in models:
        found = {method: [*by_seed(cases, model, method).values()] for method in methods}
        known = {method: runs for method, runs in found.items() if runs}
        for method in sorted(known, key=lambda each: _badness(known[each])):
            table.append([model, method, len(known[method]), *_row(cases, model, method, known)])
    return table


def _badness(runs: Sequence[Any]) -> float:
    """The mean perplexity, or the accuracy, of which more is better."""
    scores = [run["score"] for run in runs]
    return float(statistics.mean(each.get("perplexity", -each["accuracy"]) for each in scores))


def _row(
    cases: Mapping[str, Any], model: str, method: str, known: Mapping[str, Sequence[Any]]
) -> Iterator[object]:
    mean = _badness(known[method])
    yield f"{mean:.2f}" if mean > 0 else f"{-100 * mean:.2f} %"
    differences = losses(cases, model, method)
    yield signed(statistics.mean(differences), mean > 0) if differences else "-"
    interval = half_interval(differences)
    yield "-" if interval is None else f"± {100 * interval:.2f}"
    if DENSE not in known:
        yield "-"
    else:
        dense, own = (statistics.mean(map(all_bytes, known[each])) for each in (DENSE, method))
        yield f"{dense / own:.1f}"
