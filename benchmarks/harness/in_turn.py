"""Seconds of several contestants that take turns, on a machine that may be busy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping


def take_turns(
    contestants: Mapping[str, Callable[[], object]], repeats: int, before: Callable[[], object]
) -> dict[str, float]:
    """Seconds of each contestant's fastest turn; one turn of each, again and again."""
    best = dict.fromkeys(contestants, math.inf)
    for turn in range(repeats + 1):
        for name, contestant in contestants.items():
            before()
            start = time.perf_counter()
            contestant()
            elapsed = time.perf_counter() - start
            if turn:  # the first touches new memory
                best[name] = min(best[name], elapsed)
    return best
