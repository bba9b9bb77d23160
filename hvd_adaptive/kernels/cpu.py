"""Kernels for host memory, in Numba: one call does all layers of a bucket, without the GIL.

Two passes over a layer. The first forms ``x + gradient`` in cache, without storing it, measures it and
*collects* the candidates: elements at or above a floor. A NaN or an Inf ends it with nothing changed.
The second stores the sum, and over it what encoding left of the values sent. Every selection rule
sends the largest elements and differs only in how many: it is a floor, a limit, and what is done with
the candidates; collecting and encoding are shared.

The floor of top-k only saves time, it never decides: it is a lower bound of the k-th largest that is
certain (small layers) or was guessed from a sample and is checked afterwards (large layers). What
decides is the exact trimming of the candidates to the k largest. DGC's floor decides where no more
than k reach it.

Magnitudes are compared as their bits: the bits of non-negative floats order as the floats do, and
NaN and Inf are the largest. A *bin* is the upper 16 of these bits: exponent and 7 mantissa bits.

Addresses are passed as int64 and every bound is checked by whoever forms the address. Numba's cache
notices changes of this file only: after a change of a constant in ``wire``, delete ``__pycache__``.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, int32, int64, uint8, uint16, uint32, uint64
from torch import Tensor

from hvd_adaptive.kernels.intrinsics import (
    LANES,
    add_and_survey,
    below_zero,
    bits_float,
    compiled,
    fence,
    float32_pointer,
    float_bits,
    in_bin,
    int64_pointer,
    load_f32,
    load_u8,
    load_u16,
    load_u32,
    load_u64,
    prefetch,
    put_chosen,
    store_f32,
    store_u8,
    store_u16,
    store_u64,
    stream,
    subtract_chosen,
    survey,
    trailing_zeros,
    uint32_pointer,
    whole_log2,
)
from hvd_adaptive.kernels.reference import (
    BINS,
    CANCELLED,
    LARGE,
    LARGEST,
    SAMPLE,
    SMALL,
    STRIDES,
    SelectionRule,
    check_bins,
    check_bodies,
    check_body,
    check_counts,
    check_layers,
    check_outs,
    check_spectra,
    check_spectrum,
    check_thresholds,
    errors_from_spectrum,
)
from hvd_adaptive.wire import ValueFormat
from hvd_adaptive.wire.sparse import (
    CODE_BLOCK,
    HEAD_BITS,
    HEAD_PARAMETER,
    HEAD_TEUHOLA,
    MAX_SCALE,
    VALUE_BLOCK,
    Damage,
    damaged,
)
from hvd_adaptive.wire.varint import MAX_VARINT_BYTES

__all__ = [
    "SelectionRule",
    "errors_from_spectrum",
    "moments",
    "position_bits",
    "refined_spectrum",
    "sample_spectrum",
    "sparse_clear_",
    "sparse_compress_",
    "sparse_decompress_add_",
    "sparse_decompress_sum_",
    "sparse_recompress_",
    "spectrum",
    "summary",
]

BLOCK = 2048
"""Elements handled at once: 8 KiB stay in the first-level cache."""
SPARE = 4096
"""Candidates that a layer may have beyond 3 k before they are trimmed."""
TILE = 8192
"""Elements that are summed at once: 32 KiB."""
AHEAD = 24
"""So many values ahead of time, a value's place in the output is fetched; so many groups, a group's."""
LINE = 64
"""Bytes of a cache line."""
STREAMED = 1 << 20
"""Bytes from which on a sum is written past the cache, which could not hold it until it is read."""
KEPT = 1 << 22
"""Values that a thread keeps room for, 32 MiB to compress and as much to decompress; of more, the room
is given back after each call."""
SLACK = 16
"""Bytes that the bit writer may touch past the end."""

INF = 0x7F800000
MAGNITUDE = 0x7FFFFFFF

FP32, FP16, BF16, INT8, SIGN = (int(value) for value in ValueFormat)
TOPK, THRESHOLD, DGC, REDSYNC = (int(rule) for rule in SelectionRule)
NEAR, FAR = STRIDES

TRUNCATED, OVERLONG, COUNT, FORMAT, PARAMETER, RUN, INDEX, LENGTH, PADDING, VALUE, TRAILING = (
    int(damage) for damage in Damage if damage
)

# Sums may be reordered, but what takes part in them may be a NaN or an Inf.
_kernel, _vector = compiled(), compiled("reassoc", "contract")
_inlined = compiled(inline=True)


# --- reading -------------------------------------------------------------------------------------


@_vector
def _magnitude_sum(x, n):
    """The sum of the magnitudes of n elements."""
    a = carray(float32_pointer(x), n)
    total = 0.0
    for i in range(n):
        total += np.float64(abs(a[i]))
    return total


@_vector
def _measure_block(x, n):
    """Energy and largest magnitude (as bits) of n elements."""
    a = carray(float32_pointer(x), n)
    energy = 0.0
    top = int32(0)
    for i in range(n):
        energy += np.float64(a[i]) * np.float64(a[i])
        top = max(top, int32(float_bits(a[i]) & uint32(MAGNITUDE)))
    return energy, int64(top)


@_kernel
def _take_back(x, g, n):
    """x -= g for n elements that g was added to; what that leaves of rounding alone becomes 0.

    As error feedback does for a layer that was not finite on another rank.
    """
    a = carray(float32_pointer(x), n)
    b = carray(float32_pointer(g), n)
    for i in range(n):
        rest = a[i] - b[i]
        a[i] = rest if abs(rest) > np.float32(CANCELLED) * abs(b[i]) else np.float32(0)


# --- the floor of top-k --------------------------------------------------------------------------


@_kernel
def _bin_of_kth(hist, top, k):
    """The bin of the k-th largest magnitude; 0 where fewer were counted."""
    above = int64(0)
    for b in range(top >> 16, 0, -1):
        above += hist[b]
        if above >= k:
            return b
    return 0


@_kernel
def _raise_maxima(x, g, maxima, n):
    """maxima = max(maxima, |x + g|) as bits, for n elements."""
    a = carray(float32_pointer(x), n)
    if g == 0:
        for i in range(n):
            maxima[i] = max(maxima[i], int32(float_bits(a[i]) & uint32(MAGNITUDE)))
        return
    b = carray(float32_pointer(g), n)
    for i in range(n):
        maxima[i] = max(maxima[i], int32(float_bits(a[i] + b[i]) & uint32(MAGNITUDE)))


@_kernel
def _certain_floor(x, g, n, k, work):
    """A lower bound of the k-th largest magnitude: the k-th largest of 3 k group maxima.

    On scattered data 1.2 k elements reach it. Group j is every width-th element from j on, so that
    the maxima are formed by vector operations.
    """
    hist, maxima, _, _ = work
    width = max(3 * k + 31, 64) & ~31
    if width > n // 2:
        return 1
    maxima[:width] = 0
    for start in range(0, n, width):
        _raise_maxima(x + 4 * start, g + 4 * start if g else 0, maxima, min(width, n - start))
    top = int32(0)
    for i in range(width):
        top = max(top, maxima[i])
        hist[maxima[i] >> 16] += int32(1)
    b = _bin_of_kth(hist, int64(top), k)
    for i in range(width):
        hist[maxima[i] >> 16] = 0
    return max(1, b << 16)


@_kernel
def _sample(x, g, n, hist):
    """Count the bins of a sample: one group of 16 in 13, or in 61 of large layers. (top, elements)

    Odd strides, because weights have periods of powers of two.
    """
    stride = SAMPLE * (NEAR if n < LARGE else FAR)
    top, seen = int64(0), 0
    for start in range(0, n - SAMPLE, stride):
        for line in range(0, 4 * SAMPLE, LINE):
            further = 4 * (start + AHEAD * stride) + line
            prefetch(x + further)
            if g:
                prefetch(g + further)
        a = carray(float32_pointer(x + 4 * start), SAMPLE)
        b = carray(float32_pointer(g + 4 * start if g else x), SAMPLE)
        for i in range(SAMPLE):
            value = a[i] + b[i] if g else a[i]
            magnitude = int64(float_bits(value)) & MAGNITUDE
            hist[magnitude >> 16] += int32(1)
            top = max(top, magnitude)
        seen += SAMPLE
    return top, seen


@_kernel
def _sampled_floor(x, g, n, k, hist):
    """A guess at a magnitude that somewhat more than k elements reach."""
    top, seen = _sample(x, g, n, hist)
    expected = k * seen / n
    b = _bin_of_kth(hist, top, int64(expected + 4 * np.sqrt(expected)) + 2)
    hist[:] = 0
    return max(1, b << 16)


@_kernel
def _floor_dgc(x, g, n, k, hist):
    """``reference.dgc_floor`` of the sample (a test compares the two)."""
    top, seen = _sample(x, g, n, hist)
    expected = k * seen / n
    deviation = np.sqrt(expected)
    wanted = int64(max(expected + 2 * deviation, 0.7 * expected + 4 * deviation + 2))
    b = _bin_of_kth(hist, top, wanted)
    floor = int64(1)
    if b > 0:
        reached = int64(0)
        for above in range(b, (top >> 16) + 1):
            reached += hist[above]
        floor = (b << 16) + ((reached - wanted) << 16) // int64(hist[b])
    hist[:] = 0
    return floor


@_kernel
def _floor_topk(x, g, n, k, work):
    """Where to start collecting the k largest: (floor, whether it is certain)."""
    if k == 0:
        return INF, True
    if k >= n // 3:
        return int64(1), True
    if n <= SMALL:
        return _certain_floor(x, g, n, k, work), True
    floor = _sampled_floor(x, g, n, k, work[0])
    return floor, floor == 1


# --- collecting ----------------------------------------------------------------------------------


@_kernel
def _extremes(values, n):
    """The smallest and the largest magnitude of n elements, as bits."""
    words = carray(uint32_pointer(values), n)
    lowest, top = int32(INF), int32(0)
    for i in range(n):
        magnitude = int32(words[i] & uint32(MAGNITUDE))
        lowest, top = min(lowest, magnitude), max(top, magnitude)
    return int64(lowest), int64(top)


@_kernel
def _reaching(values, n, floor):
    """How many of n elements have magnitudes whose bits are at least a number."""
    words = carray(uint32_pointer(values), n)
    bar, found = int32(floor), int32(0)
    for i in range(n):
        found = int32(found + int32(int32(words[i] & uint32(MAGNITUDE)) >= bar))
    return int64(found)


@_kernel
def _trim(indices, values, count, k):
    """Keep the k largest of more than k candidates in place, in order; ties go to the lowest index.

    Returns a magnitude as bits that all kept reach; those equal to it may have been too many. Found by
    bisection: to count is so much quicker than to sort into bins that twenty times are, too.
    """
    address = int64(values.ctypes.data)
    low, high = _extremes(address, count)
    above, high = int64(0), high + 1  # reach the upper end; at least k reach the lower one
    while high - low > 1 and above < k:
        middle = (low + high) >> 1
        found = _reaching(address, count, middle)
        if found > k:
            low = middle
        else:
            high, above = middle, found
    wanted, kept = k - above, int64(0)
    for i in range(count):
        magnitude = int64(float_bits(values[i])) & MAGNITUDE
        tie = int64((magnitude == low) & (wanted > 0))
        wanted -= tie
        indices[kept] = indices[i]
        values[kept] = values[i]
        kept += int64(magnitude >= high) | tie
    return high if above == k else low


@_inlined
def _add_group(x, g, left, floor):
    """x += g for the next 64 elements (of ``left`` that are there), if all sums are finite.

    Returns (which of them reach the floor, as bits; their energy: finite if they are). Where g is 0,
    nothing is added.
    """
    if left >= LANES:
        return add_and_survey(x, g, int32(floor)) if g != 0 else survey(x, g, int32(floor))
    hits, energy = uint64(0), 0.0
    for i in range(left):
        value = load_f32(x + 4 * i) + (load_f32(g + 4 * i) if g != 0 else np.float32(0))
        magnitude = int64(float_bits(value)) & MAGNITUDE
        hits |= uint64(magnitude >= floor) << uint64(i)
        energy += np.float64(value) * np.float64(value)
    if g != 0 and energy < np.inf:
        for i in range(left):
            store_f32(x + 4 * i, load_f32(x + 4 * i) + load_f32(g + 4 * i))
    return hits, energy


@_kernel
def _collect(x, g, n, floor, limit, summing, work):
    """Add g to x, and collect the elements of the sum that reach the floor.

    Of too many at least the ``limit`` largest: candidates beyond it are trimmed when the room is full.
    From then on the least of those kept is the floor, and an equal does not reach it: its index would
    be higher.

    Returns (energy, whether all is finite, sum of magnitudes if ``summing``, count). If not, x is as it
    was but for rounding, and what was collected means nothing.
    """
    _, indices, values, _ = work
    room = _room(n, limit)
    energy, total, count = 0.0, 0.0, int64(0)
    for block in range(0, n, BLOCK):
        size = min(BLOCK, n - block)
        for start in range(block, block + size, LANES):
            here, there = x + 4 * start, g + 4 * start if g != 0 else int64(0)
            # The branches below would otherwise leave the memory idle.
            for line in range(0, 4 * LANES, LINE):
                prefetch(here + 4 * BLOCK + line)
                prefetch((there if g != 0 else here) + 4 * BLOCK + line)
            if count + LANES > room and count > limit:
                floor = _trim(indices, values, count, limit) + 1
                count = limit
            hits, squares = _add_group(here, there, n - start, floor)
            if not squares < np.inf:
                if g != 0:
                    _take_back(x, g, start)
                return energy, False, total, count
            energy += squares
            # The first without a branch: whether there is one, nobody could foresee; two are rare.
            while True:
                i = int64(trailing_zeros(hits)) & (LANES - 1)
                indices[count] = int32(start + i)
                values[count] = load_f32(here + 4 * i)
                count += int64(hits != 0)
                hits &= hits - uint64(1)
                if hits == 0:
                    break
        if summing:
            total += _magnitude_sum(x + 4 * block, size)
    return energy, True, total, count


# --- the rules -----------------------------------------------------------------------------------


@_kernel
def _take(x, g, n, k, rule, threshold, work):
    """Add g to x, and take what a rule sends of the sum, as candidates in order; threshold as bits.

    Returns (energy, whether all is finite, count); if not, x is as it was but for rounding.
    """
    limit = min(n, 2 * k + 1) if rule == REDSYNC else k
    guessed = rule == DGC and n > SMALL and 0 < k < n // 3
    if guessed:
        first, certain = _floor_dgc(x, g, n, k, work[0]), False
    elif rule == THRESHOLD and k > 0:
        first, certain = threshold, True
    else:
        first, certain = _floor_topk(x, g, n, limit, work)
    while True:
        energy, finite, total, count = _collect(x, g, n, first, limit, rule == REDSYNC, work)
        if not finite:
            return energy, False, count
        if certain or first == 1 or count >= limit or (guessed and 10 * count >= 7 * k):
            break
        first, guessed, g = int64(1), False, int64(0)  # too high a guess; x is the sum by now
    if count > limit:
        _trim(work[1], work[2], count, limit)
        count = limit
    if rule == REDSYNC and count > k:
        count = _cut_redsync(count, k, np.float32(total / n), work)
    return energy, True, count


@_kernel
def _cut_redsync(count, k, mean, work):
    """Keep between k and 2 k of the 2 k + 1 largest, in order; returns how many."""
    hist, indices, values, _ = work
    lowest, top = int64(INF) >> 16, int64(0)
    for i in range(count):
        magnitude = int64(float_bits(values[i])) & MAGNITUDE
        hist[magnitude >> 16] += int32(1)
        lowest, top = min(lowest, magnitude >> 16), max(top, magnitude)
    for b in range((top >> 16) - 1, lowest - 1, -1):
        hist[b] += hist[b + 1]
    floor = _bisect(hist, lowest, count, k, mean, top) << 16
    hist[lowest : (top >> 16) + 1] = 0
    if floor == 0:
        _trim(indices, values, count, k)
        return k
    kept = int64(0)
    for i in range(count):
        indices[kept] = indices[i]
        values[kept] = values[i]
        kept += int64((int64(float_bits(values[i])) & MAGNITUDE) >= floor)
    return kept


@_kernel
def _bisect(reached, lowest, count, k, mean, top):
    """``reference.redsync_count``, but it returns the bin of the threshold; 0 if there is none.

    ``reached`` counts the candidates in a bin or a higher one; none is below the ``lowest``.
    """
    low, high, middle = 0.0, np.float64(bits_float(uint32(top))), np.float64(mean)
    low_bin, high_bin = int64(0), (top >> 16) + 1
    while high_bin - low_bin > 1:
        b = max(int64(1), int64(float_bits(np.float32(middle))) >> 16)
        found = int64(reached[b]) if b >= lowest else count
        if k <= found <= 2 * k:
            return b
        if found < k:
            high, high_bin = middle, b
        else:
            low, low_bin = middle, b
        middle = low + (high - low) / 2
    return int64(0)


# --- storing -------------------------------------------------------------------------------------


@_kernel
def _count_block(x, n, spectrum):
    """Count the magnitudes of n elements by their bins; spectrum is the address of int64 counts."""
    words = carray(uint32_pointer(x), n)
    counts = carray(int64_pointer(spectrum), BINS)
    for i in range(n):
        counts[(int64(words[i]) & MAGNITUDE) >> 16] += 1


@_kernel
def _store(x, n, indices, values, count, spectrum):
    """Put values in the place of the sums at their indices; count all before, if spectrum is not 0."""
    if spectrum != 0:
        _count_block(x, n, spectrum)
    for i in range(count):
        prefetch(x + 4 * int64(indices[min(i + AHEAD, count - 1)]))
        store_f32(x + 4 * int64(indices[i]), values[i])


# --- coding --------------------------------------------------------------------------------------


@_kernel
def _bit_length(value):
    bits = 0
    while value > 0:
        value >>= 1
        bits += 1
    return bits


@_kernel
def _put_varint(out, value):
    while value > 0x7F:
        store_u8(out, uint8(0x80 | (value & 0x7F)))
        value >>= 7
        out += 1
    store_u8(out, uint8(value))
    return out + 1


@_kernel
def _varint_bytes(value):
    return max(1, (_bit_length(value) + 6) // 7)


@_kernel
def _value_bytes(count, value_format):
    if value_format == INT8:
        return count + 4 * ((count + VALUE_BLOCK - 1) // VALUE_BLOCK)
    if value_format == SIGN:
        return 8 + (count + 7) // 8
    return count * (4 if value_format == FP32 else 2)


@_kernel
def _sparse_bound(numel, count, value_format):
    """``wire.sparse.max_sparse_bytes`` (a test compares the two)."""
    count = min(count, numel)
    if count <= 0:
        return 1
    rest = numel - count
    r = max(0, _bit_length(rest // count) - 1)
    blocks = (count + CODE_BLOCK - 1) // CODE_BLOCK
    index_bytes = ((rest >> r) + count * (r + 1) + HEAD_BITS * blocks + 7) // 8
    return (
        _varint_bytes(count << 4)
        + _varint_bytes(index_bytes)
        + index_bytes
        + _value_bytes(count, value_format)
    )


@_kernel
def _choose_codes(indices, count, heads):
    """What every block of gaps begins with; returns the bits of the whole stream."""
    bits = 0
    previous = -1
    for start in range(0, count, CODE_BLOCK):
        size = min(CODE_BLOCK, count - start)
        total = int64(indices[start + size - 1]) - previous - size
        middle = max(1, _bit_length(total // size) - 1)
        # quotient sums for middle - 1, middle and middle + 1
        first = int64(indices[start]) - previous - 1
        low, mid, high = first >> (middle - 1), first >> middle, first >> (middle + 1)
        logs = whole_log2(uint64(first + 1))
        for i in range(start + 1, start + size):
            gap = int64(indices[i] - indices[i - 1] - int32(1))
            low += gap >> (middle - 1)
            mid += gap >> middle
            high += gap >> (middle + 1)
            logs += whole_log2(uint64(gap + 1))
        best, cost = middle - 1, low + size * middle
        if mid + size * (middle + 1) < cost:
            best, cost = middle, mid + size * (middle + 1)
        if high + size * (middle + 2) < cost:
            best, cost = middle + 1, high + size * (middle + 2)
        r = logs // size
        logs = whole_log2(uint64(first + (int64(1) << r)))
        for i in range(start + 1, start + size):
            gap = int64(indices[i] - indices[i - 1] - int32(1))
            logs += whole_log2(uint64(gap + (int64(1) << r)))
        if 2 * logs + size * (1 - r) < cost:
            best, cost = r | HEAD_TEUHOLA, 2 * logs + size * (1 - r)
        heads[start // CODE_BLOCK] = best
        bits += HEAD_BITS + cost
        previous = int64(indices[start + size - 1])
    return bits


@_kernel
def _put_positions(out, indices, count, heads):
    """Write the index stream; whole 8-byte words are stored, so SLACK bytes past it are touched."""
    word, fill = uint64(0), int64(0)
    previous = int64(-1)
    for start in range(0, count, CODE_BLOCK):
        head = int64(heads[start // CODE_BLOCK])
        word |= uint64(head) << uint64(fill)
        fill += HEAD_BITS
        r = head & HEAD_PARAMETER
        width, mask = r, (int64(1) << r) - 1
        for i in range(start, min(start + CODE_BLOCK, count)):
            store_u64(out, word)
            out += fill >> 3
            word >>= uint64(fill & ~7)
            fill &= 7
            index = int64(indices[i])
            gap = index - previous - 1
            previous = index
            zeros = gap >> r
            if head >= HEAD_TEUHOLA:
                gap += mask + 1
                width = whole_log2(uint64(gap))
                zeros = width - r
            ones = ((gap & ((int64(1) << width) - 1)) << 1) | 1
            zeros += fill
            while zeros > 24:  # room for a one and 31 low bits
                store_u64(out, word)
                out += 3
                word >>= uint64(24)
                zeros -= 24
            word |= uint64(ones) << uint64(zeros)
            fill = zeros + 1 + width
    store_u64(out, word)
    return out + ((fill + 7) >> 3)


@_kernel
def _half_bits(value):
    """IEEE half of a finite float32, round to nearest even, saturated at 65504."""
    word = int64(float_bits(value))
    magnitude = word & MAGNITUDE
    sign = (word >> 16) & 0x8000
    if magnitude >= 0x477FE000:
        return sign | 0x7BFF
    if magnitude < 0x38800000:
        # Below 2^-14 halves are multiples of 2^-24, the spacing of floats in [0.5, 1): let the
        # addition round.
        shifted = bits_float(uint32(magnitude)) + np.float32(0.5)
        return sign | (int64(float_bits(shifted)) - 0x3F000000)
    return sign | ((magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13)


@_kernel
def _half_value(half):
    """The float32 of a half; the codes of Inf and NaN give Inf."""
    if half & 0x7C00 == 0x7C00:
        return bits_float(uint32(INF))
    scaled = bits_float(uint32((half & 0x7FFF) << 13)) * np.float32(2.0**112)
    return bits_float(float_bits(scaled) | uint32((half & 0x8000) << 16))


@_kernel
def _brain_bits(value):
    """bfloat16 of a finite float32, round to nearest even, saturated at the largest finite."""
    word = int64(float_bits(value))
    rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    if rounded & 0x7FFF >= INF >> 16:
        rounded -= 1
    return rounded


@_kernel
def _put_int8(out, values, start, size):
    """One block of int8 codes after its scale; values becomes the remainder. Returns the energy."""
    largest = np.float32(0)
    for i in range(start, start + size):
        largest = max(largest, abs(values[i]))
    # the division of a denormal may underflow to 0, and 127 times the quotient may overflow
    scale = max(largest / np.float32(127), bits_float(uint32(1)))
    scale = min(scale, np.float32(MAX_SCALE))
    store_f32(out, scale)
    energy = 0.0
    for i in range(size):
        code = np.rint(values[start + i] / scale)
        code = min(max(code, np.float32(-127)), np.float32(127))
        store_u8(out + 4 + i, uint8(int32(code)))
        decoded = code * scale
        values[start + i] -= decoded
        energy += np.float64(decoded) * np.float64(decoded)
    return energy


@_kernel
def _put_signs(out, values, count):
    """Two means and a sign bit a value; values becomes the remainder. Returns the energy."""
    plus, minus, negatives = 0.0, 0.0, int64(0)
    for i in range(count):
        # No branch: nobody could foresee it.
        value = np.float64(values[i])
        plus += max(value, 0.0)
        minus -= min(value, 0.0)
        negatives += int64(values[i] < 0)
    positives = count - negatives
    up = np.float32(plus / positives) if positives else np.float32(0)
    down = np.float32(minus / negatives) if negatives else np.float32(0)
    store_f32(out, up)
    store_f32(out + 4, down)
    address, whole = int64(values.ctypes.data), count & ~7
    for start in range(0, whole, 8):
        byte = below_zero(address + 4 * start)
        store_u8(out + 8 + (start >> 3), byte)
        subtract_chosen(address + 4 * start, byte, -down, up)
    last = int64(0)
    for i in range(whole, count):
        negative = values[i] < 0
        last |= int64(negative) << (i - whole)
        values[i] -= -down if negative else up
    if count > whole:
        store_u8(out + 8 + (whole >> 3), uint8(last))
    squares = positives * np.float64(up) ** 2
    return squares + negatives * np.float64(down) ** 2


@_kernel
def _put_values(out, values, count, value_format):
    """Write the values and leave in them what rounding left out. Returns (energy, next address)."""
    energy = 0.0
    if value_format == INT8:
        for start in range(0, count, VALUE_BLOCK):
            size = min(VALUE_BLOCK, count - start)
            energy += _put_int8(out, values, start, size)
            out += 4 + size
        return energy, out
    if value_format == SIGN:
        return _put_signs(out, values, count), out + _value_bytes(count, value_format)
    for i in range(count):
        value = values[i]
        decoded = value
        if value_format == FP32:
            store_f32(out + 4 * i, value)
        elif value_format == FP16:
            half = _half_bits(value)
            store_u16(out + 2 * i, uint16(half))
            decoded = _half_value(half)
        else:
            brain = _brain_bits(value)
            store_u16(out + 2 * i, uint16(brain))
            decoded = bits_float(uint32(brain << 16))
        values[i] = value - decoded
        energy += np.float64(decoded) * np.float64(decoded)
    return energy, out + _value_bytes(count, value_format)


@_kernel
def _encode(out, indices, values, count, value_format, heads):
    """Write one layer and leave in its values what rounding left out. Returns (energy, address)."""
    out = _put_varint(out, (count << 4) | (value_format << 1 if count else 0))
    if count == 0:
        return 0.0, out
    index_bytes = (_choose_codes(indices, count, heads) + 7) >> 3
    out = _put_varint(out, index_bytes)
    out = _put_positions(out, indices, count, heads)
    return _put_values(out, values, count, value_format)


# --- compression of a bucket ---------------------------------------------------------------------


@_kernel
def _room(n, limit):
    """Candidates that a layer may have: three times what is kept of them, and some more."""
    return min(n, 3 * limit + SPARE)


@_kernel
def _sizes(offsets, counts, value_format, rule):
    """Bytes that the body needs at most, and the most candidates that a layer can have."""
    total, candidates = 0, 0
    for layer in range(len(counts)):
        n = offsets[layer + 1] - offsets[layer]
        k = min(counts[layer], n)
        limit = k
        most = k
        if rule == REDSYNC:
            limit, most = 2 * k + 1, 2 * k
        total += _sparse_bound(n, most, value_format)
        candidates = max(candidates, _room(n, limit))
    return total, candidates


@functools.lru_cache(maxsize=256)
def _kept_sizes(offsets: bytes, counts: bytes, value_format: int, rule: int) -> tuple[int, int]:
    """As :func:`_sizes`; kept, because a bucket has the same ones at every step."""
    edges, wanted = (np.frombuffer(each, np.int64).copy() for each in (offsets, counts))
    bound, candidates = _sizes(edges, wanted, value_format, rule)
    return bound, candidates


@_kernel
def _compress_layer(x, g, n, k, rule, floor, value_format, out, stats, spectrum, work):
    """One layer, from the gradient to the payload; returns the address after it."""
    _, indices, values, heads = work
    energy, finite, count = _take(x, g, n, k, rule, floor, work)
    if not finite:
        stats[:] = 0.0
        stats[3] = 1.0
        return _put_varint(out, int64(1))
    sent, out = _encode(out, indices, values, count, value_format, heads)
    _store(x, n, indices, values, count, spectrum)
    stats[0], stats[1], stats[2], stats[3] = energy, sent, float(count), 0.0
    return out


@_kernel
def _compress_layers(x, offsets, counts, rule, floors, grads, how, out, stats, spectra, work):
    """All layers of a bucket; returns the bytes written."""
    start = out
    for layer in range(len(counts)):
        first = offsets[layer]
        n = offsets[layer + 1] - first
        k = min(counts[layer], n)
        spectrum = spectra + 8 * BINS * layer if spectra != 0 else 0
        g, floor, row = grads[layer], floors[layer], stats[layer]
        out = _compress_layer(x + 4 * first, g, n, k, rule, floor, how, out, row, spectrum, work)
    return out - start


@_kernel
def _energy_by_layer(offsets, indices, values, count, stats, column):
    """Add the energies of values of all layers' one vector to a column of their layers' rows."""
    layer = 0
    for i in range(count):
        while int64(indices[i]) >= offsets[layer + 1] - offsets[0]:
            layer += 1
        stats[layer, column] += np.float64(values[i]) * np.float64(values[i])


@_kernel
def _note_sent(end, offsets, indices, values, count, value_format, stats):
    """Energy and number of what each layer sends of a body that ends at ``end``, into its row."""
    if count == 0:
        return
    _get_values(end - _value_bytes(count, value_format), values, count, value_format)
    _energy_by_layer(offsets, indices, values, count, stats, 1)
    edges = offsets - offsets[0]
    for layer in range(len(stats)):
        cuts = np.searchsorted(indices[:count], edges[layer : layer + 2])
        stats[layer, 2] = float(cuts[1] - cuts[0])


class _Room:
    """Of indices and values of up to so many elements, and a byte for each block of them.

    Room for the most that was ever sent would grow for long while plans vary, as if it leaked.
    """

    def __init__(self) -> None:
        self._kept = self._make(1 << 12)

    @staticmethod
    def _make(count: int) -> tuple[npt.NDArray[np.generic], ...]:
        heads = np.empty(count // CODE_BLOCK + 1, np.uint8)
        return np.empty(count, np.int32), np.empty(count, np.float32), heads

    def of(self, count: int) -> tuple[npt.NDArray[np.generic], ...]:
        if count > KEPT:
            return self._make(count)
        if count > len(self._kept[0]):
            self._kept = self._make(min(KEPT, count + count // 4))
        return self._kept


class _Work(threading.local):
    """Buffers of one thread; the histogram is always zero."""

    def __init__(self) -> None:
        self.hist = np.zeros(BINS, np.int32)
        self.block = np.empty(TILE, np.float32)
        self._candidates, self._decoded = _Room(), _Room()

    def arrays(self, candidates: int) -> tuple[npt.NDArray[np.generic], ...]:
        """For compressing: bins, candidates, and what blocks of positions begin with."""
        return (self.hist, *self._candidates.of(candidates))

    def decoded(self, count: int) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        """For decompressing: indices and values."""
        indices, values, _ = self._decoded.of(count)
        return indices, values


_work = _Work()


def sparse_compress_(
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    values: ValueFormat,
    grads: Sequence[Tensor] | None = None,
    reserve: int = 0,
    spectra: npt.NDArray[np.int64] | None = None,
    rule: SelectionRule = SelectionRule.topk,
    thresholds: npt.NDArray[np.float32] | None = None,
    whole: bool = False,
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """See :func:`hvd_adaptive.kernels.reference.sparse_compress_`: the same bytes, at memory speed.

    Releases the GIL. Cost at density 1 %: about two copies of the tensor, and for small layers some
    microseconds each. Memory: 24 bytes a value sent by the largest layer (48 for RedSync), of which a
    thread keeps up to 32 MiB.
    """
    offsets, counts = check_layers(x, offsets, counts, grads, whole)
    floors = check_thresholds(rule, thresholds, len(counts))
    layers = len(offsets) - 1
    check_spectra(spectra, layers)
    addresses = np.zeros(layers, np.int64)
    if grads is not None:
        addresses[:] = [grad.data_ptr() for grad in grads]
    spectra_address = 0 if spectra is None else spectra.ctypes.data
    spans = offsets[[0, -1]] if whole else offsets
    bound, candidates = _kept_sizes(spans.tobytes(), counts.tobytes(), int(values), int(rule))
    buffer = torch.empty(reserve + max(bound, layers) + SLACK, dtype=torch.uint8)
    stats = np.empty((layers, 4))
    how, work = int(values), _work.arrays(candidates)
    start, out = x.data_ptr(), buffer.data_ptr() + reserve
    if not whole:
        size = _compress_layers(
            start, offsets, counts, int(rule), floors, addresses, how, out, stats, spectra_address, work
        )
        return buffer[: reserve + size], stats
    # Every layer is added and measured by itself first: one that is not finite must stay as it was.
    none = np.zeros(layers, np.int64)
    _compress_layers(
        start,
        offsets,
        none,
        int(SelectionRule.topk),
        none,
        addresses,
        how,
        out,
        stats,
        spectra_address,
        work,
    )
    if stats[:, 3].any():
        buffer[reserve] = 1
        return buffer[: reserve + 1], stats
    total = np.empty((1, 4))
    size = _compress_layers(
        start, spans, counts, int(rule), floors, np.zeros(1, np.int64), how, out, total, 0, work
    )
    count = int(total[0, 2])
    _note_sent(out + size, offsets, work[1], _work.decoded(count)[1], count, how, stats)
    return buffer[: reserve + size], stats


# --- decompression -------------------------------------------------------------------------------


@_kernel
def _get_varint(position, end):
    """(value, next address), or (-damage, address of the damage)."""
    value = int64(0)
    for length in range(MAX_VARINT_BYTES):
        if position + length >= end:
            return -TRUNCATED, end
        byte = int64(load_u8(position + length))
        value |= (byte & 0x7F) << (7 * length)
        if byte < 0x80:
            if byte == 0 and length > 0:
                break
            return value, position + length + 1
    return -OVERLONG, position


@_kernel
def _window(position, bit, end):
    """64 bits from a bit address on, at least 57 of them the stream's; zeros past its end."""
    address = position + (bit >> 3)
    if address + 8 <= end:
        return load_u64(address) >> uint64(bit & 7)
    word = uint64(0)
    for i in range(max(0, end - address)):
        word |= uint64(load_u8(address + i)) << uint64(8 * i)
    return word >> uint64(bit & 7)


