"""What layers with error feedback withhold, of what they should: as their residuals have shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.planning.budgets.losses import withheld_at_first
from hvd_adaptive.planning.budgets.patience import FILLING
from hvd_adaptive.planning.gradient_signals import GradientSignals
from hvd_adaptive.planning.table import CandidateTable

__all__ = ["Withholding"]

FACTORS = (0.05, 16.0)
"""Bounds of what layers withhold, of what they should."""


class Withholding:
    """Of each layer: since when it has had a residual, and by what factor that is off.

    Args:
        since: ``int64[L]``, steps; -1 where nothing is withheld. None before the first plan.
        factors: ``float64[2, L]``, ``k`` of what sends all elements and of what selects some (see
            :class:`~hvd_adaptive.planning.budgets.auto.Accuracy`); None where nothing was observed.

    Example:
        >>> layers = Withholding()
        >>> for step, withholds in ((10, [True, True, False]), (30, [True, False, True])):
        ...     layers.take(np.array(withholds), step)
        >>> layers.since.tolist()
        [10, -1, 30]
    """

    def __init__(self, since: Int64s | None = None, factors: Float64s | None = None) -> None:
        self.since, self._factors = since, factors

    def take(self, withholds: npt.NDArray[np.bool_], step: int) -> None:
        """A plan is in force from this step on, by which these layers have residuals: ``bool[L]``."""
        before = np.full(len(withholds), -1) if self.since is None else self.since
        self.since = np.where(withholds, np.where(before >= 0, before, step), -1).astype(np.int64)

    def observe(
        self,
        table: CandidateTable,
        signals: GradientSignals,
        seen: Float64s,
        levels: Int64s | None,
        step: int,
    ) -> Float64s:
        """The factors, ``float64[2, L]``, after what the plan in force has shown.

        A residual that is still filling up shows too few, so an observation that is below what is
        known counts once a layer has been compressed for as long as one filling takes.

        Args:
            table: of the candidates.
            signals: of the layers' gradients.
            seen: ``float64[L]``, steps that are withheld, by the residuals.
            levels: of the plan in force; None before the first.
            step: of the training.
        """
        if self._factors is None:
            self._factors = np.ones((2, len(signals.energy)))
        if levels is None or self.since is None:
            return self._factors
        chosen = [*enumerate(levels.tolist())]
        density, errors, projected = (
            np.array([rows[layer][index] for layer, index in chosen])
            for rows in (signals.densities, table.errors, signals.projected)
        )
        expected = withheld_at_first(density, signals.energy, errors)
        tells = (self.since >= 0) & np.isfinite(expected) & (expected >= 1) & ~projected
        for layer in np.flatnonzero(tells):
            found = float(np.clip(seen[layer] / expected[layer], *FACTORS))
            filled = step - self.since[layer] >= max(expected[layer], FILLING)
            known = self._factors[int(density[layer] < 1)]
            if found > known[layer] or filled:
                known[layer] = 0.5 * (known[layer] + found)
        return self._factors

    def to_dict(self) -> dict[str, Any]:
        """JSON, for the state of a budget."""
        return {
            # counts from 0 on: 0 is not compressed
            "since": None if self.since is None else (self.since + 1).tolist(),
            "factors": None if self._factors is None else self._factors.tolist(),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Withholding:
        """Of :meth:`to_dict`, among whatever else there is; older states know one kind of factors."""
        since, factors = (
            None if state[name] is None else np.array(state[name]) for name in ("since", "factors")
        )
        if factors is not None and factors.ndim == 1:
            factors = np.stack([np.ones_like(factors), factors])
        return cls(
            None if since is None else since.astype(np.int64) - 1,
            None if factors is None else factors.astype(np.float64),
        )
