"""Do payloads that are compressed twice keep the accuracy of those that are gathered, at 16 ranks?

    python -m benchmarks.accuracy.many_ranks                          # hours on one core; resumable
    python -m benchmarks.accuracy.many_ranks --only "lstm-sotu qsgd:bits=4 seed 1"
    python -m benchmarks.accuracy.many_ranks --quick                  # a smoke run; writes no file
    python -m benchmarks.accuracy.many_ranks --check                  # 1 if a stored target is missed

A case trains a preset from one seed with the gradients of 16 virtual ranks
(virtual_training.py): by allgather and in two shots, at equal levels of the first shot, and with sums
at a higher level. At 16 ranks'
learning rates the presets' own training is unstable. So the ResNet's rate grows with the ranks' square
root (of that and no growth the better one for dense runs with seed 0), and the LSTM is smaller, with
the best rate of 1, 2.5 and 5 in short dense runs with seed 0.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import command_line

RANKS = 16
STEPS = 300
PRESETS = {
    "resnet-fashion": ("--lr-scaling", "sqrt"),
    "lstm-sotu": ("--width", "192", "--vocabulary", "5000", "--lr", "2.5"),
}
"""And what differs from them."""
COMPRESSORS = {"qsgd:bits=4": (), "topk:density=0.01": ("--dense-steps", "15")}
"""And their further options: 5 % of the steps are dense where something is withheld."""
SEEDS = (1, 2, 3)
GATHERED, TWICE = "allgather", "two_shot"
FINER = {"qsgd:bits=4": "two_shot:level=5", "topk:density=0.01": "two_shot:level=0.04"}
"""Sums at a higher level: no mean over ranks makes their noise and delay smaller."""
CASES = {
    f"{preset} {compressor} seed {seed}": (preset, compressor, seed)
    for compressor in COMPRESSORS
    for seed in SEEDS
    for preset in PRESETS
}
ACCURACY, PERPLEXITY = 0.003, 0.01
"""Targets: of the mean difference in accuracy, and of perplexity's, relative."""


def measure(wanted: list[str], cases: dict[str, Any], out: Path | None, quick: bool) -> None:
    """Add each case's scores to ``cases``, by scheme."""
    for title in wanted:
        schemes = (GATHERED, TWICE, FINER[CASES[title][1]])
        found = {scheme: _train(title, scheme, 3 if quick else None) for scheme in schemes}
        command_line.keep(cases, title, found, rows, missed, out)


def _train(title: str, scheme: str, steps: int | None) -> dict[str, float]:
    """The scores and the payload of one training run."""
    preset, compressor, seed = CASES[title]
    from benchmarks.accuracy import virtual_training  # needs Horovod, which tables do not

    words = ["--virtual-ranks", str(RANKS), "--steps", str(steps or STEPS)]
    words += ["--preset", preset, *PRESETS[preset], "--seed", str(seed)]
    words += ["--compression", compressor, "--scheme", scheme, *COMPRESSORS[compressor]]
    run = virtual_training.apart(words)
    return {**run["score"], "payload bytes": float(np.mean(run["payload_bytes"]))}


def difference(case: Mapping[str, Mapping[str, float]], scheme: str = TWICE) -> float:
    """What two shots lose: accuracy, or a share of perplexity; below 0 where they gain."""
    gathered, twice = case[GATHERED], case[scheme]
    if "perplexity" in gathered:
        return twice["perplexity"] / gathered["perplexity"] - 1
    return gathered["accuracy"] - twice["accuracy"]


def groups(cases: Mapping[str, Any]) -> dict[tuple[str, str], list[Any]]:
    """The cases of all seeds, by preset and compressor."""
    found: dict[tuple[str, str], list[Any]] = {}
    for title, case in cases.items():
        preset, compressor, _ = CASES[title]
        found.setdefault((preset, compressor), []).append(case)
    return found


def lost(cases: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """The mean difference over the seeds, by preset and compressor."""
    return {
        key: float(np.mean([difference(case) for case in of_all]))
        for key, of_all in groups(cases).items()
    }


def rows(cases: Mapping[str, Any]) -> list[list[object]]:
    """A table: for each preset and compressor, the mean differences and their standard errors."""
    found: list[list[object]] = [
        ["preset", "compressor", "scheme", "seeds", GATHERED, "in two shots", "lost", "standard error"]
    ]
    for (preset, compressor), of_all in groups(cases).items():
        for scheme in (TWICE, FINER[compressor]):
            seeds = [case for case in of_all if scheme in case]
            if seeds:
                found.append([preset, compressor, scheme, len(seeds), *_compared(seeds, scheme)])
    return found


def _compared(seeds: list[Any], scheme: str) -> list[str]:
    """The mean scores by allgather and by a scheme, what is lost, and its standard error."""
    metric = "perplexity" if "perplexity" in seeds[0][GATHERED] else "accuracy"
    scores = [np.mean([case[name][metric] for case in seeds]) for name in (GATHERED, scheme)]
    if metric == "perplexity":
        unit, shown = "%", [f"{each:.1f}" for each in scores]
    else:
        unit, shown = "pp", [f"{100 * each:.2f} %" for each in scores]
    differences = [100 * difference(case, scheme) for case in seeds]
    error = f"{_standard_error(differences):.2f} {unit}" if len(seeds) > 1 else "-"
    return [*shown, f"{np.mean(differences):+.2f} {unit}", error]


def _standard_error(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def missed(cases: Mapping[str, Any]) -> list[str]:
    """The targets that are missed, and the cases that were not measured."""
    problems = []
    for (preset, compressor), share in lost(cases).items():
        limit = PERPLEXITY if preset.startswith("lstm") else ACCURACY
        if share > limit:
            problems.append(
                f"{preset}, {compressor}: two shots lose {100 * share:.2f}, target {100 * limit:g}"
            )
    return problems + [f"{title} was not measured" for title in CASES if title not in cases]


def main() -> int:
    """Command line."""
    return command_line.cases(__doc__, "many_ranks", CASES, measure, rows, missed)


if __name__ == "__main__":
    sys.exit(main())