@_kernel
def _skip_zeros(position, bit, end, most):
    """Count zero bits until a one and its low bits lie within one window: (damage, bit, zeros)."""
    size = 8 * (end - position)
    skipped = 0
    zeros = int64(trailing_zeros(_window(position, bit, end)))
    while zeros > 25:
        skipped += 25
        bit += 25
        if bit >= size:
            return TRUNCATED, bit, 0
        if skipped > most:
            return RUN, bit, 0
        zeros = int64(trailing_zeros(_window(position, bit, end)))
    return 0, bit, skipped


@_kernel
def _name_excess(position, bit, end, n, head, zeros, quotient, width):
    """(damage, its bit) of an index past the end whose code begins at a bit, by the reference's words.

    ``zeros`` of the ``quotient`` were not skipped, as 25 at a time are where a word does not hold all.
    """
    most = _most_zeros(n, head)
    if zeros > 25:
        damage, bit, skipped = _skip_zeros(position, bit, end, most)
        if damage:
            return damage, bit
        zeros -= skipped
    if head >= HEAD_TEUHOLA and quotient > most:
        return RUN, bit
    return INDEX, bit + zeros + 1 + width


@_inlined
def _next_index(position, end, n, i, bit, index, head, word, left):
    """Decode index i, below n: (damage, bit, index, head, word, left), all but the first as for i + 1.

    ``head`` is what the block begins with; ``word`` holds the stream from ``bit`` on, ``left`` bits.
    """
    if i % CODE_BLOCK == 0:
        head = int64(_window(position, bit, end) & uint64(HEAD_PARAMETER | HEAD_TEUHOLA))
        bit += HEAD_BITS
        left = int64(0)
        if head & HEAD_PARAMETER > _bit_length(n):
            return PARAMETER, bit, index, head, word, left
    r, grows = head & HEAD_PARAMETER, head >= HEAD_TEUHOLA
    zeros, skipped = int64(trailing_zeros(word)), int64(0)
    if zeros + 1 + r + (zeros if grows else 0) > left:
        damage, bit, skipped = _skip_zeros(position, bit, end, _most_zeros(n, head))
        if damage:
            return damage, bit, index, head, word, left
        word, left = _window(position, bit, end), int64(57)
        zeros = int64(trailing_zeros(word))
    quotient = skipped + zeros
    width = min(r + quotient, 62) if grows else r
    index += 1 + (int64(word >> uint64(zeros + 1)) & ((int64(1) << width) - 1))
    index += (int64(1) << width) - (int64(1) << r) if grows else quotient << r
    if index >= n:
        damage, bit = _name_excess(position, bit, end, n, head, zeros, quotient, width)
        return damage, bit, index, head, word, left
    length = zeros + 1 + width
    return 0, bit + length, index, head, word >> uint64(length), left - length


