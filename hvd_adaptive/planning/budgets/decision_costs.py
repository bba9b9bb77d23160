"""What ``auto``'s own decisions cost: they are to take next to nothing of a training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hvd_adaptive.planning.measurements import StepMeasurements

__all__ = ["SHARE", "DecisionCosts"]

SHARE = 0.003
"""Of the time so far that measuring gradients, planning, and measuring the network again may take when
a plan is made. Steps lose about half as much again that is not counted, while a plan is made beside
them and when buffers are made for it: with that it is less than half a percent."""
EXPOSED_SHARE = 0.01
"""Of the communication that is exposed until then, which is what the next plan may save: it comes once
it takes no more than this, even if more than :data:`SHARE` has been spent."""


@dataclass(slots=True)
class DecisionCosts:
    """Seconds of decisions and of training, and how long a plan is kept for their sake.

    What comes before the first plan is in force is not counted: kernels are loaded meanwhile, and it
    must come.

    Example:
        >>> step = StepMeasurements(0, seconds=0.1, deciding_seconds=0.001, plan=1)
        >>> costs = DecisionCosts()
        >>> for _ in range(101):  # the first step tells what the plan took
        ...     costs.observe(step)
        >>> costs.decided(exposed=0.0)  # 0.1 s of 10 s, and the next would be as much again
        >>> costs.wait, costs.periods(100), costs.early
        (567, 6, True)
        >>> for _ in range(100):
        ...     costs.observe(step)
        >>> costs.observe(StepMeasurements(201, seconds=0.1, pricing_seconds=2.0, plan=1))
        >>> costs.decided(exposed=0.08)  # 10 s in 125 steps, of which a plan of 0.1 s may save much
        >>> costs.wait, round(costs.share, 2)
        (125, 0.11)
    """

    _begun: bool = False
    _elapsed: float = 0.0
    _steps: int = 0
    _spent: float = 0.0
    _kept: int = 0
    """Steps since the last plan."""
    _last: float = 0.0
    """What was spent since the last plan, without measuring the network."""
    _price: float = 0.0
    """The same of the plan before."""
    _exposed: float = 0.0
    """Seconds of communication that the plan in force leaves exposed in a step, over its patience."""

    @property
    def share(self) -> float:
        """What decisions have taken, of the time since the first plan."""
        return self._spent / self._elapsed if self._elapsed else 0.0

    @property
    def wait(self) -> int:
        """Steps for which the plan in force is kept, unless something goes wrong.

        What a plan takes shows in the steps that follow, and the next one costs as much.
        """
        if not self._elapsed:
            return 0
        price = max(self._price, self._last)
        missing = (self._spent + price) / SHARE - self._elapsed  # seconds of training
        wait = self._kept + missing * self._steps / self._elapsed
        if self._exposed > 0:
            wait = min(wait, price / (EXPOSED_SHARE * self._exposed))
        return max(0, math.ceil(wait - 1e-9))

    @property
    def early(self) -> bool:
        """Whether the next plan would come before its time, as one may that loses more than time."""
        return self._kept < self.wait

    def observe(self, facts: StepMeasurements) -> None:
        """Count a step."""
        self._kept += 1
        if self._begun:
            self._last += facts.deciding_seconds
            self._spent += facts.deciding_seconds + facts.pricing_seconds
            if facts.seconds is not None:
                self._elapsed += facts.seconds
                self._steps += 1
        self._begun |= facts.plan > 0

    def decided(self, exposed: float, patience: int = 1) -> None:
        """A plan was made.

        Args:
            exposed: seconds of communication that it is expected to leave exposed in a step.
            patience: by what factor less of them may be expected to be saved.
        """
        self._price, self._last, self._kept = self._last, 0.0, 0
        self._exposed = exposed / patience

    def periods(self, period: int) -> int:
        """How many of so many steps the plan in force is kept; 1 where there are no periods."""
        return max(1, math.ceil(self.wait / period)) if period else 1

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> DecisionCosts:
        """As :meth:`to_dict` made it; older states hold the wait, which follows from it."""
        return cls(**{name: value for name, value in state.items() if name != "wait"})
