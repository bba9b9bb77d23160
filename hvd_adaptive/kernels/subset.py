"""Random subsets that all ranks draw alike: the beginning of a permutation that a key chooses.

A Feistel network permutes the numbers below the next power of two; those that are not below the
number of elements are left out. Source: Luby and Rackoff, "How to Construct Pseudorandom Permutations
from Pseudorandom Functions" (SIAM J. Comput. 1988).
"""

# mypy: disable-error-code="attr-defined, no-untyped-def"

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, int64, njit, uint32
from torch import Tensor

from hvd_adaptive.kernels.intrinsics import float32_pointer, prefetch
from hvd_adaptive.keys import mix

__all__ = ["add_", "first_indices", "take"]

_BLOCK = 512
_ROUNDS, _ROUNDS_IF_SMALL, _SMALL = 4, 16, 16
"""Four are enough for large domains (Luby and Rackoff); those of a few bits need more."""

_kernel: Any = njit(nogil=True, cache=True, error_model="numpy")


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
def _draw(first, numel, images, network):
    """Put those of the next images that are below ``numel`` in front; returns how many they are."""
    low, high, keys = network
    _permute(uint32(first), images, low, high, keys)
    found = 0
    for i in range(images.size):
        image = images[i]
        images[found] = image
        found += image < numel
    return found


@_kernel
def _list(numel, out, network):
    images = np.empty(_BLOCK, np.uint32)
    first, done = 0, 0
    while done < out.size:
        found = min(_draw(first, numel, images, network), out.size - done)
        out[done : done + found] = images[:found]
        first, done = first + _BLOCK, done + found


@_kernel
def _take(x, numel, out, count, network):
    a, out = carray(float32_pointer(x), numel), carray(float32_pointer(out), count)
    images = np.empty(_BLOCK, np.uint32)
    first, done = 0, 0
    while done < count:
        found = min(_draw(first, numel, images, network), count - done)
        for i in range(found):
            prefetch(x + 4 * int64(images[i]))
        for i in range(found):
            out[done + i] = a[images[i]]
        first, done = first + _BLOCK, done + found


@_kernel
def _add(x, numel, values, count, scale, network):
    a, values = carray(float32_pointer(x), numel), carray(float32_pointer(values), count)
    images = np.empty(_BLOCK, np.uint32)
    first, done = 0, 0
    while done < count:
        found = min(_draw(first, numel, images, network), count - done)
        for i in range(found):
            prefetch(x + 4 * int64(images[i]))
        for i in range(found):
            a[images[i]] += scale * values[done + i]
        first, done = first + _BLOCK, done + found


def _network(numel: int, count: int, key: int) -> tuple[np.uint32, np.uint32, npt.NDArray[np.uint32]]:
    """Bits of both halves, and a key for each round."""
    if not 0 <= count <= numel < 1 << 31:
        raise ValueError(f"cannot draw {count} different numbers below {numel}")
    bits = max(2, (numel - 1).bit_length())
    rounds = _ROUNDS if bits > _SMALL else _ROUNDS_IF_SMALL
    keys = np.array([mix(key ^ (r << 56)) & 0xFFFFFFFF for r in range(rounds)], np.uint32)
    return np.uint32(bits // 2), np.uint32(bits - bits // 2), keys


def first_indices(numel: int, count: int, key: int) -> Tensor:
    """``count`` different numbers below ``numel``: the beginning of a random permutation.

    Cost: about 3 ns an index, whatever ``numel`` is; releases the GIL.

    Args:
        numel: below 2^31.
        count: at most ``numel``.
        key: the same key gives the same numbers, and a smaller count a beginning of them.

    Returns:
        int64, 1-D, not sorted, in host memory.

    Raises:
        ValueError: a count beyond ``numel``, or a ``numel`` beyond 2^31.

    Example:
        >>> sorted(first_indices(5, 5, key=1).tolist()), len(first_indices(10**6, 10, key=1))
        ([0, 1, 2, 3, 4], 10)
    """
    out = torch.empty(count, dtype=torch.int64)
    _list(numel, out.numpy(), _network(numel, count, key))
    return out


def take(x: Tensor, count: int, key: int) -> Tensor:
    """``x[first_indices(x.numel(), count, key)]``, for any device; in host memory without the indices.

    Example:
        >>> int(take(torch.arange(9.0), 9, key=1).sum())
        36
    """
    if x.device.type != "cpu":
        return x[first_indices(x.numel(), count, key).to(x.device)]
    out = torch.empty(count)
    _take(x.data_ptr(), x.numel(), out.data_ptr(), count, _network(x.numel(), count, key))
    return out


def add_(x: Tensor, values: Tensor, key: int, scale: float = 1.0) -> None:
    """``x[first_indices(x.numel(), values.numel(), key)] += scale * values``, as :func:`take`.

    Args:
        x: float32, 1-D, contiguous.
        values: float32, 1-D, contiguous, of the same device.
        key: which subset.
        scale: factor of the values.

    Example:
        >>> x = torch.zeros(3)
        >>> add_(x, torch.ones(3), key=1, scale=0.5)
        >>> x.tolist()
        [0.5, 0.5, 0.5]
    """
    numel, count = x.numel(), values.numel()
    if x.device.type != "cpu":
        x[first_indices(numel, count, key).to(x.device)] += scale * values
        return
    network = _network(numel, count, key)
    _add(x.data_ptr(), numel, values.data_ptr(), count, np.float32(scale), network)
