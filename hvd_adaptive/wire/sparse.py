"""The sparse format: positions and values of some elements of a layer.

Everything is little endian. A **sparse layer** is::

    varint  count << 4 | value format << 1 | nonfinite
    when count > 0:
      varint  bytes of the index stream
      u32     for each group of 4096 values but the last: the bits that it takes in the index stream
      bytes   index stream: coded gaps between indices, bits from the least significant up
      bytes   values in index order

* Gap ``i`` is ``index[i] - index[i - 1] - 1``, the first counted from -1. Every block of 256 gaps
  starts with a 5-bit parameter ``r`` and a bit that names one of two codes. 0: ``gap >> r`` zero bits,
  a one bit, and the low ``r`` bits (Rice, "Some Practical Universal Noiseless Coding Techniques",
  JPL 79-22, 1979); for scattered indices. 1: with ``w`` the whole part of ``log2(gap + 2^r)``,
  ``w - r`` zero bits, a one bit, and the low ``w`` bits of ``gap + 2^r`` (Teuhola, "A compression
  method for clustered bit-vectors", Information Processing Letters 7(6), 1978); for indices that crowd
  in some rows of a matrix. The encoder takes the cheapest of Rice's code with three ``r`` around
  ``log2(mean gap)`` and Teuhola's with the mean of ``log2(gap + 1)``.
* A block has all its zeros and ones first and all low bits after them, as Elias and Fano keep rising
  numbers. That takes the same bits as code after code, but a decoder need not read a code to know where
  the next one begins: a number's zeros are those before the one of its rank, whose place a GPU finds
  for a whole block at once, and a processor by counting trailing zeros of whole words.
* The table before the stream tells a decoder where each **group** of 16 blocks begins, so that a GPU
  decodes all of them at once; it takes 32 bits per 4096 values, 0.008 bits per value. A group whose
  codes end elsewhere is damage to every decoder, also to one that reads them one after the other.
* fp32 and bf16 values are the float's high bytes, fp16 is IEEE half; int8 is, for every block of 256
  values, one float32 scale and then a signed byte a value; sign is two float32, the mean magnitude of
  the positive values and that of the negative ones, and then one bit a value, from the least
  significant up, 1 for a negative one.
* A layer that held a NaN or an Inf has no values and the nonfinite bit set.
* The value format is part of the layer because ranks may choose their levels by themselves.
"""

from __future__ import annotations

import enum

import torch

from hvd_adaptive.wire.errors import WireError
from hvd_adaptive.wire.varint import varint_bytes

CODE_BLOCK = 256
HEAD_BITS = 6
"""Before each block: five of the parameter, and one that names the code."""
HEAD_PARAMETER, HEAD_TEUHOLA = 31, 32
"""Of these bits those of the parameter, and the one of Teuhola's code."""
GROUP = 16 * CODE_BLOCK
"""Values whose positions can be decoded without those before them: where they begin is known."""
GROUP_BYTES = 4
"""Of a group's entry in the table: its bits, as ``u32``."""
VALUE_BLOCK = 256
MAX_SCALE = float(torch.finfo(torch.float32).max) / 127 * (1 - 2.0**-23)
"""Largest int8 scale: one float32 below the quotient, so that 127 times it cannot overflow."""
MAX_NUMEL = 2**31 - 1
"""Elements of one layer: indices are kept as int32."""


