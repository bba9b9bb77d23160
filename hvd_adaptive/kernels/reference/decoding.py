"""Positions and values from bytes, in plain torch: every length and index is checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hvd_adaptive.kernels.reference.encoding import in_blocks, unpack_bits
from hvd_adaptive.wire import ValueFormat
from hvd_adaptive.wire.sparse import (
    CODE_BLOCK,
    GROUP,
    GROUP_BYTES,
    HEAD_BITS,
    HEAD_PARAMETER,
    HEAD_TEUHOLA,
    VALUE_BLOCK,
    Damage,
    damaged,
    group_table_bytes,
)
from hvd_adaptive.wire.varint import MAX_VARINT_BYTES


class _FoundError(Exception):
    """What is wrong at which byte; :func:`decompress_add_` adds the layer."""

    def __init__(self, damage: Damage, position: int) -> None:
        super().__init__(damage, position)
        self.damage, self.position = damage, position


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at ``position`` and the position after it."""
    value = 0
    for length in range(MAX_VARINT_BYTES):
        if position + length >= len(data):
            raise _FoundError(Damage.truncated, len(data))
        byte = data[position + length]
        value |= (byte & 0x7F) << (7 * length)
        if byte < 0x80:
            if byte == 0 and length > 0:
                break
            return value, position + length + 1
    raise _FoundError(Damage.overlong, position)


def _window(stream: bytes, bit: int) -> int:
    """At least 64 bits of the stream from ``bit`` on, zeros past its end."""
    return int.from_bytes(stream[bit >> 3 : (bit >> 3) + 9], "little") >> (bit & 7)


def _group_ends(table: bytes) -> list[int]:
    """Where each group but the last ends, in bits of the stream, as its table says."""
    entries = (table[place : place + GROUP_BYTES] for place in range(0, len(table), GROUP_BYTES))
    return [*itertools.accumulate(int.from_bytes(entry, "little") for entry in entries)]


def _read_gaps(stream: bytes, begin: int, bit: int, numel: int, size: int) -> tuple[list[int], int]:
    """The gaps of the block at ``bit``, and the bit after it; ``begin`` is its byte, for messages."""
    head = _window(stream, bit)
    r, grows = head & HEAD_PARAMETER, bool(head & HEAD_TEUHOLA)
    if r > numel.bit_length():
        raise _FoundError(Damage.parameter, begin)
    most = (numel + (1 << r)).bit_length() - 1 - r if grows else numel >> r
    bit, quotients = bit + HEAD_BITS, []
    for _ in range(size):
        one = _find_one(stream, bit)
        zeros = max(0, one - bit)
        if zeros > most:
            raise _FoundError(Damage.run, begin)
        if one >= 8 * len(stream):
            raise _FoundError(Damage.truncated, begin)
        quotients.append(zeros)
        bit = one + 1
    gaps = []
    for zeros in quotients:
        width = r + zeros if grows else r
        high = (1 << width) - (1 << r) if grows else zeros << r
        gaps.append(high + (_window(stream, bit) & ((1 << width) - 1)))
        bit += width
    return gaps, bit


def _find_one(stream: bytes, bit: int) -> int:
    """The first bit from ``bit`` on that is one; the number of bits where there is none."""
    while bit < 8 * len(stream):
        window = _window(stream, bit) & ((1 << 64) - 1)
        if window:
            return bit + (window & -window).bit_length() - 1
        bit += 64
    return 8 * len(stream)