@_kernel
def _most_zeros(n, head):
    """The zeros before the one of the longest gap that n elements have room for, or somewhat more."""
    r = head & HEAD_PARAMETER
    return _bit_length(n + (int64(1) << r)) - 1 - r if head >= HEAD_TEUHOLA else n >> r


@_kernel
def _check_positions_end(position, end, bit):
    """(damage, address) of a stream in [position, end) whose last index ends before a bit."""
    if bit > 8 * (end - position):
        return TRUNCATED, end
    if (bit + 7) >> 3 != end - position:
        return LENGTH, position + (bit >> 3)
    if _window(position, bit, end) != 0:
        return PADDING, end - 1
    return 0, end


@_kernel
def _get_positions(position, end, n, indices, count):
    """Decode count indices below n from the stream in [position, end); returns (damage, address)."""
    return _get_positions_rest(position, end, n, indices, 0, count, int64(0), int64(-1), int64(0))


@_kernel
def _get_positions_rest(position, end, n, indices, start, count, bit, index, head):
    """The same from index number ``start`` on; ``bit``, ``index`` and ``head`` are those before it."""
    word, left = uint64(0), int64(0)
    for i in range(start, count):
        damage, bit, index, head, word, left = _next_index(
            position, end, n, i, bit, index, head, word, left
        )
        if damage:
            return damage, position + (bit >> 3)
        indices[i] = int32(index)
    return _check_positions_end(position, end, bit)


