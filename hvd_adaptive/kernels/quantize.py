"""Quantization for host memory, in Numba: one call does all layers of a bucket, without the GIL.

Two passes over a layer, block by block. The first forms ``x + gradient`` in cache, measures it and
writes the blocks' norms; a NaN or an Inf ends it with nothing changed. The second forms the sum again,
chooses codes, packs them, and leaves in ``x`` what they do not hold.

Codes are chosen in loops without branches, which the compiler turns into vector instructions. They
are float32 operations in the order in which they stand here, never reordered or contracted, so the
bytes are those of ``quantize_reference``; sums are pairwise, which is an order too.

Addresses are passed as int64 and every bound is checked by whoever forms the address. Numba's cache
notices changes of this file only: after a change of a constant elsewhere, delete ``__pycache__``.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, int32, int64, uint8, uint16, uint32, uint64
from torch import Tensor

from hvd_adaptive.kernels.cpu import BINS, INF, MAGNITUDE, SLACK, _count_block, _window
from hvd_adaptive.kernels.intrinsics import (
    bits_float,
    compiled,
    float32_pointer,
    float_bits,
    load_f32,
    load_u8,
    load_u32,
    load_u64,
    store_f32,
    store_u8,
    store_u64,
)
from hvd_adaptive.kernels.quantize_reference import (
    EDGES,
    LARGEST_BF16,
    LARGEST_NORM,
    NAN_BF16,
    WEIGHT_BINS,
    WEIGHT_SHIFT,
    check_bits,
    check_keys,
)
from hvd_adaptive.kernels.reference import check_layers, check_outs, check_spectra
from hvd_adaptive.wire.quantized import (
    LEVELS,
    MAX_BITS,
    NONFINITE,
    TRIT_BYTES,
    TRITS,
    Damage,
    Norm,
    QuantizationRule,
    Rounding,
    Tables,
    damaged,
    layer_bytes,
)

__all__ = [
    "expected_error_at",
    "norm_histogram",
    "quantize_compress_",
    "quantize_decompress_add_",
    "round_at_random_",
]

TRUNCATED, HEADER, NORM, CODE, PADDING, TRAILING = (
    int(Damage[name]) for name in ("truncated", "header", "norm", "code", "padding", "trailing")
)
L2, MAX, POWER, CLIPPED, MEAN, SIDES = (int(norm) for norm in Norm)
UNIFORM, POWERS, TABLE, SIGN = (int(rounding) for rounding in Rounding)

EXPONENT = 0x7F800000
TRIT_CODES = np.array(
    [
        sum(
            (byte // 3**digit % 3 if byte < TRIT_BYTES else 255) << (8 * digit)
            for digit in range(TRITS)
        )
        for byte in range(256)
    ],
    dtype=np.uint64,
)
"""The five codes in a byte, a byte each."""
BIAS = 127

# What has the second mark sums numbers that are finite or may give any NaN: their order may change.
_kernel, _vector = compiled(), compiled("reassoc")


# --- reading and measuring -----------------------------------------------------------------------


@_kernel
def _form(x, g, n, sums):
    """(address of n values of x + g, their largest magnitude as bits): x's own without a gradient."""
    a = carray(float32_pointer(x), n)
    top = int32(0)
    if g == 0:
        for i in range(n):
            top = max(top, int32(float_bits(a[i]) & uint32(MAGNITUDE)))
        return x, int64(top)
    b = carray(float32_pointer(g), n)
    c = carray(float32_pointer(sums), n)
    for i in range(n):
        value = a[i] + b[i]
        c[i] = value
        top = max(top, int32(float_bits(value) & uint32(MAGNITUDE)))
    return sums, int64(top)


@_kernel
def _total(terms, n):
    """The sum of n terms, the upper half added to the lower again and again; overwrites them."""
    while n > 1:
        half = 1
        while 2 * half < n:
            half *= 2
        lower, upper = terms[:half], terms[half:n]
        for i in range(n - half):
            lower[i] += upper[i]
        n = half
    return terms[0]


