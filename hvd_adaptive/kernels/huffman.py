"""Huffman coding of quantized layers: packed bodies made smaller, and back.

Codes are taken in **groups** of up to 8: one symbol for the codes of several elements, so that even a
code that is nearly always zero costs a fraction of a bit. The group is the shortest that holds 4 bits
of entropy, within an alphabet of 2^15 and of a 32nd of the elements. The stream is then within 2 % of
the entropy; below 0.6 bits an element no group holds enough, and it can be 10 % above.

One Huffman code serves all layers of the same number of bits in a call; it is made from their actual
counts, no longer than 15 bits, and canonical: only the lengths travel, as nibbles from the low one up::

    u8      codes in a group
    ...     for each symbol in order a nibble: its length, or 0 and a run of symbols that do not occur:
            run - 1 in 3 bits a nibble from the lowest up, the top bit set on all but the last

A symbol is the group's codes as digits in base of the alphabet, the first the lowest; the last group of
a layer is filled up with the middle code. Codewords are assigned in order of length and symbol, and
stand in the stream with their first bit lowest. What is left of the last byte is 0.

Source: Huffman, "A Method for the Construction of Minimum-Redundancy Codes" (1952); for levels of a
quantizer, Faghri et al. (NeurIPS 2020), section 3.3 and appendix D; lengths are limited as in ITU T.81,
annex K.3.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numba import int64, uint8, uint16, uint32, uint64
from torch import Tensor

from hvd_adaptive.kernels.cpu import SLACK, _window
from hvd_adaptive.kernels.intrinsics import compiled, store_u64
from hvd_adaptive.kernels.quantize import _group, _pack, _packed_bytes, _unpack, quantize_compress_
from hvd_adaptive.wire.quantized import (
    HUFFMAN,
    MAX_BITS,
    NONFINITE,
    WITH_HUFFMAN,
    WITH_TABLE,
    Damage,
    Float32s,
    Norm,
    QuantizationRule,
    Rounding,
    Tables,
    alphabet_of,
    damaged,
    packed_bytes,
    read_magnitudes,
)

MAX_LENGTH = 15
MAX_SYMBOLS = 1 << MAX_LENGTH
MAX_GROUP = 8
"""Codes in a group: they are written as one 8-byte word."""
ENOUGH_BITS = 4.0
"""Entropy of a group that makes the redundancy small."""
ELEMENTS_A_SYMBOL = 32
"""Elements that there must be for each possible symbol, for the lengths to cost little beside them."""
CHUNK = 3360
"""Codes handled at once: a multiple of all groups, and of what is packed together."""
SAMPLE = 8
"""One chunk in so many is looked at to choose the group."""
DEEPEST = 96
"""Longer than any codeword before it is limited: a depth d needs more than 1.6^d elements."""

_SIZE = struct.Struct("<I")
_Arrays: TypeAlias = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]

_kernel = compiled()


# --- the code ------------------------------------------------------------------------------------


@_kernel
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


@_kernel
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


@_kernel
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


@_kernel
def _reversed(word, length):
    """The lowest ``length`` bits of ``word`` in the opposite order."""
    reverse = 0
    for _ in range(length):
        reverse = (reverse << 1) | (word & 1)
        word >>= 1
    return reverse


@_kernel
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


@_kernel
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


@_kernel
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


@dataclass(frozen=True, eq=False)
class Code:
    """A canonical Huffman code for groups of codes.

    Args:
        group: codes in a symbol.
        alphabet: levels that a code may stand for.
        lengths: ``uint8[alphabet ** group]``, 0 for symbols that do not occur.
    """

    group: int
    alphabet: int
    lengths: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, counts: npt.NDArray[np.int64], group: int, alphabet: int) -> Code:
        """The best code for symbols that occur ``counts`` times.

        Example:
            >>> Code.of(np.array([5, 1, 0, 2]), group=2, alphabet=2).lengths.tolist()
            [1, 2, 0, 2]
        """
        lengths = np.empty(counts.size, np.uint8)
        _lengths(counts, lengths)
        return cls(group, alphabet, lengths)

    @property
    def words(self) -> npt.NDArray[np.uint16]:
        """The codewords, first bit lowest."""
        words = np.zeros(self.lengths.size, np.uint16)
        _words(self.lengths, words)
        return words

    def to_bytes(self) -> bytes:
        """The code as it travels."""
        nibbles = np.zeros(3 * self.lengths.size + 2, np.uint8)
        size = _put_lengths(self.lengths, nibbles)
        size += size & 1
        packed = nibbles[0:size:2] | nibbles[1:size:2] << 4
        return bytes([self.group]) + packed.tobytes()

    @classmethod
    def read(cls, data: npt.NDArray[np.uint8], alphabet: int) -> tuple[Code, int] | Damage:
        """The code at the front of ``data`` and its bytes there, or what is wrong.

        Example:
            >>> code = Code.of(np.array([5, 1, 0, 2]), group=2, alphabet=2)
            >>> again, size = Code.read(np.frombuffer(code.to_bytes(), np.uint8), alphabet=2)
            >>> again.lengths.tolist(), size
            ([1, 2, 0, 2], 4)
        """
        group = int(data[0]) if data.size else 0
        if not 1 <= group <= MAX_GROUP or alphabet**group > MAX_SYMBOLS:
            return Damage.huffman
        lengths = np.empty(alphabet**group, np.uint8)
        raw = data[1 : 2 + 2 * lengths.size]
        nibbles = np.stack([raw & 15, raw >> 4], 1).reshape(-1)
        size = _get_lengths(nibbles, lengths)
        if size < 0 or not _words(lengths, np.empty(lengths.size, np.uint16)):
            return Damage.huffman
        return cls(group, alphabet, lengths), 1 + (size + 1) // 2


# --- streams -------------------------------------------------------------------------------------


@_kernel
def _gather(codes, count, alphabet, group, symbols):
    """Make symbols of count codes, which are filled up to whole groups; returns how many."""
    groups = (count + group - 1) // group
    codes[count : groups * group] = uint8(alphabet // 2)
    for i in range(groups):
        symbol = uint32(0)
        for digit in range(group - 1, -1, -1):
            symbol = uint32(symbol * uint32(alphabet) + uint32(codes[group * i + digit]))
        symbols[i] = symbol
    return groups


@_kernel
def _symbols(position, end, first, n, bits, alphabet, group, work):
    """Symbols of the chunk of a layer that begins at code ``first``; returns how many."""
    codes, symbols = work
    count = min(CHUNK, n - first)
    _unpack(position, end, first, count, bits, alphabet, int64(codes.ctypes.data))
    return _gather(codes, count, alphabet, group, symbols)


@_kernel
def _count(body, starts, numels, chosen, bits, alphabet, group, stride, counts, work):
    """Count the symbols of the chosen layers, whose packed codes begin at ``starts``."""
    for layer in chosen:
        n = numels[layer]
        position = body + starts[layer]
        end = position + _packed_bytes(n, bits, alphabet)
        for first in range(0, n, CHUNK * stride):
            for i in range(_symbols(position, end, first, n, bits, alphabet, group, work)):
                counts[work[1][i]] += 1


@_kernel
def _stream_bits(position, n, bits, alphabet, group, lengths, work):
    """Bits that a layer takes."""
    end = position + _packed_bytes(n, bits, alphabet)
    total = int64(0)
    for first in range(0, n, CHUNK):
        for i in range(_symbols(position, end, first, n, bits, alphabet, group, work)):
            total += int64(lengths[work[1][i]])
    return total


@_kernel
def _put_stream(position, n, bits, alphabet, group, lengths, words, out, work):
    """Write a layer's stream; touches 8 bytes past it. Returns the address after it."""
    end = position + _packed_bytes(n, bits, alphabet)
    word, fill = uint64(0), uint64(0)
    for first in range(0, n, CHUNK):
        for i in range(_symbols(position, end, first, n, bits, alphabet, group, work)):
            symbol = work[1][i]
            word |= uint64(words[symbol]) << fill
            fill += uint64(lengths[symbol])
            store_u64(out, word)
            out += int64(fill >> uint64(3))
            word >>= fill & ~uint64(7)
            fill &= uint64(7)
    store_u64(out, word)
    return out + int64((fill + uint64(7)) >> uint64(3))


