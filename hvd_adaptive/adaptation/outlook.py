"""What planners that look ahead are told besides averages: costs, the horizon, the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, TypeAlias

from hvd_adaptive.adaptation.step_trace import StepTrace
from hvd_adaptive.collectives.measured_costs import MeasuredCosts
from hvd_adaptive.compressors.base import Compressor
from hvd_adaptive.planning import Planner, Recipe, format_recipe
from hvd_adaptive.planning.budgets.auto import AutoBudget
from hvd_adaptive.planning.step_time import StepCosts

MeasureCosts: TypeAlias = Callable[[Sequence[Compressor], bool], MeasuredCosts]
"""Measures what compressors and the network cost, the network again if told so; all ranks call it, and
get the same."""


class Outlook:
    """What one rank knows of costs, and what its user has told it.

    Args:
        measure: measures compressors and network; None where no planner asks for that.
        planner: of this rank, which makes plans on one of them.
    """

    def __init__(self, measure: MeasureCosts | None, planner: Planner) -> None:
        self._measure, self._planner = measure, planner
        self._compressors: tuple[Compressor, ...] = ()
        self.measured: MeasuredCosts | None = None
        """Of compressors and network, the same on all ranks."""
        self.plans = 0
        """How many plans have taken effect; the same on all ranks."""
        self.decided = 0
        """The step of the last of them in this run; the same on all ranks."""
        self.loss: float | None = None
        """Of this step, where the user reports it."""
        self.horizon: int | None = None
        """Steps of the whole training run, where the user knows them."""
        self.spent = 0.0
        """Seconds of this step that measuring gradients, planning, and following a plan have taken."""
        self._repriced = 0.0
        """The same of measuring the network once more."""

    @property
    def costs(self) -> StepCosts | None:
        """What a step's parts cost among the ranks that there are."""
        return None if self.measured is None else self.measured.step_costs()

    def price(self, compressors: Sequence[Compressor]) -> None:
        """Measure what these cost, and the network where that is not known; all ranks call it."""
        self._compressors = tuple(dict.fromkeys(compressors))
        self._price(again=False)

    def price_again(self) -> None:
        """Measure the network once more; all ranks call it."""
        started = perf_counter()
        self._price(again=True)
        seconds = perf_counter() - started
        self._repriced += seconds
        self.spent -= seconds  # it is part of taking over a plan, and counted there as well

    def _price(self, again: bool) -> None:
        if self._measure is not None:
            self.measured = self._measure(self._compressors, again)

    def of_step(self) -> dict[str, Any]:
        """Fields of a step's measurements that are known here; its loss and costs are forgotten."""
        found = {"plan": self.plans, "loss": self.loss, "horizon": self.horizon}
        if self.measured is not None and not self.measured.assumed:
            found |= {"deciding_seconds": self.spent, "pricing_seconds": self._repriced}
        self.loss, self.spent, self._repriced = None, 0.0, 0.0
        return found

    @property
    def deciding_share(self) -> float:
        """Share of the time that decisions have taken, on the rank that plans; 0 where none counts."""
        budget = self._planner.budget
        return budget.deciding_share if isinstance(budget, AutoBudget) else 0.0

    def trace(self) -> StepTrace | None:
        """What the last plan of ``auto`` was made from, on the rank that plans; None elsewhere."""
        budget, facts = self._planner.budget, self._planner.facts
        if facts is None or self.measured is None or not isinstance(budget, AutoBudget):
            return None
        recipe = self._planner.allocator
        assert isinstance(recipe, Recipe), recipe
        return StepTrace.of(format_recipe(recipe), budget.dense, self.measured, facts)
