"""Huffman coding of quantized layers: packed bodies made smaller, and back.

What all backends share: which layers are coded, in which groups, and what is sent. A backend has the
tools that look at elements and symbols (:class:`HuffmanTools`).

Codes are taken in **groups** of up to 8: one symbol for the codes of several elements, so that even a
code that is nearly always zero costs a fraction of a bit. The group is the shortest that holds 4 bits
of entropy, within an alphabet of 2^15 and of a 32nd of the elements. The stream is then within 2 % of
the entropy; below 0.6 bits an element no group holds enough, and it can be 10 % above.

One Huffman code serves all layers of the same number of bits in a call; it is made from their actual
counts, no longer than 15 bits, and canonical: only the lengths are sent, as nibbles from the low one
up::

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

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.wire.quantized import (
    HUFFMAN,
    MAX_BITS,
    NONFINITE,
    WITH_HUFFMAN,
    WITH_TABLE,
    Damage,
    Float32s,
    QuantizationRule,
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
SPARE = 16
"""Bytes that a writer may touch past the end."""
SAMPLE = 8
"""One chunk in so many is looked at to choose the group."""

_SIZE = struct.Struct("<I")
Front: TypeAlias = Callable[[Mapping[int, bytes]], bytes]
"""Takes the Huffman codes as they are sent, by bits; returns what stands before the layers."""
Writer: TypeAlias = Callable[[int, int], None]
"""Takes a layer and the byte to write its stream at; may touch 8 bytes past the stream."""
Reader: TypeAlias = Callable[[int, int, int, int, npt.NDArray[np.uint8]], bool]
"""Takes the first byte of a stream, its bytes, the elements of the layer, the bits of a code, and room
for the packed codes, past which it may touch :data:`SPARE` bytes.