@_kernel
def _fill_table(lengths, words, table):
    """table[next bits] = symbol << 4 | length; 0 where no codeword begins so."""
    table[:] = 0
    for symbol in range(len(lengths)):
        length = int64(lengths[symbol])
        if length:
            for i in range(int64(words[symbol]), len(table), 1 << length):
                table[i] = uint32((symbol << 4) | length)


@_kernel
def _fill_digits(alphabet, group, digits):
    """The codes of every symbol, a byte each."""
    for symbol in range(len(digits)):
        word, rest = uint64(0), symbol
        for digit in range(group):
            word |= uint64(rest % alphabet) << uint64(8 * digit)
            rest //= alphabet
        digits[symbol] = word


@_kernel
def _get_stream(position, size, n, bits, alphabet, group, table, digits, out, codes):
    """Decode a stream of ``size`` bytes into packed codes at ``out``; returns whether it is whole."""
    end, bit = position + size, int64(0)
    address = int64(codes.ctypes.data)
    mask = uint64(len(table) - 1)
    packed = _group(alphabet)
    for first in range(0, n, CHUNK):
        count = min(CHUNK, n - first)
        for i in range(0, count, group):
            entry = table[_window(position, bit, end) & mask]
            bit += int64(entry & uint32(15))
            if entry == 0 or bit > 8 * size:
                return False
            store_u64(address + i, digits[entry >> uint32(4)])
        groups = (count + packed - 1) // packed
        codes[count : groups * packed] = 0
        out = _pack(address, groups, bits, alphabet, out)
    return (bit + 7) >> 3 == size and _window(position, bit, end) == 0


