"""A trial of collective schemes: steps of training by each of them, where a forecast is too close.

What an operation takes beside others, and beside backward on shared cores, no measurement of an idle
network tells.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

SETTLE, STEPS = 1, 3
"""Steps of a turn: the first are not counted, as buffers are made in them."""


class SchemeTrial:
    """Lets schemes take turns, forth and back, so that a machine that slows down favors none.

    Args:
        foreseen: seconds of all buckets by each scheme, two or more.
        buckets: how many there are.

    Example:
        >>> trial, now, seen = SchemeTrial({"allgather": 0.010, "two_shot": 0.011}, 2), 0.0, ""
        >>> while not trial.ended:
        ...     seen += trial.scheme[0]
        ...     now += 0.2 if trial.scheme == "allgather" else 0.1
        ...     _ = trial.end_step(now)
        >>> seen
        'aaaattttttttaaaa'
        >>> {name: round(seconds, 4) for name, seconds in trial.excess().items()}
        {'allgather': 0.0505, 'two_shot': 0.0}
    """

    def __init__(self, foreseen: Mapping[str, float], buckets: int) -> None:
        self._foreseen, self._buckets = dict(foreseen), buckets
        self._turns: tuple[str, ...] = (*foreseen, *reversed(list(foreseen)))
        self._steps = 0
        self._last: float | None = None
        self._seconds: dict[str, list[float]] = {name: [] for name in foreseen}

    @property
    def schemes(self) -> Sequence[str]:
        """That are tried."""
        return list(self._foreseen)

    @property
    def ended(self) -> bool:
        """Whether all turns were taken."""
        return self._steps == len(self._turns) * (SETTLE + STEPS)

    @property
    def scheme(self) -> str:
        """Of the step that comes next; after the end that of the last one."""
        return self._turns[min(self._steps // (SETTLE + STEPS), len(self._turns) - 1)]

    def end_step(self, now: float) -> bool:
        """Note that a step has ended; whether the next is by another scheme, or the trial is over.

        Args:
            now: seconds of a clock.
        """
        scheme = self.scheme
        if self._last is not None and self._steps % (SETTLE + STEPS) >= SETTLE:
            self._seconds[scheme].append(now - self._last)
        self._last = now
        self._steps += 1
        return self.ended or self.scheme != scheme

    def step_seconds(self) -> dict[str, float]:
        """The median step by each scheme, after the end."""
        return {name: statistics.median(seconds) for name, seconds in self._seconds.items()}

    def excess(self) -> dict[str, float]:
        """Seconds that a bucket takes longer by each scheme than foreseen, compared with the others."""
        steps = self.step_seconds()
        more = {name: steps[name] - foreseen for name, foreseen in self._foreseen.items()}
        least = min(more.values())
        return {name: (each - least) / self._buckets for name, each in more.items()}