@_kernel
def _squares(address, n, terms):
    """The energy of n values."""
    a = carray(float32_pointer(address), n)
    for i in range(n):
        terms[i] = np.float64(a[i]) * np.float64(a[i])
    return _total(terms, n)


@_kernel
def _mean_of_side(address, n, sign, terms):
    """Mean magnitude of the values that are negative (sign -1) or are not (1); 0 of none."""
    a = carray(float32_pointer(address), n)
    negative = 0
    for i in range(n):
        negative += int64(a[i] < 0)
        terms[i] = np.float64(max(sign * a[i], np.float32(0)))
    count = negative if sign < 0 else n - negative
    return abs(np.float32(_total(terms, n) / max(1, count)))  # no -0


@_kernel
def _mean(address, n, terms):
    a = carray(float32_pointer(address), n)
    for i in range(n):
        terms[i] = np.float64(abs(a[i]))
    return np.float32(_total(terms, n) / n)


@_kernel
def _put_norms(out, address, n, energy, top, norm, clip, terms):
    """Write the norms of one block; returns the address after them."""
    if norm == SIDES:
        store_f32(out, _mean_of_side(address, n, np.float32(-1), terms))
        store_f32(out + 4, _mean_of_side(address, n, np.float32(1), terms))
        return out + 8
    if norm == L2:
        value = np.float32(min(np.sqrt(energy), LARGEST_NORM))
    elif norm == MEAN:
        value = _mean(address, n, terms)
    elif norm == POWER:
        value = bits_float(uint32((top + 0x7FFFFF) & EXPONENT))
    else:
        value = bits_float(uint32(top))
        if norm == CLIPPED:
            value = min(value, np.float32(min(clip * np.sqrt(energy / n), LARGEST_NORM)))
    value = min(value, np.float32(LARGEST_NORM))
    store_f32(out, value)
    return out + 4


@_kernel
def _measure(x, g, n, block, norm, clip, out, work):
    """The first pass: write the norms. Returns (energy; -1 where not finite, address after them)."""
    sums, terms, _, _, _, _, _, _ = work
    sums_address = int64(sums.ctypes.data)
    energy = 0.0
    for start in range(0, n, block):
        size = min(block, n - start)
        values, top = _form(x + 4 * start, g + 4 * start if g else 0, size, sums_address)
        if top >= INF:
            return -1.0, out
        block_energy = _squares(values, size, terms)
        energy += block_energy
        out = _put_norms(out, values, size, block_energy, top, norm, clip, terms)
    return energy, out


# --- rounding ------------------------------------------------------------------------------------


@_kernel
def _word(i, low, high):
    """32 random bits, number i of a stream: a hash of i and the key.

    The 32-bit mixer of Wellons ("lowbias32", 2018), with half of the mixed key before and half inside.
    """
    h = uint32(i ^ low)
    h = uint32(h ^ (h >> uint32(16)))
    h = uint32(h * uint32(0x7FEB352D))
    h = uint32(h ^ high)
    h = uint32(h ^ (h >> uint32(15)))
    h = uint32(h * uint32(0x846CA68B))
    return uint32(h ^ (h >> uint32(16)))


@_kernel
def _uniform(i, low, high):
    """Number i of a stream, one of the 2^24 multiples of 2^-24 in [0, 1)."""
    return np.float32(int32(_word(i, low, high) >> uint32(8))) * np.float32(2.0**-24)


@_kernel
def _halves(key):
    """The halves of ``keys.mix(key)`` (the oracle compares the two)."""
    word = uint64(key) + uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> uint64(27))) * uint64(0x94D049BB133111EB)
    word ^= word >> uint64(31)
    return uint32(word & uint64(0xFFFFFFFF)), uint32(word >> uint64(32))


@_kernel
def _share(value, norm):
    """value / norm, saturated: what is left to round."""
    return min(max(value / norm, np.float32(-1)), np.float32(1))


