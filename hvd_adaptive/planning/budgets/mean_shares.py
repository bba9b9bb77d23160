"""The mean gradient's share of the gradients' energy, as several plans have seen it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.planning.gradient_signals import GradientSignals

__all__ = ["MeanShares"]

NEW_SHARE = 0.25
"""What the last plan's estimate counts, beside those before."""


@dataclass(slots=True)
class MeanShares:
    """Of each layer.

    Sketches of a few steps are off by a fifth, of which differences are made. And a plan takes the
    layers that seem to lose least, so that errors would not cancel.
    """

    shares: Float64s = field(default_factory=lambda: np.zeros(0))
    plans: int = 0

    def smoothed(self, signals: GradientSignals) -> GradientSignals:
        """Learn from a plan's signals; the same with the share as all plans so far saw it together."""
        if len(self.shares) != len(signals.energy):
            self.shares, self.plans = np.ones(len(signals.energy)), 0
        self.plans += 1
        seen = signals.energy > 0
        found = np.minimum(signals.mean_energy[seen] / signals.energy[seen], 1.0)
        weight = max(NEW_SHARE, 1.0 / self.plans)
        self.shares[seen] += weight * (found - self.shares[seen])
        return replace(signals, mean_energy=self.shares * signals.energy)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"shares": self.shares.tolist(), "shares_of": self.plans}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> MeanShares:
        """As :meth:`to_dict` made it."""
        return cls(np.array(state["shares"]), int(state["shares_of"]))