@_inlined
def _quick_index(position, n, bit, index, head):
    """Decode an index whose code takes at most 57 bits: (whether it does, and is sound, bit, index).

    At least 8 bytes of the stream are there from ``bit`` on.
    """
    r, grows = head & HEAD_PARAMETER, -(head >> 5)  # all bits or none
    word = load_u64(position + (bit >> 3)) >> uint64(bit & 7)
    zeros = int64(trailing_zeros(word))
    width = r + (zeros & grows)
    length = zeros + 1 + width
    power = int64(1) << (width & 63)
    index += 1 + (int64(word >> uint64((zeros + 1) & 63)) & (power - 1))
    index += ((zeros << r) & ~grows) | ((power - (int64(1) << r)) & grows)
    return (length <= 57) & (index < n), bit + length, index


@_kernel
def _get_positions_pair(positions, ends, n, indices, counts):
    """Decode counts[j] indices below n from the stream in [positions[j], ends[j]), j being 0 and 1.

    Returns whether both streams are sound. They are decoded in lock step: to decode an index, the
    processor has to wait for the one before, but not for the other stream's.
    """
    one, other = indices
    here, there = positions
    bit, index, head = int64(0), int64(-1), int64(0)
    bit2, index2, head2 = int64(0), int64(-1), int64(0)
    last, last2 = 8 * (ends[0] - here - 8), 8 * (ends[1] - there - 8)
    none, left = uint64(0), int64(0)
    both, i = min(counts[0], counts[1]), int64(0)
    while i < both:
        # What is not quick: the start of a block, a long gap, the last bytes.
        bad, bit, index, head, _, _ = _next_index(here, ends[0], n, i, bit, index, head, none, left)
        bad2, bit2, index2, head2, _, _ = _next_index(
            there, ends[1], n, i, bit2, index2, head2, none, left
        )
        if bad or bad2:
            return False
        one[i], other[i] = int32(index), int32(index2)
        i += 1
        block = min(both, (i + CODE_BLOCK - 1) // CODE_BLOCK * CODE_BLOCK)
        while i < block and bit <= last and bit2 <= last2:
            fine, next_bit, next_index = _quick_index(here, n, bit, index, head)
            fine2, next_bit2, next_index2 = _quick_index(there, n, bit2, index2, head2)
            if not fine & fine2:
                break
            bit, index, bit2, index2 = next_bit, next_index, next_bit2, next_index2
            one[i], other[i] = int32(index), int32(index2)
            i += 1
    damage, _ = _get_positions_rest(here, ends[0], n, one, both, counts[0], bit, index, head)
    damage2, _ = _get_positions_rest(there, ends[1], n, other, both, counts[1], bit2, index2, head2)
    return damage == 0 and damage2 == 0


@_kernel
def _get_values(position, values, count, value_format):
    """Decode count values; the caller has checked that their bytes are there."""
    if value_format == INT8:
        for start in range(0, count, VALUE_BLOCK):
            size = min(VALUE_BLOCK, count - start)
            scale = load_f32(position)
            for i in range(size):
                # two conversions: a byte is signed only once it is an int8
                code = (int64(load_u8(position + 4 + i)) ^ 0x80) - 0x80
                values[start + i] = np.float32(code) * scale
            position += 4 + size
        return
    if value_format == SIGN:
        up, down = load_f32(position), load_f32(position + 4)
        address, whole = int64(values.ctypes.data), count & ~7
        for start in range(0, whole, 8):
            put_chosen(address + 4 * start, load_u8(position + 8 + (start >> 3)), -down, up)
        for i in range(whole, count):
            negative = (int64(load_u8(position + 8 + (i >> 3))) >> (i & 7)) & 1
            values[i] = -down if negative else up
        return
    for i in range(count):
        if value_format == FP32:
            values[i] = load_f32(position + 4 * i)
        elif value_format == FP16:
            values[i] = _half_value(int64(load_u16(position + 2 * i)))
        else:
            values[i] = bits_float(uint32(load_u16(position + 2 * i)) << uint32(16))


@_kernel
def _check_signs(position, count):
    """(damage, address) of the two means and the bits after the last sign."""
    for mean in range(2):
        if (int64(load_u32(position + 4 * mean)) & MAGNITUDE) >= INF:
            return VALUE, position
    last = position + 7 + (count + 7) // 8
    if count & 7 and int64(load_u8(last)) >> (count & 7):
        return PADDING, last
    return 0, position


@_kernel
def _read_head(position, end, n, expected):
    """What a layer's bytes announce: (damage, next address or that of the damage, count, how, bytes).

    Count -1 marks a nonfinite layer; ``bytes`` are those of the positions, which come next.
    """
    header, after = _get_varint(position, end)
    if header < 0:
        return -header, after, 0, 0, 0
    count, value_format = header >> 4, (header >> 1) & 7
    if count == 0:
        if value_format != 0:
            return FORMAT, position, 0, 0, 0
        return 0, after, -(header & 1), 0, 0
    if count > n or header & 1:
        return COUNT, position, 0, 0, 0
    if value_format > SIGN or (value_format != expected and expected >= 0):
        return FORMAT, position, 0, 0, 0
    index_bytes, position = _get_varint(after, end)
    if index_bytes < 0:
        return -index_bytes, position, 0, 0, 0
    value_bytes = _value_bytes(count, value_format)
    if index_bytes > end - position or value_bytes > end - position - index_bytes:
        return TRUNCATED, end, 0, 0, 0
    return 0, position, count, value_format, index_bytes


@_kernel
def _most_values(position, end, numels, expected):
    """The most that a layer of a body holds, of those before the first that is announced wrongly."""
    most = int64(0)
    for layer in range(len(numels)):
        damage, position, count, value_format, index_bytes = _read_head(
            position, end, numels[layer], expected
        )
        if damage:
            break
        if count > 0:
            position += index_bytes + _value_bytes(count, value_format)
            most = max(most, count)
    return most


@_kernel
def _read_values(position, values, count, value_format):
    """Decode and check count values, whose bytes are there: (damage, next address or that of it)."""
    if value_format == SIGN:
        damage, position = _check_signs(position, count)
        if damage:
            return damage, position
    _get_values(position, values, count, value_format)
    if _measure_block(int64(values.ctypes.data), count)[1] >= INF:
        return VALUE, position
    return 0, position + _value_bytes(count, value_format)


@_kernel
def _decode_layer(position, end, n, expected, indices, values):
    """Decode and check one layer without writing to its output.

    Returns (damage, next address or that of the damage, count); count -1 marks a nonfinite layer.
    """
    damage, position, count, value_format, index_bytes = _read_head(position, end, n, expected)
    if damage or count <= 0:
        return damage, position, count
    damage, position = _get_positions(position, position + index_bytes, n, indices, count)
    if damage == 0:
        damage, position = _read_values(position, values, count, value_format)
    return damage, position, count


@_kernel
def _decode_pair(starts, ends, n, expected, indices, values, counts):
    """Decode a layer of two bodies at once, and move their starts on; returns whether both are sound.

    Where one is not, or holds nothing, all is as it was: each is to be decoded by itself.
    """
    firsts, middles, hows = np.empty(2, np.int64), np.empty(2, np.int64), np.empty(2, np.int64)
    for j in range(2):
        damage, firsts[j], counts[j], hows[j], size = _read_head(starts[j], ends[j], n, expected)
        middles[j] = firsts[j] + size
        if damage or counts[j] <= 0:
            return False
    if not _get_positions_pair(firsts, middles, n, indices, counts):
        return False
    for j in range(2):
        damage, firsts[j] = _read_values(middles[j], values[j], counts[j], hows[j])
        if damage:
            return False
    starts[:] = firsts
    return True


@_kernel
def _read_but_positions(position, end, n, expected, indices, values):
    """Decode and check a layer but for its positions: (damage, address, end of these, next, count).

    The address is that of the positions or of the damage; count -1 marks a nonfinite layer.
    """
    damage, position, count, value_format, index_bytes = _read_head(position, end, n, expected)
    middle = position + index_bytes
    if damage or count <= 0:
        return damage, position, middle, middle, count
    damage, after = _read_values(middle, values, count, value_format)
    if damage:  # that of the positions is reported first
        found, where = _get_positions(position, middle, n, indices, count)
        damage, position = (found, where) if found else (damage, after)
    return damage, position, middle, after, count


@_kernel
def _exchange(out, i, scale, indices, values):
    """Add value i to an output; what was there takes its place among the values."""
    at = uint64(i)  # else Numba asks whether it counts from the end
    place = out + 4 * int64(indices[at])
    before = load_f32(place)
    store_f32(place, before + scale * values[at])
    values[at] = before


@_kernel
def _add_at_positions(position, end, out, n, count, scale, indices, values):
    """Decode count positions and add the values to an output of n; damaged, it is as it was.

    Returns (damage, its address). The values are spoilt. A value is added while positions further on
    are decoded: for one the processor waits for the position before, for the other for memory.
    """
    bit, index, head = int64(0), int64(-1), int64(0)
    word, left = uint64(0), int64(0)
    damage, done = int64(0), int64(0)
    for i in range(count):
        damage, bit, index, head, word, left = _next_index(
            position, end, n, i, bit, index, head, word, left
        )
        if damage:
            break
        indices[i] = int32(index)
        prefetch(out + 4 * index)
        if i >= AHEAD:
            _exchange(out, done, scale, indices, values)
            done += 1
    where = position + (bit >> 3)
    if damage == 0:
        damage, where = _check_positions_end(position, end, bit)
    if damage:
        for i in range(done):
            store_f32(out + 4 * int64(indices[i]), values[i])
        return damage, where
    for i in range(done, count):
        _exchange(out, i, scale, indices, values)
    return damage, where


@_kernel
def _add_layer(position, end, out, n, scale, expected, indices, values):
    """Decode one layer into its output: (damage, next address or that of the damage, mark).

    The mark is -1 for a layer that is not finite, else 0: that many values are left to be added.
    """
    damage, position, middle, after, count = _read_but_positions(
        position, end, n, expected, indices, values
    )
    if damage or count <= 0:
        return damage, position, count
    damage, where = _add_at_positions(position, middle, out, n, count, scale, indices, values)
    return damage, where if damage else after, int64(0)


@_kernel
def _scatter(out, n, first, i, count, scale, clear, indices, values):
    """Put what is left from value i on and lies in [first, first + n) into an output.

    Returns the first value that lies beyond. ``clear`` stores zeros instead of adding.
    """
    end = i
    while end < count and int64(indices[end]) < first + n:
        end += 1
    target = carray(float32_pointer(out), n)
    for j in range(i, end):
        prefetch(out + 4 * (int64(indices[min(j + AHEAD, end - 1)]) - first))
        index = int64(indices[j]) - first
        target[index] = np.float32(0) if clear else target[index] + scale * values[j]
    return end


@_kernel
def _apply_layers(start, size, outs, numels, whole, clear, scale, expected, marks, decoded):
    """Decode all layers into the outputs; returns (damage, layer, byte position)."""
    indices, values = decoded
    position, end = start, start + size
    coded = 1 if whole else len(outs)
    for layer in range(coded):
        first, last = (0, len(outs)) if whole else (layer, layer + 1)
        n = int64(numels[first:last].sum())
        if whole or clear:
            damage, position, count = _decode_layer(position, end, n, expected, indices, values)
        else:
            out = outs[layer]
            damage, position, count = _add_layer(
                position, end, out, n, scale, expected, indices, values
            )
        if damage:
            return damage, layer, position - start
        before, i = int64(0), int64(0)
        for out in range(first, last):
            marks[out] = count < 0
            if count < 0 and not clear:
                carray(float32_pointer(outs[out]), numels[out])[:] = np.float32(np.nan)
            i = _scatter(outs[out], numels[out], before, i, count, scale, clear, indices, values)
            before += numels[out]
    if position != end:
        return TRAILING, coded - 1, position - start
    return 0, 0, 0


def _apply(
    body: Tensor,
    outs: Sequence[Tensor],
    scale: float,
    values: ValueFormat | None,
    whole: bool,
    clear: bool,
) -> npt.NDArray[np.uint8]:
    """Decode a body into the outputs, or clear them where it holds a value; returns the marks."""
    numels = np.array(check_outs(body, outs, whole), np.int64)
    addresses = np.array([out.data_ptr() for out in outs], np.int64)
    marks = np.zeros(len(outs), np.uint8)
    start, size = body.data_ptr(), body.numel()
    spans = numels.sum(keepdims=True) if whole else numels
    expected = -1 if values is None else int(values)
    damage, layer, position = _apply_layers(
        start,
        size,
        addresses,
        numels,
        whole,
        clear,
        np.float32(scale),
        expected,
        marks,
        _work.decoded(_most_values(start, start + size, spans, expected)),
    )
    if damage:
        raise _damaged(damage, layer, spans, position, size)
    return marks


def _damaged(
    damage: int, layer: int, numels: npt.NDArray[np.int64], position: int, size: int
) -> Exception:
    layer = max(layer, 0)
    return damaged(damage, layer, int(numels[layer]) if len(numels) else 0, min(position, size), size)


def sparse_decompress_add_(
    body: Tensor,
    outs: Sequence[Tensor],
    scale: float,
    values: ValueFormat | None = None,
    whole: bool = False,
) -> npt.NDArray[np.uint8]:
    """See :func:`hvd_adaptive.kernels.reference.sparse_decompress_add_`. Releases the GIL."""
    return _apply(body, outs, scale, values, whole, clear=False)


def sparse_clear_(
    body: Tensor, outs: Sequence[Tensor], values: ValueFormat | None = None, whole: bool = False
) -> None:
    """See :func:`hvd_adaptive.kernels.reference.sparse_clear_`. Releases the GIL."""
    _apply(body, outs, 0.0, values, whole, clear=True)


# --- summing -------------------------------------------------------------------------------------


@_kernel
def _clear(out, n):
    """Write n zeros."""
    target = carray(float32_pointer(out), n)
    for i in range(n):
        target[i] = np.float32(0)


@_kernel
def _add_until(end, out, indices, values, i, count, scale):
    """Add the values from number i on whose indices are below ``end``; returns the next number.

    Addresses all: what Numba does to slice an array costs as much as adding ten values.
    """
    while i < count:
        index = int64(load_u32(indices + 4 * i))
        if index >= end:
            break
        store_f32(out + 4 * index, load_f32(out + 4 * index) + scale * load_f32(values + 4 * i))
        i += 1
    return i


@_kernel
def _add_all_until(end, out, decoded, counts, places, scale):
    """The same for all bodies; ``places``: the next value of each, moved on."""
    indices, values = decoded
    where, what, row = int64(indices.ctypes.data), int64(values.ctypes.data), 4 * indices.shape[1]
    for body in range(len(counts)):
        skip = body * row
        places[body] = _add_until(
            end, out, where + skip, what + skip, places[body], counts[body], scale
        )


@_kernel
def _sum_output(out, n, first, fresh, scale, decoded, counts, places, block):
    """Sum what the bodies hold in [first, first + n).

    A small output is summed in its place; a large one that held nothing before in a block in the
    cache, from which it is written past the cache.
    """
    end = first + n
    if not fresh or 4 * n < STREAMED or out % 32 != 0:
        if fresh:
            _clear(out, n)
        _add_all_until(end, out - 4 * first, decoded, counts, places, scale)
        return
    here = int64(block.ctypes.data)
    for start in range(0, n, TILE):
        size = min(TILE, n - start)
        _clear(here, size)
        begin = first + start
        _add_all_until(begin + size, here - 4 * begin, decoded, counts, places, scale)
        whole = size & ~7
        for i in range(0, whole, 8):
            stream(here + 4 * i, out + 4 * (start + i))
        for i in range(whole, size):
            store_f32(out + 4 * (start + i), load_f32(here + 4 * i))


@_kernel
def _sum_layers(
    starts, ends, outs, numels, whole, fresh, scale, expected, marks, decoded, counts, places, block
):
    """Sum all bodies, layer by layer; returns (damage, body, layer, its address)."""
    indices, values = decoded
    coded = 1 if whole else len(outs)
    for layer in range(coded):
        first, last = (0, len(outs)) if whole else (layer, layer + 1)
        n, nonfinite = int64(numels[first:last].sum()), False
        places[:], body = 0, 0
        while body < len(starts):
            pair = slice(body, body + 2)
            if body + 1 < len(starts) and _decode_pair(
                starts[pair], ends[pair], n, expected, indices[pair], values[pair], counts[pair]
            ):
                body += 2
                continue
            damage, starts[body], count = _decode_layer(
                starts[body], ends[body], n, expected, indices[body], values[body]
            )
            if damage:
                return damage, body, layer, starts[body]
            nonfinite |= count < 0
            counts[body] = max(count, 0)
            body += 1
        before = int64(0)
        for out in range(first, last):
            if nonfinite:
                marks[out] = 1
                carray(float32_pointer(outs[out]), numels[out])[:] = np.float32(np.nan)
            else:
                _sum_output(
                    outs[out], numels[out], before, fresh, scale, decoded, counts, places, block
                )
            before += numels[out]
    fence()
    for body in range(len(starts)):
        if starts[body] != ends[body]:
            return TRAILING, body, coded - 1, starts[body]
    return 0, 0, 0, 0


def sparse_decompress_sum_(
    bodies: Sequence[Tensor],
    outs: Sequence[Tensor],
    scale: float,
    values: ValueFormat | None = None,
    whole: bool = False,
) -> npt.NDArray[np.uint8]:
    """See :func:`hvd_adaptive.kernels.reference.sparse_decompress_sum_`. Releases the GIL.

    Cost: some ns a value, and writing the outputs once for as many bodies as hold 2^22 values in their
    largest layer, or for two. Memory: 8 bytes for each of these values, of which a thread keeps up to
    32 MiB.
    """
    numels = np.array(check_outs(check_bodies(bodies)[0], outs, whole), np.int64)
    addresses = np.array([out.data_ptr() for out in outs], np.int64)
    marks = np.zeros(len(outs), np.uint8)
    for body in bodies[1:]:
        check_body(body, bodies[0])
    spans = numels.sum(keepdims=True) if whole else numels
    expected = -1 if values is None else int(values)
    edges = np.array([(body.data_ptr(), body.data_ptr() + body.numel()) for body in bodies], np.int64)
    most = max(1, *(_most_values(start, end, spans, expected) for start, end in edges))
    together = min(len(bodies), max(2, KEPT // most))
    indices, decoded = (
        each[: together * most].reshape(together, most) for each in _work.decoded(together * most)
    )
    for first in range(0, len(bodies), together):
        starts, ends = edges[first : first + together].T.copy()
        counts, places = np.empty((2, len(starts)), np.int64)
        damage, which, layer, position = _sum_layers(
            starts.copy(),
            ends,
            addresses,
            numels,
            whole,
            first == 0,
            np.float32(scale),
            expected,
            marks,
            (indices, decoded),
            counts,
            places,
            _work.block,
        )
        if damage:
            begin, size = int(starts[which]), int(ends[which] - starts[which])
            raise _damaged(damage, layer, spans, position - begin, size)
    return marks


# --- compressing again ---------------------------------------------------------------------------


@_kernel
def _shrink_layer(position, end, x, n, k, rule, floor, how, out, stats, decoded, work):
    """Decode a layer, encode what the rule takes of its values, and add the others to x.

    Returns (damage, next address or that of the damage, next address of the output, count decoded).
    """
    old_indices, old_values = decoded
    damage, position, middle, after, count = _read_but_positions(
        position, end, n, how, old_indices, old_values
    )
    if damage:
        return damage, position, out, count
    if count < 0:
        stats[:] = 0.0
        stats[3] = 1.0
        return 0, position, _put_varint(out, int64(1)), count
    _, indices, values, heads = work
    old, one = int64(old_values.ctypes.data), np.float32(1)
    energy, _, kept = _take(old, 0, count, min(k, count), rule, floor, work)
    for i in range(kept):
        old_values[indices[i]] = np.float32(0)
    damage, where = _add_at_positions(position, middle, x, n, count, one, old_indices, old_values)
    if damage:
        return damage, where, out, count
    for i in range(kept):
        indices[i] = old_indices[indices[i]]
    sent, out = _encode(out, indices, values, kept, how, heads)
    target = carray(float32_pointer(x), n)
    for i in range(kept):
        target[indices[i]] += values[i]
    largest = np.float32(LARGEST)
    for i in range(count):  # rounding up the largest of all magnitudes would give Inf
        target[old_indices[i]] = min(max(target[old_indices[i]], -largest), largest)
    stats[0], stats[1], stats[2], stats[3] = energy, sent, float(kept), 0.0
    return 0, after, out, count


@_kernel
def _shrink_layers(body, size, x, offsets, counts, rule, floors, how, out, stats, decoded, work):
    """All layers of a bucket; returns (damage, layer, position, bytes written, last layer's count)."""
    position, end, start, count = body, body + size, out, int64(0)
    for layer in range(len(counts)):
        first = offsets[layer]
        n = offsets[layer + 1] - first
        k, floor, row = counts[layer], floors[layer], stats[layer]
        damage, position, out, count = _shrink_layer(
            position, end, x + 4 * first, n, k, rule, floor, how, out, row, decoded, work
        )
        if damage:
            return damage, layer, position - body, 0, 0
    if position != end:
        return TRAILING, len(counts) - 1, position - body, 0, 0
    return 0, 0, 0, out - start, count


def sparse_recompress_(
    body: Tensor,
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    values: ValueFormat,
    reserve: int = 0,
    rule: SelectionRule = SelectionRule.topk,
    thresholds: npt.NDArray[np.float32] | None = None,
    whole: bool = False,
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """See :func:`hvd_adaptive.kernels.reference.sparse_recompress_`. Releases the GIL.

    Cost: about 6 ns for every value in ``body``.
    """
    offsets, counts = check_layers(x, offsets, counts, None, whole)
    floors = check_thresholds(rule, thresholds, len(counts))
    check_body(body, x)
    spans = offsets[[0, -1]] if whole else offsets
    numels, size = np.diff(spans), body.numel()
    start, how = body.data_ptr(), int(values)
    most = _most_values(start, start + size, numels, how)
    counts = np.minimum(counts, most)
    bound, candidates = _sizes(spans, counts, how, int(rule))
    buffer = torch.empty(reserve + bound + SLACK, dtype=torch.uint8)
    stats = np.empty((len(counts), 4))
    decoded, work = _work.decoded(most), _work.arrays(candidates)
    out = buffer.data_ptr() + reserve
    damage, layer, position, written, count = _shrink_layers(
        start,
        size,
        x.data_ptr(),
        spans,
        counts,
        int(rule),
        floors,
        how,
        out,
        stats,
        decoded,
        work,
    )
    if damage:
        raise _damaged(damage, layer, numels, position, size)
    if whole:
        sent, nonfinite = int(stats[0, 2]), stats[0, 3]
        stats = np.zeros((len(offsets) - 1, 4))
        stats[:, 3] = nonfinite
        # anew: what was in x has taken the values' places
        _read_but_positions(start, start + size, int(numels[0]), how, *decoded)
        _energy_by_layer(offsets, *decoded, count, stats, 0)
        _note_sent(out + written, offsets, work[1], decoded[1], sent, how, stats)
    return buffer[: reserve + written], stats


# --- the spectrum --------------------------------------------------------------------------------


def spectrum(x: Tensor) -> npt.NDArray[np.int64]:
    """See :func:`hvd_adaptive.kernels.reference.spectrum`. Releases the GIL."""
    check_spectrum(x)
    hist = np.zeros(BINS, np.int64)
    _count_block(x.data_ptr(), x.numel(), hist.ctypes.data)
    return hist


def sample_spectrum(x: Tensor) -> npt.NDArray[np.int64]:
    """See :func:`hvd_adaptive.kernels.reference.sample_spectrum`. Releases the GIL."""
    check_spectrum(x)
    hist = np.zeros(BINS, np.int32)
    _sample(x.data_ptr(), 0, x.numel(), hist)
    return hist.astype(np.int64)


_FEW_BINS = 6
"""Bins up to which it pays to compare 64 elements at once with each of them."""


@_kernel
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
    """See :func:`hvd_adaptive.kernels.reference.refined_spectrum`. Releases the GIL."""
    check_spectrum(x)
    bins = check_bins(bins)
    rows = np.full(BINS, -1, np.int32)
    rows[bins] = np.arange(len(bins), dtype=np.int32)
    fine = np.zeros((len(bins), 1 << 16), np.int32)
    _count_fine(x.data_ptr(), x.numel(), bins, rows, fine)
    return fine


def summary(x: Tensor) -> tuple[npt.NDArray[np.int64], float, float, float]:
    """See :func:`hvd_adaptive.kernels.reference.summary`. Releases the GIL."""
    check_spectrum(x)
    hist = np.zeros(BINS, np.int64)
    total, energy, top = _summarise(x.data_ptr(), x.numel(), hist.ctypes.data)
    return hist, total, energy, float(np.uint32(top).view(np.float32))


@_vector
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


@_kernel
def _summarise(x, n, spectrum):
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


@_kernel
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
    """See :func:`hvd_adaptive.kernels.reference.moments`. Releases the GIL."""
    check_spectrum(x)
    sums = np.zeros((2 * BINS, 3))
    _add_moments(x.data_ptr(), x.numel(), sums)
    return sums.reshape(2, BINS, 3)


@_kernel
def _fill_position_bits(x, n, counts, order, table, work):
    """Select the most, thin them out from count to count, and measure what is left."""
    _, indices, values, heads = work
    _, finite, left = _take(x, 0, n, min(n, counts[order[0]]), TOPK, 1, work)
    if not finite:
        return
    for row in order:
        if counts[row] < left:
            if counts[row] > 0:
                _trim(indices, values, left, counts[row])
            left = counts[row]
        table[row, 0] = left
        table[row, 1] = _choose_codes(indices, left, heads)


def position_bits(x: Tensor, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """See :func:`hvd_adaptive.kernels.reference.position_bits`. Releases the GIL.

    Cost: top-k's selection of the most, and some ns for each element at each count that takes it.
    """
    counts = check_counts(x, counts)
    table = np.zeros((len(counts), 2), np.int64)
    if len(counts):
        numel = x.numel()
        work = _work.arrays(_room(numel, min(numel, int(counts.max()))))
        _fill_position_bits(x.data_ptr(), numel, counts, np.argsort(-counts), table, work)
    return table
