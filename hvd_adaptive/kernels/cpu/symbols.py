"""Huffman streams, decoded several symbols at a time.

Decoding is one chain: where a codeword begins is known when the one before it is. So the next 12 bits
are looked up, and all whole codewords that begin there are decoded together. What such a table does not
hold, and what stands near either end, is decoded symbol by symbol.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, int64, uint8, uint16, uint32, uint64

from hvd_adaptive.kernels.cpu.compiling import kernel
from hvd_adaptive.kernels.cpu.intrinsics import (
    load_u64,
    store_u64,
    uint8_pointer,
    uint32_pointer,
    uint64_pointer,
)
from hvd_adaptive.kernels.cpu.packing import group_size, pack_codes
from hvd_adaptive.kernels.cpu.streams import stream_window
from hvd_adaptive.kernels.huffman import CHUNK, MAX_GROUP, MAX_LENGTH, Code
from hvd_adaptive.wire.quantized import MAX_BITS

STEP_BITS = 12
"""Bits looked up at once; the codes there fit in a word, and tables for all of them in cache."""
STEPS = 4
"""Look-ups between two reads of the stream, each of which gives 56 bits at least."""
OVERSHOOT = STEPS * MAX_GROUP
"""Codes that may be decoded beyond those wanted, and bytes that may be touched beyond these."""


@kernel
def _reversed(word, length):
    """The lowest ``length`` bits of ``word`` in the opposite order."""
    reverse = 0
    for _ in range(length):
        reverse = (reverse << 1) | (word & 1)
        word >>= 1
    return reverse


@kernel
def find_codewords(lengths, words):
    """Canonical codewords, first bit lowest; False where no code has these lengths."""
    counts, following = np.zeros(MAX_LENGTH + 1, np.int64), np.zeros(MAX_LENGTH + 1, np.int64)
    for length in lengths:
        counts[length] += 1
    counts[0] = 0
    word = 0
    for length in range(1, MAX_LENGTH + 1):
        word = (word + counts[length - 1]) << 1
        following[length] = word
        if word + counts[length] > 1 << length:
            return False
    for symbol in range(len(lengths)):
        length = int64(lengths[symbol])
        words[symbol] = uint16(_reversed(following[length], length))
        following[length] += int64(length > 0)
    return counts.sum() > 0


@kernel
def _fill_table(lengths, words, table):
    """table[next bits] = symbol << 4 | length; 0 where no codeword begins so."""
    table[:] = 0
    for symbol in range(len(lengths)):
        length = int64(lengths[symbol])
        if length:
            for i in range(int64(words[symbol]), len(table), 1 << length):
                table[i] = uint32((symbol << 4) | length)


@kernel
def _fill_digits(alphabet, group, digits):
    """The codes of every symbol, a byte each."""
    for symbol in range(len(digits)):
        word, rest = uint64(0), symbol
        for digit in range(group):
            word |= uint64(rest % alphabet) << uint64(8 * digit)
            rest //= alphabet
        digits[symbol] = word


@kernel
def _fill_steps(table, digits, group, most, sizes, counts, codes):
    """For the next ``most`` bits: bits of the whole codewords there, and how many codes, and which."""
    mask = len(table) - 1
    for bits in range(len(sizes)):
        used, found, word = 0, 0, uint64(0)
        while found + group <= MAX_GROUP:
            entry = table[(bits >> used) & mask]
            if entry == 0 or used + int64(entry & uint32(15)) > most:
                break
            word |= digits[entry >> uint32(4)] << uint64(8 * found)
            used += int64(entry & uint32(15))
            found += group
        sizes[bits], counts[bits], codes[bits] = uint8(used), uint8(found), word


class Decoder:
    """The tables that decode the streams of one code.

    Args:
        code: the code.
        size: bytes of the streams, about: for few, smaller tables are made.
    """

    def __init__(self, code: Code, size: int) -> None:
        table = np.empty(1 << int(code.lengths.max()), np.uint32)
        digits, words = np.empty(code.lengths.size, np.uint64), np.zeros(code.lengths.size, np.uint16)
        find_codewords(code.lengths, words)
        _fill_table(code.lengths, words, table)
        _fill_digits(code.alphabet, code.group, digits)
        bits = min(STEP_BITS, size.bit_length())
        sizes, counts = np.empty(1 << bits, np.uint8), np.empty(1 << bits, np.uint8)
        codes = np.empty(1 << bits, np.uint64)
        _fill_steps(table, digits, code.group, bits, sizes, counts, codes)
        self.group = code.group
        self.tables: tuple[npt.NDArray[Any], ...] = (table, digits, sizes, counts, codes)


def decoder_addresses(decoders: Mapping[int, Decoder]) -> npt.NDArray[np.int64]:
    """For each number of bits, where its decoder's tables are: :func:`tables_at` makes them of it.

    Kernels that decode several bodies at once take it, since each of these has codes of its own.

    Args:
        decoders: by bits; they must outlive the addresses.

    Returns:
        ``int64[9, 11]``: the group (0 where there is no code), and address and length of each table.
    """
    found = np.zeros((MAX_BITS + 1, 11), np.int64)
    for bits, decoder in decoders.items():
        rows = [(table.ctypes.data, table.size) for table in decoder.tables]
        found[bits] = [decoder.group, *itertools.chain.from_iterable(rows)]
    return found


@kernel
def tables_at(row):
    """The tables of a decoder, from a row of :func:`decoder_addresses`."""
    return (
        carray(uint32_pointer(row[1]), row[2]),
        carray(uint64_pointer(row[3]), row[4]),
        carray(uint8_pointer(row[5]), row[6]),
        carray(uint8_pointer(row[7]), row[8]),
        carray(uint64_pointer(row[9]), row[10]),
    )


@kernel
def _decode_steps(position, end, bit, ready, wanted, most, tables, out):
    """Decode many symbols at a time: as :func:`decode_until`, while no more than ``most`` are ready."""
    _, _, sizes, counts, codes = tables
    mask, size = uint64(len(sizes) - 1), uint64(1)
    source = position + (bit >> 3) + 7
    if source + 8 > end:
        return bit, ready
    window, bits = load_u64(source - 7) >> uint64(bit & 7), uint64(56 - (bit & 7))
    while ready < wanted and ready <= most and source + 8 <= end and size > uint64(0):
        window |= load_u64(source) << bits
        source += int64((uint64(63) - bits) >> uint64(3))
        bits |= uint64(56)
        for _ in range(STEPS):
            step = window & mask
            size = uint64(sizes[step])
            window >>= size
            bits -= size
            store_u64(out + ready, codes[step])
            ready += int64(counts[step])
    return 8 * (source - position) - int64(bits), ready


@kernel
def decode_until(position, end, bit, ready, wanted, left, group, tables, out):
    """Decode a stream's symbols until there are ``wanted`` codes.

    Args:
        position, end: addresses of the stream and of what follows it.
        bit: of the stream, at which to go on.
        ready: codes that are at ``out`` already.
        wanted: of them in all; up to OVERSHOOT more may be decoded.
        left: codes of the layer that are not decoded.
        group, tables: of a :class:`Decoder`.
        out: address of the codes.

    Returns:
        The bit after the last symbol, -1 where the stream is damaged; and how many codes are ready.
    """
    table, digits, _, _, _ = tables
    mask, most = uint64(len(table) - 1), ready + left - OVERSHOOT
    while True:
        bit, ready = _decode_steps(position, end, bit, ready, wanted, most, tables, out)
        if ready >= wanted:
            return bit, ready
        entry = table[stream_window(position, bit, end) & mask]
        bit += int64(entry & uint32(15))
        if entry == 0 or bit > 8 * (end - position):
            return -1, ready
        store_u64(out + ready, digits[entry >> uint32(4)])
        ready += group


@kernel
def is_whole(position, end, bit):
    """Whether a stream ends at this bit: in its last byte, the rest of which is 0."""
    return (bit + 7) >> 3 == end - position and stream_window(position, bit, end) == 0


@kernel
def move_down(codes, ready, taken):
    """Move the codes that were not taken to the front; returns how many they are."""
    for i in range(ready - taken):
        codes[i] = codes[taken + i]
    return ready - taken


@kernel
def get_stream(position, size, n, bits, alphabet, group, tables, out, codes):
    """Decode a stream of ``size`` bytes into packed codes at ``out``; returns whether it is whole."""
    end, bit, ready, decoded = position + size, 0, 0, 0
    address = int64(codes.ctypes.data)
    packed = group_size(alphabet)
    for first in range(0, n, CHUNK):
        count = min(CHUNK, n - first)
        bit, now = decode_until(position, end, bit, ready, count, n - decoded, group, tables, address)
        if bit < 0:
            return False
        decoded += now - ready
        if first + count == n:
            codes[count : count + packed] = 0
        out = pack_codes(address, (count + packed - 1) // packed, bits, alphabet, out)
        ready = move_down(codes, now, count)
    return is_whole(position, end, bit)
