"""Random subsets of tensors in host memory, in Numba: no indices are written down.

What is drawn is described in :mod:`hvd_adaptive.kernels.orders`. Releases the GIL.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def"

from __future__ import annotations

import numpy as np
import torch
from numba import carray, int64, uint32
from torch import Tensor

from hvd_adaptive.kernels.cpu.compiling import kernel
from hvd_adaptive.kernels.cpu.intrinsics import float32_pointer, prefetch
from hvd_adaptive.kernels.cpu.memory import LINE
from hvd_adaptive.kernels.orders import check_subset, order_of

_BLOCK = 1024


@kernel
def _permute(first, out, low, high, keys):
    """``out[i] =`` the image of ``first + i`` among the numbers of ``low + high`` bits; no branches."""
    for i in range(out.size):
        out[i] = uint32(first + i)
    for key in keys:
        mask, down = uint32((uint32(1) << low) - uint32(1)), uint32(uint32(32) - high)
        for i in range(out.size):
            right = uint32(out[i] & mask)
            mixed = uint32(uint32(right + key) * uint32(0x9E3779B1))
            mixed = uint32(uint32(mixed ^ (mixed >> uint32(15))) * uint32(0x85EBCA77))
            left = uint32((out[i] >> low) ^ (mixed >> down))
            out[i] = uint32((right << high) | left)
        low, high = high, low


@kernel
def _room(wanted, order):
    """Space for some runs, and for their elements."""
    least = (2 * wanted) // order.run + 16
    runs = min(least, max(_BLOCK // order.run, 16))
    return np.empty(runs, np.uint32), np.empty(runs * order.run, np.uint32)


@kernel
def _draw(first, numel, runs, indices, order):
    """Write the elements of the next runs, of which the last is shorter; returns how many they are."""
    _permute(uint32(first), runs, order.low, order.high, order.keys)
    size, count, found = order.run, uint32(-(-numel // order.run)), 0
    for i in range(runs.size):
        start = uint32(runs[i] * uint32(size))
        for j in range(size):
            index = uint32(start + order.offset + uint32(j))
            indices[found + j] = min(index, uint32(index - uint32(numel)))  # goes round
        found += min(size, numel - int64(start)) if runs[i] < count else 0
    return found


@kernel
def _prefetch(x, indices, found, order):
    """Fetch the lines of a block."""
    for i in range(0, found, min(order.run, LINE // 4)):
        prefetch(x + 4 * int64(indices[i]))


@kernel
def _list(numel, out, order):
    runs, indices = _room(out.size, order)
    first, done = 0, 0
    while done < out.size:
        found = min(_draw(first, numel, runs, indices, order), out.size - done)
        out[done : done + found] = indices[:found]
        first, done = first + runs.size, done + found


@kernel
def _take(x, numel, out, wanted, order):
    a, out = carray(float32_pointer(x), numel), carray(float32_pointer(out), wanted)
    runs, indices = _room(wanted, order)
    first, done = 0, 0
    while done < wanted:
        found = min(_draw(first, numel, runs, indices, order), wanted - done)
        _prefetch(x, indices, found, order)
        for i in range(found):
            out[done + i] = a[indices[i]]
            a[indices[i]] = np.float32(0)
        first, done = first + runs.size, done + found


@kernel
def _add(x, numel, values, wanted, skip, scale, order):
    a, values = carray(float32_pointer(x), numel), carray(float32_pointer(values), wanted)
    runs, indices = _room(wanted, order)
    first, done = 0, 0
    while done < wanted:
        found = min(_draw(first, numel, runs, indices, order), wanted - done)
        _prefetch(x, indices, found, order)
        for i in range(max(0, skip - done), found):
            a[indices[i]] += scale * values[done + i]
        first, done = first + runs.size, done + found


def first_indices(numel: int, count: int, key: int) -> Tensor:
    """See :meth:`hvd_adaptive.kernels.base.SubsetKernels.first_indices`. About 3 ns per index."""
    out = torch.empty(count, dtype=torch.int64)
    _list(numel, out.numpy(), order_of(numel, count, key))
    return out


def take_(x: Tensor, count: int, key: int) -> Tensor:
    """See :meth:`hvd_adaptive.kernels.base.SubsetKernels.take_`."""
    check_subset(x)
    out = torch.empty(count)
    _take(x.data_ptr(), x.numel(), out.data_ptr(), count, order_of(x.numel(), count, key))
    return out


def add_(x: Tensor, values: Tensor, key: int, scale: float = 1.0, skip: int = 0) -> None:
    """See :meth:`hvd_adaptive.kernels.base.SubsetKernels.add_`."""
    check_subset(x, values)
    order = order_of(x.numel(), values.numel(), key)
    layout = (values.numel(), skip, np.float32(scale), order)
    _add(x.data_ptr(), x.numel(), values.data_ptr(), *layout)
