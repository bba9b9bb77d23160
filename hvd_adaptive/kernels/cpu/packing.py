"""Codes packed at their true width, and back."""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import carray, int64, uint8, uint64

from hvd_adaptive.kernels.cpu.compiling import kernel
from hvd_adaptive.kernels.cpu.intrinsics import (
    load_u8,
    load_u64,
    store_u8,
    store_u64,
    uint64_pointer,
)
from hvd_adaptive.kernels.cpu.streams import stream_window
from hvd_adaptive.wire.quantized import TRIT_BYTES, TRITS

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


@kernel
def _pack_groups(codes, groups, bits, out):
    """Pack groups of 8 codes (bytes at an address) into ``bits`` bytes each; touches 8 past the end.

    Within a word, pairs of neighbors become one field, three times. All words at once, in the place of
    the codes: that is done by vector instructions, as storing them is not.
    """
    b = uint64(bits)
    one = uint64(1)
    pairs = uint64(0x0001000100010001) * ((one << b) - one)
    fours = uint64(0x0000000100000001) * ((one << (b + b)) - one)
    eights = (one << (uint64(4) * b)) - one
    words = carray(uint64_pointer(codes), groups)
    for i in range(groups):
        w = words[i]
        w = (w & pairs) | ((w >> (uint64(8) - b)) & (pairs << b))
        w = (w & fours) | ((w >> (uint64(16) - uint64(2) * b)) & (fours << (uint64(2) * b)))
        words[i] = (w & eights) | ((w >> (uint64(32) - uint64(4) * b)) & (eights << (uint64(4) * b)))
    for i in range(groups):
        store_u64(out + bits * i, words[i])


@kernel
def _unpack_groups(position, end, groups, bits, codes):
    """Undo :func:`_pack_groups`; bytes from ``end`` on are zeros and not read."""
    b = uint64(bits)
    one = uint64(1)
    pairs = uint64(0x0001000100010001) * ((one << b) - one)
    fours = uint64(0x0000000100000001) * ((one << (b + b)) - one)
    eights = (one << (uint64(4) * b)) - one
    words = carray(uint64_pointer(codes), groups)
    inside = min(groups, max(0, (end - 8 - position) // bits + 1))
    for i in range(inside):
        words[i] = load_u64(position + bits * i)
    for i in range(inside, groups):
        words[i] = stream_window(position + bits * i, 0, end)
    for i in range(groups):
        w = words[i]
        w = (w & eights) | ((w & (eights << (uint64(4) * b))) << (uint64(32) - uint64(4) * b))
        w = (w & fours) | ((w & (fours << (uint64(2) * b))) << (uint64(16) - uint64(2) * b))
        words[i] = (w & pairs) | ((w & (pairs << b)) << (uint64(8) - b))


@kernel
def _pack_trits(codes, groups, out):
    """Pack groups of 5 codes of three levels into a byte each."""
    for group in range(groups):
        word = 0
        for digit in range(TRITS - 1, -1, -1):
            word = 3 * word + int64(load_u8(codes + TRITS * group + digit))
        store_u8(out + group, uint8(word))


@kernel
def _unpack_trits(position, end, groups, codes):
    """Undo :func:`_pack_trits`; other bytes than of five digits give no codes. Touches 3 more."""
    for group in range(groups):
        word = load_u8(position + group) if position + group < end else uint8(0)
        store_u64(codes + TRITS * group, TRIT_CODES[word])


@kernel
def group_size(alphabet):
    """(codes, bytes for each bit of the width) that are packed together."""
    return TRITS if alphabet == 3 else 8


@kernel
def bytes_of_codes(n, bits, alphabet):
    """``wire.quantized.packed_bytes`` (a test compares the two)."""
    return (n + TRITS - 1) // TRITS if alphabet == 3 else (n * bits + 7) // 8


@kernel
def pack_codes(codes, groups, bits, alphabet, out):
    """Pack whole groups of codes, which are overwritten; returns the address after them.

    ``codes`` is a multiple of 8.
    """
    if alphabet == 3:
        _pack_trits(codes, groups, out)
        return out + groups
    _pack_groups(codes, groups, bits, out)
    return out + bits * groups


@kernel
def unpack_codes(position, end, first, count, bits, alphabet, codes):
    """Unpack codes first to first + count of a layer; returns how many others stand before them.

    ``codes`` is a multiple of 8.
    """
    group = group_size(alphabet)
    skip = first % group
    groups = (skip + count + group - 1) // group
    if alphabet == 3:
        _unpack_trits(position + first // group, end, groups, codes)
    else:
        _unpack_groups(position + bits * (first // group), end, groups, bits, codes)
    return skip
