"""L-GreCo's budget: as much error as the defaults make."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_adaptive.planning.budgets.base import Budget, BudgetOptions
from hvd_adaptive.planning.table import CandidateTable, Limits

__all__ = ["Static", "StaticBudget"]


@dataclass(frozen=True)
class Static(BudgetOptions):
    """No more error than the defaults make. Source: L-GreCo, section 3, "The Error Bound"."""

    def budget(self, ranks: int = 1) -> Budget:
        """Has no state."""
        del ranks
        return StaticBudget()


class StaticBudget(Budget):
    """See :class:`Static`."""

    def allow(self, table: CandidateTable) -> Limits:
        """The defaults' error and bytes."""
        return Limits.like(table, table.defaults)
