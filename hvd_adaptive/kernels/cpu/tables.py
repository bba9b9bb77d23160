"""Rounding to the levels of a table, and back, where these are few: by comparisons, without look-ups.

A look-up per element keeps the compiler from using vector instructions; comparing every element with
each level does not. Levels are symmetric, so it is enough to compare magnitudes. Codes and what they
decode to are those of :mod:`hvd_adaptive.kernels.cpu.rounding`, by the same float32 operations.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import carray, int32, uint8, uint32

from hvd_adaptive.kernels.cpu.compiling import inlined, kernel
from hvd_adaptive.kernels.cpu.intrinsics import float32_pointer
from hvd_adaptive.kernels.cpu.rounding import saturated_share, uniform

FEW = 32
"""Levels up to which comparing is faster than bisection."""
FEW_TO_DECODE = 16
"""Levels up to which choosing is faster than a look-up."""
ABOVE = 2.0
"""More than any magnitude of a share."""


@kernel
def find_intervals(levels, alphabet, lows, highs):
    """The intervals between neighboring magnitudes, from the middle outwards, for up to FEW levels.

    Without a level at 0, the first one is that between the least level above 0 and its negative.
    """
    middle = (alphabet - 1) >> 1
    lows[: FEW // 2] = np.float32(ABOVE)
    for j in range(alphabet - 1 - middle):
        lows[j], highs[j] = levels[middle + j], levels[middle + j + 1]


@inlined
def _round(address, n, norm, lows, highs, steps, alphabet, stream, first, codes, decoded):
    """See :func:`round_to_few`; ``steps`` is a constant, so that the loop over levels is unrolled."""
    a = carray(float32_pointer(address), n)
    divisor = norm if norm > 0 else np.float32(1)
    middle, zero = int32((alphabet - 1) >> 1), int32(alphabet & 1)
    for i in range(n):
        share = saturated_share(a[i], divisor)
        size, negative = abs(share), share < 0
        low, high, interval = lows[0], highs[0], int32(0)
        for k in range(1, steps + 1):
            other_low, other_high = lows[k], highs[k]  # read whether needed or not: no branch
            within = size >= other_low
            low = other_low if within else low
            high = other_high if within else high
            interval += int32(within)
        inside = high - size if negative else size - low
        up = uniform(uint32(first + i), stream) < inside / (high - low)
        lower = -zero - interval if negative else interval
        codes[i] = uint8(middle + lower + int32(up))
        magnitude = high if up != negative else low
        decoded[i] = norm * (-magnitude if negative else magnitude)


@kernel
def round_to_few(address, n, norm, lows, highs, alphabet, stream, first, codes, decoded):
    """Codes of n values and what they decode to; what decodes to 0 may be -0.

    Args:
        address, n: of the values.
        norm: of the block.
        lows, highs: what :func:`find_intervals` found.
        alphabet: levels, at most FEW.
        stream, first: of the random numbers, and which of them the first value takes.
        codes, decoded: ``uint8[n]`` and ``float32[n]``.
    """
    if alphabet <= 8:
        _round(address, n, norm, lows, highs, 3, alphabet, stream, first, codes, decoded)
    elif alphabet <= 16:
        _round(address, n, norm, lows, highs, 7, alphabet, stream, first, codes, decoded)
    else:
        _round(address, n, norm, lows, highs, 15, alphabet, stream, first, codes, decoded)


@inlined
def _of_four(code, a, b, c, d):
    """One of four values, by the lower two bits of a code."""
    lower = b if code & 1 else a
    upper = d if code & 1 else c
    return upper if code & 2 else lower


@kernel
def add_few(out, codes, n, norm, scale, levels, alphabet):
    """out += scale * (norm * the codes' levels), for at most FEW_TO_DECODE levels."""
    total = carray(float32_pointer(out), n)
    a, b, c, d = levels[0], levels[1], levels[2], levels[3]
    e, f, g, h = levels[4], levels[5], levels[6], levels[7]
    if alphabet <= 8:
        for i in range(n):
            code = int32(codes[i])
            lower, upper = _of_four(code, a, b, c, d), _of_four(code, e, f, g, h)
            total[i] += scale * (norm * (upper if code & 4 else lower))
        return
    p, q, r, s = levels[8], levels[9], levels[10], levels[11]
    t, u, v, w = levels[12], levels[13], levels[14], levels[15]
    for i in range(n):
        code = int32(codes[i])
        first, second = _of_four(code, a, b, c, d), _of_four(code, e, f, g, h)
        third, fourth = _of_four(code, p, q, r, s), _of_four(code, t, u, v, w)
        lower, upper = (second if code & 4 else first), (fourth if code & 4 else third)
        total[i] += scale * (norm * (upper if code & 8 else lower))
