"""What travels: value formats, varints, the size of a sparse layer, and the frame around a bucket.

Everything is little endian. A **sparse layer** is::

    varint  count << 4 | value format << 1 | nonfinite
    when count > 0:
      varint  bytes of the index stream
      bytes   index stream: gaps between indices, Rice-coded, bits from the least significant up
      bytes   values in index order

* Gap ``i`` is ``index[i] - index[i - 1] - 1``, the first counted from -1. Every block of 256 gaps
  starts with a 5-bit parameter ``r`` and a bit that names one of two codes. 0: ``gap >> r`` zero bits,
  a one bit, and the low ``r`` bits (Rice, "Some Practical Universal Noiseless Coding Techniques",
  JPL 79-22, 1979); for scattered indices. 1: with ``w`` the whole part of ``log2(gap + 2^r)``,
  ``w - r`` zero bits, a one bit, and the low ``w`` bits of ``gap + 2^r`` (Teuhola, "A compression
  method for clustered bit-vectors", Information Processing Letters 7(6), 1978); for indices that crowd
  in some rows of a matrix. The encoder takes the cheapest of Rice's code with three ``r`` around
  ``log2(mean gap)`` and Teuhola's with the mean of ``log2(gap + 1)``.
* fp32 and bf16 values are the float's high bytes, fp16 is IEEE half; int8 is, for every block of 256
  values, one float32 scale and then a signed byte a value; sign is two float32, the mean magnitude of
  the positive values and that of the negative ones, and then one bit a value, from the least
  significant up, 1 for a negative one.
* A layer that held a NaN or an Inf has no values and the nonfinite bit set.
* The value format is part of the layer because ranks may choose their levels by themselves.

A **body** is the layers of one bucket one after the other; a **frame** is a 16-byte header and the
body: magic ``u16``, version ``u8``, flags ``u8`` (1: a layer was not finite), bytes of the body
``u32``, bucket index ``u32``, number of layers ``u32``. A rank whose frame would be too large for the
gathering sends one with the flag 2 in its place, whose body is the size as ``u64``.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

MAGIC = 0x4148  # "HA"
VERSION = 3
HEADER = struct.Struct("<HBBIII")
HEADER_BYTES = HEADER.size
_SIZE, _PART = struct.Struct("<Q"), struct.Struct("<I")

CODE_BLOCK = 256
HEAD_BITS = 6
"""Before each block: five of the parameter, and one that names the code."""
HEAD_PARAMETER, HEAD_TEUHOLA = 31, 32
"""Of these bits those of the parameter, and the one of Teuhola's code."""
VALUE_BLOCK = 256
MAX_SCALE = float(torch.finfo(torch.float32).max) / 127 * (1 - 2.0**-23)
"""Largest int8 scale: one float32 below the quotient, so that 127 times it cannot overflow."""
MAX_NUMEL = 2**31 - 1
"""Elements of one layer: indices are kept as int32."""
MAX_BODY_BYTES = 2**32 - 1
MAX_GATHERED_BYTES = 2**31 - 1
"""What all ranks together may gather: MPI's counts and displacements are 32-bit, and beyond them it
writes to the wrong places."""
NONFINITE, TOO_LARGE = 1, 2
"""Flags of a frame."""
MAX_VARINT_BYTES = 9
"""63 bits: every length fits an int64."""


class WireError(ValueError):
    """Bytes that no rank of this run can have sent: damaged, cut short, or of another bucket."""


class TooLargeError(ValueError):
    """More bytes than one operation can gather from all ranks; raised on all of them."""


class ValueFormat(enum.IntEnum):
    """How the values of a sparse layer travel; the number is the code on the wire."""

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


