"""Numbers of one to nine bytes, small ones in few (LEB128)."""

from __future__ import annotations

MAX_VARINT_BYTES = 9
"""63 bits: every length fits an int64."""


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