def _work_arrays() -> _Arrays:
    """Room for one chunk's codes and symbols."""
    return np.empty(CHUNK + 2 * SLACK, np.uint8), np.empty(CHUNK, np.uint32)


# --- bodies --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Packed:
    """Where the codes of layers lie in a packed body that was made here."""

    body: npt.NDArray[np.uint8]
    numels: npt.NDArray[np.int64]
    headers: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    """Byte at which a layer's codes begin."""
    begins: npt.NDArray[np.int64]
    """Byte at which a layer begins, and the end of the last one."""

    @classmethod
    def of(
        cls,
        body: npt.NDArray[np.uint8],
        numels: npt.NDArray[np.int64],
        rule: QuantizationRule,
        tables: Tables,
    ) -> _Packed:
        """Walk along the layers of ``body``, which begin at its first byte."""
        headers, starts, position = [], [], 0
        begins = [0]
        for numel in numels.tolist():
            header = int(body[position])
            headers.append(header)
            finite = header != NONFINITE
            start = position + 1 + (rule.norm_bytes(numel) if finite else 0)
            alphabet = int(tables.alphabets[header]) if finite else 0
            starts.append(start)
            position = start + (int(_packed_bytes(numel, header, alphabet)) if finite else 0)
            begins.append(position)
        return cls(body, numels, *(np.array(a, np.int64) for a in (headers, starts, begins)))


def _group_for(packed: _Packed, chosen: npt.NDArray[np.int64], bits: int, alphabet: int) -> int:
    """Codes in a symbol: the fewest with enough entropy, where the alphabet allows."""
    counts = np.zeros(alphabet, np.int64)
    body = packed.body.ctypes.data
    work = _work_arrays()
    _count(body, packed.starts, packed.numels, chosen, bits, alphabet, 1, SAMPLE, counts, work)
    shares = counts / max(1, counts.sum())
    entropy = float(shares @ _ideal_bits(shares))
    return _group_of(entropy, alphabet, int(packed.numels[chosen].sum()))


