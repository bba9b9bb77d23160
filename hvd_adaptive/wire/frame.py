"""The frame around a bucket: a header, the codes of one compressor or of several, and their limits.

Everything is little endian. A **body** is the layers of one bucket one after the other; a **frame** is
a 16-byte header and the body: magic ``u16``, version ``u8``, flags ``u8`` (1: a layer was not finite),
bytes of the body ``u32``, bucket index ``u32``, number of layers ``u32``. A rank whose frame would be
too large for the gathering sends one with the flag 2 in its place, whose body is the size as ``u64``;
one that could not do its part sends one with the flag 4, whose body says why, in UTF-8.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_adaptive.wire.errors import TooLargeError, WireError

MAGIC = 0x4148  # "HA"
VERSION = 5
HEADER = struct.Struct("<HBBIII")
HEADER_BYTES = HEADER.size
_REASON_BYTES = 1000
_SIZE, _PART = struct.Struct("<Q"), struct.Struct("<I")
MAX_BODY_BYTES = 2**32 - 1
MAX_GATHERED_BYTES = 2**31 - 1
"""What all ranks together may gather: MPI's counts and displacements are 32-bit, and beyond them it
writes to the wrong places."""
NONFINITE, TOO_LARGE, REFUSED = 1, 2, 4
"""Flags of a frame."""


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


def refused(reason: str, bucket: int, layers: int) -> Tensor:
    """What to send in the place of a frame that could not be made: all ranks then raise alike.

    Example:
        >>> refused("rank 3 sent damaged bytes", bucket=7, layers=2).numel()
        41
    """
    body = reason.encode()[:_REASON_BYTES]
    header = HEADER.pack(MAGIC, VERSION, REFUSED, len(body), bucket, layers)
    return torch.frombuffer(bytearray(header + body), dtype=torch.uint8)


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
        marked = flags == REFUSED or (flags == TOO_LARGE and size == _SIZE.size)
        known = flags if marked else flags & NONFINITE
        expected = (MAGIC, VERSION, known, size, bucket, layers)
        if found != expected:
            raise _frame_error(rank, bucket, _difference(found, expected))
        position = start + size
        if position > total:
            raise _frame_error(rank, bucket, f"its body ends at byte {position} of {total}")
        if flags == REFUSED:
            reason = bytes(buffer[start:position].tolist()).decode(errors="replace")
            raise WireError(f"rank {rank} could not reduce its shard of bucket {bucket}: {reason}")
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
    room = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=codes[0].device)
    return torch.cat([room, *_behind_lengths(codes)])


def _behind_lengths(codes: Sequence[Tensor]) -> list[Tensor]:
    """Each of the codes, with its length in front."""
    lengths = [
        torch.frombuffer(bytearray(_PART.pack(code.numel())), dtype=torch.uint8) for code in codes
    ]
    pairs = zip(lengths, codes, strict=True)
    return [piece for length, code in pairs for piece in (length.to(code.device), code)]


def frame_pieces(
    codes: Sequence[Tensor], bucket: int, layers: int, device: torch.device, nonfinite: bool
) -> list[Tensor]:
    """A frame of any number of codes, as what is to be joined: header, and codes behind their lengths.

    Args:
        codes: uint8, 1-D.
        bucket: index of the bucket.
        layers: number of layers in the bucket.
        device: of the codes.
        nonfinite: whether a layer was not finite.

    Example:
        >>> none = frame_pieces([], 7, 2, torch.device("cpu"), nonfinite=False)
        >>> [piece.numel() for piece in none]
        [16]
    """
    sizes = [code.numel() for code in codes]
    header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
    total = frame_bytes(sizes) - HEADER_BYTES
    HEADER.pack_into(header.numpy().data, 0, MAGIC, VERSION, nonfinite, total, bucket, layers)
    return [header.to(device), *(codes if len(codes) == 1 else _behind_lengths(codes))]


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
