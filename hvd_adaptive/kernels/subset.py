"""Random subsets that all ranks draw alike: the beginning of a random order that a key chooses.

In large tensors elements are drawn in runs of neighbours, of which there are always 65,536 or more: a
place in memory that was not read lately costs as much as dozens of elements beside each other. Runs
begin at an offset that the key chooses, too, and go round from the end to the beginning, so that
all elements are equally likely whatever their number.

A Feistel network permutes the numbers below the next power of two; those that are not below the
number of runs are left out. Source: Luby and Rackoff, "How to Construct Pseudorandom Permutations
from Pseudorandom Functions" (SIAM J. Comput. 1988).
"""

# mypy: disable-error-code="attr-defined, no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, int64, uint32
from torch import Tensor

from hvd_adaptive.kernels.intrinsics import compiled, float32_pointer, prefetch
from hvd_adaptive.rng import mix

__all__ = ["add_", "first_indices", "run_length", "take_"]

_LEAST_RUNS, _LONGEST_RUN = 1 << 16, 64
_BLOCK = 1024
_LINE = 16  # float32 in a line of the cache
_ROUNDS, _ROUNDS_IF_SMALL, _SMALL = 4, 16, 16
"""Four are enough for large domains (Luby and Rackoff); those of a few bits need more."""

_kernel = compiled()


class _Order(NamedTuple):
    """The order in which a key draws: how long runs are, where the first begins, who permutes them."""

    run: int
    offset: np.uint32
    low: np.uint32
    high: np.uint32
    keys: npt.NDArray[np.uint32]


@_kernel
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


@_kernel
def _room(wanted, order):
    """Space for some runs, and for their elements."""
    least = (2 * wanted) // order.run + 16
    runs = min(least, max(_BLOCK // order.run, 16))
    return np.empty(runs, np.uint32), np.empty(runs * order.run, np.uint32)


@_kernel
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


@_kernel
def _prefetch(x, indices, found, order):
    """Fetch the lines of a block."""
    for i in range(0, found, min(order.run, _LINE)):
        prefetch(x + 4 * int64(indices[i]))


@_kernel
def _list(numel, out, order):
    runs, indices = _room(out.size, order)
    first, done = 0, 0
    while done < out.size:
        found = min(_draw(first, numel, runs, indices, order), out.size - done)
        out[done : done + found] = indices[:found]
        first, done = first + runs.size, done + found


@_kernel
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


@_kernel
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


def run_length(numel: int) -> int:
    """How many neighbours are drawn together: 1 up to 131,071 elements, 64 from 4,194,304 on.

    Example:
        >>> [run_length(numel) for numel in (1000, 1 << 17, 1 << 30)]
        [1, 2, 64]
    """
    return min(_LONGEST_RUN, 1 << max(0, (numel // _LEAST_RUNS).bit_length() - 1))


def _order(numel: int, count: int, key: int) -> _Order:
    """What a key chooses, for so many elements."""
    if not 0 <= count <= numel < 1 << 31:
        raise ValueError(f"cannot draw {count} different numbers below {numel}")
    run = run_length(numel)
    bits = max(2, (-(-numel // run) - 1).bit_length())
    rounds = _ROUNDS if bits > _SMALL else _ROUNDS_IF_SMALL
    keys = np.array([mix(key ^ (r << 56)) & 0xFFFFFFFF for r in range(rounds)], np.uint32)
    offset = mix(key ^ (rounds << 56)) % max(1, numel)
    return _Order(run, np.uint32(offset), np.uint32(bits // 2), np.uint32(bits - bits // 2), keys)


def first_indices(numel: int, count: int, key: int) -> Tensor:
    """``count`` different numbers below ``numel``: the beginning of a random order.

    Each number is as likely as any other. Cost: about 3 ns an index at most; releases the GIL.

    Args:
        numel: below 2^31.
        count: at most ``numel``.
        key: the same key gives the same numbers, and a smaller count a beginning of them.

    Returns:
        int64, 1-D, not sorted, in host memory: runs of :func:`run_length` neighbours.

    Raises:
        ValueError: a count beyond ``numel``, or a ``numel`` beyond 2^31.

    Example:
        >>> sorted(first_indices(5, 5, key=1).tolist()), len(first_indices(10**6, 10, key=1))
        ([0, 1, 2, 3, 4], 10)
    """
    out = torch.empty(count, dtype=torch.int64)
    _list(numel, out.numpy(), _order(numel, count, key))
    return out


def _check(*tensors: Tensor) -> None:
    """ValueError unless what addresses are formed of is contiguous float32."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(
                f"a subset is taken of contiguous float32 tensors, got {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}, stride {tensor.stride()}: use x.float().contiguous()"
            )


def take_(x: Tensor, count: int, key: int) -> Tensor:
    """``x[first_indices(x.numel(), count, key)]``, which are 0 in ``x`` afterwards.

    Args:
        x: float32, 1-D, contiguous, on any device; in host memory no indices are written down.
        count: how many.
        key: which subset.

    Raises:
        ValueError: ``x`` is of another kind, or has too few elements.

    Example:
        >>> x = torch.arange(9.0)
        >>> int(take_(x, 9, key=1).sum()), int(x.sum())
        (36, 0)
    """
    _check(x)
    if x.device.type != "cpu":
        indices = first_indices(x.numel(), count, key).to(x.device)
        out = x[indices]
        x[indices] = 0.0
        return out
    out = torch.empty(count)
    _take(x.data_ptr(), x.numel(), out.data_ptr(), count, _order(x.numel(), count, key))
    return out


def add_(x: Tensor, values: Tensor, key: int, scale: float = 1.0, skip: int = 0) -> None:
    """``x[first_indices(x.numel(), values.numel(), key)] += scale * values``, as :func:`take_`.

    Args:
        x: float32, 1-D, contiguous.
        values: float32, 1-D, contiguous, of the same device.
        key: which subset.
        scale: factor of the values.
        skip: so many values at the beginning are not added.

    Raises:
        ValueError: ``x`` or ``values`` are of another kind, or there are more values than elements.

    Example:
        >>> x = torch.zeros(3)
        >>> add_(x, torch.ones(3), key=1, scale=0.5)
        >>> x.tolist()
        [0.5, 0.5, 0.5]
    """
    _check(x, values)
    numel, count = x.numel(), values.numel()
    if x.device.type != "cpu":
        x[first_indices(numel, count, key)[skip:].to(x.device)] += scale * values[skip:]
        return
    order = _order(numel, count, key)
    _add(x.data_ptr(), numel, values.data_ptr(), count, skip, np.float32(scale), order)
