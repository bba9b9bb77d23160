"""Huffman coding for host memory, in Numba: counting symbols, making codes, streams.

What is coded how, and what is sent, is decided in :mod:`hvd_adaptive.kernels.huffman`. Releases the
GIL.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numba import int64, uint8, uint16, uint32, uint64

from hvd_adaptive.kernels.cpu.compiling import kernel
from hvd_adaptive.kernels.cpu.fields import (
    count_symbols,
    field_count,
    fill_entries,
    put_stream,
    shape_of,
    stream_bits,
)
from hvd_adaptive.kernels.cpu.intrinsics import store_u64
from hvd_adaptive.kernels.cpu.packing import group_size, pack_codes
from hvd_adaptive.kernels.cpu.streams import SLACK, stream_window
from hvd_adaptive.kernels.huffman import CHUNK, MAX_LENGTH, Code, HuffmanCoder, PackedLayers
from hvd_adaptive.wire.quantized import packed_bytes

DEEPEST = 96
"""Longer than any codeword before it is limited: a depth d needs more than 1.6^d elements."""

_Arrays: TypeAlias = tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]


@kernel
def _depths(weights, count):
    """How many leaves of the Huffman tree of ``count`` rising weights lie at each depth."""
    leaves = np.zeros(DEEPEST, np.int64)
    if count == 1:
        leaves[1] = 1
        return leaves
    sums, parent = np.empty(2 * count, np.int64), np.zeros(2 * count, np.int64)
    sums[:count] = weights[:count]
    leaf, node = 0, count  # the two queues: leaves, and nodes in the order of their making
    for made in range(count, 2 * count - 1):
        total = 0
        for _ in range(2):
            if leaf < count and (node >= made or sums[leaf] <= sums[node]):
                least = leaf
                leaf += 1
            else:
                least = node
                node += 1
            total += sums[least]
            parent[least] = made
        sums[made] = total
    depth = np.zeros(2 * count, np.int64)
    for i in range(2 * count - 3, -1, -1):
        depth[i] = depth[parent[i]] + 1
        if i < count:
            leaves[depth[i]] += 1
    return leaves


@kernel
def _limit(leaves):
    """Move leaves up until none is deeper than MAX_LENGTH; the tree stays complete."""
    for depth in range(DEEPEST - 1, MAX_LENGTH, -1):
        while leaves[depth] > 0:
            above = depth - 2
            while leaves[above] == 0:
                above -= 1
            # two siblings leave: one takes their parent's place, the other splits a leaf above
            leaves[depth] -= 2
            leaves[depth - 1] += 1
            leaves[above + 1] += 2
            leaves[above] -= 1


@kernel
def _lengths(counts, lengths):
    """Lengths of the codewords for symbols that occur ``counts`` times; 0 for those that do not."""
    lengths[:] = 0
    symbols = np.flatnonzero(counts)
    if len(symbols) == 0:
        return
    order = np.argsort(counts[symbols], kind="mergesort")
    leaves = _depths(counts[symbols[order]], len(symbols))
    _limit(leaves)
    i = len(symbols)
    for depth in range(DEEPEST):
        for _ in range(leaves[depth]):
            i -= 1
            lengths[symbols[order[i]]] = uint8(depth)


@kernel
def _reversed(word, length):
    """The lowest ``length`` bits of ``word`` in the opposite order."""
    reverse = 0
    for _ in range(length):
        reverse = (reverse << 1) | (word & 1)
        word >>= 1
    return reverse


@kernel
def _words(lengths, words):
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
def _put_lengths(lengths, out):
    """Write lengths as nibbles, a byte each; returns how many."""
    size, i = 0, 0
    while i < len(lengths):
        out[size] = lengths[i]
        size += 1
        if lengths[i]:
            i += 1
            continue
        run = 0
        while i < len(lengths) and lengths[i] == 0:
            run += 1
            i += 1
        run -= 1
        while run > 7:
            out[size] = uint8(8 | (run & 7))
            run >>= 3
            size += 1
        out[size] = uint8(run)
        size += 1
    return size


@kernel
def _get_lengths(nibbles, lengths):
    """Read lengths; returns how many nibbles they took, -1 where they are cut short or too many."""
    i, at = 0, 0
    while i < len(lengths):
        if at >= len(nibbles):
            return -1
        length = nibbles[at]
        at += 1
        if length:
            lengths[i] = length
            i += 1
            continue
        run, shift = 1, 0
        while True:
            if at >= len(nibbles) or shift > 15:
                return -1
            nibble = int64(nibbles[at])
            at += 1
            run += (nibble & 7) << shift
            shift += 3
            if nibble < 8:
                break
        if run > len(lengths) - i:
            return -1
        lengths[i : i + run] = 0
        i += run
    return at


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
def _get_stream(position, size, n, bits, alphabet, group, table, digits, out, codes):
    """Decode a stream of ``size`` bytes into packed codes at ``out``; returns whether it is whole."""
    end, bit = position + size, int64(0)
    address = int64(codes.ctypes.data)
    mask = uint64(len(table) - 1)
    packed = group_size(alphabet)
    for first in range(0, n, CHUNK):
        count = min(CHUNK, n - first)
        for i in range(0, count, group):
            entry = table[stream_window(position, bit, end) & mask]
            bit += int64(entry & uint32(15))
            if entry == 0 or bit > 8 * size:
                return False
            store_u64(address + i, digits[entry >> uint32(4)])
        groups = (count + packed - 1) // packed
        codes[count : groups * packed] = 0
        out = pack_codes(address, groups, bits, alphabet, out)
    return (bit + 7) >> 3 == size and stream_window(position, bit, end) == 0


def _work_arrays() -> _Arrays:
    """Room for one chunk's fields and codes."""
    return np.empty(CHUNK, np.uint16), np.empty(CHUNK + 2 * SLACK, np.uint8)


