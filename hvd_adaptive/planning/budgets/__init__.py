"""How much compression now: small state machines that watch the steps and grant limits.

=======================  =================================================================
:class:`Static`          as much error as the defaults make (L-GreCo)
:class:`Bandwidth`       as many bytes as fit into a step's time (Kimad)
:class:`Throughput`      the factor with the highest throughput x gain (GraVAC)
:class:`CriticalRegimes`  little compression in critical regimes, else much (Accordion)
:class:`Accuracy`         the least time within limits on delay and noise (auto)
=======================  =================================================================

These hold options; ``budget(ranks)`` of each starts its state machine. A budget observes
every step (:meth:`Budget.observe`) and is asked for :class:`~hvd_adaptive.planning.table.Limits`
when a plan is due; it may ask for a plan itself (:attr:`Budget.urgent`).
"""

from __future__ import annotations

from hvd_adaptive.planning.budgets.auto import Accuracy, AutoBudget
from hvd_adaptive.planning.budgets.bandwidth import Bandwidth, BandwidthBudget
from hvd_adaptive.planning.budgets.base import Budget, BudgetOptions
from hvd_adaptive.planning.budgets.critical_regimes import CriticalRegimes, RegimeBudget
from hvd_adaptive.planning.budgets.static import Static, StaticBudget
from hvd_adaptive.planning.budgets.throughput import Throughput, ThroughputBudget

__all__ = [
    "Accuracy",
    "AutoBudget",
    "Bandwidth",
    "BandwidthBudget",
    "Budget",
    "BudgetOptions",
    "CriticalRegimes",
    "RegimeBudget",
    "Static",
    "StaticBudget",
    "Throughput",
    "ThroughputBudget",
]
