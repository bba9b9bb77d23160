"""When layers' gradients arrive in a backward pass, and in what order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.planning.dense_steps import DenseSteps
from hvd_adaptive.planning.step_time import arrival_order, spread

__all__ = ["Arrivals"]


@dataclass(frozen=True)
class Arrivals:
    """Of some layers.

    Args:
        ready: ``float64[L]``, in seconds before the end of the backward pass; at most 0.
        order: ``int64[L]``, layers by the time at which they arrive.
    """

    ready: Float64s
    order: Int64s

    @classmethod
    def even(cls, buckets: Int64s, numel: Int64s, seconds: float) -> Arrivals:
        """Where nobody has seen it: forward and backward pass take so many seconds.

        Example:
            >>> Arrivals.even(np.array([1, 0]), np.array([3, 1]), 0.4).order.tolist()
            [1, 0]
        """
        order = arrival_order(buckets)
        return cls(spread(seconds, numel, order), order)

    @classmethod
    def seen(cls, buckets: Int64s, numel: Int64s, dense: DenseSteps) -> Arrivals:
        """As dense steps have shown: a layer's gradient when its bucket is launched."""
        order = arrival_order(buckets)
        return cls(dense.ready(buckets, numel, order, dense.quantiles()[1]), order)

    def to_dict(self) -> dict[str, Any]:
        """JSON, for the state of a budget."""
        return {"ready": self.ready.tolist(), "order": self.order.tolist()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Arrivals | None:
        """Of :meth:`to_dict`, among whatever else there is; None where nobody knew."""
        if state["ready"] is None or state["order"] is None:
            return None
        return cls(np.array(state["ready"], np.float64), np.array(state["order"], np.int64))
