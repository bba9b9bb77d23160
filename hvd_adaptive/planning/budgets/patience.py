"""How long ``auto`` keeps a plan without another look: longer where looking has changed nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_adaptive.arrays import Int64s
from hvd_adaptive.planning.least_time import LEAST_GAIN, Contender, TimeLimits

__all__ = ["FILLING", "MOST_PERIODS", "Patience", "in_vain"]

FILLING = 50
"""Steps for which residuals are taken to fill up at least, also where they should hold one step."""

MOST_PERIODS = 8
"""That a plan is kept at most: measuring errors takes as long as a small step does."""
LATEST = 0.25
"""Share of the steps so far for which a plan that compresses is kept at most: as much more may wait by
then, and another plan may save time."""
OTHER_RATE = 2.0
"""By what factor the learning rate changes where what was measured tells no more."""


@dataclass(slots=True)
class Patience:
    """Of one plan after the other.

    Example:
        >>> patience, periods = Patience(), []
        >>> for vain in (True, True, False, True):
        ...     patience.judge(vain)
        ...     periods.append(patience.periods)
        >>> patience.judge(True, kept=200, step=1000)
        >>> [*periods, patience.periods]
        [2, 4, 1, 2, 2]
    """

    periods: int = 1
    """That the plan in force is kept."""
    rate: float | None = None
    """The learning rate that it was made at; None where that is not known."""
    _now: float | None = None

    def judge(self, vain: bool, kept: int = 0, step: int = 0) -> None:
        """A plan was made.

        Args:
            vain: whether it saves next to nothing over the one before.
            kept: steps for which that one was, if it compresses.
            step: of the training.
        """
        if self.ended or not vain or kept > LATEST * step:
            self.periods = 1
        elif 2 * kept <= LATEST * step:
            self.periods = min(2 * self.periods, MOST_PERIODS)
        self.rate = self._now

    def note(self, rate: float | None) -> None:
        """The learning rate of a step."""
        if rate is not None:
            self._now = rate

    @property
    def ended(self) -> bool:
        """Whether the learning rate is another one, so that noise and errors may be others.

        Of a plan that is kept for one period only, the next comes soon enough.
        """
        if self.periods == 1 or not self.rate or not self._now:
            return False
        return not 1 / OTHER_RATE < self._now / self.rate < OTHER_RATE

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"patience": self.periods, "rate": self.rate, "rate_now": self._now}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Patience:
        """As :meth:`to_dict` made it; older states know less."""
        return cls(int(state.get("patience", 1)), state.get("rate"), state.get("rate_now"))


def in_vain(limits: TimeLimits, chosen: Contender, since: Int64s | None, step: int) -> bool:
    """Whether a plan saves next to nothing over the one in force.

    Args:
        limits: that it was made within.
        chosen: the plan.
        since: ``int64[L]``: from which step on error feedback has kept something of each layer, or -1.
            Of one that compresses it must be known what residuals hold.
        step: of the training.
    """
    if limits.only_dense or limits.current is None:
        return False
    if limits.of(limits.current).dense:
        return chosen.dense
    filled = since is None or step - int(since.max(initial=-step)) >= FILLING
    return filled and any(chosen.seconds > (1 - LEAST_GAIN) * each.seconds for each in limits.in_force)
