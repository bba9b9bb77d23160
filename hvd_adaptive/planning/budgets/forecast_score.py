"""How right a plan's forecast is: medians of short windows of steps against the seconds foreseen."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvd_adaptive.planning.explanation import in_ms

__all__ = ["ForecastScore"]

TOLERANCE = 0.15
"""Relative difference that still counts as right."""
HANDFUL = 5
"""Steps that are enough to see what is far off."""
SETTLING = 5
"""Steps after a switch that do not count: buffers are made, and caches filled."""
TELLING, RECENT = 2, 3
"""Windows that say what steps take, even if one met something else: so many at least, and at most."""
PASSING, LASTING = 1.0, 4
"""Seconds for which steps are slow where ranks share cores and now and then get into disorder; and how
many windows are enough where steps are so short that this would be many."""


@dataclass(slots=True)
class ForecastScore:
    """Scores the plan in force.

    Args:
        window: steps whose median is one score; an evaluation between two steps is then no matter.

    Example:
        >>> score = ForecastScore()
        >>> score.begin(0.1)
        >>> for _ in range(25):
        ...     _ = score.observe(0.15)
        >>> score.misses, score.median, score.is_off
        (2, 0.15, True)
    """

    window: int = 10
    expected: float | None = None
    """Seconds of a step that are foreseen."""
    misses: int = 0
    """Windows in a row that missed the forecast by more than :data:`TOLERANCE`."""
    missed_seconds: float = 0.0
    """What their steps took."""
    median: float | None = None
    """Of the last window."""
    exposed: float | None = None
    """Of the last window's seconds, those of exposed communication; None where nobody knows."""
    slower: float = 0.0
    """Seconds that computing took longer than was foreseen in the last window; 0 where nobody knows."""
    _recent: list[float] = field(default_factory=list)
    _computing: float | None = None
    _settling: int = 0
    _seconds: list[float] = field(default_factory=list)
    _computed: list[float] = field(default_factory=list)

    def begin(
        self,
        expected: float | None,
        settling: int = SETTLING,
        computing: float | None = None,
        same: bool = False,
    ) -> None:
        """Another plan takes effect.

        Args:
            expected: seconds of a step; None where they are not foreseen.
            settling: steps that do not count.
            computing: those of them that forward and backward pass take, where that can be compared.
            same: whether it does what the one before did, so that what steps usually take is known.
        """
        self.expected, self.misses, self.median = expected, 0, None
        self._settling, self._seconds = settling, []
        self.exposed, self.slower, self._computing, self._computed = None, 0.0, computing, []
        self.missed_seconds = 0.0
        if not same:
            self._recent = []

    @property
    def dense(self) -> bool:
        """Whether it is known what computing takes of the seconds, as of dense steps."""
        return self._computing is not None

    @property
    def faster(self) -> bool:
        """Whether the last window's steps took less than was foreseen."""
        return self.median is not None and self.expected is not None and self.median < self.expected

    @property
    def is_off(self) -> bool:
        """Whether steps have missed the forecast for two windows in a row, and for long enough."""
        lasting = self.missed_seconds >= PASSING or self.misses >= LASTING
        return self.misses >= 2 and lasting

    @property
    def usual(self) -> float | None:
        """The median of the last windows, or the lesser of two; None where too few are known."""
        return statistics.median_low(self._recent) if len(self._recent) >= TELLING else None

    @property
    def early(self) -> float | None:
        """The median of the running window, if it has :data:`HANDFUL` steps and more is not known."""
        if len(self._seconds) < HANDFUL or self.usual is not None:
            return None
        return statistics.median(self._seconds)

    @property
    def settled(self) -> bool:
        """Whether the next step counts."""
        return not self._settling

    def observe(self, seconds: float, computing: float | None = None) -> bool:
        """One step, with those of its seconds that computing took; whether it completes a window."""
        if self._settling:
            self._settling -= 1
            return False
        self._seconds.append(seconds)
        if computing is not None:
            self._computed.append(computing)
        if len(self._seconds) < self.window:
            return False
        self.median = statistics.median(self._seconds)
        took = statistics.median(self._computed) if self._computed else None
        self.exposed = None if took is None else max(0.0, self.median - took)
        self.slower = 0.0 if took is None or self._computing is None else took - self._computing
        self._recent = [*self._recent, self.median][-RECENT:]
        self._count(sum(self._seconds))
        self._seconds, self._computed = [], []
        return True

    def _count(self, seconds: float) -> None:
        """A window that took so long is complete: whether it missed the forecast."""
        if self.expected is None or self.median is None:
            return
        if abs(self.median - self.expected) > TOLERANCE * self.expected:
            self.misses, self.missed_seconds = self.misses + 1, self.missed_seconds + seconds
        else:
            self.misses, self.missed_seconds = 0, 0.0

    def told(self, so: str) -> str:
        """That the last window was off, and what follows from that."""
        took, foreseen = (in_ms(each or 0.0) for each in (self.median, self.expected))
        off = f"{100 * TOLERANCE:.0f} %"
        return f"a step took {took}, {foreseen} were foreseen: off by more than {off}, so {so}"

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        return {
            "expected": self.expected,
            "misses": self.misses,
            "missed_seconds": self.missed_seconds,
            "recent": list(self._recent),
            "median": self.median,
            "settling": self._settling,
            "seconds": list(self._seconds),
            "exposed": self.exposed,
            "slower": self.slower,
            "computing": self._computing,
            "computed": list(self._computed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.expected, self.median = state["expected"], state["median"]
        self.misses = int(state["misses"])
        self._settling = int(state["settling"])
        self._seconds = [float(each) for each in state["seconds"]]
        # older states know less
        self.missed_seconds = float(state.get("missed_seconds", 0.0))
        self._recent = [float(each) for each in state.get("recent", ())]
        self.slower, self._computing = float(state.get("slower", 0.0)), state.get("computing")
        self.exposed = state.get("exposed")
        self._computed = [float(each) for each in state.get("computed", ())]