Returns False if the stream is damaged.
"""


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


@dataclass(frozen=True)
class PackedLayers:
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
    ) -> PackedLayers:
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
            position = start + (packed_bytes(numel, header, alphabet) if finite else 0)
            begins.append(position)
        return cls(body, numels, *(np.array(a, np.int64) for a in (headers, starts, begins)))


class HuffmanTools(Protocol):
    """What a backend does for :class:`HuffmanCoder`."""

    def lengths_of(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Lengths of the best codewords for symbols that occur ``counts`` times, else 0."""

    def is_code(self, lengths: npt.NDArray[np.uint8]) -> bool:
        """Whether a code has these lengths."""

    def nibbles_of(self, lengths: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Lengths as they are sent, one nibble per byte."""

    def read_nibbles(self, nibbles: npt.NDArray[np.uint8], lengths: npt.NDArray[np.uint8]) -> int:
        """Fill ``lengths``; returns how many nibbles they took, -1 if cut short or too many."""

    def count(
        self,
        packed: PackedLayers,
        chosen: npt.NDArray[np.int64],
        bits: int,
        shape: tuple[int, int],
        stride: int,
    ) -> npt.NDArray[np.int64]:
        """How often the symbols of some layers occur; ``shape``: alphabet of a code, codes in a symbol.

        Of every ``stride`` chunks of :data:`CHUNK` codes the first is looked at.
        """

    def stream_bits(
        self, packed: PackedLayers, chosen: npt.NDArray[np.int64], bits: int, code: Code
    ) -> npt.NDArray[np.int64]:
        """Bits of each chosen layer's stream."""

    def writer(self, bits: int, code: Code, packed: PackedLayers, out: npt.NDArray[np.uint8]) -> Writer:
        """What writes streams of packed layers into ``out``, of those whose codes have ``bits``."""

    def reader(self, code: Code, data: npt.NDArray[np.uint8]) -> Reader:
        """What reads the streams in ``data``."""


class HuffmanCoder:
    """The functions of an entropy backend; :class:`hvd_adaptive.kernels.base.EntropyKernels`."""

    def __init__(self, tools: HuffmanTools) -> None:
        self._tools = tools

    def encode(
        self,
        body: Tensor,
        numels: npt.NDArray[np.int64],
        rule: QuantizationRule,
        tables: Tables,
        front: Front = lambda codes: b"",
    ) -> tuple[Tensor, dict[int, bytes]]:
        """See :meth:`hvd_adaptive.kernels.base.EntropyKernels.encode`."""
        packed = PackedLayers.of(body.numpy(), numels, rule, tables)
        codes: dict[int, Code] = {}
        streams: dict[int, int] = {}  # bytes of each layer's stream
        for bits in np.unique(packed.headers).tolist():
            if bits == NONFINITE:
                continue
            chosen = np.flatnonzero((packed.headers == bits) & (numels > 0))
            code, sizes = self._code_for(packed, chosen, bits, int(tables.alphabets[bits]))
            saved = packed.begins[chosen + 1] - packed.starts[chosen] - sizes - 4
            if saved[saved > 0].sum() > len(self.code_to_bytes(code)) + 1:
                codes[bits] = code
                streams.update(
                    (layer, size)
                    for layer, size, gain in zip(chosen.tolist(), sizes.tolist(), saved, strict=True)
                    if gain > 0
                )
        sent = {bits: self.code_to_bytes(code) for bits, code in codes.items()}
        return self._write(packed, codes, streams, front(sent)), sent

    def decode(
        self,
        body: Tensor,
        start: int,
        numels: Sequence[int],
        rule: QuantizationRule,
        tables: Tables,
        codes: Mapping[int, Code],
    ) -> Tensor:
        """See :meth:`hvd_adaptive.kernels.base.EntropyKernels.decode`."""
        data = body.numpy()
        readers = {bits: self._tools.reader(code, data) for bits, code in codes.items()}
        layers = [*layers_of(data, start, numels, rule, tables, codes)]
        room = torch.empty(sum(layer.packed for layer in layers) + SPARE, dtype=torch.uint8)
        out, position = room.numpy(), 0
        for layer in layers:
            front = data[layer.start : layer.codes if layer.stream else layer.end]
            out[position : position + front.size] = front
            if layer.stream:
                out[position] = layer.bits
                place = out[position + front.size :]
                size = layer.end - layer.stream
                reader = readers[layer.bits]
                if not reader(layer.stream, size, layer.numel, layer.bits, place):
                    raise damaged(Damage.stream, layer.index, layer.numel, layer.stream, data.size)
            position += layer.packed
        return room[:position]

    def read_codebooks(
        self, data: npt.NDArray[np.uint8], rule: QuantizationRule
    ) -> tuple[Tables, dict[int, Code], int]:
        """See :meth:`hvd_adaptive.kernels.base.EntropyKernels.read_codebooks`."""
        found: dict[int, Float32s] = {}
        codes: dict[int, Code] = {}
        position, last = 1, 0
        for _ in range(int(data[0]) if data.size else 0):
            head = int(data[position]) if position < data.size else 0
            bits, table, coded = head & 15, bool(head & WITH_TABLE), bool(head & WITH_HUFFMAN)
            known = 1 <= bits <= MAX_BITS and (rule.carried or bool(rule.tables.alphabets[bits]))
            if not known or bits <= last or table != rule.carried or head >> 6 or not (table or coded):
                raise damaged(Damage.codebooks, -1, 0, min(position, data.size), data.size)
            position, last = position + 1, bits
            alphabet = int(rule.tables.alphabets[bits])
            if table:
                magnitudes = read_magnitudes(data[position:], bits)
                if isinstance(magnitudes, Damage):
                    raise damaged(magnitudes, -1, 0, position, data.size)
                position += magnitudes.nbytes
                found[bits], alphabet = magnitudes, alphabet_of(magnitudes)
            if coded:
                read = self.read_code(data[position:], alphabet)
                if isinstance(read, Damage):
                    raise damaged(read, -1, 0, position, data.size)
                codes[bits] = read[0]
                position += read[1]
        if not data.size:
            raise damaged(Damage.codebooks, -1, 0, 0, 0)
        return Tables(found) if rule.carried else rule.tables, codes, position

    def expected_bytes(self, counts: npt.NDArray[np.float64], numel: int) -> int:
        """See :meth:`hvd_adaptive.kernels.base.EntropyKernels.expected_bytes`.

        Example:
            >>> from hvd_adaptive.kernels import for_device
            >>> entropy = for_device(torch.device("cpu")).entropy
            >>> entropy.expected_bytes(np.array([500.0, 9000.0, 500.0]), 10_000)  # packed: 2,000
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
        code = self.code_of(drawn, group, counts.size)
        redundancy = float(drawn @ (code.lengths - _ideal_bits(joint)))
        stream = symbols * group * entropy + redundancy + spread
        return math.ceil(stream / 8) + len(self.code_to_bytes(code))

    def code_of(self, counts: npt.NDArray[np.int64], group: int, alphabet: int) -> Code:
        """The best code for symbols that occur ``counts`` times."""
        return Code(group, alphabet, self._tools.lengths_of(counts))

    def code_to_bytes(self, code: Code) -> bytes:
        """A code as it is sent."""
        nibbles = self._tools.nibbles_of(code.lengths)
        packed = nibbles[0::2].copy()
        packed[: nibbles.size // 2] |= nibbles[1::2] << 4
        return bytes([code.group]) + packed.tobytes()

    def read_code(self, data: npt.NDArray[np.uint8], alphabet: int) -> tuple[Code, int] | Damage:
        """The code at the front of ``data`` and its bytes there, or what is wrong."""
        group = int(data[0]) if data.size else 0
        if not 1 <= group <= MAX_GROUP or alphabet**group > MAX_SYMBOLS:
            return Damage.huffman
        lengths = np.empty(alphabet**group, np.uint8)
        raw = data[1 : 2 + 2 * lengths.size]
        nibbles = np.stack([raw & 15, raw >> 4], 1).reshape(-1)
        size = self._tools.read_nibbles(nibbles, lengths)
        if size < 0 or not self._tools.is_code(lengths):
            return Damage.huffman
        return Code(group, alphabet, lengths), 1 + (size + 1) // 2

    def _code_for(
        self, packed: PackedLayers, chosen: npt.NDArray[np.int64], bits: int, alphabet: int
    ) -> tuple[Code, npt.NDArray[np.int64]]:
        """A code for the chosen layers, and the bytes of their streams."""
        single = self._tools.count(packed, chosen, bits, (alphabet, 1), SAMPLE)
        shares = single / max(1, single.sum())
        entropy = float(shares @ _ideal_bits(shares))
        group = _group_of(entropy, alphabet, int(packed.numels[chosen].sum()))
        counts = self._tools.count(packed, chosen, bits, (alphabet, group), 1)
        code = self.code_of(counts, group, alphabet)
        if chosen.size == 1:
            sizes = np.array([counts @ code.lengths.astype(np.int64)])
        else:
            sizes = self._tools.stream_bits(packed, chosen, bits, code)
        return code, (sizes + 7) // 8

    def _write(
        self,
        packed: PackedLayers,
        codes: Mapping[int, Code],
        streams: Mapping[int, int],
        front: bytes,
    ) -> Tensor:
        """After ``front`` the layers, some as streams of these sizes, the others as they are."""
        position = len(front)
        room = torch.empty(position + int(packed.begins[-1]) + SPARE, dtype=torch.uint8)
        out = room.numpy()
        out[:position] = np.frombuffer(front, np.uint8)
        writers = {bits: self._tools.writer(bits, code, packed, out) for bits, code in codes.items()}
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
            writers[int(packed.headers[layer])](layer, position)
            position += streams[layer]
        return room[:position]


def _group_of(entropy: float, alphabet: int, numel: int) -> int:
    """Codes in a symbol, for ``numel`` codes of this entropy."""
    most = min(MAX_SYMBOLS, numel // ELEMENTS_A_SYMBOL)
    group = 1
    while group < MAX_GROUP and group * entropy < ENOUGH_BITS and alphabet ** (group + 1) <= most:
        group += 1
    return group


def _ideal_bits(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The bits of information in symbols that have these shares; 0 where one never occurs."""
    return -np.log2(np.where(shares > 0, shares, 1.0))


@dataclass(frozen=True)
class ReceivedLayer:
    """Where a layer lies in a body."""

    index: int
    numel: int
    bits: int
    """Of a packed code; 0 where the layer was not finite."""
    start: int
    codes: int
    """Byte at which its packed codes begin, or the length of its stream."""
    stream: int
    """Byte at which its stream begins; 0 where it has none."""
    end: int
    packed: int
    """Bytes of the layer with its codes packed."""


def layers_of(
    data: npt.NDArray[np.uint8],
    start: int,
    numels: Sequence[int],
    rule: QuantizationRule,
    tables: Tables,
    codes: Mapping[int, Code],
) -> Iterator[ReceivedLayer]:
    """Walk along the layers of a received body that has Huffman codes.

    Args:
        data, start, numels, rule, tables, codes: as of
            :meth:`hvd_adaptive.kernels.base.EntropyKernels.decode`.

    Raises:
        WireError: a layer is cut short or has no code, when it is reached; or bytes are left.
    """
    for index, numel in enumerate(numels):
        found = _layer_at(data, start, index, numel, rule, tables, codes)
        if isinstance(found, Damage):
            raise damaged(found, index, numel, min(start, data.size), data.size)
        yield found
        start = found.end
    if start != data.size:
        raise damaged(Damage.trailing, len(numels) - 1, 0, start, data.size)


def _layer_at(
    data: npt.NDArray[np.uint8],
    start: int,
    index: int,
    numel: int,
    rule: QuantizationRule,
    tables: Tables,
    codes: Mapping[int, Code],
) -> ReceivedLayer | Damage:
    """The layer at byte ``start``, or what is wrong with it."""
    if start >= data.size:
        return Damage.truncated
    header = int(data[start])
    if header == NONFINITE:
        return ReceivedLayer(index, numel, 0, start, start + 1, 0, start + 1, 1)
    bits = header & ~HUFFMAN
    if bits > MAX_BITS or not tables.alphabets[bits] or (header & HUFFMAN and bits not in codes):
        return Damage.header
    norms_end = start + 1 + rule.norm_bytes(numel)
    packed = packed_bytes(numel, bits, int(tables.alphabets[bits]))
    stream, end = 0, norms_end + packed
    if header & HUFFMAN:
        word = data[norms_end : norms_end + _SIZE.size].tobytes()
        if len(word) < _SIZE.size:
            return Damage.truncated
        stream = norms_end + _SIZE.size
        end = stream + int(_SIZE.unpack(word)[0])
    if end > data.size:
        return Damage.truncated
    whole = norms_end - start + packed
    return ReceivedLayer(index, numel, bits, start, norms_end, stream, end, whole)
