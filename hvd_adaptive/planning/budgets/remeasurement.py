"""When ``auto`` has the network measured again: where forecasts go wrong, and not ever again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_adaptive.planning.budgets.forecast_score import ForecastScore

__all__ = ["Remeasurement", "far_off"]

LEAST_GAP, MOST_GAP = 50, 1600
"""Steps between measurements: doubled each time."""
FAR_OFF, FAR_GAP = 1.5, 200
"""By what factor steps are off where that is hardly chance; and the most such steps then, counted from
the last measurement: what forecasts were since then mended by says nothing of another network."""
QUIET = 4
"""Such gaps without a reason to measure, after which they may be half as long: where steps take now
this and now that time, measuring helps for a while only, and costs as much as a dozen small steps."""


@dataclass(slots=True)
class Remeasurement:
    """Asked for by a plan, and done before the next one.

    Example:
        >>> score, again = ForecastScore(), Remeasurement()
        >>> score.begin(0.1)
        >>> for step in range(80):
        ...     if score.observe(0.15):
        ...         again.judge(score, step)
        >>> again.wanted, again.asked(80), again.done
        (True, True, True)
    """

    wanted: bool = False
    """Whether the next plan must ask for it."""
    done: bool = False
    """Whether the last plan has asked for it."""
    doubted: bool = False
    """Whether the next plan is to ask for it, because the last one is odd."""
    _step: int = 0
    """Of the last measurement, or of the last steps that did instead."""
    _gap: int = LEAST_GAP
    _measured_step: int = 0

    def judge(self, score: ForecastScore, step: int) -> None:
        """A window of steps is complete: see whether they have been off for long enough."""
        if not score.misses and step >= self._step + QUIET * self._gap:
            self._gap = max(LEAST_GAP, self._gap // 2)
        self.join(score, step)

    def join(self, score: ForecastScore, step: int) -> None:
        """See that, and no more: a plan is made anyway, and must not hide what could wait for it."""
        self.wanted |= score.is_off and self._may(score, step)

    def _may(self, score: ForecastScore, step: int) -> bool:
        """Not again and again where measuring does not help, unless all is very different."""
        if far_off(score):
            return step >= self._measured_step + min(self._gap, FAR_GAP)
        return step >= self._step + self._gap

    def spared(self, score: ForecastScore, step: int) -> bool:
        """Steps were off that tell why: whether a plan that goes by them is enough, and is due instead.

        Dense ones tell how much slower the network is than it was measured, or how much slower the
        machine is. What is far off is measured.
        """
        if not self.wanted or far_off(score):
            return False
        self.wanted, self.done = False, True
        self._wait(step)
        return True

    def asked(self, step: int) -> bool:
        """A plan is there: whether it asks for a measurement."""
        asks, self.done, self.wanted = self.wanted, self.wanted, False
        if asks:
            self._measured_step = step
            self._wait(step)
        return asks

    def _wait(self, step: int) -> None:
        self._step, self._gap = step, min(2 * self._gap, MOST_GAP)

    def to_dict(self) -> dict[str, Any]:
        """JSON, for the state of a budget."""
        return {
            "remeasure": self.wanted,
            "measured": self.done,
            "doubted": self.doubted,
            "mended_step": self._step,
            "measured_step": self._measured_step,
            "measure_gap": self._gap,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Remeasurement:
        """Of :meth:`to_dict`, among whatever else there is."""
        return cls(
            bool(state["remeasure"]),
            bool(state["measured"]),
            bool(state.get("doubted")),  # older states know less
            int(state.get("mended_step", state["measured_step"])),
            int(state["measure_gap"]),
            int(state["measured_step"]),
        )


def far_off(score: ForecastScore) -> bool:
    """Whether steps took a very different time than was foreseen, and not because of the machine.

    Where it can be told apart from that, because all is dense, a network that is faster is no haste.

    Example:
        >>> score = ForecastScore()
        >>> for computing in (0.2, 0.1):
        ...     score.begin(0.2, computing=0.1)
        ...     for _ in range(15):
        ...         _ = score.observe(0.31, computing)
        ...     print(score.misses, far_off(score))
        1 False
        1 True
    """
    if score.median is None or not score.expected:
        return False
    if score.dense:
        return score.median - score.slower > FAR_OFF * score.expected
    return abs(math.log(score.median / score.expected)) > math.log(FAR_OFF)