class ValueFormat(enum.IntEnum):
    """How the values of a sparse layer are sent; the number is the code on the wire."""

    fp32 = 0
    fp16 = 1
    bf16 = 2
    int8 = 3
    sign = 4

    @property
    def bits(self) -> int:
        """Bits of one value, without int8's scale for every 256 values and sign's two means."""
        return (32, 16, 16, 8, 1)[self]

    def nbytes(self, count: int) -> int:
        """Bytes that ``count`` values take, scales and means included."""
        extra = 0
        if self is ValueFormat.int8:
            extra = 4 * -(-count // VALUE_BLOCK)
        elif self is ValueFormat.sign and count > 0:
            extra = 8
        return -(-count * self.bits // 8) + extra


class Damage(enum.IntEnum):
    """What a decoder can find wrong; the kernels return the number."""

    none = 0
    truncated = 1
    overlong = 2
    count = 3
    format = 4
    parameter = 5
    run = 6
    index = 7
    length = 8
    padding = 9
    value = 10
    trailing = 11
    group = 12

    @property
    def text(self) -> str:
        """The finding in words."""
        return _DAMAGE_TEXT[self]


_DAMAGE_TEXT = {
    Damage.none: "nothing is wrong",
    Damage.truncated: "the bytes end before the layer does",
    Damage.overlong: "a varint is longer than its number needs, or than 63 bits",
    Damage.count: "more values than the layer has elements, or values beside a nonfinite mark",
    Damage.format: "the values are not in the expected format, or in none that there is",
    Damage.parameter: "a code's parameter is beyond the size of the layer",
    Damage.run: "a gap is longer than the layer",
    Damage.index: "an index is past the end of the layer",
    Damage.length: "the index stream is not as long as its length says",
    Damage.padding: "the padding of the index stream or of the signs is not zero",
    Damage.value: "a value or a scale is NaN or Inf",
    Damage.trailing: "bytes are left over after the last layer",
    Damage.group: "a group of positions does not end where its table says",
}


def damaged(damage: int, layer: int, numel: int, position: int, size: int) -> WireError:
    """The error for one finding: which layer, where in the body, and what was found."""
    return WireError(
        f"damaged sparse payload: {Damage(damage).text} (layer {layer} of {numel} elements, at byte "
        f"{position} of {size})"
    )


def count_of(numel: int, density: float) -> int:
    """How many of ``numel`` elements a density asks for: the nearest number, but at least one.

    Args:
        numel: elements of the layer; 0 gives 0.
        density: share of the elements, in (0, 1].

    Raises:
        ValueError: density outside (0, 1].

    Example:
        >>> count_of(1_000_000, 0.001), count_of(10, 0.01), count_of(0, 0.5)
        (1000, 1, 0)
    """
    if not 0.0 < density <= 1.0:
        raise ValueError(f"density is a share of the elements in (0, 1], got {density}")
    return max(1, round(density * numel)) if numel else 0


def max_sparse_bytes(numel: int, count: int, values: ValueFormat) -> int:
    """Upper bound of the bytes of a sparse layer: true for any input, and close for scattered ones.

    With one Rice parameter ``r`` for the whole layer the quotients sum to at most
    ``(numel - count) / 2^r``; the encoder's choice for each block is never worse than the best ``r``.
    Scattered indices take up to 7 % less; with their values that is 3 %, but for signs, whose
    positions the compressor's ``sizes`` measures instead.

    Args:
        numel: elements of the layer.
        count: values sent, at most ``numel`` of them.
        values: how they are sent.

    Example:
        >>> max_sparse_bytes(1_000_000, 10_000, ValueFormat.int8) * 8 / 10_000  # bits per value
        16.7096
    """
    count = min(count, numel)
    if count <= 0:
        return 1
    rest = numel - count
    # (rest / count) / 2^r + r is least where 2^r <= rest / count < 2^(r + 1)
    r = max(0, (rest // count).bit_length() - 1)
    bits = (rest >> r) + count * (r + 1) + HEAD_BITS * -(-count // CODE_BLOCK)
    return sparse_bytes(count, bits, values)


def group_table_bytes(count: int) -> int:
    """The bytes of the table that says how long each group of a layer's positions is, but the last.

    Example:
        >>> [group_table_bytes(count) for count in (0, 4096, 4097, 8193)]
        [0, 0, 4, 8]
    """
    return GROUP_BYTES * (max(count - 1, 0) // GROUP)


def sparse_bytes(count: int, index_bits: int, values: ValueFormat) -> int:
    """The bytes of a sparse layer whose index stream takes so many bits.

    Args:
        count: values sent.
        index_bits: of the stream, what its blocks begin with included, without the table of groups.
        values: how they are sent.

    Example:
        >>> sparse_bytes(3, 17, ValueFormat.fp32), sparse_bytes(0, 0, ValueFormat.fp32)
        (17, 1)
    """
    if count == 0:
        return 1
    index_bytes = -(-index_bits // 8)
    positions = varint_bytes(index_bytes) + group_table_bytes(count) + index_bytes
    return varint_bytes(count << 4) + positions + values.nbytes(count)