def varint_bytes(value: int) -> int:
    """Bytes that :func:`write_varint` takes for ``value``."""
    return max(1, -(-value.bit_length() // 7))


def write_varint(value: int) -> bytes:
    """LEB128: seven bits a byte from the lowest up, the top bit set on all but the last.

    Example:
        >>> write_varint(300).hex()
        'ac02'
    """
    if value < 0 or varint_bytes(value) > MAX_VARINT_BYTES:
        raise ValueError(f"a varint holds 0 to 2^63 - 1, got {value}")
    out = bytearray()
    while value > 0x7F:
        out.append(0x80 | value & 0x7F)
        value >>= 7
    out.append(value)
    return bytes(out)


def max_sparse_bytes(numel: int, count: int, values: ValueFormat) -> int:
    """Upper bound of the bytes of a sparse layer: true for any input, and close for scattered ones.

    With one Rice parameter ``r`` for the whole layer the quotients sum to at most
    ``(numel - count) / 2^r``; the encoder's choice for each block is never worse than the best ``r``.
    Scattered indices take up to 7 % less; with their values that is 3 %, but for signs, whose
    positions the compressor's ``sizes`` measures instead.

    Args:
        numel: elements of the layer.
        count: values sent, at most ``numel`` of them.
        values: how they travel.

    Example:
        >>> max_sparse_bytes(1_000_000, 10_000, ValueFormat.int8) * 8 / 10_000  # bits a value
        16.7032
    """
    count = min(count, numel)
    if count <= 0:
        return 1
    rest = numel - count
    # (rest / count) / 2^r + r is least where 2^r <= rest / count < 2^(r + 1)
    r = max(0, (rest // count).bit_length() - 1)
    bits = (rest >> r) + count * (r + 1) + HEAD_BITS * -(-count // CODE_BLOCK)
    return sparse_bytes(count, bits, values)


def sparse_bytes(count: int, index_bits: int, values: ValueFormat) -> int:
    """The bytes of a sparse layer whose index stream takes so many bits.

    Args:
        count: values sent.
        index_bits: of the stream, its codes included.
        values: how they travel.

    Example:
        >>> sparse_bytes(3, 17, ValueFormat.fp32), sparse_bytes(0, 0, ValueFormat.fp32)
        (17, 1)
    """
    if count == 0:
        return 1
    index_bytes = -(-index_bits // 8)
    return varint_bytes(count << 4) + varint_bytes(index_bytes) + index_bytes + values.nbytes(count)


def write_header(buffer: Tensor, bucket: int, layers: int, nonfinite: bool = False) -> None:
    """Fill the first 16 bytes of ``buffer``: header room followed by a body.

    Args:
        buffer: uint8, 1-D, at least 16 bytes (see ``reserve`` of the kernels), any device.
        bucket: index of the bucket.
        layers: number of layers in the body.
        nonfinite: whether one of them was not finite.

    Raises:
        ValueError: the buffer has no room for a header, or its body is over 4 GiB.
    """
    size = buffer.numel() - HEADER_BYTES
    if not 0 <= size <= MAX_BODY_BYTES:
        raise ValueError(
            f"bucket {bucket}: a frame is {HEADER_BYTES} bytes of header and a body of at most "
            f"{MAX_BODY_BYTES}, got a buffer of {buffer.numel()} bytes"
        )
    if buffer.device.type == "cpu":
        HEADER.pack_into(buffer.numpy().data, 0, MAGIC, VERSION, nonfinite, size, bucket, layers)
    else:
        header = bytearray(HEADER.pack(MAGIC, VERSION, nonfinite, size, bucket, layers))
        buffer[:HEADER_BYTES].copy_(torch.frombuffer(header, dtype=torch.uint8))


def too_large(size: int, bucket: int, layers: int) -> Tensor:
    """What to send in the place of a frame of ``size`` bytes that is beyond a rank's share.

    All ranks then find that out together, in :func:`split_frames`.

    Example:
        >>> too_large(10**10, bucket=7, layers=2).numel()
        24
    """
    header = HEADER.pack(MAGIC, VERSION, TOO_LARGE, _SIZE.size, bucket, layers)
    return torch.frombuffer(bytearray(header + _SIZE.pack(size)), dtype=torch.uint8)


def frame(body: Tensor, bucket: int, layers: int) -> Tensor:
    """A header and a copy of ``body``; where the body has room in front, use :func:`write_header`.

    Args:
        body: uint8, 1-D, any device.
        bucket: index of the bucket.
        layers: number of layers in the body.

    Example:
        >>> framed = frame(torch.zeros(3, dtype=torch.uint8), bucket=7, layers=2)
        >>> framed.numel(), [part.numel() for part in split_frames(framed, 7, 2, ranks=1)[0]]
        (19, [3])
    """
    framed = torch.empty(HEADER_BYTES + body.numel(), dtype=torch.uint8, device=body.device)
    write_header(framed, bucket, layers)
    framed[HEADER_BYTES:] = body
    return framed


def split_frames(buffer: Tensor, bucket: int, layers: int, ranks: int) -> tuple[list[Tensor], bool]:
    """Cut an allgathered buffer into the ranks' bodies (views, no copy).

    Args:
        buffer: uint8, 1-D: the frames of all ranks in rank order.
        bucket: index of the bucket that is expected.
        layers: number of layers that is expected.
        ranks: number of frames that is expected.

    Returns:
        One body a rank, and whether any of them holds a layer that was not finite.

    Raises:
        WireError: a frame is cut short, of another bucket, format or number of layers, or bytes are
            left over; the message names the rank, the bucket and what differed.
        TooLargeError: a rank had more to send than it may.
    """
    bodies = []
    nonfinite = False
    position, total = 0, buffer.numel()
    here = buffer.numpy().data if buffer.device.type == "cpu" else None
    for rank in range(ranks):
        start = position + HEADER_BYTES
        if start > total:
            raise _frame_error(rank, bucket, f"its header ends at byte {start} of {total}")
        header = here[position:start] if here is not None else bytes(buffer[position:start].tolist())
        found = HEADER.unpack(header)
        flags, size = found[2:4]
        known = flags & NONFINITE if flags != TOO_LARGE or size != _SIZE.size else flags
        expected = (MAGIC, VERSION, known, size, bucket, layers)
        if found != expected:
            raise _frame_error(rank, bucket, _difference(found, expected))
        position = start + size
        if position > total:
            raise _frame_error(rank, bucket, f"its body ends at byte {position} of {total}")
        if flags == TOO_LARGE:
            raise _too_large_error(rank, bucket, buffer[start:position], ranks)
        bodies.append(buffer[start:position])
        nonfinite |= bool(flags)
    if position != total:
        raise _frame_error(ranks - 1, bucket, f"{total - position} bytes follow the last frame")
    return bodies, nonfinite


def _too_large_error(rank: int, bucket: int, body: Tensor, ranks: int) -> TooLargeError:
    (size,) = _SIZE.unpack(bytes(body.tolist()))
    return TooLargeError(
        f"rank {rank} has {size} bytes to send for bucket {bucket}, but of {ranks} ranks each can send "
        f"at most {MAX_GATHERED_BYTES // ranks}, because MPI counts in 32 bits: use a level that sends "
        "less, or a smaller bucket_cap_mb"
    )


def _frame_error(rank: int, bucket: int, what: str) -> WireError:
    return WireError(f"the frame of rank {rank} for bucket {bucket} is damaged: {what}")


def _difference(found: Sequence[int], expected: Sequence[int]) -> str:
    names = ("magic number", "format version", "flags", "size", "bucket", "number of layers")
    return ", ".join(
        f"{name} {have} instead of {want}"
        for name, have, want in zip(names, found, expected, strict=True)
        if have != want
    )


def frame_bytes(codes: Sequence[int]) -> int:
    """Bytes of a frame of codes of so many bytes.

    Example:
        >>> frame_bytes([100]), frame_bytes([100, 0])
        (116, 124)
    """
    return HEADER_BYTES + sum(codes) + (_PART.size * len(codes) if len(codes) > 1 else 0)


def join_parts(codes: Sequence[Tensor]) -> Tensor:
    """One frame, header room first, of the codes of several compressors, each behind its length.

    Args:
        codes: uint8, 1-D, on one device.

    Returns:
        uint8, 1-D, for :func:`write_header`.
    """
    pieces = [torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=codes[0].device)]
    for code in codes:
        length = torch.frombuffer(bytearray(_PART.pack(code.numel())), dtype=torch.uint8)
        pieces += [length.to(code.device), code]
    return torch.cat(pieces)


def split_parts(body: Tensor, parts: int) -> list[Tensor]:
    """The codes that :func:`join_parts` joined; a lone part is the body itself.

    Raises:
        WireError: the lengths do not fill the body exactly.
    """
    if parts == 1:
        return [body]
    codes: list[Tensor] = []
    position, size = 0, body.numel()
    for part in range(parts):
        start = position + _PART.size
        if start > size:
            raise WireError(f"damaged frame: part {part} of {parts} begins past its {size} bytes")
        (length,) = _PART.unpack(bytes(body[position:start].tolist()))
        position = start + length
        if position > size:
            raise WireError(f"damaged frame: part {part} of {parts} ends past its {size} bytes")
        codes.append(body[start:position])
    if position != size:
        raise WireError(f"damaged frame: {size - position} bytes are left over after {parts} parts")
    return codes