@_kernel
def _round_uniform(address, n, norm, top, low, high, first, codes):
    """Codes of n values for 2 top + 1 evenly spaced levels."""
    a = carray(float32_pointer(address), n)
    middle = np.float32(top)
    for i in range(n):
        scaled = _share(a[i], norm) * middle
        below = np.floor(scaled)
        up = np.float32(_uniform(uint32(first + i), low, high) < scaled - below)
        codes[i] = uint8(np.int32(below + middle + up))


@_kernel
def _round_powers(address, n, norm, top, low, high, first, codes):
    """Codes of n values for the levels 0 and 2^-j, j < top: a level's index is its exponent."""
    a = carray(float32_pointer(address), n)
    middle = np.float32(top)
    zero = np.float32(BIAS - top)  # the exponent that zero has in the place of -infinity
    least = bits_float(uint32((BIAS - top + 1) << 23))
    for i in range(n):
        share = _share(a[i], norm)
        word = float_bits(share) & uint32(EXPONENT)
        level = max(np.float32(int32(word >> uint32(23))) - zero, np.float32(0))
        below = bits_float(word) if level > 0 else np.float32(0)
        gap = bits_float(word) if level > 0 else least
        inside = abs(share) - below
        inside = gap - inside if share < 0 else inside
        up = np.float32(_uniform(uint32(first + i), low, high) < inside / gap)
        lower = np.float32(-1) - level if share < 0 else level
        codes[i] = uint8(np.int32(middle + lower + up))


@_kernel
def _round_table(address, n, norm, levels, bits, alphabet, low, high, first, codes, work):
    """Codes of n values for any rising levels: bisection, a step for all values at a time."""
    _, _, _, shares, below, gap, search, gaps = work
    a = carray(float32_pointer(address), n)
    for i in range(n):
        shares[i] = _share(a[i], norm)
    search[: alphabet - 1] = levels[: alphabet - 1]
    search[alphabet - 1 :] = np.float32(2)  # above any share
    for i in range(alphabet - 1):
        gaps[i] = levels[i + 1] - levels[i]
    codes[:n] = 0
    step = uint64(1) << uint64(bits - 1)
    while step > uint64(0):
        for i in range(n):
            other = codes[i] + step
            codes[i] = uint8(other) if search[other] <= shares[i] else codes[i]
        step >>= uint64(1)
    for i in range(n):
        below[i] = levels[codes[i]]
        gap[i] = gaps[codes[i]]
    for i in range(n):
        part = (shares[i] - below[i]) / gap[i]
        codes[i] += uint8(_uniform(uint32(first + i), low, high) < part)


@_kernel
def _round_sign(address, n, codes):
    """Code 1 for what is not negative."""
    a = carray(float32_pointer(address), n)
    for i in range(n):
        codes[i] = uint8(a[i] >= 0)


@_kernel
def _choose(address, n, norm, rounding, bits, levels, alphabet, key, first, codes, work):
    """Codes of one block."""
    low, high = _halves(key)
    norm = norm if norm > 0 else np.float32(1)
    top = (alphabet - 1) >> 1
    if rounding == SIGN:
        _round_sign(address, n, codes)
    elif rounding == UNIFORM and bits > 1:
        _round_uniform(address, n, norm, top, low, high, first, codes)
    elif rounding == POWERS and bits > 1:
        _round_powers(address, n, norm, top, low, high, first, codes)
    else:
        _round_table(address, n, norm, levels, bits, alphabet, low, high, first, codes, work)


@_kernel
def _block_levels(norms, sides, levels, pair):
    """(norm, signed levels) of a block whose norms are at ``norms``; pair has room for two levels."""
    if not sides:
        return load_f32(norms), levels
    pair[0], pair[1] = -load_f32(norms), load_f32(norms + 4)
    return np.float32(1), pair


