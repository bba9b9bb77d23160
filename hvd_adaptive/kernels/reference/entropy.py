"""Huffman coding in numpy: an array element for every bit.

What is coded how, and what is sent, is decided in :mod:`hvd_adaptive.kernels.huffman`.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch

from hvd_adaptive.kernels.huffman import CHUNK, MAX_LENGTH, Code, HuffmanCoder, PackedLayers
from hvd_adaptive.kernels.reference.packing import pack, unpack
from hvd_adaptive.wire.quantized import packed_bytes


def _leaves(weights: list[int]) -> list[int]:
    """How many leaves of the Huffman tree of rising weights lie at each depth."""
    if len(weights) == 1:
        return [0, 1]
    # the two queues, leaves and nodes, are one list: nodes are made in the order of their weights
    count, sums = len(weights), list(weights)
    parent = [0] * (2 * count - 1)
    leaf, node = 0, count
    for made in range(count, 2 * count - 1):
        total = 0
        for _ in range(2):
            if leaf < count and (node >= made or sums[leaf] <= sums[node]):
                least, leaf = leaf, leaf + 1
            else:
                least, node = node, node + 1
            total += sums[least]
            parent[least] = made
        sums.append(total)
    depths = [0] * (2 * count - 1)
    for i in range(2 * count - 3, -1, -1):
        depths[i] = depths[parent[i]] + 1
    found: list[int] = np.bincount(depths[:count]).tolist()
    return found


def _limit(leaves: list[int]) -> list[int]:
    """Leaves moved up until none is deeper than a codeword may be long; the tree stays complete."""
    leaves = leaves + [0] * (MAX_LENGTH + 2 - len(leaves))
    for depth in range(len(leaves) - 1, MAX_LENGTH, -1):
        while leaves[depth] > 0:
            above = max(d for d in range(depth - 1) if leaves[d] > 0)
            # two siblings leave: one takes their parent's place, the other splits a leaf above
            leaves[depth] -= 2
            leaves[depth - 1] += 1
            leaves[above + 1] += 2
            leaves[above] -= 1
    return leaves


def _words(lengths: npt.NDArray[np.uint8]) -> list[int] | None:
    """Canonical codewords, first bit lowest, 0 for symbols that do not occur; None if no code fits."""
    counts = np.bincount(lengths, minlength=MAX_LENGTH + 1)
    counts[0] = 0
    if not counts.any():
        return None
    following, word = [0] * (MAX_LENGTH + 1), 0
    for length in range(1, MAX_LENGTH + 1):
        word = (word + int(counts[length - 1])) << 1
        following[length] = word
        if word + int(counts[length]) > 1 << length:
            return None
    words = []
    for length in lengths.tolist():
        words.append(int(f"{following[length]:0{length}b}"[::-1], 2) if length else 0)
        following[length] += 1
    return words


def _symbols(
    packed: PackedLayers, layer: int, bits: int, alphabet: int, group: int
) -> npt.NDArray[np.int64]:
    """The symbols of a layer of packed codes."""
    numel, start = int(packed.numels[layer]), int(packed.starts[layer])
    data = packed.body[start : start + packed_bytes(numel, bits, alphabet)]
    codes = _unpacked(data, numel, bits, alphabet)
    codes = np.pad(codes, (0, -numel % group), constant_values=alphabet // 2)
    symbols: npt.NDArray[np.int64] = codes.reshape(-1, group) @ alphabet ** np.arange(group)
    return symbols


def _unpacked(
    data: npt.NDArray[np.uint8], numel: int, bits: int, alphabet: int
) -> npt.NDArray[np.int64]:
    # a byte more, for what fills up the last code
    codes = unpack(torch.from_numpy(np.append(data, np.uint8(0))), bits, alphabet)
    return codes[:numel].numpy()


class _Writer:
    """See :class:`hvd_adaptive.kernels.huffman.HuffmanTools`."""

    def __init__(self, bits: int, code: Code, packed: PackedLayers, out: npt.NDArray[np.uint8]) -> None:
        del bits
        self._code, self._packed, self._out = code, packed, out
        self._words = np.array(_words(code.lengths))

    def __call__(self, layer: int, position: int) -> None:
        code, bits = self._code, int(self._packed.headers[layer])
        symbols = _symbols(self._packed, layer, bits, code.alphabet, code.group)
        lengths, words = code.lengths[symbols].astype(np.int64), self._words[symbols]
        ends = np.cumsum(lengths)
        stream = np.zeros(int(ends[-1]), np.uint8)
        for bit in range(int(lengths.max())):
            has = lengths > bit
            stream[(ends - lengths + bit)[has]] = (words[has] >> bit) & 1
        data = np.packbits(stream, bitorder="little")
        self._out[position : position + data.size] = data


class _Reader:
    """See :class:`hvd_adaptive.kernels.huffman.HuffmanTools`."""

    def __init__(self, code: Code, data: npt.NDArray[np.uint8]) -> None:
        self._code, self._data = code, data
        rows = zip(code.lengths.tolist(), _words(code.lengths) or [], strict=True)
        self._symbols = {row: symbol for symbol, row in enumerate(rows) if row[0]}

    def __call__(
        self, start: int, size: int, numel: int, bits: int, out: npt.NDArray[np.uint8]
    ) -> bool:
        code, symbols, stream = self._code, [], self._data[start : start + size]
        left = iter(np.unpackbits(stream, bitorder="little").tolist())
        for _ in range(-(-numel // code.group)):
            word, length = 0, 0
            while (length, word) not in self._symbols or not length:
                bit = next(left, None)
                if bit is None or length == MAX_LENGTH:
                    return False
                word, length = word | bit << length, length + 1
            symbols.append(self._symbols[length, word])
        rest = list(left)
        if len(rest) > 7 or any(rest):
            return False
        digits = np.array(symbols, np.int64)[:, None] // code.alphabet ** np.arange(code.group)
        codes = (digits % code.alphabet).reshape(-1)[:numel]
        packed = pack(torch.from_numpy(codes), bits, code.alphabet).numpy()
        out[: packed.size] = packed
        return True


class _Tools:
    """See :class:`hvd_adaptive.kernels.huffman.HuffmanTools`."""

    writer, reader = _Writer, _Reader

    def lengths_of(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        lengths = np.zeros(counts.size, np.uint8)
        symbols = np.flatnonzero(counts)
        if symbols.size:
            order = symbols[np.argsort(counts[symbols], kind="stable")]
            leaves = _limit(_leaves(counts[order].tolist()))
            lengths[order[::-1]] = np.repeat(np.arange(len(leaves)), leaves)
        return lengths

    def is_code(self, lengths: npt.NDArray[np.uint8]) -> bool:
        return _words(lengths) is not None

    def nibbles_of(self, lengths: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        nibbles: list[int] = []
        for length, found in itertools.groupby(lengths.tolist()):
            run = len(list(found))
            if length:
                nibbles += [length] * run
                continue
            nibbles.append(0)
            run -= 1
            while run > 7:
                nibbles.append(8 | run & 7)
                run >>= 3
            nibbles.append(run)
        return np.array(nibbles, np.uint8)

    def read_nibbles(self, nibbles: npt.NDArray[np.uint8], lengths: npt.NDArray[np.uint8]) -> int:
        left, i, taken = iter(nibbles.tolist()), 0, 0
        while i < lengths.size:
            length = next(left, None)
            taken += 1
            if length is None:
                return -1
            if length:
                lengths[i] = length
                i += 1
                continue
            run, shift, nibble = 1, 0, 8
            while nibble >= 8:
                found = next(left, None)
                taken += 1
                if found is None or shift > 15:
                    return -1
                nibble = found
                run += (nibble & 7) << shift
                shift += 3
            if run > lengths.size - i:
                return -1
            lengths[i : i + run] = 0
            i += run
        return taken

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
        for layer in chosen.tolist():
            symbols = _symbols(packed, layer, bits, alphabet, group)
            chunk = np.arange(symbols.size) // (CHUNK // group)
            counts += np.bincount(symbols[chunk % stride == 0], minlength=counts.size)
        return counts

    def stream_bits(
        self, packed: PackedLayers, chosen: npt.NDArray[np.int64], bits: int, code: Code
    ) -> npt.NDArray[np.int64]:
        layers = (_symbols(packed, layer, bits, code.alphabet, code.group) for layer in chosen.tolist())
        return np.array([int(code.lengths[symbols].sum()) for symbols in layers], np.int64)


_coder = HuffmanCoder(_Tools())
encode, decode = _coder.encode, _coder.decode
read_codebooks, expected_bytes = _coder.read_codebooks, _coder.expected_bytes
code_of, code_to_bytes, read_code = _coder.code_of, _coder.code_to_bytes, _coder.read_code
