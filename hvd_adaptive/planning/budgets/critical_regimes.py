"""Accordion's budget: little compression in critical regimes, much outside of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.planning.budgets.base import Budget, BudgetOptions, require_factors
from hvd_adaptive.planning.measurements import Measurement, StepMeasurements
from hvd_adaptive.planning.table import CandidateTable, Limits

__all__ = ["CriticalRegimes", "RegimeBudget"]


@dataclass(frozen=True)
class CriticalRegimes(BudgetOptions):
    """Little compression for layers in a critical regime, much for the others.

    A layer is critical if the norm of its gradient, averaged over the ranks and accumulated over the
    period, changed by ``eta`` or more since the period before, and all layers are if the learning rate
    fell. The first period counts as changed, and so does one that is more than twice as long as the one
    before, or less than half as long. Source: Agarwal, Wang, Lee, Venkataraman and Papailiopoulos,
    "Accordion" (2021), algorithm 1.

    What cancels out over the period, such as the noise of minibatches, is not in the norm. Memory: one
    float32 per element, for the sum of the period's gradients.

    Args:
        eta: relative change.
        low: bytes in a critical regime, in those of the default: little compression.
        high: bytes otherwise: much compression.
        drop: share by which the learning rate must fall within one step to count; schedules that
            fall a little with every step would be critical forever.

    Raises:
        ValueError: an option out of its range.

    Example:
        >>> budget = CriticalRegimes().budget()
        >>> table = CandidateTable.of(["w"], [[1, 2, 4]], [[80, 40, 20]], [["8", "4", "2"]], [1], [320])
        >>> for energy in (1.0, 1.1, 9.0):
        ...     budget.observe(StepMeasurements(0, period_energy=np.array([energy])))
        ...     print(budget.allow(table).reference)
        [0]
        [2]
        [0]
    """

    eta: float = 0.5
    low: float = 2.0
    high: float = 0.5
    drop: float = 0.1

    def __post_init__(self) -> None:
        if not (0 < self.eta < math.inf and 0 < self.high <= self.low < math.inf and 0 < self.drop < 1):
            raise ValueError(
                f"eta={self.eta:g} must be above 0, drop={self.drop:g} in (0, 1), and "
                f"0 < high={self.high:g} <= low={self.low:g} (multiples of the default's bytes)"
            )
        super().__post_init__()

    def check_range(self, compressors: str, factors: Float64s, default: float) -> None:
        """ValueError unless ``low`` and ``high`` lie in the range.

        Where all levels have one factor, only the data tell how many bytes a level sends.
        """
        if len(factors) > 1 and factors.min() == factors.max():
            return
        ends = default / self.low, default / self.high
        require_factors(compressors, factors, ends, "write a smaller low or a larger high")

    def budget(self, ranks: int = 1) -> Budget:
        """Starts critical."""
        del ranks
        return RegimeBudget(self)


class RegimeBudget(Budget):
    """See :class:`CriticalRegimes`."""

    needs = frozenset({Measurement.PERIOD_ENERGY, Measurement.LEARNING_RATE})

    def __init__(self, options: CriticalRegimes) -> None:
        self._options = options
        self._energy: Float64s | None = None
        self._steps = 0
        self._norms: Float64s | None = None
        self._norms_steps = 0
        self._rate: float | None = None
        self._critical = 1.0
        self._fell = False

    @property
    def urgent(self) -> bool:
        """Whether the learning rate has fallen since the last plan."""
        return self._fell

    def observe(self, facts: StepMeasurements) -> None:
        """Look at the energies of a period; those that are not finite are left out."""
        energy = facts.period_energy
        if energy is not None and np.isfinite(energy).all():
            self._energy = np.asarray(energy, dtype=np.float64)
            self._steps = facts.period_steps
        if facts.learning_rate is not None:
            if self._rate is not None and facts.learning_rate < (1 - self._options.drop) * self._rate:
                self._fell = True
            self._rate = float(facts.learning_rate)

    def allow(self, table: CandidateTable) -> Limits:
        """The error and bytes of the levels that the regimes call for; a new period starts.

        Raises:
            ValueError: energies of another number of layers.
        """
        critical = self._regimes(len(table.names))
        self._critical = float(critical.mean()) if len(critical) else 0.0
        multiples = np.where(critical, self._options.low, self._options.high)
        return Limits.like(table, table.resized(table.defaults, multiples))

    def _regimes(self, layers: int) -> npt.NDArray[np.bool_]:
        fell, self._fell = self._fell, False
        before, before_steps = self._norms, self._norms_steps
        if self._energy is None:  # nothing was seen: nothing is known
            return np.ones(layers, dtype=np.bool_)
        if len(self._energy) != layers:
            raise ValueError(f"energies of {len(self._energy)} layers, but the table has {layers}")
        self._norms, self._norms_steps = np.sqrt(self._energy), self._steps
        self._energy = None
        alike = before_steps <= 2 * self._steps and self._steps <= 2 * before_steps
        if before is None or fell or not alike:
            return np.ones(layers, dtype=np.bool_)
        change = np.abs(before - self._norms)
        return (change >= self._options.eta * before) & (change > 0)

    def report(self) -> dict[str, float]:
        """The share of the layers that were critical."""
        return {"critical": self._critical}

    def state_dict(self) -> dict[str, Any]:
        """Norms and sums."""
        return {
            "energy": None if self._energy is None else self._energy.tolist(),
            "steps": self._steps,
            "norms": None if self._norms is None else self._norms.tolist(),
            "norms_steps": self._norms_steps,
            "rate": self._rate,
            "critical": self._critical,
            "fell": self._fell,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._energy = None if state["energy"] is None else np.array(state["energy"], dtype=np.float64)
        self._norms = None if state["norms"] is None else np.array(state["norms"], dtype=np.float64)
        self._steps, self._norms_steps = int(state["steps"]), int(state["norms_steps"])
        self._rate = None if state["rate"] is None else float(state["rate"])
        self._critical, self._fell = float(state["critical"]), bool(state["fell"])
