"""Random subsets in plain torch, on any device: see :mod:`hvd_adaptive.kernels.orders`."""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_adaptive.kernels.orders import Order, check_subset, order_of

_WORD = 0xFFFFFFFF
_MOST = 1 << 22
"""Runs that are drawn at once."""


def _permute(numbers: Tensor, order: Order) -> Tensor:
    """The image of each number: a Feistel network whose halves have ``low`` and ``high`` bits."""
    low, high = int(order.low), int(order.high)
    for key in order.keys.tolist():
        right = numbers & ((1 << low) - 1)
        mixed = (((right + key) & _WORD) * 0x9E3779B1) & _WORD
        mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA77) & _WORD
        left = (numbers >> low) ^ (mixed >> (32 - high))
        numbers = (right << high) | left
        low, high = high, low
    return numbers


def first_indices(numel: int, count: int, key: int, device: torch.device | None = None) -> Tensor:
    """See :meth:`hvd_adaptive.kernels.base.SubsetKernels.first_indices`.

    Example:
        >>> sorted(first_indices(5, 5, key=1).tolist()), len(first_indices(10**6, 10, key=1))
        ([0, 1, 2, 3, 4], 10)
    """
    order = order_of(numel, count, key)
    places = torch.arange(order.run, device=device)
    found, first, parts = 0, 0, [torch.empty(0, dtype=torch.int64, device=device)]
    while found < count:
        size = min(_MOST, 2 * (count - found) // order.run + 16)
        starts = _permute(torch.arange(first, first + size, device=device), order) * order.run
        indices = starts[starts < numel].unsqueeze(1) + places
        indices = (indices[indices < numel] + int(order.offset)) % numel  # goes round
        parts.append(indices)
        found, first = found + len(indices), first + size
    return torch.cat(parts)[:count]


def take_(x: Tensor, count: int, key: int) -> Tensor:
    """See :meth:`hvd_adaptive.kernels.base.SubsetKernels.take_`.

    Example:
        >>> x = torch.arange(9.0)
        >>> int(take_(x, 9, key=1).sum()), int(x.sum())
        (36, 0)
    """
    check_subset(x)
    indices = first_indices(x.numel(), count, key, x.device)
    out = x[indices]
    x[indices] = 0.0
    return out


def add_(x: Tensor, values: Tensor, key: int, scale: float = 1.0, skip: int = 0) -> None:
    """See :meth:`hvd_adaptive.kernels.base.SubsetKernels.add_`.

    Example:
        >>> x = torch.zeros(3)
        >>> add_(x, torch.ones(3), key=1, scale=0.5)
        >>> x.tolist()
        [0.5, 0.5, 0.5]
    """
    check_subset(x, values)
    indices = first_indices(x.numel(), values.numel(), key, x.device)
    x[indices[skip:]] += scale * values[skip:]
