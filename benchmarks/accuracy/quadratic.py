"""Whether Kimad gets to the minimum of a quadratic sooner than EF21 with the best fixed K.

    python -m benchmarks.accuracy.quadratic          # half a minute; a table
    python -m benchmarks.accuracy.quadratic --quick  # seconds: fewer step sizes

The experiment of Kimad's section 4.1: one worker minimizes ``f(x) = 1/2 sum a_i x_i^2`` over a link
whose rate is ``low + (high - low) sin^2(w t)``, with top-k and EF21; what comes down costs nothing.
All methods are tuned: step sizes for all, K for EF21, the time of a step for Kimad. Gradient descent
without compression is the baseline. What counts is the simulated time until ``f`` is 10^-6 of what it
was.

The paper shows curves, of which its text holds no numbers; what it says of them stands in
:data:`PATTERNS`.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.comm.simulated_network import arrival, sine_squared
from hvd_adaptive.planning.allocators import Uniform
from hvd_adaptive.planning.knapsack import Infeasible
from hvd_adaptive.planning.table import CandidateTable, Limits

DIMENSIONS = 30
CURVATURES: Float64s = np.geomspace(1.0, 100.0, DIMENSIONS)
COMPUTING = 0.05
"""Seconds of a step that are not communication."""
ENTRY, DENSE_BYTES = 8.0, 4.0 * DIMENSIONS
"""Bytes of a value with its index, and of all values."""
GOAL = 1e-6
KS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)
SECONDS = (0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25)
"""Of Kimad's steps, without those of computing."""
STEP_SIZES = tuple(1.9 * 2.0 ** (-power / 4) for power in range(9))
"""In units of one over the largest curvature."""


@dataclass(frozen=True)
class Pattern:
    """How the rate of the link varies, and what the paper says of it.

    Args:
        low: bytes per second.
        high: bytes per second.
        period: seconds from one low to the next.
        says: the paper's words.
        gains: whether Kimad is to be faster than the best fixed K.
    """

    low: float
    high: float
    period: float
    says: str
    gains: bool

    def rate(self, now: float) -> float:
        """Bytes per second at a time."""
        return sine_squared(self.low, self.high, self.period)(now)

    def sent(self, nbytes: float, now: float) -> float:
        """When that many bytes are through."""
        return arrival(nbytes, now, self.rate)


PATTERNS = {
    "small, high oscillation": Pattern(10.0, 1000.0, 4.0, "much faster than the best EF21", True),
    "larger amplitude": Pattern(20.0, 2000.0, 4.0, "still an improvement", True),
    "very high, low oscillation": Pattern(1e6, 1.1e6, 4.0, "no gain: no bottleneck", False),
}

Choose: TypeAlias = Callable[[Float64s, float], int]
"""How many of the entries of a vector to send at a rate."""


def minimize(pattern: Pattern, choose: Choose, step_size: float, limit: float = 1e3) -> float:
    """Simulated seconds until ``f`` is :data:`GOAL` of what it was; infinite if that takes longer."""
    x = np.ones(DIMENSIONS)
    estimate, start = CURVATURES * x, float(CURVATURES @ (x * x))
    now = 0.0
    while now <= limit:
        x = x - step_size / CURVATURES.max() * estimate
        value = float(CURVATURES @ (x * x))
        if value <= GOAL * start:
            return now
        if value > 100 * start:
            break
        difference = CURVATURES * x - estimate
        now += COMPUTING
        count = choose(difference, pattern.rate(now))
        kept = np.argsort(-np.abs(difference), kind="stable")[:count]
        estimate[kept] += difference[kept]
        now = pattern.sent(DENSE_BYTES if count == DIMENSIONS else ENTRY * count, now)
    return math.inf


def fixed(count: int) -> Choose:
    """EF21 with one K; all entries are gradient descent."""
    return lambda x, rate: count


class Kimad:
    """As many entries as the rate carries in a time; it is known, as in the paper's simulator.

    Args:
        seconds: of a step, without those of computing.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        counts = (*range(1, DIMENSIONS // 2), DIMENSIONS)
        self._counts = counts
        self._sizes = [DENSE_BYTES if count == DIMENSIONS else ENTRY * count for count in counts]
        self._labels = [f"top {count}" for count in counts]

    def __call__(self, x: Float64s, rate: float) -> int:
        """By the planner's allocator; the least where nothing fits."""
        energies = np.append(np.cumsum(np.sort(x * x))[::-1], 0.0)
        errors = [energies[count] for count in self._counts]
        table = CandidateTable.of(["x"], [errors], [self._sizes], [self._labels], [0], [DENSE_BYTES])
        try:
            (choice,) = Uniform().allocate(table, Limits(max_bytes=rate * self._seconds)).tolist()
        except Infeasible:
            (choice,) = table.cheapest().tolist()
        count: int = self._counts[choice]
        return count


def best(
    pattern: Pattern, methods: Sequence[tuple[object, Callable[[], Choose]]], steps: Sequence[float]
) -> tuple[float, object]:
    """The least time of all methods and step sizes, and the method's setting."""
    least: tuple[float, object] = (1e3, None)
    for (setting, make), size in itertools.product(methods, steps):
        least = min(least, (minimize(pattern, make(), size, least[0]), setting), key=lambda row: row[0])
    return least


def measure(pattern: Pattern, steps: Sequence[float] = STEP_SIZES) -> dict[str, tuple[float, object]]:
    """Seconds and setting of each method, tuned."""
    return {
        "GD": best(pattern, [("all", lambda: fixed(DIMENSIONS))], steps),
        "EF21": best(pattern, [(count, partial(fixed, count)) for count in KS], steps),
        "Kimad": best(pattern, [(each, partial(Kimad, each)) for each in SECONDS], steps),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each pattern."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer step sizes")
    steps = STEP_SIZES[::2] if parser.parse_args(arguments).quick else STEP_SIZES
    print(f"{'rate':<28}{'GD':>9}{'EF21':>9}{'Kimad':>9}  EF21 / Kimad  the paper says")
    for name, pattern in PATTERNS.items():
        found = measure(pattern, steps)
        times = "".join(f"{found[method][0]:>8.1f}s" for method in ("GD", "EF21", "Kimad"))
        ratio = found["EF21"][0] / found["Kimad"][0]
        print(f"{name:<28}{times}  {ratio:12.2f}  {pattern.says}")
        print(f"{'':<28}(K = {found['EF21'][1]}, t = {found['Kimad'][1]} s)")


if __name__ == "__main__":
    main()