@_kernel
def _decode(codes, n, norm, rounding, levels, alphabet, decoded):
    """decoded = norm * the codes' levels: evenly spaced ones by arithmetic, others by look-up."""
    if rounding == UNIFORM and alphabet > 2:
        top = np.float32((alphabet - 1) >> 1)
        for i in range(n):
            decoded[i] = norm * ((np.float32(int32(codes[i])) - top) / top)
        return
    for i in range(n):
        decoded[i] = norm * levels[codes[i]]


@_vector
def _leave(x, sums, n, decoded):
    """x = sums - decoded; returns the energy of what is decoded."""
    a = carray(float32_pointer(sums), n)
    b = carray(float32_pointer(x), n)
    sent = 0.0
    for i in range(n):
        b[i] = a[i] - decoded[i]
        sent += np.float64(decoded[i]) * np.float64(decoded[i])
    return sent


# --- packing -------------------------------------------------------------------------------------


@_kernel
def _pack_groups(codes, groups, bits, out):
    """Pack groups of 8 codes (bytes at an address) into ``bits`` bytes each; touches 8 past the end.

    Within a word, pairs of neighbours become one field, three times.
    """
    b = uint64(bits)
    one = uint64(1)
    pairs = uint64(0x0001000100010001) * ((one << b) - one)
    fours = uint64(0x0000000100000001) * ((one << (b + b)) - one)
    eights = (one << (uint64(4) * b)) - one
    for group in range(groups):
        w = load_u64(codes + 8 * group)
        w = (w & pairs) | ((w >> (uint64(8) - b)) & (pairs << b))
        w = (w & fours) | ((w >> (uint64(16) - uint64(2) * b)) & (fours << (uint64(2) * b)))
        w = (w & eights) | ((w >> (uint64(32) - uint64(4) * b)) & (eights << (uint64(4) * b)))
        store_u64(out + bits * group, w)


@_kernel
def _unpack_groups(position, end, groups, bits, codes):
    """Undo :func:`_pack_groups`; bytes from ``end`` on are zeros and not read."""
    b = uint64(bits)
    one = uint64(1)
    pairs = uint64(0x0001000100010001) * ((one << b) - one)
    fours = uint64(0x0000000100000001) * ((one << (b + b)) - one)
    eights = (one << (uint64(4) * b)) - one
    for group in range(groups):
        w = _window(position + bits * group, 0, end)
        w = (w & eights) | ((w & (eights << (uint64(4) * b))) << (uint64(32) - uint64(4) * b))
        w = (w & fours) | ((w & (fours << (uint64(2) * b))) << (uint64(16) - uint64(2) * b))
        w = (w & pairs) | ((w & (pairs << b)) << (uint64(8) - b))
        store_u64(codes + 8 * group, w)


@_kernel
def _pack_trits(codes, groups, out):
    """Pack groups of 5 codes of three levels into a byte each."""
    for group in range(groups):
        word = 0
        for digit in range(TRITS - 1, -1, -1):
            word = 3 * word + int64(load_u8(codes + TRITS * group + digit))
        store_u8(out + group, uint8(word))


@_kernel
def _unpack_trits(position, end, groups, codes):
    """Undo :func:`_pack_trits`; other bytes than of five digits give no codes. Touches 3 more."""
    for group in range(groups):
        word = load_u8(position + group) if position + group < end else uint8(0)
        store_u64(codes + TRITS * group, TRIT_CODES[word])


@_kernel
def _group(alphabet):
    """(codes, bytes for each bit of the width) that are packed together."""
    return TRITS if alphabet == 3 else 8


@_kernel
def _packed_bytes(n, bits, alphabet):
    """``wire_codes.packed_bytes`` (a test compares the two)."""
    return (n + TRITS - 1) // TRITS if alphabet == 3 else (n * bits + 7) // 8


@_kernel
def _pack(codes, groups, bits, alphabet, out):
    """Pack whole groups of codes; returns the address after them."""
    if alphabet == 3:
        _pack_trits(codes, groups, out)
        return out + groups
    _pack_groups(codes, groups, bits, out)
    return out + bits * groups


