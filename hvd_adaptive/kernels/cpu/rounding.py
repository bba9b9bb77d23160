"""Rounding of a block to levels: random numbers, the choice of codes, and what these decode to.

Codes are chosen in loops without branches, which the compiler turns into vector instructions. They are
float32 operations in the order in which they stand here, never reordered or contracted, so the bytes
are those of the reference.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import carray, int32, uint8, uint32, uint64

from hvd_adaptive.kernels.cpu.compiling import kernel, reordered
from hvd_adaptive.kernels.cpu.intrinsics import bits_float, float32_pointer, float_bits, load_f32
from hvd_adaptive.wire.quantized import Norm, Rounding

EXPONENT = 0x7F800000
BIAS = 127


@kernel
def random_word(i, low, high):
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


@kernel
def uniform(i, stream):
    """Number i of a stream, one of the 2^24 multiples of 2^-24 in [0, 1)."""
    low, high, mirror, shift = stream
    word = uint32((random_word(i, low, high) ^ mirror) + shift)
    return np.float32(int32(word >> uint32(8))) * np.float32(2.0**-24)


@kernel
def key_halves(key):
    """The halves of ``rng.mix(key)`` (the oracle compares the two)."""
    word = uint64(key) + uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> uint64(27))) * uint64(0x94D049BB133111EB)
    word ^= word >> uint64(31)
    return uint32(word & uint64(0xFFFFFFFF)), uint32(word >> uint64(32))


@kernel
def stream_of(key, dither):
    """What a layer's random numbers are made of: see :func:`hvd_adaptive.rng.dithers`."""
    low, high = key_halves(key)
    word = uint64(dither)
    return low, high, uint32(word >> uint64(32)), uint32(word & uint64(0xFFFFFFFF))


@kernel
def saturated_share(value, norm):
    """value / norm, saturated: what is left to round."""
    return min(max(value / norm, np.float32(-1)), np.float32(1))


@kernel
def _round_uniform(address, n, norm, top, stream, first, codes):
    """Codes of n values for 2 top + 1 evenly spaced levels."""
    a = carray(float32_pointer(address), n)
    middle = np.float32(top)
    for i in range(n):
        scaled = saturated_share(a[i], norm) * middle
        below = np.floor(scaled)
        up = np.float32(uniform(uint32(first + i), stream) < scaled - below)
        codes[i] = uint8(np.int32(below + middle + up))


@kernel
def _round_powers(address, n, norm, top, stream, first, codes):
    """Codes of n values for the levels 0 and 2^-j, j < top: a level's index is its exponent."""
    a = carray(float32_pointer(address), n)
    middle = np.float32(top)
    zero = np.float32(BIAS - top)  # the exponent that zero has in the place of -infinity
    least = bits_float(uint32((BIAS - top + 1) << 23))
    for i in range(n):
        share = saturated_share(a[i], norm)
        word = float_bits(share) & uint32(EXPONENT)
        level = max(np.float32(int32(word >> uint32(23))) - zero, np.float32(0))
        below = bits_float(word) if level > 0 else np.float32(0)
        gap = bits_float(word) if level > 0 else least
        inside = abs(share) - below
        inside = gap - inside if share < 0 else inside
        up = np.float32(uniform(uint32(first + i), stream) < inside / gap)
        lower = np.float32(-1) - level if share < 0 else level
        codes[i] = uint8(np.int32(middle + lower + up))


@kernel
def _round_table(address, n, norm, levels, bits, alphabet, stream, first, codes, work):
    """Codes of n values for any rising levels: bisection, a step for all values at a time."""
    _, _, _, shares, below, gap, search, gaps = work
    a = carray(float32_pointer(address), n)
    for i in range(n):
        shares[i] = saturated_share(a[i], norm)
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
        codes[i] += uint8(uniform(uint32(first + i), stream) < part)


@kernel
def _round_sign(address, n, codes):
    """Code 1 for what is not negative."""
    a = carray(float32_pointer(address), n)
    for i in range(n):
        codes[i] = uint8(a[i] >= 0)


@kernel
def choose_codes(address, n, norm, rounding, bits, levels, alphabet, stream, first, codes, work):
    """Codes of one block."""
    norm = norm if norm > 0 else np.float32(1)
    top = (alphabet - 1) >> 1
    if rounding == SIGN:
        _round_sign(address, n, codes)
    elif rounding == UNIFORM and bits > 1:
        _round_uniform(address, n, norm, top, stream, first, codes)
    elif rounding == POWERS and bits > 1:
        _round_powers(address, n, norm, top, stream, first, codes)
    else:
        _round_table(address, n, norm, levels, bits, alphabet, stream, first, codes, work)


@kernel
def block_levels(norms, sides, levels, pair):
    """(norm, signed levels) of a block whose norms are at ``norms``; pair has room for two levels."""
    if not sides:
        return load_f32(norms), levels
    pair[0], pair[1] = -load_f32(norms), load_f32(norms + 4)
    return np.float32(1), pair


@kernel
def decode_codes(codes, n, norm, rounding, levels, alphabet, decoded):
    """decoded = norm * the codes' levels: evenly spaced ones by arithmetic, others by look-up."""
    if rounding == UNIFORM and alphabet > 2:
        top = np.float32((alphabet - 1) >> 1)
        for i in range(n):
            decoded[i] = norm * ((np.float32(int32(codes[i])) - top) / top)
        return
    for i in range(n):
        decoded[i] = norm * levels[codes[i]]


@reordered
def leave_remainder(x, sums, n, decoded):
    """x = sums - decoded; returns the energy of what is decoded."""
    a = carray(float32_pointer(sums), n)
    b = carray(float32_pointer(x), n)
    sent = 0.0
    for i in range(n):
        b[i] = a[i] - decoded[i]
        sent += np.float64(decoded[i]) * np.float64(decoded[i])
    return sent


L2, MAX, POWER, CLIPPED, MEAN, SIDES = (int(norm) for norm in Norm)
UNIFORM, POWERS, TABLE, SIGN = (int(rounding) for rounding in Rounding)