class _Fields:
    """The codewords of every field of codes.

    Args:
        bits: of a packed code.
        code: that of its symbols.
        numel: so many codes in all.
    """

    def __init__(self, bits: int, code: Code, numel: int) -> None:
        self.shape = shape_of(bits, code.alphabet, code.group, numel)
        self.lengths, self.words = code.lengths, np.zeros(code.lengths.size, np.uint16)
        _words(code.lengths, self.words)
        self.entries = np.empty(field_count(self.shape), np.uint64)
        self.longest = fill_entries(self.lengths, self.words, self.shape, self.entries)


class _Writer:
    """See :class:`hvd_adaptive.kernels.huffman.HuffmanTools`."""

    def __init__(self, bits: int, code: Code, packed: PackedLayers, out: npt.NDArray[np.uint8]) -> None:
        self._packed, self._work = packed, _work_arrays()
        self._source, self._out = packed.body.ctypes.data, out.ctypes.data
        self._fields = _Fields(bits, code, int(packed.numels.sum()))

    def __call__(self, layer: int, position: int) -> None:
        packed, fields = self._packed, self._fields
        put_stream(
            self._source + packed.starts[layer],
            packed.numels[layer],
            fields.shape,
            fields.entries,
            fields.longest,
            fields.lengths,
            fields.words,
            self._out + position,
            self._work,
        )


class _Reader:
    """The tables that decode the streams of one code."""

    def __init__(self, code: Code, data: npt.NDArray[np.uint8]) -> None:
        self._code, self._address, self._codes = code, data.ctypes.data, _work_arrays()[1]
        self._table = np.empty(1 << int(code.lengths.max()), np.uint32)
        self._digits = np.empty(code.lengths.size, np.uint64)
        words = np.zeros(code.lengths.size, np.uint16)
        _words(code.lengths, words)
        _fill_table(code.lengths, words, self._table)
        _fill_digits(code.alphabet, code.group, self._digits)

    def __call__(self, start: int, size: int, numel: int, bits: int) -> npt.NDArray[np.uint8] | None:
        code = self._code
        length = packed_bytes(numel, bits, code.alphabet)
        out = np.empty(length + SLACK, np.uint8)
        whole = _get_stream(
            self._address + start,
            size,
            numel,
            bits,
            code.alphabet,
            code.group,
            self._table,
            self._digits,
            out.ctypes.data,
            self._codes,
        )
        return out[:length] if whole else None


class _Tools:
    """See :class:`hvd_adaptive.kernels.huffman.HuffmanTools`."""

    writer, reader = _Writer, _Reader

    def lengths_of(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        lengths = np.empty(counts.size, np.uint8)
        _lengths(counts, lengths)
        return lengths

    def is_code(self, lengths: npt.NDArray[np.uint8]) -> bool:
        return bool(_words(lengths, np.empty(lengths.size, np.uint16)))

    def nibbles_of(self, lengths: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        nibbles = np.zeros(3 * lengths.size + 2, np.uint8)
        return nibbles[: _put_lengths(lengths, nibbles)]

    def read_nibbles(self, nibbles: npt.NDArray[np.uint8], lengths: npt.NDArray[np.uint8]) -> int:
        return int(_get_lengths(nibbles, lengths))

    def count(
        self,
        packed: PackedLayers,
        chosen: npt.NDArray[np.int64],
        bits: int,
        shape: tuple[int, int],
        stride: int,
    ) -> npt.NDArray[np.int64]:
        alphabet, group = shape
        counts = np.zeros(alphabet**group, np.int64)
        fields = shape_of(bits, alphabet, group, int(packed.numels[chosen].sum()) // stride)
        count_symbols(
            packed.body.ctypes.data,
            packed.starts,
            packed.numels,
            chosen,
            stride,
            fields,
            np.zeros(field_count(fields), np.int64),
            counts,
            _work_arrays(),
        )
        return counts

    def stream_bits(
        self, packed: PackedLayers, chosen: npt.NDArray[np.int64], bits: int, code: Code
    ) -> npt.NDArray[np.int64]:
        body, work = packed.body.ctypes.data, _work_arrays()
        fields = _Fields(bits, code, int(packed.numels[chosen].sum()))
        layout = (fields.shape, fields.entries, code.lengths, work)
        sizes = [
            stream_bits(body + packed.starts[layer], packed.numels[layer], *layout) for layer in chosen
        ]
        return np.array(sizes, np.int64)


_coder = HuffmanCoder(_Tools())
encode, decode = _coder.encode, _coder.decode
read_codebooks, expected_bytes = _coder.read_codebooks, _coder.expected_bytes
code_of, code_to_bytes, read_code = _coder.code_of, _coder.code_to_bytes, _coder.read_code
