"""Numbers in streams of bits and bytes: varints, and 64 bits at any place."""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

from numba import int64, uint8, uint64

from hvd_adaptive.kernels.cpu.compiling import kernel
from hvd_adaptive.kernels.cpu.enums import OVERLONG, TRUNCATED
from hvd_adaptive.kernels.cpu.intrinsics import load_u8, load_u64, store_u8
from hvd_adaptive.wire.varint import MAX_VARINT_BYTES

SLACK = 16
"""Bytes that the bit writer may touch past the end."""


@kernel
def bit_length(value):
    bits = 0
    while value > 0:
        value >>= 1
        bits += 1
    return bits


@kernel
def put_varint(out, value):
    while value > 0x7F:
        store_u8(out, uint8(0x80 | (value & 0x7F)))
        value >>= 7
        out += 1
    store_u8(out, uint8(value))
    return out + 1


@kernel
def varint_bytes(value):
    return max(1, (bit_length(value) + 6) // 7)


@kernel
def get_varint(position, end):
    """(value, next address), or (-damage, address of the damage)."""
    value = int64(0)
    for length in range(MAX_VARINT_BYTES):
        if position + length >= end:
            return -TRUNCATED, end
        byte = int64(load_u8(position + length))
        value |= (byte & 0x7F) << (7 * length)
        if byte < 0x80:
            if byte == 0 and length > 0:
                break
            return value, position + length + 1
    return -OVERLONG, position


@kernel
def stream_window(position, bit, end):
    """64 bits from a bit address on, at least 57 of them the stream's; zeros past its end."""
    address = position + (bit >> 3)
    if address + 8 <= end:
        return load_u64(address) >> uint64(bit & 7)
    word = uint64(0)
    for i in range(max(0, end - address)):
        word |= uint64(load_u8(address + i)) << uint64(8 * i)
    return word >> uint64(bit & 7)
