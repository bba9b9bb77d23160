"""Packed codes, several at a time: what Huffman coding counts and writes.

A **field** is what lies in the packed bits of one or more symbols: some 12 bits, read at once and
looked up at once. Codes of three levels, five to a byte, have no such bits; there a field is a symbol,
made of unpacked codes.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import int64, uint8, uint16, uint64

from hvd_adaptive.kernels.cpu.compiling import inlined, kernel
from hvd_adaptive.kernels.cpu.intrinsics import load_u64, store_u64
from hvd_adaptive.kernels.cpu.packing import bytes_of_codes, unpack_codes
from hvd_adaptive.kernels.cpu.streams import stream_window
from hvd_adaptive.kernels.huffman import CHUNK

FIELD_BITS = 12
"""Most bits of a field of several symbols: a table of 8 bytes for each field stays in cache."""
FIELDS_A_SYMBOL = 16
"""Codes that there must be for each possible field of several symbols: its table is made first."""
AT_ONCE = 8
"""Fields read from as many bytes as each has bits."""
FLUSHED = 56
"""Most bits appended to a stream at once: up to 7 are waiting."""


def shape_of(bits: int, alphabet: int, group: int, numel: int) -> tuple[int, int, int, int]:
    """(bits of a code, levels, codes in a symbol, symbols in a field), for so many codes in all."""
    width = bits * group
    most = min(FIELD_BITS, (numel // FIELDS_A_SYMBOL).bit_length() - 1)
    return bits, alphabet, group, 1 if alphabet == 3 else max(1, most // width)


def field_count(shape: tuple[int, int, int, int]) -> int:
    """How many fields there can be."""
    bits, alphabet, group, join = shape
    return int(alphabet**group if alphabet == 3 else 1 << (bits * group * join))


@kernel
def _split(field, shape, symbols):
    """The symbols in a field; False where one of its codes stands for no level."""
    bits, alphabet, group, join = shape
    if alphabet == 3:
        symbols[0] = field
        return True
    mask = (1 << bits) - 1
    for k in range(join):
        symbol, place = 0, 1
        for _ in range(group):
            code = field & mask
            if code >= alphabet:
                return False
            symbol += place * code
            place *= alphabet
            field >>= bits
        symbols[k] = symbol
    return True


@kernel
def _gather(codes, count, group, fields):
    """Make symbols of count codes of three levels, filled up to whole groups; returns how many."""
    groups = (count + group - 1) // group
    codes[count : groups * group] = uint8(1)
    for i in range(groups):
        symbol = 0
        for digit in range(group - 1, -1, -1):
            symbol = 3 * symbol + int64(codes[group * i + digit])
        fields[i] = uint16(symbol)
    return groups


@kernel
def _read(position, end, first, count, shape, work):
    """The whole fields among ``count`` codes of a chunk, into ``work``; returns how many."""
    bits, alphabet, group, join = shape
    fields, codes = work
    if alphabet == 3:
        unpack_codes(position, end, first, count, bits, alphabet, int64(codes.ctypes.data))
        return _gather(codes, count, group, fields)
    start, width = position + bits * (first // 8), bits * group * join
    mask = uint64((1 << width) - 1)
    whole, i = count // (group * join), 0
    while i + AT_ONCE <= whole and start + width + 8 <= end:
        for k in range(AT_ONCE):
            bit = k * width
            fields[i + k] = uint16((load_u64(start + (bit >> 3)) >> uint64(bit & 7)) & mask)
        i += AT_ONCE
        start += width
    for k in range(whole - i):
        fields[i + k] = uint16(stream_window(start, k * width, end) & mask)
    return whole


@kernel
def _symbol_at(position, end, first, n, shape):
    """The symbol whose first code is ``first``; what is missing is filled up."""
    bits, alphabet, group, _ = shape
    symbol = 0
    for k in range(first + group - 1, first - 1, -1):
        code = alphabet // 2
        if k < n:
            code = int64(stream_window(position, bits * k, end) & uint64((1 << bits) - 1))
        symbol = symbol * alphabet + code
    return symbol


@kernel
def _rest(n, shape):
    """The first code of a layer that is in no whole field."""
    _, alphabet, group, join = shape
    return n if alphabet == 3 else n - n % (group * join)


@kernel
def count_symbols(body, starts, numels, chosen, stride, shape, found, counts, work):
    """Add up how often symbols occur in the chosen layers, whose packed codes begin at ``starts``.

    Args:
        body, starts, numels, chosen: the layers.
        stride: one chunk in so many is looked at.
        shape: see :func:`shape_of`.
        found: zeros for each possible field, overwritten.
        counts: for each symbol.
        work: room for fields, and for unpacked codes.
    """
    bits, alphabet, group, join = shape
    for layer in chosen:
        n, position = numels[layer], body + starts[layer]
        end = position + bytes_of_codes(n, bits, alphabet)
        for first in range(0, n, CHUNK * stride):
            count = min(CHUNK, n - first)
            for i in range(_read(position, end, first, count, shape, work)):
                found[work[0][i]] += 1
            if first + count == n:
                for code in range(_rest(n, shape), n, group):
                    counts[_symbol_at(position, end, code, n, shape)] += 1
    symbols = np.empty(join, np.int64)
    for field in range(len(found)):
        if found[field] and _split(field, shape, symbols):
            for symbol in symbols:
                counts[symbol] += found[field]


@kernel
def fill_entries(lengths, words, shape, entries):
    """For each field its codewords and, in the lowest 8 bits, their bits; returns the most bits."""
    symbols = np.empty(shape[3], np.int64)
    longest = int64(0)
    for field in range(len(entries)):
        word, size = uint64(0), int64(0)
        if _split(field, shape, symbols):
            for symbol in symbols:
                word |= uint64(words[symbol]) << uint64(size)
                size += int64(lengths[symbol])
        entries[field] = (word << uint64(8)) | uint64(size)
        longest = max(longest, size)
    return longest


@kernel
def stream_bits(position, n, shape, entries, lengths, work):
    """Bits that a layer's stream takes."""
    bits, alphabet, group, _ = shape
    end = position + bytes_of_codes(n, bits, alphabet)
    total = uint64(0)
    for first in range(0, n, CHUNK):
        for i in range(_read(position, end, first, min(CHUNK, n - first), shape, work)):
            total += entries[work[0][i]] & uint64(255)
    for code in range(_rest(n, shape), n, group):
        total += uint64(lengths[_symbol_at(position, end, code, n, shape)])
    return int64(total)


