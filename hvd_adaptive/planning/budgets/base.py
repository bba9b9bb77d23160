"""The contract of a budget: a small state machine that watches the steps and grants limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.planning.measurements import (
    CheckedOptions,
    Measurement,
    PlanningInput,
    StepMeasurements,
)
from hvd_adaptive.planning.table import CandidateTable, Limits, Prices

__all__ = ["Budget", "BudgetOptions"]

SLACK = 1.25
"""How far, as a ratio, what is asked for may lie beyond the candidates: levels that are whole numbers
hardly ever have a factor exactly."""


def require_factors(compressors: str, factors: Float64s, asked: Sequence[float], remedy: str) -> None:
    """ValueError unless there is a candidate near each of the compression factors.

    Args:
        compressors: whose candidates these are.
        factors: ``float64[C]``: of the candidates. All at 1 or below: the layer cannot be compressed,
            and nothing is asked of it.
        asked: compression factors, above 0.
        remedy: what to write instead.
    """
    least, most = float(factors.min()), float(factors.max())
    for factor in asked:
        if most > 1 and not least / SLACK <= factor <= most * SLACK:
            raise ValueError(
                f"the planner asks for a compression factor of {factor:g}, but the levels of "
                f"{compressors} have {least:.3g} to {most:.3g}: {remedy}, or give the compressor a "
                "wider range, levels=LEAST-LARGEST"
            )


class Budget(ABC):
    """Decides how much compression now."""

    needs: frozenset[Measurement] = frozenset()
    """What must be measured for it."""

    @property
    def ready(self) -> bool:
        """Whether it has seen enough to grant anything."""
        return True

    @property
    def plans(self) -> int:
        """How many plans it has been told of, where it watches each (``StepMeasurements.plan``)."""
        return 0

    @property
    def urgent(self) -> bool:
        """Whether it would grant something else than last time, so that a plan is due at once."""
        return False

    @property
    def patience(self) -> int:
        """Periods until the next plan, unless something is urgent; errors are measured as seldom."""
        return 1

    @property
    def factors(self) -> tuple[float, ...]:
        """Compression factors whose gains it wants to observe, step by step."""
        return ()

    @property
    def factor(self) -> float:
        """The nominal compression factor that it grants now, where it goes by factors; else 1."""
        return 1.0

    def observe(self, facts: StepMeasurements) -> None:
        """Learn from a step; what is missing in ``facts`` is skipped. Cost: O(layers) at most."""
        del facts

    def inform(self, facts: PlanningInput) -> None:
        """What is known when a plan is made, before :meth:`allow` is asked."""
        del facts

    @abstractmethod
    def allow(self, table: CandidateTable) -> Limits:
        """What may be lost or sent from now on."""

    def chosen(self, levels: Int64s) -> tuple[str, ...]:
        """Learn what was decided within the last limits; what there is to say about it, in words."""
        del levels
        return ()

    @property
    def prices(self) -> Prices:
        """What a byte costs in each direction, of those that the last limits are in."""
        return Prices()

    def seconds(self, nbytes: float) -> float | None:
        """Expected seconds of a step that sends this many bytes; None where that is not known."""
        del nbytes
        return None

    def report(self) -> dict[str, float]:
        """Figures that explain the last limits."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        del state


class BudgetOptions(CheckedOptions, ABC):
    """Options of a budget; members are frozen dataclasses."""

    def candidate_factors(self) -> tuple[float, ...]:
        """Compression factors that it may grant, for which there must be candidates; rising."""
        return ()

    def check_range(self, compressors: str, factors: Float64s, default: float) -> None:
        """Raise ValueError if a layer's candidates cannot hold what the budget asks for.

        Args:
            compressors: whose they are, for the message.
            factors: ``float64[C]``: nominal compression factors.
            default: that of the default.
        """
        del compressors, factors, default

    @abstractmethod
    def budget(self, ranks: int = 1) -> Budget:
        """A state machine at its start, for a training run on this many ranks."""
