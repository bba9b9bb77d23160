"""The contract of a budget: a small state machine that watches the steps and grants limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from hvd_adaptive.planning.measurements import CheckedOptions, Measurement, StepMeasurements
from hvd_adaptive.planning.table import CandidateTable, Limits

__all__ = ["Budget", "BudgetOptions"]


class Budget(ABC):
    """Decides how much compression now."""

    needs: frozenset[Measurement] = frozenset()
    """What must be measured for it."""

    @property
    def ready(self) -> bool:
        """Whether it has seen enough to grant anything."""
        return True

    @property
    def urgent(self) -> bool:
        """Whether it would grant something else than last time, so that a plan is due at once."""
        return False

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

    @abstractmethod
    def allow(self, table: CandidateTable) -> Limits:
        """What may be lost or sent from now on."""

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

    @abstractmethod
    def budget(self, ranks: int = 1) -> Budget:
        """A state machine at its start, for a training run on this many ranks."""
