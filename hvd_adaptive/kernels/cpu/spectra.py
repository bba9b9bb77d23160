"""Histograms of magnitudes and sums over them: what errors and sizes are estimated from."""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray, int32, int64, uint32, uint64
from torch import Tensor

from hvd_adaptive.kernels.checks import check_bins, check_counts, check_spectrum
from hvd_adaptive.kernels.cpu.candidates import (
    BLOCK,
    candidate_room,
    count_sample,
    take_candidates,
    trim_candidates,
)
from hvd_adaptive.kernels.cpu.compiling import fused, kernel
from hvd_adaptive.kernels.cpu.enums import TOPK
from hvd_adaptive.kernels.cpu.intrinsics import (
    LANES,
    bits_float,
    float32_pointer,
    float_bits,
    in_bin,
    int64_pointer,
    load_u32,
    trailing_zeros,
    uint32_pointer,
)
from hvd_adaptive.kernels.cpu.memory import thread_buffers
from hvd_adaptive.kernels.cpu.positions import choose_codes
from hvd_adaptive.kernels.floats import BINS, MAGNITUDE


@kernel
def _count_block(x, n, spectrum):
    """Count the magnitudes of n elements by their bins; spectrum is the address of int64 counts."""
    words = carray(uint32_pointer(x), n)
    counts = carray(int64_pointer(spectrum), BINS)
    for i in range(n):
        counts[(int64(words[i]) & MAGNITUDE) >> 16] += 1


def spectrum(x: Tensor) -> npt.NDArray[np.int64]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.spectrum`. Releases the GIL."""
    check_spectrum(x)
    hist = np.zeros(BINS, np.int64)
    _count_block(x.data_ptr(), x.numel(), hist.ctypes.data)
    return hist


def sample_spectrum(x: Tensor) -> npt.NDArray[np.int64]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.sample_spectrum`. Releases the GIL."""
    check_spectrum(x)
    hist = np.zeros(BINS, np.int32)
    count_sample(x.data_ptr(), 0, x.numel(), hist)
    return hist.astype(np.int64)


_FEW_BINS = 6
"""Bins up to which it pays to compare 64 elements at once with each of them."""


@kernel
def _count_fine(x, n, bins, rows, fine):
    """Count the lower 16 bits of the elements in the row of their bin, where it has one (not -1)."""
    whole = n - n % LANES if len(bins) <= _FEW_BINS else 0
    for start in range(0, whole, LANES):
        hits = uint64(0)
        for b in bins:
            hits |= in_bin(x + 4 * start, int32(b << 16))
        while hits:
            magnitude = int64(load_u32(x + 4 * (start + int64(trailing_zeros(hits))))) & MAGNITUDE
            fine[rows[magnitude >> 16], magnitude & 0xFFFF] += int32(1)
            hits &= hits - uint64(1)
    for i in range(whole, n):
        magnitude = int64(load_u32(x + 4 * i)) & MAGNITUDE
        row = rows[magnitude >> 16]
        if row >= 0:  # seldom: a branch that is foreseen
            fine[row, magnitude & 0xFFFF] += int32(1)


def refined_spectrum(x: Tensor, bins: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.refined_spectrum`. Releases the GIL."""
    check_spectrum(x)
    bins = check_bins(bins)
    rows = np.full(BINS, -1, np.int32)
    rows[bins] = np.arange(len(bins), dtype=np.int32)
    fine = np.zeros((len(bins), 1 << 16), np.int32)
    _count_fine(x.data_ptr(), x.numel(), bins, rows, fine)
    return fine


def summary(x: Tensor) -> tuple[npt.NDArray[np.int64], float, float, float]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.summary`. Releases the GIL."""
    check_spectrum(x)
    hist = np.zeros(BINS, np.int64)
    total, energy, top = _summarize(x.data_ptr(), x.numel(), hist.ctypes.data)
    return hist, total, energy, float(np.uint32(top).view(np.float32))


@fused
def _norms_block(x, n):
    """Sum of magnitudes, energy, and largest magnitude (as bits) of n elements."""
    a = carray(float32_pointer(x), n)
    total, energy = 0.0, 0.0
    top = int32(0)
    for i in range(n):
        value = np.float64(a[i])
        total += abs(value)
        energy += value * value
        top = max(top, int32(float_bits(a[i]) & uint32(MAGNITUDE)))
    return total, energy, int64(top)


@kernel
def _summarize(x, n, spectrum):
    """(sum of magnitudes, energy, largest magnitude as bits), block by block: one read of memory."""
    total, energy, top = 0.0, 0.0, int64(0)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        _count_block(x + 4 * start, size, spectrum)  # first: it has time to wait for memory
        block_total, block_energy, block_top = _norms_block(x + 4 * start, size)
        total += block_total
        energy += block_energy
        top = max(top, block_top)
    return total, energy, top


@kernel
def _add_moments(x, n, moments):
    """Add count, sum and square of every element to the row of its sign and bin."""
    words = carray(uint32_pointer(x), n)
    for i in range(n):
        word = uint32(words[i])
        magnitude = np.float64(bits_float(word & uint32(MAGNITUDE)))
        row = moments[int64(word) >> 16]
        row[0] += 1.0
        row[1] += magnitude
        row[2] += magnitude * magnitude


def moments(x: Tensor) -> npt.NDArray[np.float64]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.moments`. Releases the GIL."""
    check_spectrum(x)
    sums = np.zeros((2 * BINS, 3))
    _add_moments(x.data_ptr(), x.numel(), sums)
    return sums.reshape(2, BINS, 3)


@kernel
def _fill_position_bits(x, n, counts, order, table, work):
    """Select the most, thin them out from count to count, and measure what is left."""
    _, indices, values, heads = work
    _, finite, left = take_candidates(x, 0, n, min(n, counts[order[0]]), TOPK, 1, work)
    if not finite:
        return
    for row in order:
        if counts[row] < left:
            if counts[row] > 0:
                trim_candidates(indices, values, left, counts[row])
            left = counts[row]
        table[row, 0] = left
        table[row, 1] = choose_codes(indices, left, heads)


def position_bits(x: Tensor, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.position_bits`. Releases the GIL.

    Cost: top-k's selection of the most, and some ns for each element at each count that takes it.
    """
    counts = check_counts(x, counts)
    table = np.zeros((len(counts), 2), np.int64)
    if len(counts):
        numel = x.numel()
        work = thread_buffers.arrays(candidate_room(numel, min(numel, int(counts.max()))))
        _fill_position_bits(x.data_ptr(), numel, counts, np.argsort(-counts), table, work)
    return table
