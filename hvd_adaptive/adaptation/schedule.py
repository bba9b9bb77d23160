"""On which steps gradients are measured for a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["SAMPLES", "Schedule"]

SAMPLES = 4
"""Steps of a period on which gradients are measured; the first is soon after it begins."""
LEAST_APART = 4
"""Steps from one of them to the next at least: a short period would measure every step."""


@dataclass(slots=True)
class Schedule:
    """A few steps of the last period before the next plan: they are the same on all ranks.

    What the plan goes by is then new, and costs nothing if training ends before.

    Args:
        sampled: steps that were measured since the last plan.
        patience: periods from the last plan to the next.
        planned: the step after which the last plan took effect.
        hurries: whether a plan is asked for, and nothing was measured: then the next step is.

    Example:
        >>> schedule = Schedule()
        >>> schedule.keep(patience=3, step=110)
        >>> [step for step in range(500) if schedule.due(step, 100)]
        [325, 350, 375, 400, 425, 450, 475]
    """

    sampled: int = 0
    patience: int = 1
    planned: int = 0
    hurries: bool = False

    def keep(self, patience: int, step: int) -> None:
        """A plan takes effect after a step; the next one comes after so many periods."""
        self.patience, self.planned = patience, step

    def due(self, step: int, period: int) -> bool:
        """Whether a step's gradients are measured."""
        begun = step >= self.planned + (self.patience - 1) * period
        return self.hurries or (begun and step % max(LEAST_APART, period // SAMPLES) == 0)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Schedule:
        """Of :meth:`to_dict`, among whatever else there is; older states know less."""
        return cls(
            int(state["sampled"]),
            int(state.get("patience", 1)),
            int(state.get("planned", 0)),
            bool(state.get("hurries", False)),
        )
