"""What is sent of each layer, added up over the steps of a window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.layers import Layer

__all__ = ["LayerGains"]


class LayerGains:
    """Sums of the layers' energies, and of what was sent of them, by bucket.

    Cost: two sums of short arrays per bucket and step.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Sequence[Layer], Float64s, Float64s]] = {}

    def add(self, index: int, layers: Sequence[Layer], energy: Float64s, sent: Float64s) -> None:
        """Add one step of bucket `index`; a bucket of other layers than before starts afresh.

        Args:
            index: the bucket's number.
            layers: the same object in each step, while the bucket is the same.
            energy: `float64[L]`: squared L2 norms before compression.
            sent: `float64[L]`: squared L2 norms of what was transmitted.
        """
        known = self._sums.get(index)
        if known is None or known[0] is not layers:
            self._sums[index] = (layers, energy.copy(), sent.copy())
        else:
            np.add(known[1], energy, out=known[1])
            np.add(known[2], sent, out=known[2])

    def clear(self) -> None:
        """Begin another window."""
        self._sums.clear()

    def record(self) -> dict[str, float]:
        """Of each layer that had any energy, the share of it that was sent, as `gain/LAYER`."""
        total: dict[str, tuple[float, float]] = {}
        for layers, energies, sent in self._sums.values():
            for layer, *pair in zip(layers, energies.tolist(), sent.tolist(), strict=True):
                energy, passed = total.get(layer.name, (0.0, 0.0))
                total[layer.name] = (energy + pair[0], passed + pair[1])
        return {
            f"gain/{name}": passed / energy for name, (energy, passed) in total.items() if energy > 0
        }
