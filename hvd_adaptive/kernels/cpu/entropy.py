"""Huffman coding for host memory, in Numba: counting symbols, making codes, streams.

What is coded how, and what is sent, is decided in :mod:`hvd_adaptive.kernels.huffman`. Releases the
GIL.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numba import int64, uint8

from hvd_adaptive.kernels.cpu.compiling import kernel
from hvd_adaptive.kernels.cpu.fields import (
    count_symbols,
    field_count,
    fill_entries,
    put_stream,
    shape_of,
    stream_bits,
)
from hvd_adaptive.kernels.cpu.symbols import OVERSHOOT, Decoder, find_codewords, get_stream
from hvd_adaptive.kernels.huffman import CHUNK, MAX_LENGTH, Code, HuffmanCoder, PackedLayers

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


def _work_arrays() -> _Arrays:
    """Room for one chunk's fields and codes."""
    return np.empty(CHUNK, np.uint16), np.empty(CHUNK + 2 * OVERSHOOT, np.uint8)


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
        find_codewords(code.lengths, self.words)
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
    """See :class:`hvd_adaptive.kernels.huffman.HuffmanTools`."""

    def __init__(self, code: Code, data: npt.NDArray[np.uint8]) -> None:
        self._alphabet, self._address = code.alphabet, data.ctypes.data
        self._codes = _work_arrays()[1]
        self._decoder = Decoder(code, data.size)

    def __call__(
        self, start: int, size: int, numel: int, bits: int, out: npt.NDArray[np.uint8]
    ) -> bool:
        decoder, position = self._decoder, self._address + start
        layout = (bits, self._alphabet, decoder.group, decoder.tables)
        return bool(get_stream(position, size, numel, *layout, out.ctypes.data, self._codes))


class _Tools:
    """See :class:`hvd_adaptive.kernels.huffman.HuffmanTools`."""

    writer, reader = _Writer, _Reader

    def lengths_of(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        lengths = np.empty(counts.size, np.uint8)
        _lengths(counts, lengths)
        return lengths

    def is_code(self, lengths: npt.NDArray[np.uint8]) -> bool:
        return bool(find_codewords(lengths, np.empty(lengths.size, np.uint16)))

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
