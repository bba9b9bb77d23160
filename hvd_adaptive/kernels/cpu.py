"""Kernels for host memory, in Numba: one call does all layers of a bucket, without the GIL.

Two passes over a layer. The *survey* forms ``x + gradient`` in cache without storing it and learns the
energy, the largest magnitude and a histogram of magnitudes; a NaN or an Inf ends it with nothing
changed. The *extraction* stores the sum and picks the elements at or above a threshold. Between
them a selection rule turns the histogram into a threshold: a rule is one small function, everything
else is shared.

Magnitudes are compared as their bits: the bits of non-negative floats order as the floats do, and
NaN and Inf are the largest. A *bin* is the upper 16 of these bits: exponent and 7 mantissa bits.

Addresses are passed as int64 and every bound is checked by whoever forms the address.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, int32, int64, njit, uint8, uint16, uint32, uint64
from torch import Tensor

from hvd_adaptive.kernels.intrinsics import (
    LANES,
    at_least,
    bits_float,
    float32_pointer,
    float_bits,
    load_f32,
    load_u8,
    load_u16,
    load_u32,
    load_u64,
    store_f32,
    store_u8,
    store_u16,
    store_u32,
    store_u64,
    trailing_zeros,
    uint32_pointer,
)
from hvd_adaptive.kernels.reference import BINS, check_layers, check_out, errors_from_spectrum
from hvd_adaptive.wire import (
    MAX_VARINT_BYTES,
    RICE_BITS,
    RICE_BLOCK,
    VALUE_BLOCK,
    Damage,
    ValueFormat,
    damaged,
)

__all__ = ["errors_from_spectrum", "sparse_decompress_add_", "spectrum", "topk_compress_"]

BLOCK = 2048
"""Elements handled at once: 8 KiB of sums stay in the first-level cache."""
SPARE = 65536
"""Candidates that a layer may have beyond 1.5 k before the threshold is refined by another pass."""
SLACK = 16
"""Bytes that the bit writer may touch past the end."""

INF = 0x7F800000
MAGNITUDE = 0x7FFFFFFF
NO_LIMIT = np.iinfo(np.int64).max

FP32, FP16, BF16, INT8 = (int(value) for value in ValueFormat)
VALUE_BYTES = tuple(value.bits // 8 for value in ValueFormat)

TRUNCATED, OVERLONG, COUNT, FORMAT, RICE, RUN, INDEX, LENGTH, PADDING, VALUE, TRAILING = (
    int(damage) for damage in Damage if damage
)

# No nnan or ninf: the sums must stay what they are where a NaN or an Inf takes part.
_REORDER = {"reassoc", "contract", "nsz"}

_kernel = njit(nogil=True, cache=True, error_model="numpy")
_vector = njit(nogil=True, cache=True, error_model="numpy", fastmath=_REORDER)


# --- pass 1: the survey --------------------------------------------------------------------------


@_kernel
def _add_block(x, g, out, n):
    """out = x + g for n elements at three addresses."""
    a, b, c = (
        carray(float32_pointer(x), n),
        carray(float32_pointer(g), n),
        carray(float32_pointer(out), n),
    )
    for i in range(n):
        c[i] = a[i] + b[i]


@_vector
def _measure_block(x, n):
    """Energy and largest magnitude (as bits) of n elements."""
    values = carray(float32_pointer(x), n)
    words = carray(uint32_pointer(x), n)
    energy = 0.0
    top = int32(0)
    for i in range(n):
        wide = np.float64(values[i])
        energy += wide * wide
        top = max(top, int32(words[i] & uint32(MAGNITUDE)))
    return energy, int64(top)


@_kernel
def _count_all(x, n, hist, low):
    """Histogram of all nonzero magnitudes; returns how many there were and the lowest bin."""
    words = carray(uint32_pointer(x), n)
    kept = 0
    for i in range(n):
        magnitude = int64(words[i]) & MAGNITUDE
        found = int64(magnitude != 0)
        b = magnitude >> 16
        hist[b] += int32(found)
        kept += found
        low = min(low, b if found else BINS)
    return kept, low


@_kernel
def _count_from(x, n, floor, hist):
    """Histogram of the magnitudes whose bits are at least floor; returns how many there were."""
    words = carray(uint32_pointer(x), n)
    kept = 0
    whole = n - n % LANES
    for start in range(0, whole, LANES):
        hits = at_least(x + 4 * start, int32(floor))
        while hits:
            i = start + int64(trailing_zeros(hits))
            hits &= hits - uint64(1)
            hist[(int64(words[i]) & MAGNITUDE) >> 16] += int32(1)
            kept += 1
    for i in range(whole, n):
        magnitude = int64(words[i]) & MAGNITUDE
        if magnitude >= floor:
            hist[magnitude >> 16] += int32(1)
            kept += 1
    return kept


@_kernel
def _bin_of_kth(hist, top, k):
    """The bin of the k-th largest magnitude and the count above it; -1 where there are fewer."""
    above = 0
    for b in range(top, -1, -1):
        if above + hist[b] >= k:
            return b, above
        above += hist[b]
    return -1, above


@_kernel
def _survey(x, g, n, k, hist, block):
    """Energy, top and histogram of x + g, without storing the sum.

    The histogram is complete only as far down as the k-th largest needs: the k-th largest of what
    has been seen so far is a lower bound of the answer, so what lies below is never counted. On
    scattered data k (1 + ln(n / k)) elements are counted instead of n. ``k >= n`` counts none.

    Returns (energy, top, kept, floor, low): the histogram counts the ``kept`` elements from ``floor``
    on, low is the lowest bin it touched. top >= INF: not finite, and the histogram is incomplete.
    """
    energy, top, kept, low = 0.0, 0, 0, BINS
    floor, raise_at = 1, 2 * k
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        sums = x + 4 * start
        if g != 0:
            _add_block(sums, g + 4 * start, block, size)
            sums = block
        block_energy, block_top = _measure_block(sums, size)
        energy += block_energy
        top = max(top, block_top)
        if top >= INF:
            break
        if k >= n or block_top < floor:
            continue
        if floor == 1:
            found, low = _count_all(sums, size, hist, low)
        else:
            found = _count_from(sums, size, floor, hist)
        kept += found
        if kept >= raise_at:
            b, above = _bin_of_kth(hist, top >> 16, k)
            floor = max(1, b << 16)
            kept = above + hist[b]
            # The walk over the bins is paid for by at least as many counted elements.
            raise_at = kept + max(k, (top >> 16) - b)
    return energy, top, kept, floor, low


# --- selection rules -----------------------------------------------------------------------------


@_kernel
def _refine(x, g, n, b, wanted, fine, block):
    """The bits of the wanted-th largest magnitude within bin b, by one more pass."""
    fine[:] = 0
    words = carray(uint32_pointer(x), n)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        sums = x + 4 * start
        if g != 0:
            _add_block(sums, g + 4 * start, block, size)
            sums = block
        words = carray(uint32_pointer(sums), size)
        for i in range(size):
            magnitude = int64(words[i]) & MAGNITUDE
            if magnitude >> 16 == b:
                fine[magnitude & 0xFFFF] += int32(1)
    if b == 0:
        fine[0] = 0  # zeros are never sent
    for low in range(0xFFFF, -1, -1):
        if wanted <= fine[low]:
            return (b << 16) | low, wanted
        wanted -= fine[low]
    return b << 16, 0


@_kernel
def _rule_topk(x, g, n, k, hist, top, kept, floor, fine, block):
    """Top-k as a threshold: take all above it and the first ``ties`` that equal it.

    Returns (threshold, ties, count): where the threshold is the edge of a bin that holds more than
    is wanted, ``count`` is more than k and the candidates are to be trimmed.
    """
    if k >= n or kept <= k:
        return floor, NO_LIMIT, kept
    b, above = _bin_of_kth(hist, top >> 16, k)
    count = above + hist[b]
    if count <= max(k + k // 2, SPARE):
        return max(1, b << 16), NO_LIMIT, count
    threshold, ties = _refine(x, g, n, b, k - above, fine, block)
    return threshold, ties, k


# --- pass 2: extraction --------------------------------------------------------------------------


@_kernel
def _extract(x, g, n, threshold, ties, indices, values):
    """Store x += g and collect what lies above the threshold, and the first ties that equal it."""
    count = 0
    taken = 0
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        base = x + 4 * start
        if g != 0:
            _add_block(base, g + 4 * start, base, size)
        if taken == ties:
            threshold, taken = threshold + 1, -1  # no more ties: only what is larger
        for group in range(0, size, LANES):
            if group + LANES <= size:
                hits = at_least(base + 4 * group, int32(threshold))
            else:
                hits = uint64(0)
                for i in range(size - group):
                    word = load_u32(base + 4 * (group + i))
                    hits |= uint64((int64(word) & MAGNITUDE) >= threshold) << uint64(i)
            while hits:
                i = group + int64(trailing_zeros(hits))
                hits &= hits - uint64(1)
                word = load_u32(base + 4 * i)
                if taken >= 0 and (int64(word) & MAGNITUDE) == threshold:
                    if taken == ties:
                        continue
                    taken += 1
                indices[count] = int32(start + i)
                values[count] = bits_float(word)
                count += 1
    return count


@_kernel
def _trim(indices, values, count, k, fine):
    """Keep the k largest of the candidates in place, ties by lowest index; they stay in order.

    The candidates above k share a bin with the k-th, so 16 bits decide, 8 at a time.
    """
    least = int64(MAGNITUDE)
    for i in range(count):
        least = min(least, int64(float_bits(values[i])) & MAGNITUDE)
    b = least >> 16
    wanted = k
    for i in range(count):
        wanted -= int64((int64(float_bits(values[i])) & MAGNITUDE) >> 16 != b)
    prefix = b
    for shift in (8, 0):
        fine[:256] = 0
        for i in range(count):
            magnitude = int64(float_bits(values[i])) & MAGNITUDE
            if magnitude >> (shift + 8) == prefix:
                fine[(magnitude >> shift) & 0xFF] += int32(1)
        digit = 255
        while wanted > fine[digit]:
            wanted -= fine[digit]
            digit -= 1
        prefix = (prefix << 8) | digit
    kept = 0
    for i in range(count):
        magnitude = int64(float_bits(values[i])) & MAGNITUDE
        tie = int64(magnitude == prefix and wanted > 0)
        wanted -= tie
        indices[kept] = indices[i]
        values[kept] = values[i]
        kept += int64(magnitude > prefix) | tie
    return kept


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
    return count * (4 if value_format == FP32 else 2)


@_kernel
def _sparse_bound(numel, count, value_format):
    """``wire.max_sparse_bytes`` (a test compares the two)."""
    count = min(count, numel)
    if count <= 0:
        return 1
    rest = numel - count
    r = max(0, _bit_length(rest // count) - 1)
    blocks = (count + RICE_BLOCK - 1) // RICE_BLOCK
    index_bytes = ((rest >> r) + count * (r + 1) + RICE_BITS * blocks + 7) // 8
    return (
        _varint_bytes(count << 3)
        + _varint_bytes(index_bytes)
        + index_bytes
        + _value_bytes(count, value_format)
    )


@_kernel
def _choose_rice(indices, count, parameters):
    """The Rice parameter of every block of gaps; returns the bits of the whole stream."""
    bits = 0
    previous = -1
    for start in range(0, count, RICE_BLOCK):
        size = min(RICE_BLOCK, count - start)
        total = int64(indices[start + size - 1]) - previous - size
        middle = max(1, _bit_length(total // size) - 1)
        # quotient sums for middle - 1, middle and middle + 1
        first = int64(indices[start]) - previous - 1
        low, mid, high = first >> (middle - 1), first >> middle, first >> (middle + 1)
        for i in range(start + 1, start + size):
            gap = int64(indices[i] - indices[i - 1] - int32(1))
            low += gap >> (middle - 1)
            mid += gap >> middle
            high += gap >> (middle + 1)
        best, cost = middle - 1, low + size * middle
        if mid + size * (middle + 1) < cost:
            best, cost = middle, mid + size * (middle + 1)
        if high + size * (middle + 2) < cost:
            best, cost = middle + 1, high + size * (middle + 2)
        parameters[start // RICE_BLOCK] = best
        bits += RICE_BITS + cost
        previous = int64(indices[start + size - 1])
    return bits


@_kernel
def _put_rice(out, indices, count, parameters):
    """Write the index stream; whole 8-byte words are stored, so SLACK bytes past it are touched."""
    word, fill = uint64(0), int64(0)
    previous = int64(-1)
    for start in range(0, count, RICE_BLOCK):
        r = int64(parameters[start // RICE_BLOCK])
        word |= uint64(r) << uint64(fill)
        fill += RICE_BITS
        mask = (int64(1) << r) - 1
        for i in range(start, min(start + RICE_BLOCK, count)):
            store_u64(out, word)
            out += fill >> 3
            word >>= uint64(fill & ~7)
            fill &= 7
            index = int64(indices[i])
            gap = index - previous - 1
            previous = index
            zeros = fill + (gap >> r)
            while zeros > 24:  # room for a one and 31 low bits
                store_u64(out, word)
                out += 3
                word >>= uint64(24)
                zeros -= 24
            word |= uint64(((gap & mask) << 1) | 1) << uint64(zeros)
            fill = zeros + 1 + r
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
    scale = largest / np.float32(127)
    if scale == 0:
        scale = bits_float(uint32(1))  # the least denormal: the division underflowed
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
def _put_values(out, values, count, value_format):
    """Write the values and leave in them what rounding left out. Returns (energy, next address)."""
    energy = 0.0
    if value_format == INT8:
        for start in range(0, count, VALUE_BLOCK):
            size = min(VALUE_BLOCK, count - start)
            energy += _put_int8(out, values, start, size)
            out += 4 + size
        return energy, out
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
def _encode(out, x, n, indices, values, count, value_format, parameters):
    """Write one layer and put the remainder of its values back into x."""
    out = _put_varint(out, (count << 3) | (value_format << 1 if count else 0))
    if count == 0:
        return 0.0, out
    index_bytes = (_choose_rice(indices, count, parameters) + 7) >> 3
    out = _put_varint(out, index_bytes)
    out = _put_rice(out, indices, count, parameters)
    energy, out = _put_values(out, values, count, value_format)
    rest = carray(float32_pointer(x), n)
    for i in range(count):
        rest[indices[i]] = values[i]
    return energy, out


# --- compression of a bucket ---------------------------------------------------------------------


@_kernel
def _sizes(offsets, counts, value_format):
    """Bytes that the body needs at most, and the most candidates that a layer can have."""
    total, candidates = 0, 0
    for layer in range(len(counts)):
        n = offsets[layer + 1] - offsets[layer]
        k = min(counts[layer], n)
        total += _sparse_bound(n, k, value_format)
        candidates = max(candidates, min(n, max(k + k // 2, SPARE)))
    return total, candidates


@_kernel
def _topk_layer(x, g, n, k, value_format, out, stats, work):
    """One layer, from the gradient to the payload; returns the address after it."""
    hist, fine, block, indices, values, parameters = work
    energy, top, kept, floor, low = _survey(x, g, n, k, hist, block.ctypes.data)
    if top >= INF:
        hist[low:] = 0
        stats[:] = 0.0
        stats[3] = 1.0
        return _put_varint(out, 1)
    threshold, ties, count = _rule_topk(
        x, g, n, k, hist, top, kept, floor, fine, block.ctypes.data
    )
    hist[low : (top >> 16) + 1] = 0
    if k == 0:
        threshold, count = INF, 0
    found = _extract(x, g, n, threshold, ties, indices, values)
    if count > k:
        found = _trim(indices, values, found, k, fine)
    sent, out = _encode(out, x, n, indices, values, found, value_format, parameters)
    stats[0], stats[1], stats[2], stats[3] = energy, sent, float(found), 0.0
    return out


@_kernel
def _topk_layers(x, offsets, counts, grads, value_format, out, stats, work):
    """All layers of a bucket; returns the bytes written."""
    start = out
    for layer in range(len(counts)):
        first = offsets[layer]
        n = offsets[layer + 1] - first
        k = min(counts[layer], n)
        out = _topk_layer(
            x + 4 * first, grads[layer], n, k, value_format, out, stats[layer], work
        )
    return out - start


class _Work(threading.local):
    """Buffers of one thread, grown to the largest bucket seen; the histogram is always zero."""

    def __init__(self) -> None:
        self.hist = np.zeros(BINS, np.int32)
        self.fine = np.empty(1 << 16, np.int32)
        self.block = np.empty(BLOCK, np.float32)
        self.grow(1 << 12)

    def grow(self, candidates: int) -> None:
        self.indices = np.empty(candidates, np.int32)
        self.values = np.empty(candidates, np.float32)
        self.parameters = np.empty(candidates // RICE_BLOCK + 1, np.uint8)

    def arrays(self, candidates: int) -> tuple[npt.NDArray[np.generic], ...]:
        if candidates > len(self.indices):
            self.grow(candidates + candidates // 4)
        return (self.hist, self.fine, self.block, self.indices, self.values, self.parameters)


_work = _Work()


def topk_compress_(
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    values: ValueFormat,
    grads: Sequence[Tensor] | None = None,
    reserve: int = 0,
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """See :func:`hvd_adaptive.kernels.reference.topk_compress_`: the same bytes, at memory speed.

    Releases the GIL. Cost at density 1 %: about five copies of the tensor; a few microseconds for a
    layer of some thousand elements.
    """
    offsets, counts = check_layers(x, offsets, counts, grads)
    layers = len(counts)
    addresses = np.zeros(layers, np.int64)
    if grads is not None:
        addresses[:] = [grad.data_ptr() for grad in grads]
    bound, candidates = _sizes(offsets, counts, int(values))
    buffer = torch.empty(reserve + bound + SLACK, dtype=torch.uint8)
    stats = np.empty((layers, 4))
    size = _topk_layers(
        x.data_ptr(),
        offsets,
        counts,
        addresses,
        int(values),
        buffer.data_ptr() + reserve,
        stats,
        _work.arrays(candidates),
    )
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
def _get_rice(position, end, n, indices, count):
    """Decode count indices below n from the stream in [position, end); returns (damage, address)."""
    size = 8 * (end - position)
    bit = int64(0)
    index = int64(-1)
    r, mask = int64(0), int64(0)
    most = _bit_length(n)
    for i in range(count):
        if i % RICE_BLOCK == 0:
            r = int64(_window(position, bit, end) & uint64(31))
            bit += RICE_BITS
            mask = (int64(1) << r) - 1
            if r > most:
                return RICE, position + (bit >> 3)
        word = _window(position, bit, end)
        zeros = int64(trailing_zeros(word))
        quotient = int64(0)
        while zeros > 25:  # the one and the low bits might not be in this window
            quotient += 25
            bit += 25
            if bit >= size or quotient > n >> r:
                return (TRUNCATED if bit >= size else RUN), position + (bit >> 3)
            word = _window(position, bit, end)
            zeros = int64(trailing_zeros(word))
        quotient += zeros
        index += 1 + ((quotient << r) | (int64(word >> uint64(zeros + 1)) & mask))
        bit += zeros + 1 + r
        if index >= n:
            return INDEX, position + (bit >> 3)
        indices[i] = int32(index)
    if bit > size:
        return TRUNCATED, end
    if (bit + 7) >> 3 != end - position:
        return LENGTH, position + (bit >> 3)
    if _window(position, bit, end) != 0:
        return PADDING, end - 1
    return 0, end


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
    for i in range(count):
        if value_format == FP32:
            values[i] = load_f32(position + 4 * i)
        elif value_format == FP16:
            values[i] = _half_value(int64(load_u16(position + 2 * i)))
        else:
            values[i] = bits_float(uint32(load_u16(position + 2 * i)) << uint32(16))


@_kernel
def _decode_layer(position, end, n, expected, indices, values):
    """Decode and check one layer without writing to its output.

    Returns (damage, next address or that of the damage, count); count -1 marks a nonfinite layer.
    """
    header, after = _get_varint(position, end)
    if header < 0:
        return -header, after, 0
    count, value_format = header >> 3, (header >> 1) & 3
    if count == 0:
        if value_format != 0:
            return FORMAT, position, 0
        return 0, after, -(header & 1)
    if count > n or header & 1:
        return COUNT, position, 0
    if value_format != expected and expected >= 0:
        return FORMAT, position, 0
    index_bytes, position = _get_varint(after, end)
    if index_bytes < 0:
        return -index_bytes, position, 0
    value_bytes = _value_bytes(count, value_format)
    if index_bytes > end - position or value_bytes > end - position - index_bytes:
        return TRUNCATED, end, 0
    damage, after = _get_rice(position, position + index_bytes, n, indices, count)
    if damage:
        return damage, after, 0
    _get_values(after, values, count, value_format)
    if _measure_block(values.ctypes.data, count)[1] >= INF:
        return VALUE, after, 0
    return 0, after + value_bytes, count


@_kernel
def _add_layers(start, size, outs, numels, scale, expected, marks, indices, values):
    """Decode all layers; returns (damage, layer, byte position)."""
    position, end = start, start + size
    for layer in range(len(outs)):
        n = numels[layer]
        damage, position, count = _decode_layer(position, end, n, expected, indices, values)
        if damage:
            return damage, layer, position - start
        out = carray(float32_pointer(outs[layer]), n)
        marks[layer] = count < 0
        if count < 0:
            out[:] = np.float32(np.nan)
        for i in range(count):
            out[indices[i]] += scale * values[i]
    if position != end:
        return TRAILING, len(outs) - 1, position - start
    return 0, 0, 0


def sparse_decompress_add_(
    body: Tensor, outs: Sequence[Tensor], scale: float, values: ValueFormat | None = None
) -> npt.NDArray[np.uint8]:
    """See :func:`hvd_adaptive.kernels.reference.sparse_decompress_add_`. Releases the GIL."""
    if body.dtype != torch.uint8 or not body.is_contiguous():
        raise ValueError(f"a body is 1-D contiguous uint8, got {body.dtype}, stride {body.stride()}")
    addresses = np.array([out.data_ptr() for out in outs], np.int64)
    numels = np.array([check_out(out) for out in outs], np.int64)
    marks = np.zeros(len(outs), np.uint8)
    size = body.numel()
    # A value takes at least a byte, so a body cannot hold more values than bytes.
    work = _work.arrays(size)
    damage, layer, position = _add_layers(
        body.data_ptr(),
        size,
        addresses,
        numels,
        np.float32(scale),
        -1 if values is None else int(values),
        marks,
        work[3],
        work[4],
    )
    if damage:
        raise damaged(damage, layer, int(numels[layer]) if outs else 0, position, size)
    return marks


# --- the spectrum --------------------------------------------------------------------------------


@_kernel
def _spectrum(x, n, hist):
    words = carray(uint32_pointer(x), n)
    for i in range(n):
        hist[(int64(words[i]) & MAGNITUDE) >> 16] += 1


def spectrum(x: Tensor) -> npt.NDArray[np.int64]:
    """See :func:`hvd_adaptive.kernels.reference.spectrum`. Releases the GIL."""
    hist = np.zeros(BINS, np.int64)
    _spectrum(x.data_ptr(), x.numel(), hist)
    return hist