def _read_indices(stream: bytes, table: bytes, start: int, numel: int, count: int) -> list[int]:
    """Decode ``count`` indices; ``start`` is where the stream lies in the body, for messages."""
    size, bit, index = 8 * len(stream), 0, -1
    group_ends = _group_ends(table)
    indices: list[int] = []
    for first in range(0, count, CODE_BLOCK):
        if first % GROUP == 0 and first > 0 and bit != group_ends[first // GROUP - 1]:
            raise _FoundError(Damage.group, start + (bit >> 3))
        begin = start + (bit >> 3)
        gaps, bit = _read_gaps(stream, begin, bit, numel, min(CODE_BLOCK, count - first))
        indices += (index + total for total in itertools.accumulate(gap + 1 for gap in gaps))
        index = indices[-1]
        if index >= numel:
            raise _FoundError(Damage.index, begin)
    if bit > size:
        raise _FoundError(Damage.truncated, start + len(stream))
    if (bit + 7) >> 3 != len(stream):
        raise _FoundError(Damage.length, start + (bit >> 3))
    if _window(stream, bit):
        raise _FoundError(Damage.padding, start + len(stream) - 1)
    return indices


def _decode_values(data: Tensor, count: int, how: ValueFormat) -> Tensor:
    """The float32 values in ``data``, which has the right size."""
    if how is ValueFormat.int8:
        row = 4 + VALUE_BLOCK
        rows = in_blocks(data, row)
        scales = rows[:, :4].contiguous().view(torch.float32)
        codes = rows[:, 4:].contiguous().view(torch.int8)
        return (codes.float() * scales).reshape(-1)[:count]
    if how is ValueFormat.sign:
        means = data[:8].clone().view(torch.float32)
        return torch.where(unpack_bits(data[8:])[:count].bool(), -means[1], means[0])
    dtype = {
        ValueFormat.fp32: torch.float32,
        ValueFormat.fp16: torch.float16,
        ValueFormat.bf16: torch.bfloat16,
    }[how]
    return data.clone().view(dtype).float()  # a clone is aligned


def _check_signs(data: Tensor, start: int, count: int) -> None:
    """Raise if a mean is not finite or a bit is set after the last sign."""
    if not bool(data[:8].clone().view(torch.float32).isfinite().all()):
        raise _FoundError(Damage.value, start)
    if bool(unpack_bits(data[8:])[count:].any()):
        raise _FoundError(Damage.padding, start + len(data) - 1)


def _decode_layer(
    body: Tensor, data: bytes, position: int, numel: int, expected: ValueFormat | None
) -> tuple[list[int], Tensor, bool, int]:
    """(indices, values, nonfinite, next position) of the layer at ``position``."""
    header, after = _read_varint(data, position)
    count, code, nonfinite = header >> 4, (header >> 1) & 7, bool(header & 1)
    if count == 0:
        if code:
            raise _FoundError(Damage.format, position)
        return [], body[:0].float(), nonfinite, after
    if count > numel or nonfinite:
        raise _FoundError(Damage.count, position)
    if code > max(ValueFormat) or (expected is not None and code != expected):
        raise _FoundError(Damage.format, position)
    how = ValueFormat(code)
    index_bytes, table = _read_varint(data, after)
    position = table + group_table_bytes(count)
    after = position + index_bytes
    end = after + how.nbytes(count)
    if end > len(data):
        raise _FoundError(Damage.truncated, len(data))
    indices = _read_indices(data[position:after], data[table:position], position, numel, count)
    if how is ValueFormat.sign:
        _check_signs(body[after:end], after, count)
    values = _decode_values(body[after:end], count, how)
    if not bool(values.isfinite().all()):
        raise _FoundError(Damage.value, after)
    return indices, values, False, end


def decode_layers(
    body: Tensor, data: bytes, numels: Sequence[int], expected: ValueFormat | None
) -> Iterator[tuple[list[int], Tensor, bool]]:
    """(indices, values, nonfinite) of one layer after the other; WireError at the first damage."""
    layer, position = 0, 0
    try:
        for layer in range(len(numels)):
            found = _decode_layer(body, data, position, numels[layer], expected)
            indices, values, nonfinite, position = found
            yield indices, values, nonfinite
        layer = max(0, len(numels) - 1)
        if position != len(data):
            raise _FoundError(Damage.trailing, position)
    except _FoundError as found_error:
        numel = numels[layer] if numels else 0
        at = min(found_error.position, len(data))
        raise damaged(found_error.damage, layer, numel, at, len(data)) from None