@inlined
def _append(out, waiting, fill, word, size):
    """Append bits to those that wait for a whole byte; returns all three anew. Touches 8 bytes."""
    waiting |= word << fill
    fill += size
    store_u64(out, waiting)
    whole = fill & ~uint64(7)
    return out + int64(fill >> uint64(3)), waiting >> whole, fill - whole


@kernel
def put_stream(position, n, shape, entries, longest, lengths, words, out, work):
    """Write a layer's stream; touches 8 bytes past it. Returns the address after it."""
    bits, alphabet, group, _ = shape
    end, fields = position + bytes_of_codes(n, bits, alphabet), work[0]
    waiting, fill = uint64(0), uint64(0)
    for first in range(0, n, CHUNK):
        count = _read(position, end, first, min(CHUNK, n - first), shape, work)
        i = 0
        while i + 2 <= count and 2 * longest <= FLUSHED:
            one, two = entries[fields[i]], entries[fields[i + 1]]
            size = one & uint64(63)
            both = (one >> uint64(8)) | ((two >> uint64(8)) << size)
            out, waiting, fill = _append(out, waiting, fill, both, size + (two & uint64(63)))
            i += 2
        for k in range(i, count):
            one = entries[fields[k]]
            out, waiting, fill = _append(out, waiting, fill, one >> uint64(8), one & uint64(63))
    for code in range(_rest(n, shape), n, group):
        symbol = _symbol_at(position, end, code, n, shape)
        size = uint64(lengths[symbol])
        out, waiting, fill = _append(out, waiting, fill, uint64(words[symbol]), size)
    store_u64(out, waiting)
    return out + int64((fill + uint64(7)) >> uint64(3))
