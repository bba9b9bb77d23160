"""How quantized layers are sent: norms, codes at their true width, and the tables that decode them.

Everything is little endian. A **body** is::

    u8      number of codebooks, rising by their bits
    a codebook, for each number of bits whose codes need one:
      u8    bits | 0x10 with a table | 0x20 with a Huffman code
      f32   2^(bits - 1) magnitudes, if with a table
      ...   the Huffman code, if with one (see hvd_adaptive.kernels.huffman)
    the layers:
      u8    bits | 0x40 Huffman-coded; or 0x80 alone: the layer held a NaN or an Inf
      f32   norms, one per block (two for the rule ``sides``)
      ...   the codes: packed, or u32 bytes of a Huffman stream and the stream

A body of **rotated** layers is 0x81, the u64 key of the rotation, and a body as above, of the layers
after :meth:`~hvd_adaptive.kernels.base.RotationKernels.rotate_`.

* A layer is cut into blocks of ``block`` elements; the last one is what is left.
* The **magnitudes** of ``bits`` are 2^(bits - 1) float32, rising, the last one 1. If the first is 0
  the signed levels are their negatives, zero, and they: 2^bits - 1. If it is above 0 the levels are
  their negatives and they: 2^bits. A code is the index of a signed level, the least being 0, and
  decodes to ``level * norm of its block``, a float32 product.
* Codes are packed from the least significant bit up, ``bits`` bits each. Three levels are packed five
  to a byte in base 3, the first code the lowest digit: 1.6 bits each. What is left of the last byte
  is 0.
* The number of bits is part of the layer, and tables that were learned are part of the body, because
  ranks may choose by themselves: decoding needs no key and no state.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hvd_adaptive.wire import WireError

MAX_BITS = 8
MAX_BLOCK = 1 << 16
"""Elements that may share a norm: a block is worked on in cache."""
LEVELS = 1 << MAX_BITS
TRITS = 5
"""Codes of three levels in a byte."""
TRIT_BYTES = 3**TRITS
"""Bytes from this value on hold no five digits."""

WITH_TABLE = 0x10
WITH_HUFFMAN = 0x20
HUFFMAN = 0x40
ROTATED = 0x81
ROTATION_BYTES = 9
"""In front of a body of rotated layers."""
NONFINITE = 0x80

Float32s = npt.NDArray[np.float32]


class Norm(enum.IntEnum):
    """What a block's values are divided by; a single one is 2^127 at most."""

    l2 = 0
    """The Euclidean norm."""
    max = 1
    """The largest magnitude."""
    power = 2
    """The largest magnitude, rounded up to a power of two."""
    clipped = 3
    """The largest magnitude, but at most ``clip`` times the root mean square; values saturate."""
    mean = 4
    """The mean magnitude."""
    sides = 5
    """Two: the mean magnitude of the negative values and that of the others."""


class Rounding(enum.IntEnum):
    """Where the levels are, and so how a code is found."""

    uniform = 0
    """Evenly spaced, with a zero (but for 1 bit)."""
    powers = 1
    """Negative powers of two, with a zero (but for 1 bit)."""
    table = 2
    """Anywhere: the tables are sent in the body."""
    sign = 3
    """The sign alone, which is not random."""


