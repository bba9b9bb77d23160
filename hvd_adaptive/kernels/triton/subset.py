"""Random subsets on a GPU: drawn twice, to count and to visit; no indices are written down.

:class:`hvd_adaptive.kernels.base.SubsetKernels` says what each function does. The host never waits.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive.kernels.orders import Order, check_subset, order_of
from hvd_adaptive.kernels.reference import subset as reference
from hvd_adaptive.kernels.triton.jit import subset as jit
from hvd_adaptive.kernels.triton.launching import launch, upload

__all__ = ["add_", "first_indices", "take_"]

first_indices = reference.first_indices
"""In host memory."""

_SIZE = 4096
"""Elements of a program."""


def take_(x: Tensor, count: int, key: int) -> Tensor:
    """See :meth:`hvd_adaptive.kernels.base.SubsetKernels.take_`."""
    check_subset(x)
    out = torch.empty(count, device=x.device)
    _visit(x, out, order_of(x.numel(), count, key), 0, None)
    return out


def add_(x: Tensor, values: Tensor, key: int, scale: float = 1.0, skip: int = 0) -> None:
    """See :meth:`hvd_adaptive.kernels.base.SubsetKernels.add_`."""
    check_subset(x, values)
    _visit(x, values, order_of(x.numel(), values.numel(), key), skip, scale)


def _visit(x: Tensor, values: Tensor, order: Order, skip: int, scale: float | None) -> None:
    """Add ``scale`` times the values to what an order draws; None takes it."""
    count, device = values.numel(), x.device
    if not count:
        return
    numbers = [x.numel(), int(order.offset), int(order.low), int(order.high), *order.keys.tolist()]
    table, size = upload(np.array(numbers, np.int64), device), _SIZE // order.run
    programs = -(-_draws(x.numel(), count, order) // size)
    drawn = {"ROUNDS": len(order.keys), "RUN": order.run, "SIZE": size}
    found = torch.empty(programs, dtype=torch.int64, device=device)
    launch(jit.count_elements, (programs,), device, table, found, **drawn)
    before = torch.cumsum(found, 0) - found
    launch(
        *(jit.visit, (programs,), device, x, values, table, before, count, skip),
        float(np.float32(scale or 0.0)),
        ADDS=scale is not None,
        **drawn,
    )


def _draws(numel: int, count: int, order: Order) -> int:
    """Runs that hold ``count`` elements, but for a chance of about one in a million.

    A number below the power of two is left out as often as it is beyond the number of runs.
    """
    domain, runs = 1 << int(order.low + order.high), -(-numel // order.run)
    wanted = -(-count // order.run) + 1
    share = runs / domain
    return min(domain, math.ceil((wanted + 5 * math.sqrt(wanted)) / share) + 8)
