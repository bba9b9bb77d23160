"""Steps of one model with several optimizers in turn, on hosts with slow links (turns_rank.py)."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import lab

CORES = 2
"""Of this machine, for all hosts together."""

Turns = list[list[dict[str, Any]]]
"""Of each rank, the turns of one method."""


def take(
    hosts: int,
    rate: str,
    methods: Sequence[str],
    words: Sequence[str],
    launcher: Sequence[str] = (),
    seconds: float = 1800.0,
) -> dict[str, Turns]:
    """Make the hosts, and let all methods take their turns on them.

    Args:
        hosts: how many.
        rate: of their links.
        methods: of turns_rank.py.
        words: its other arguments.
        launcher: further arguments of mpirun.
        seconds: after which the job counts as hung.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    with lab.Lab(hosts, rate) as made:
        job = made.module("workers.turns_rank", [*words, *methods], seconds=seconds, launcher=launcher)
        (everyone,) = job.results()  # of all ranks
    return {method: [rank[method] for rank in everyone] for method in methods}


def block_steps(turns: Turns) -> list[float]:
    """Seconds of each block: the median step of the slowest rank.

    Example:
        >>> fast, slow = {"seconds": [1.0, 2.0, 9.0]}, {"seconds": [3.0, 4.0, 5.0]}
        >>> block_steps([[fast, slow], [slow, fast]])
        [4.0, 4.0]
    """
    return [
        max(statistics.median(block["seconds"]) for block in of_all)
        for of_all in zip(*turns, strict=True)
    ]


def rounded(seconds: Sequence[float]) -> list[float]:
    """To four digits, as files of results hold them."""
    return [float(f"{each:.4g}") for each in seconds]


def summary(ranks: Turns, told: str) -> dict[str, Any]:
    """What files of results hold of a method.

    Args:
        ranks: its turns.
        told: what is wanted of its last plan: ``schemes`` or ``reasons``.

    Returns:
        The steps of each block, the mean bytes received, and what was ``told``.
    """
    received = statistics.mean(block["received"] for rank in ranks for block in rank)
    return {
        "blocks": rounded(block_steps(ranks)),
        "received": round(received),
        told: ranks[0][-1][told],
    }


def step(methods: dict[str, Any], method: str) -> float:
    """Seconds of a method's step: the median of its ``blocks``."""
    return float(statistics.median(methods[method]["blocks"]))


def share(methods: dict[str, Any], method: str, others: Sequence[str]) -> float:
    """What a method's step takes of the fastest of others: the median of what it takes in each block.

    Both are then of the same phase of the machine.

    Example:
        >>> blocks = {"a": [1.0, 2.0, 3.0], "b": [1.1, 2.0, 3.6], "c": [9.0, 9.0, 9.0]}
        >>> round(share({name: {"blocks": each} for name, each in blocks.items()}, "b", ["a", "c"]), 3)
        1.1
    """
    fastest = min(others, key=lambda other: step(methods, other))
    pairs = zip(methods[method]["blocks"], methods[fastest]["blocks"], strict=True)
    return float(statistics.median(own / other for own, other in pairs))
