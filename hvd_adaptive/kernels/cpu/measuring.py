"""What is measured of gradients in host memory, in Numba: each in one pass. Releases the GIL."""

# mypy: disable-error-code="attr-defined, no-untyped-def"

from __future__ import annotations

import numpy as np
import torch
from numba import carray, int64, uint32
from torch import Tensor

from hvd_adaptive.kernels.checks import check_measured
from hvd_adaptive.kernels.cpu.compiling import fused, inlined, kernel, reordered
from hvd_adaptive.kernels.cpu.intrinsics import bits_float, float32_pointer, float_bits
from hvd_adaptive.kernels.signs import COLUMNS, DRAWS, GROUPS, SignedSums, Signs

_WIDTH = COLUMNS // GROUPS
_NORMAL, _HALF = np.float32(2.0**-14), np.float32(0.5)
_LARGEST_HALF = np.float32(torch.finfo(torch.float16).max)
_LARGEST_BF16 = np.float32(torch.finfo(torch.bfloat16).max)


@fused
def _add_group(x, n, columns, rows, numbers):
    """Add n elements of one group of columns to its numbers; returns (energy, how many are not 0)."""
    a = carray(float32_pointer(x), n)
    first, second = columns[0], columns[1]
    third, fourth = columns[2], columns[3]
    zero = np.float32(0)
    sums0, sums1, sums2, sums3, energy, nonzero = zero, zero, zero, zero, zero, np.int32(0)
    for i in range(n):
        value = a[i]
        sums0 += value * first[i]
        sums1 += value * second[i]
        sums2 += value * third[i]
        sums3 += value * fourth[i]
        energy += value * value
        nonzero += np.int32(value != zero)
    numbers[0] += np.float64(rows[0] * sums0)
    numbers[1] += np.float64(rows[1] * sums1)
    numbers[2] += np.float64(rows[2] * sums2)
    numbers[3] += np.float64(rows[3] * sums3)
    return np.float64(energy), int64(nonzero)


@kernel
def _subtract(x, minus, n, out):
    """out = x - minus, n elements."""
    a, b = carray(float32_pointer(x), n), carray(float32_pointer(minus), n)
    for i in range(n):
        out[i] = a[i] - b[i]


@kernel
def _signed_sums(x, minus, n, rows, columns, numbers):
    """See :func:`signed_sums`; ``minus`` is an address, or 0. Returns (energy, how many are not 0)."""
    energy, nonzero = 0.0, 0
    difference = np.empty(_WIDTH, np.float32)
    for start in range(0, n, _WIDTH):
        row, group = start // COLUMNS, start % COLUMNS // _WIDTH
        size, here = min(_WIDTH, n - start), x + 4 * start
        if minus:
            _subtract(here, minus + 4 * start, size, difference)
            here = int64(difference.ctypes.data)
        found = _add_group(here, size, columns[group], rows[row], numbers[group])
        energy += found[0]
        nonzero += found[1]
    return energy, nonzero


def signed_sums(x: Tensor, signs: Signs, minus: Tensor | None = None) -> SignedSums:
    """See :meth:`hvd_adaptive.kernels.base.MeasuringKernels.signed_sums`. Releases the GIL."""
    signs.check(x, minus)
    rows = np.ascontiguousarray(signs.rows.numpy().T)
    columns = signs.columns.numpy().reshape(DRAWS, GROUPS, _WIDTH).transpose(1, 0, 2)
    numbers = np.zeros((GROUPS, DRAWS))
    other = 0 if minus is None else minus.data_ptr()
    found = _signed_sums(x.data_ptr(), other, x.numel(), rows, np.ascontiguousarray(columns), numbers)
    return SignedSums(numbers.T, *found)


@inlined
def _to_float16(magnitude):
    """The nearest float16, the even one of two; of a magnitude that is not too large."""
    word = float_bits(magnitude)
    up = uint32(0xFFF) + ((word >> uint32(13)) & uint32(1))
    rounded = bits_float(uint32(word + up) & uint32(0xFFFFE000))
    # of subnormals all steps are equal, and as large as a float32's near one half
    return rounded if magnitude >= _NORMAL else (magnitude + _HALF) - _HALF


@inlined
def _to_bfloat16(magnitude):
    """The nearest bfloat16, likewise."""
    word = float_bits(magnitude)
    up = uint32(0x7FFF) + ((word >> uint32(16)) & uint32(1))
    return bits_float(uint32(word + up) & uint32(0xFFFF0000))


@reordered
def _float16_error(x, n):
    """Of rounding to float16; what is too large saturates."""
    a = carray(float32_pointer(x), n)
    error = 0.0
    for i in range(n):
        magnitude = abs(a[i])
        lost = np.float64(magnitude) - np.float64(_to_float16(min(magnitude, _LARGEST_HALF)))
        error += lost * lost
    return error


@reordered
def _bfloat16_error(x, n):
    """Of rounding to bfloat16, likewise."""
    a = carray(float32_pointer(x), n)
    error = 0.0
    for i in range(n):
        magnitude = abs(a[i])
        lost = np.float64(magnitude) - np.float64(_to_bfloat16(min(magnitude, _LARGEST_BF16)))
        error += lost * lost
    return error


_CASTS = {torch.float16: _float16_error, torch.bfloat16: _bfloat16_error}


def cast_error(x: Tensor, dtype: torch.dtype) -> float:
    """See :meth:`hvd_adaptive.kernels.base.MeasuringKernels.cast_error`. Releases the GIL."""
    check_measured(x)
    return float(_CASTS[dtype](x.data_ptr(), x.numel()))