@dataclass(frozen=True)
class QuantizationRule:
    """Everything that both sides know beforehand about a quantized layer.

    Args:
        norm: what a block is divided by.
        rounding: where the levels are.
        block: elements that share a norm.
        clip: of :attr:`Norm.clipped`, in root mean squares.
    """

    norm: Norm
    rounding: Rounding
    block: int = 512
    clip: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.block <= MAX_BLOCK:
            raise ValueError(f"a block has 1 to {MAX_BLOCK} elements, got {self.block}")

    @property
    def norms(self) -> int:
        """Norms of one block."""
        return 2 if self.norm is Norm.sides else 1

    @property
    def carried(self) -> bool:
        """Whether the tables are sent in the body."""
        return self.rounding is Rounding.table

    @property
    def tables(self) -> Tables:
        """The levels that need not be sent; none where they are."""
        return _fixed_tables(self.rounding)

    def norm_bytes(self, numel: int) -> int:
        """Bytes of a layer's norms."""
        return 4 * self.norms * -(-numel // self.block)


class Tables:
    """Signed levels for some numbers of bits, laid out for the kernels.

    Args:
        magnitudes: for each number of bits, 1 to 8, its 2^(bits - 1) magnitudes.

    Raises:
        ValueError: magnitudes are too few or many, do not rise, or do not lie in [0, 1] and end at 1.

    Example:
        >>> tables = Tables({2: np.array([0.0, 1.0]), 1: np.array([1.0])})
        >>> tables.signed(2).tolist(), tables.signed(1).tolist(), tables.alphabets.tolist()
        ([-1.0, 0.0, 1.0], [-1.0, 1.0], [0, 2, 3, 0, 0, 0, 0, 0, 0])
    """

    def __init__(self, magnitudes: Mapping[int, npt.ArrayLike]) -> None:
        self.levels = np.zeros((MAX_BITS + 1, LEVELS), np.float32)
        """Row ``bits`` holds the signed levels, from the least one on."""
        self.alphabets = np.zeros(MAX_BITS + 1, np.int64)
        """Number of signed levels for each number of bits; 0 where there is no table."""
        self.magnitudes: dict[int, Float32s] = {}
        for bits, given in sorted(magnitudes.items()):
            positive = np.ascontiguousarray(given, dtype=np.float32)
            if not valid_magnitudes(bits, positive):
                raise ValueError(
                    f"{bits} bits need {1 << (bits - 1) if bits > 0 else 'no'} magnitudes that rise "
                    f"from 0 or more to 1, got {positive.tolist()}"
                )
            signed = np.concatenate([-positive[::-1], positive[int(positive[0] == 0) :]])
            self.magnitudes[bits] = positive
            self.levels[bits, : signed.size] = signed + np.float32(0)  # no -0
            self.alphabets[bits] = alphabet_of(positive)

    def signed(self, bits: int) -> Float32s:
        """The signed levels of ``bits``, the least one first."""
        return self.levels[bits, : self.alphabets[bits]]


def alphabet_of(magnitudes: Float32s) -> int:
    """Number of signed levels: twice the magnitudes, but zero has no negative."""
    return 2 * magnitudes.size - int(magnitudes[0] == 0)


def valid_magnitudes(bits: int, magnitudes: Float32s) -> bool:
    """Whether the magnitudes are as the format wants them; False for NaN."""
    return bool(
        1 <= bits <= MAX_BITS
        and magnitudes.shape == (1 << (bits - 1),)
        and magnitudes[0] >= 0
        and magnitudes[-1] == 1
        and (magnitudes[1:] > magnitudes[:-1]).all()
    )


def magnitudes(rounding: Rounding, bits: int) -> Float32s:
    """The magnitudes of a rounding that needs no learning.

    Example:
        >>> magnitudes(Rounding.uniform, 3).tolist(), magnitudes(Rounding.powers, 3).tolist()
        ([0.0, 0.3333333432674408, 0.6666666865348816, 1.0], [0.0, 0.25, 0.5, 1.0])
    """
    top = (1 << (bits - 1)) - 1
    if bits == 1:
        return np.ones(1, np.float32)
    steps = np.arange(top + 1, dtype=np.float32)
    if rounding is Rounding.uniform:
        return steps / np.float32(top)
    return np.where(steps > 0, np.exp2(steps - top), 0).astype(np.float32)


@lru_cache
def _fixed_tables(rounding: Rounding) -> Tables:
    widths = {
        Rounding.uniform: range(1, MAX_BITS + 1),
        Rounding.powers: range(1, MAX_BITS + 1),
        Rounding.table: range(0),
        Rounding.sign: range(1, 2),
    }[rounding]
    return Tables({bits: magnitudes(rounding, bits) for bits in widths})


def packed_bytes(numel: int, bits: int, alphabet: int) -> int:
    """Bytes of ``numel`` packed codes.

    Example:
        >>> packed_bytes(1000, 3, 7), packed_bytes(1000, 2, 3), packed_bytes(1000, 2, 4)
        (375, 200, 250)
    """
    return -(-numel // TRITS) if alphabet == 3 else -(-numel * bits // 8)


def layer_bytes(numel: int, bits: int, alphabet: int, rule: QuantizationRule) -> int:
    """Bytes of a finite layer whose codes are packed."""
    return 1 + rule.norm_bytes(numel) + packed_bytes(numel, bits, alphabet)


# --- damage --------------------------------------------------------------------------------------


class Damage(enum.IntEnum):
    """What a decoder can find wrong; the kernels return the number."""

    none = 0
    truncated = 1
    header = 2
    norm = 3
    code = 4
    padding = 5
    trailing = 6
    codebooks = 7
    table = 8
    huffman = 9
    stream = 10
    rotation = 11

    @property
    def text(self) -> str:
        """The finding in words."""
        return _DAMAGE_TEXT[self]


_DAMAGE_TEXT = {
    Damage.none: "nothing is wrong",
    Damage.truncated: "the bytes end before the layer does",
    Damage.header: "a layer has an impossible header, or codes without their codebook",
    Damage.norm: "a norm is negative, NaN or Inf",
    Damage.code: "a code stands for no level",
    Damage.padding: "the bits after the last code are not zero",
    Damage.trailing: "bytes are left over after the last layer",
    Damage.codebooks: "the codebooks are cut short, out of order, or of an impossible kind",
    Damage.table: "the levels do not rise from 0 or more to 1",
    Damage.huffman: "the lengths of a Huffman code are cut short or fit no code",
    Damage.stream: "a Huffman stream holds no code, or is not as long as its length says",
    Damage.rotation: "the key of the rotation is cut short, or there is none",
}


def damaged(damage: int, layer: int, numel: int, position: int, size: int) -> WireError:
    """The error for one finding: which layer, where in the body, and what was found.

    Args:
        damage: a :class:`Damage`.
        layer: index of the layer; -1 for the codebooks before the first.
        numel: its number of elements.
        position: byte of the body.
        size: bytes of the body.

    Example:
        >>> print(damaged(Damage.code, 2, 9, 17, 90))
        damaged quantized payload: a code stands for no level (layer 2 of 9 elements, at byte 17 of 90)
    """
    where = f"layer {layer} of {numel} elements" if layer >= 0 else "before the first layer"
    return WireError(
        f"damaged quantized payload: {Damage(damage).text} ({where}, at byte {position} of {size})"
    )


# --- rotation ---------------------------------------------------------------------------------------


def write_rotation(key: int) -> bytes:
    """The front of a body of rotated layers.

    Example:
        >>> write_rotation(258).hex()
        '810201000000000000'
    """
    return struct.pack("<BQ", ROTATED, key)


def read_rotation(front: bytes, size: int) -> int:
    """The key that :func:`write_rotation` wrote.

    Args:
        front: the first :data:`ROTATION_BYTES` of a body, or all of it if it is shorter.
        size: bytes of the body.

    Raises:
        WireError: it has no key.
    """
    if len(front) < ROTATION_BYTES or front[0] != ROTATED:
        raise damaged(Damage.rotation, -1, 0, 0, size)
    _, key = struct.unpack("<BQ", front)
    return int(key)


# --- codebooks ---------------------------------------------------------------------------------------


@dataclass
class Codebook:
    """What decoding the codes of one number of bits takes.

    Args:
        bits: of a packed code.
        magnitudes: the levels; None where both sides know them.
        huffman: the Huffman code as it is sent; None where the codes are packed.
    """

    bits: int
    magnitudes: Float32s | None = None
    huffman: bytes | None = None


def codebook_bytes(bits: int) -> int:
    """Bytes of a codebook that holds a table."""
    return 1 + 4 * (1 << (bits - 1))


def write_codebooks(codebooks: list[Codebook]) -> bytes:
    """The front of a body.

    Example:
        >>> write_codebooks([Codebook(2, np.array([0, 1], np.float32))]).hex()
        '0112000000000000803f'
    """
    parts = [struct.pack("<B", len(codebooks))]
    for codebook in codebooks:
        table, coded = codebook.magnitudes is not None, codebook.huffman is not None
        flags = WITH_TABLE * table | WITH_HUFFMAN * coded
        parts.append(struct.pack("<B", codebook.bits | flags))
        if codebook.magnitudes is not None:
            parts.append(codebook.magnitudes.astype("<f4").tobytes())
        parts.append(codebook.huffman or b"")
    return b"".join(parts)


def read_magnitudes(data: npt.NDArray[np.uint8], bits: int) -> Float32s | Damage:
    """The magnitudes at the front of ``data``, or what is wrong with them."""
    raw = data[: 4 * (1 << (bits - 1))].tobytes()
    if len(raw) < 4 * (1 << (bits - 1)):
        return Damage.codebooks
    found = np.frombuffer(raw, "<f4").astype(np.float32)
    return found if valid_magnitudes(bits, found) else Damage.table
