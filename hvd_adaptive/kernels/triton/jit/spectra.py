"""Histograms of magnitudes: exponent and upper 7 bits of the mantissa, and the 16 bits below."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from hvd_adaptive.kernels.floats import BINS as _BINS
from hvd_adaptive.kernels.triton.jit.arithmetic import entry, magnitude_bits

BINS = tl.constexpr(_BINS)


@triton.jit
def count_in_copy(counts, size, mask, COPIES: tl.constexpr, SIZE: tl.constexpr):
    """Add magnitudes to one of several copies of the spectrum."""
    counts += tl.program_id(0) % COPIES * BINS
    tl.atomic_add(counts + (size >> 16), tl.full((SIZE,), 1, tl.int32), mask=mask, sem="relaxed")


@entry
def count_bins(
    x,
    numel,
    counts,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    COPIES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Of all elements, or of groups of ``GROUP`` that begin ``STRIDE`` apart."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = i < numel
    if GROUP > 0:
        place = i // GROUP * STRIDE + i % GROUP
    else:
        place = i
    size = magnitude_bits(tl.load(x + place, mask=mask, other=0.0))
    count_in_copy(counts, size, mask, COPIES, SIZE)


@entry
def refine_bins(x, numel, rows, counts, SIZE: tl.constexpr):
    """The lower 16 bits of the elements whose bins have a row."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = i < numel
    size = magnitude_bits(tl.load(x + i, mask=mask, other=0.0))
    row = tl.load(rows + (size >> 16), mask=mask, other=-1).to(tl.int64)
    place = counts + row * 65536 + (size & 0xFFFF)
    tl.atomic_add(place, tl.full((SIZE,), 1, tl.int32), mask=row >= 0, sem="relaxed")


@entry
def summarize(x, numel, counts, sums, COPIES: tl.constexpr, SIZE: tl.constexpr):
    """The spectrum, and of each program the sum of magnitudes, the energy and the largest."""
    program = tl.program_id(0)
    i = program.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = i < numel
    value = tl.load(x + i, mask=mask, other=0.0)
    size = magnitude_bits(value)
    count_in_copy(counts, size, mask, COPIES, SIZE)
    wide = tl.abs(value).to(tl.float64)
    tl.store(sums + 3 * program, tl.sum(wide, 0))
    tl.store(sums + 3 * program + 1, tl.sum(wide * wide, 0))
    largest = tl.max(size, 0).to(tl.float32, bitcast=True)  # a NaN has the largest bits
    tl.store(sums + 3 * program + 2, largest.to(tl.float64))


@entry
def sum_bins(x, numel, sums, COPIES: tl.constexpr, SIZE: tl.constexpr):
    """Number, magnitudes and squares of the elements of each bin and sign."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = i < numel
    value = tl.load(x + i, mask=mask, other=0.0)
    negative = (value.to(tl.int32, bitcast=True) < 0).to(tl.int32)
    copy = tl.program_id(0) % COPIES
    place = sums + 3 * ((magnitude_bits(value) >> 16) + BINS * (2 * copy + negative))
    wide = tl.abs(value).to(tl.float64)
    tl.atomic_add(place, tl.full((SIZE,), 1.0, tl.float64), mask=mask, sem="relaxed")
    tl.atomic_add(place + 1, wide, mask=mask, sem="relaxed")
    tl.atomic_add(place + 2, wide * wide, mask=mask, sem="relaxed")