@_kernel
def _unpack(position, end, first, count, bits, alphabet, codes):
    """Unpack codes first to first + count of a layer; returns how many others stand before them."""
    group = _group(alphabet)
    skip = first % group
    groups = (skip + count + group - 1) // group
    if alphabet == 3:
        _unpack_trits(position + first // group, end, groups, codes)
    else:
        _unpack_groups(position + bits * (first // group), end, groups, bits, codes)
    return skip


# --- compression ---------------------------------------------------------------------------------


@_kernel
def _encode(x, g, n, bits, key, rule, levels, alphabet, norms, out, spectrum, work):
    """The second pass over a layer whose norms are written: (energy sent, address after the codes)."""
    block, norm, rounding, _ = rule
    sums, _, codes, decoded, _, _, _, _ = work
    sums_address, codes_address = int64(sums.ctypes.data), int64(codes.ctypes.data)
    pair = np.empty(2, np.float32)
    group = _group(alphabet)
    end = out + _packed_bytes(n, bits, alphabet)
    sent, ready = 0.0, 0
    for start in range(0, n, block):
        size = min(block, n - start)
        values, _ = _form(x + 4 * start, g + 4 * start if g else 0, size, sums_address)
        if spectrum != 0:
            _count_block(values, size, spectrum)
        scale, table = _block_levels(norms, norm == SIDES, levels, pair)
        norms += 8 if norm == SIDES else 4
        chosen = codes[ready:]
        _choose(values, size, scale, rounding, bits, levels, alphabet, key, start, chosen, work)
        _decode(chosen, size, scale, rounding, table, alphabet, decoded)
        sent += _leave(x + 4 * start, values, size, decoded)
        ready += size
        out = _pack(codes_address, ready // group, bits, alphabet, out)
        done = ready // group * group
        for i in range(ready - done):
            codes[i] = codes[done + i]
        ready -= done
    codes[ready : ready + group] = 0
    _pack(codes_address, (ready + group - 1) // group, bits, alphabet, out)
    return sent, end


@_kernel
def _compress_layer(x, g, n, bits, key, rule, levels, alphabet, out, stats, spectrum, work):
    """One layer, from the gradient to the payload; returns the address after it."""
    block, norm, _, clip = rule
    norms = out + 1
    energy, codes = _measure(x, g, n, block, norm, clip, norms, work)
    stats[:] = 0.0
    if energy < 0.0:
        stats[2] = 1.0
        store_u8(out, uint8(NONFINITE))
        return norms
    store_u8(out, uint8(bits))
    sent, out = _encode(x, g, n, bits, key, rule, levels, alphabet, norms, codes, spectrum, work)
    stats[0], stats[1] = energy, sent
    return out


@_kernel
def _compress_layers(x, offsets, bits, keys, grads, rule, levels, alphabets, out, stats, spectra, work):
    """All layers of a bucket; returns the bytes written."""
    start = out
    for layer in range(len(bits)):
        first, width = offsets[layer], bits[layer]
        out = _compress_layer(
            x + 4 * first,
            grads[layer],
            offsets[layer + 1] - first,
            width,
            keys[layer],
            rule,
            levels[width],
            alphabets[width],
            out,
            stats[layer],
            spectra + 8 * BINS * layer if spectra != 0 else 0,
            work,
        )
    return out - start


class _Work(threading.local):
    """Buffers of one thread, for the largest block seen."""

    def __init__(self) -> None:
        self.search, self.gaps = np.empty(LEVELS, np.float32), np.empty(LEVELS, np.float32)
        self.grow(512)

    def grow(self, block: int) -> None:
        self.block = block
        self.sums = np.empty(block, np.float32)
        self.terms = np.empty(block, np.float64)
        self.codes = np.empty(block + 2 * SLACK, np.uint8)
        self.shares, self.below, self.gap = (np.empty(block, np.float32) for _ in range(3))

    def arrays(self, block: int) -> tuple[npt.NDArray[Any], ...]:
        if block > self.block:
            self.grow(block)
        return (
            self.sums,
            self.terms,
            self.codes,
            self.shares,  # in the place of which later come the decoded values
            self.below,
            self.gap,
            self.search,
            self.gaps,
        )


_work = _Work()


def _rule(rule: QuantizationRule) -> tuple[int, int, int, float]:
    return rule.block, int(rule.norm), int(rule.rounding), float(rule.clip)


def quantize_compress_(
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    bits: npt.NDArray[np.int64],
    rule: QuantizationRule,
    tables: Tables,
    grads: Sequence[Tensor] | None = None,
    keys: npt.NDArray[np.uint64] | None = None,
    reserve: int = 0,
    spectra: npt.NDArray[np.int64] | None = None,
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """See :func:`hvd_adaptive.kernels.quantize_reference.quantize_compress_`: the same bytes, faster.

    Releases the GIL. Cost with evenly spaced levels: about ten copies of the tensor. Memory: 13 bytes
    an element of one block, kept for each thread.
    """
    offsets, bits = check_layers(x, offsets, bits, grads)
    check_bits(bits, tables)
    keys = check_keys(keys, len(bits))
    check_spectra(spectra, len(bits))
    addresses = np.zeros(len(bits), np.int64)
    if grads is not None:
        addresses[:] = [grad.data_ptr() for grad in grads]
    room = sum(
        layer_bytes(numel, width, int(tables.alphabets[width]), rule)
        for numel, width in zip(np.diff(offsets).tolist(), bits.tolist(), strict=True)
    )
    buffer = torch.empty(reserve + room + SLACK, dtype=torch.uint8)
    stats = np.empty((len(bits), 3))
    size = _compress_layers(
        x.data_ptr(),
        offsets,
        bits,
        keys,
        addresses,
        _rule(rule),
        tables.levels,
        tables.alphabets,
        buffer.data_ptr() + reserve,
        stats,
        0 if spectra is None else spectra.ctypes.data,
        _work.arrays(rule.block),
    )
    return buffer[: reserve + size], stats


# --- decompression -------------------------------------------------------------------------------


@_kernel
def _bad_norm(norms, count):
    """Index of the first of count norms that is negative (or -0), NaN or Inf; -1 where all are good."""
    for i in range(count):
        if load_u32(norms + 4 * i) >= uint32(INF):
            return i
    return -1


@_kernel
def _bad_codes(codes, skip, count, last, alphabet):
    """What is wrong with count codes after the first ``skip``, and with the padding if ``last``."""
    largest = int32(0)
    chosen = codes[skip : skip + count]
    for i in range(count):
        largest = max(largest, int32(chosen[i]))
    if largest >= alphabet:
        return CODE
    group = _group(alphabet)
    if last:
        for i in range(skip + count, (skip + count + group - 1) // group * group):
            if codes[i] != 0:
                return PADDING
    return 0


@_kernel
def _add(out, n, scale, decoded):
    """out += scale * decoded, for n elements."""
    a = carray(float32_pointer(out), n)
    for i in range(n):
        a[i] += scale * decoded[i]


@_kernel
def _add_layer(position, end, out, n, scale, rule, levels, alphabets, work):
    """Decode one layer: (damage, address after it or of the damage, whether it was finite)."""
    block, norm, rounding, _ = rule
    if position >= end:
        return TRUNCATED, end, True
    header = int64(load_u8(position))
    if header == NONFINITE:
        a = carray(float32_pointer(out), n)
        a[:] = np.float32(np.nan)
        return 0, position + 1, False
    if header > MAX_BITS or alphabets[header] == 0:
        return HEADER, position, True
    alphabet, sides = alphabets[header], norm == SIDES
    count = ((n + block - 1) // block) * (2 if sides else 1)
    norms = position + 1
    start = norms + 4 * count
    after = start + _packed_bytes(n, header, alphabet)
    if after > end:
        return TRUNCATED, end, True
    bad = _bad_norm(norms, count)
    if bad >= 0:
        return NORM, norms + 4 * bad, True
    codes, decoded, pair = work[2], work[3], np.empty(2, np.float32)
    codes_address = int64(codes.ctypes.data)
    for first in range(0, n, block):
        size = min(block, n - first)
        skip = _unpack(start, after, first, size, header, alphabet, codes_address)
        damage = _bad_codes(codes, skip, size, first + size == n, alphabet)
        if damage:
            return damage, start + _packed_bytes(first, header, alphabet), True
        value, table = _block_levels(norms, sides, levels[header], pair)
        norms += 8 if sides else 4
        _decode(codes[skip:], size, value, rounding, table, alphabet, decoded)
        _add(out + 4 * first, size, scale, decoded)
    return 0, after, True


@_kernel
def _add_layers(body, start, size, outs, numels, scale, rule, levels, alphabets, marks, work):
    """Decode all layers; returns (damage, layer, byte position)."""
    position, end = body + start, body + size
    for layer in range(len(outs)):
        damage, position, finite = _add_layer(
            position, end, outs[layer], numels[layer], scale, rule, levels, alphabets, work
        )
        if damage:
            return damage, layer, position - body
        marks[layer] = not finite
    if position != end:
        return TRAILING, len(outs) - 1, position - body
    return 0, 0, 0


def quantize_decompress_add_(
    body: Tensor,
    start: int,
    outs: Sequence[Tensor],
    scale: float,
    rule: QuantizationRule,
    tables: Tables,
) -> npt.NDArray[np.uint8]:
    """See :func:`hvd_adaptive.kernels.quantize_reference.quantize_decompress_add_`; without the GIL."""
    numels = np.array(check_outs(body, outs), np.int64)
    addresses = np.array([out.data_ptr() for out in outs], np.int64)
    marks = np.zeros(len(outs), np.uint8)
    damage, layer, position = _add_layers(
        body.data_ptr(),
        start,
        body.numel(),
        addresses,
        numels,
        np.float32(scale),
        _rule(rule),
        tables.levels,
        tables.alphabets,
        marks,
        _work.arrays(rule.block),
    )
    if damage:
        raise damaged(damage, layer, int(numels[layer]) if outs else 0, position, body.numel())
    return marks


# --- two bytes for four --------------------------------------------------------------------------


@_kernel
def _round_at_random(x, n, key, out):
    """See :func:`round_at_random_`; ``out`` holds the bfloat16s' bits."""
    low, high = _halves(key)
    a = carray(float32_pointer(x), n)
    for i in range(n):
        word = float_bits(a[i])
        magnitude = uint32(word & uint32(MAGNITUDE))
        noise = uint32(_word(uint32(i), low, high) >> uint32(16))
        total = uint32(min(magnitude, uint32(LARGEST_BF16)) + noise)
        rounded = uint32(NAN_BF16) if magnitude > uint32(INF) else uint32(total >> uint32(16))
        out[i] = uint16(rounded | (uint32(word >> uint32(16)) & uint32(0x8000)))


def round_at_random_(out: Tensor, x: Tensor, key: int) -> None:
    """See :func:`hvd_adaptive.kernels.quantize_reference.round_at_random_`. Releases the GIL."""
    bits = out.view(torch.int16).numpy().view(np.uint16)
    _round_at_random(x.data_ptr(), x.numel(), np.uint64(key), bits)


# --- expectations --------------------------------------------------------------------------------


@_vector
def _find_bins(address, n, norm, bins):
    """The bin of each share; returns the squared error of what saturates."""
    a = carray(float32_pointer(address), n)
    divisor = norm if norm > 0 else np.float32(1)
    beyond = 0.0
    for i in range(n):
        excess = max(np.float64(abs(a[i])) - np.float64(norm), 0.0)
        beyond += excess * excess
        bins[i] = float_bits(abs(_share(a[i], divisor))) >> uint32(WEIGHT_SHIFT)
    return beyond


@_kernel
def _weigh(x, n, rule, squared, norms, weights, bins, work):
    """See :func:`norm_histogram`; (what saturates; -1 if non-finite). ``norms`` holds all of them.

    Bins are found block by block, by vector operations, before anything is added to them.
    """
    block, norm, _, clip = rule
    energy, _ = _measure(x, 0, n, block, norm, clip, norms, work)
    if energy < 0.0:
        return -1.0
    beyond = 0.0
    for start in range(0, n, block):
        size, largest = min(block, n - start), load_f32(norms)
        beyond += _find_bins(x + 4 * start, size, largest, bins)
        weight = np.float64(largest) * np.float64(largest) if squared else 1.0
        for i in range(size):
            weights[bins[i]] += weight
        norms += 4
    return beyond


def norm_histogram(
    x: Tensor, rule: QuantizationRule, *, squared: bool
) -> tuple[npt.NDArray[np.float64], float]:
    """See :func:`hvd_adaptive.kernels.quantize_reference.norm_histogram`. Releases the GIL."""
    weights, bins = np.zeros(WEIGHT_BINS), np.empty(rule.block, np.uint32)
    norms = np.empty(rule.norm_bytes(x.numel()) + SLACK, np.uint8)
    work = _work.arrays(rule.block)
    address, blocks = x.data_ptr(), norms.ctypes.data
    beyond = _weigh(address, x.numel(), _rule(rule), squared, blocks, weights, bins, work)
    return weights, beyond if beyond >= 0 else float("nan")


@_kernel
def _expected_at(weights, edges, levels, alphabets, errors, counts):
    """See :func:`expected_error_at`. Reads the bins once, by rising shares, for all widths together."""
    places = np.empty(alphabets.size, np.int64)
    for k in range(alphabets.size):
        places[k] = np.searchsorted(levels[k, : alphabets[k]], np.float32(0), side="right") - 1
    for i in range(weights.size):
        if weights[i] == 0.0:
            continue
        width = edges[i + 1] - edges[i]
        for k in range(alphabets.size):
            j, last, start = places[k], alphabets[k] - 2, edges[i]
            while True:  # the pieces of the bin, cut at the levels
                while j < last and levels[k, j + 1] <= start:
                    j += 1
                end = min(edges[i + 1], np.float64(levels[k, j + 1])) if j < last else edges[i + 1]
                length, middle = end - start, (start + end) / 2
                mass = weights[i] * (length / width) if width > 0 else weights[i]
                below, above = middle - levels[k, j], levels[k, j + 1] - middle
                errors[k] += max(mass * (above * below - length * length / 12), 0.0)
                up = mass * (below / (above + below))
                counts[k, j] += mass - up
                counts[k, j + 1] += up
                start = end
                if start >= edges[i + 1]:
                    break
            places[k] = j


def expected_error_at(
    weights: npt.NDArray[np.float64], tables: Tables, bits: Sequence[int]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """See :func:`hvd_adaptive.kernels.quantize_reference.expected_error_at`. Releases the GIL."""
    errors, counts = np.zeros(len(bits)), np.zeros((len(bits), LEVELS))
    widths = np.asarray(bits, np.int64)
    _expected_at(weights, EDGES, tables.levels[widths], tables.alphabets[widths], errors, counts)
    return errors, counts


def warm() -> None:
    """Call every kernel once on a few elements, so that Numba's cache holds them."""
    from hvd_adaptive.kernels import huffman  # which imports this module

    huffman.warm()
    x = torch.ones(16)
    offsets, bits = np.array([0, 16]), np.array([2])
    tables = Tables({2: [0.0, 1.0]})
    rule = QuantizationRule(Norm.max, Rounding.uniform)
    body, _ = quantize_compress_(x, offsets, bits, rule, tables, [torch.ones(16)])
    quantize_decompress_add_(body, 0, [torch.zeros(16)], 1.0, rule, tables)
    weights, _ = norm_histogram(x, rule, squared=True)
    expected_error_at(weights, tables, [2])
    round_at_random_(x.bfloat16(), x, 1)