def _group_of(entropy: float, alphabet: int, numel: int) -> int:
    """Codes in a symbol, for ``numel`` codes of this entropy."""
    most = min(MAX_SYMBOLS, numel // ELEMENTS_A_SYMBOL)
    group = 1
    while group < MAX_GROUP and group * entropy < ENOUGH_BITS and alphabet ** (group + 1) <= most:
        group += 1
    return group


def _code_for(
    packed: _Packed, chosen: npt.NDArray[np.int64], bits: int, alphabet: int
) -> tuple[Code, npt.NDArray[np.int64]]:
    """A code for the chosen layers, and the bytes of their streams."""
    group = _group_for(packed, chosen, bits, alphabet)
    counts = np.zeros(alphabet**group, np.int64)
    body, work = packed.body.ctypes.data, _work_arrays()
    _count(body, packed.starts, packed.numels, chosen, bits, alphabet, group, 1, counts, work)
    code = Code.of(counts, group, alphabet)
    sizes = np.array(
        [
            _stream_bits(
                body + packed.starts[layer],
                packed.numels[layer],
                bits,
                alphabet,
                group,
                code.lengths,
                work,
            )
            for layer in chosen
        ],
        np.int64,
    )
    return code, (sizes + 7) // 8


def shrink(
    body: Tensor, numels: npt.NDArray[np.int64], rule: QuantizationRule, tables: Tables
) -> tuple[Tensor, dict[int, bytes]]:
    """Huffman-code the layers for which that takes fewer bytes.

    Never larger than ``body``, the books included. Cost: some five copies of the tensor. Lossless.

    Args:
        body: uint8, 1-D, on the CPU: what ``quantize_compress_`` returned, without its reserve.
        numels: ``int64[L]``.
        rule: of that call.
        tables: of that call.

    Returns:
        The layers, and for each number of bits that was coded its Huffman code as it travels.
    """
    packed = _Packed.of(body.numpy(), numels, rule, tables)
    codes: dict[int, Code] = {}
    streams: dict[int, int] = {}  # bytes of each layer's stream
    for bits in np.unique(packed.headers).tolist():
        if bits == NONFINITE:
            continue
        chosen = np.flatnonzero((packed.headers == bits) & (numels > 0))
        code, sizes = _code_for(packed, chosen, bits, int(tables.alphabets[bits]))
        saved = packed.begins[chosen + 1] - packed.starts[chosen] - sizes - 4
        if saved[saved > 0].sum() > len(code.to_bytes()) + 1:
            codes[bits] = code
            streams.update(
                (layer, size)
                for layer, size, gain in zip(chosen.tolist(), sizes.tolist(), saved, strict=True)
                if gain > 0
            )
    return _write(packed, codes, streams), {bits: code.to_bytes() for bits, code in codes.items()}


def expected_bytes(counts: npt.NDArray[np.float64], numel: int) -> int:
    """Bytes of one layer's stream and its code, where each code occurs ``counts`` times on average.

    Codes are taken to be independent, which is an upper bound. A stream then takes their entropy and
    what a code that is made for counts, which are drawn here, is off it. A standard deviation of
    what the draws of rounding may add is on top. Cost: that of making a code.

    Args:
        counts: ``float64[alphabet]``, not negative; they sum to ``numel``.
        numel: elements of the layer, at least 1.

    Example:
        >>> expected_bytes(np.array([500.0, 9000.0, 500.0]), 10_000)  # packed they take 2,000
        801
    """
    shares = counts / numel
    bits = _ideal_bits(shares)
    entropy = float(shares @ bits)
    spread = math.sqrt(numel * max(0.0, float(shares @ (bits * bits)) - entropy**2))
    group = _group_of(entropy, counts.size, numel)
    joint = shares
    for _ in range(group - 1):
        joint = np.multiply.outer(joint, shares).ravel()
    symbols = -(-numel // group)
    drawn = np.random.default_rng(0).poisson(symbols * joint)
    code = Code.of(drawn, group, counts.size)
    redundancy = float(drawn @ (code.lengths - _ideal_bits(joint)))
    stream = symbols * group * entropy + redundancy + spread
    return math.ceil(stream / 8) + len(code.to_bytes())


def _ideal_bits(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The bits of information in symbols that have these shares; 0 where one never occurs."""
    return -np.log2(np.where(shares > 0, shares, 1.0))


def read_books(
    data: npt.NDArray[np.uint8], rule: QuantizationRule
) -> tuple[Tables, dict[int, Code], int]:
    """The books at the front of a body.

    Args:
        data: the body.
        rule: that of compression.

    Returns:
        The levels, those of ``rule`` unless they travel; the Huffman codes, by bits; and the byte at
        which the layers begin.

    Raises:
        WireError: the books are damaged, or of another rule.
    """
    found: dict[int, Float32s] = {}
    codes: dict[int, Code] = {}
    position, last = 1, 0
    for _ in range(int(data[0]) if data.size else 0):
        head = int(data[position]) if position < data.size else 0
        bits, table, coded = head & 15, bool(head & WITH_TABLE), bool(head & WITH_HUFFMAN)
        known = 1 <= bits <= MAX_BITS and (rule.carried or bool(rule.tables.alphabets[bits]))
        if not known or bits <= last or table != rule.carried or head >> 6 or not (table or coded):
            raise damaged(Damage.books, -1, 0, min(position, data.size), data.size)
        position, last = position + 1, bits
        alphabet = int(rule.tables.alphabets[bits])
        if table:
            magnitudes = read_magnitudes(data[position:], bits)
            if isinstance(magnitudes, Damage):
                raise damaged(magnitudes, -1, 0, position, data.size)
            position += magnitudes.nbytes
            found[bits], alphabet = magnitudes, alphabet_of(magnitudes)
        if coded:
            read = Code.read(data[position:], alphabet)
            if isinstance(read, Damage):
                raise damaged(read, -1, 0, position, data.size)
            codes[bits] = read[0]
            position += read[1]
    if not data.size:
        raise damaged(Damage.books, -1, 0, 0, 0)
    return Tables(found) if rule.carried else rule.tables, codes, position


def _write(packed: _Packed, codes: Mapping[int, Code], streams: Mapping[int, int]) -> Tensor:
    """The layers, some as streams of these sizes, the others as they are."""
    room = torch.empty(int(packed.begins[-1]) + SLACK, dtype=torch.uint8)
    out, position, work = room.numpy(), 0, _work_arrays()
    words = {bits: code.words for bits, code in codes.items()}
    for layer, begin in enumerate(packed.begins[:-1].tolist()):
        coded = layer in streams
        end = int(packed.starts[layer] if coded else packed.begins[layer + 1])
        out[position : position + end - begin] = packed.body[begin:end]
        header, position = position, position + end - begin
        if not coded:
            continue
        out[header] |= HUFFMAN
        out[position : position + 4] = np.frombuffer(_SIZE.pack(streams[layer]), np.uint8)
        position += 4
        bits = int(packed.headers[layer])
        code, source = codes[bits], packed.body.ctypes.data + end
        layout = (packed.numels[layer], bits, code.alphabet, code.group, code.lengths, words[bits])
        _put_stream(source, *layout, room.data_ptr() + position, work)
        position += streams[layer]
    return room[:position]


def expand(
    body: Tensor,
    start: int,
    numels: Sequence[int],
    rule: QuantizationRule,
    tables: Tables,
    codes: Mapping[int, Code],
) -> Tensor:
    """Undo :func:`shrink`: every layer's codes packed.

    Args:
        body: uint8, 1-D, contiguous, on the CPU.
        start: byte of it at which the layers begin.
        numels: elements of each layer.
        rule: that of compression.
        tables: levels for all numbers of bits that a layer may have.
        codes: the Huffman codes, by bits.

    Raises:
        WireError: a layer is cut short, has no code, or its stream is damaged.
    """
    data = body.numpy()
    tools = {bits: _Decoder(code) for bits, code in codes.items()}
    parts, position, work = [], start, _work_arrays()
    for layer, numel in enumerate(numels):
        size, damage = _layer_size(data, position, numel, rule, tables, codes)
        if damage:
            raise damaged(damage, layer, numel, min(position, data.size), data.size)
        header = int(data[position])
        if not header & HUFFMAN:
            parts.append(data[position : position + size])
        else:
            bits = header ^ HUFFMAN
            stream = position + 1 + rule.norm_bytes(numel) + 4
            front = np.append(np.uint8(bits), data[position + 1 : stream - 4])
            packed = tools[bits].decode(body, stream, position + size - stream, numel, bits, work)
            if packed is None:
                raise damaged(Damage.stream, layer, numel, stream, data.size)
            parts += [front, packed]
        position += size
    if position != data.size:
        raise damaged(Damage.trailing, len(numels) - 1, 0, position, data.size)
    return torch.from_numpy(np.concatenate([*parts, np.empty(0, np.uint8)]))


def _layer_size(
    data: npt.NDArray[np.uint8],
    position: int,
    numel: int,
    rule: QuantizationRule,
    tables: Tables,
    codes: Mapping[int, Code],
) -> tuple[int, Damage]:
    """(bytes of the layer at ``position``, what is wrong with it)."""
    if position >= data.size:
        return 0, Damage.truncated
    header = int(data[position])
    if header == NONFINITE:
        return 1, Damage.none
    bits = header & ~HUFFMAN
    if bits > MAX_BITS or not tables.alphabets[bits] or (header & HUFFMAN and bits not in codes):
        return 0, Damage.header
    size = 1 + rule.norm_bytes(numel)
    if not header & HUFFMAN:
        size += packed_bytes(numel, bits, int(tables.alphabets[bits]))
    else:
        word = data[position + size : position + size + 4].tobytes()
        if len(word) < 4:
            return 0, Damage.truncated
        size += 4 + int(_SIZE.unpack(word)[0])
    return size, Damage.none if position + size <= data.size else Damage.truncated


class _Decoder:
    """The tables that decode the streams of one code."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.table = np.empty(1 << int(code.lengths.max()), np.uint32)
        self.digits = np.empty(code.lengths.size, np.uint64)
        _fill_table(code.lengths, code.words, self.table)
        _fill_digits(code.alphabet, code.group, self.digits)

    def decode(
        self, body: Tensor, start: int, size: int, numel: int, bits: int, work: _Arrays
    ) -> npt.NDArray[np.uint8] | None:
        """The packed codes of the stream in ``body[start : start + size]``; None if it is damaged."""
        code = self.code
        length = packed_bytes(numel, bits, code.alphabet)
        out = np.empty(length + SLACK, np.uint8)
        whole = _get_stream(
            body.data_ptr() + start,
            size,
            numel,
            bits,
            code.alphabet,
            code.group,
            self.table,
            self.digits,
            out.ctypes.data,
            work[0],
        )
        return out[:length] if whole else None


def warm() -> None:
    """Call every kernel once on a few elements, so that Numba's cache holds them."""
    rule = QuantizationRule(Norm.max, Rounding.uniform)
    x, one_layer = torch.zeros(4000), np.array([0, 4000])
    body, _ = quantize_compress_(x, one_layer, np.array([2]), rule, rule.tables)
    layers, codes = shrink(body, np.array([4000]), rule, rule.tables)
    read = Code.read(np.frombuffer(codes[2], np.uint8), 3)
    assert not isinstance(read, Damage)
    expand(layers, 0, [4000], rule, rule.tables, {2: read[0]})
