"""What planners that look ahead are told besides averages: costs, the horizon, the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvd_adaptive.adaptation.base import MeasureCosts
from hvd_adaptive.compressors.base import Compressor
from hvd_adaptive.planning import StepMeasurements
from hvd_adaptive.planning.step_time import StepCosts


class Outlook:
    """What one rank knows of costs, and what its user has told it.

    Args:
        measure: measures compressors and network; None where no planner asks for that.
    """

    def __init__(self, measure: MeasureCosts | None) -> None:
        self._measure = measure
        self._compressors: tuple[Compressor, ...] = ()
        self.costs: StepCosts | None = None
        """Of compressors and network, the same on all ranks."""
        self.plans = 0
        """How many plans have taken effect."""
        self.loss: float | None = None
        """Of this step, where the user reports it."""
        self.horizon: int | None = None
        """Steps of the whole training run, where the user knows them."""

    def price(self, compressors: Sequence[Compressor]) -> None:
        """Measure what these cost, and the network; all ranks call it."""
        self._compressors = tuple(dict.fromkeys(compressors))
        self.price_again()

    def price_again(self) -> None:
        """Measure the same once more; all ranks call it."""
        if self._measure is not None:
            self.costs = self._measure(self._compressors)

    def added_to(self, facts: StepMeasurements) -> StepMeasurements:
        """A step with what is known of it here; its loss is forgotten."""
        loss, self.loss = self.loss, None
        return replace(facts, plan=self.plans, loss=loss, horizon=self.horizon)
