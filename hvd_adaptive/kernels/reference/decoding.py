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


def _read_indices(stream: bytes, table: bytes, start: int, numel: int, count: int) -> list[int]:
    """Decode ``count`` indices; ``start`` is where the stream lies in the body, for messages."""
    size, bit, index, r, grows, most = 8 * len(stream), 0, -1, 0, False, 0
    group_ends = _group_ends(table)
    indices = []
    for i in range(count):
        if i % GROUP == 0 and i > 0 and bit != group_ends[i // GROUP - 1]:
            raise _FoundError(Damage.group, start + (bit >> 3))
        if i % CODE_BLOCK == 0:
            head = _window(stream, bit)
            r, grows = head & HEAD_PARAMETER, bool(head & HEAD_TEUHOLA)
            bit += HEAD_BITS
            if r > numel.bit_length():
                raise _FoundError(Damage.parameter, start + (bit >> 3))
            most = (numel + (1 << r)).bit_length() - 1 - r if grows else numel >> r
        window = _window(stream, bit)
        quotient = 0
        while not window & ((1 << 26) - 1):
            bit, quotient = bit + 25, quotient + 25
            if bit >= size:
                raise _FoundError(Damage.truncated, start + (bit >> 3))
            if quotient > most:
                raise _FoundError(Damage.run, start + (bit >> 3))
            window = _window(stream, bit)
        zeros = (window & -window).bit_length() - 1
        quotient += zeros
        if grows and quotient > most:
            raise _FoundError(Damage.run, start + (bit >> 3))
        width = r + quotient if grows else r
        gap = (1 << width) - (1 << r) if grows else quotient << r
        index += 1 + gap + ((window >> (zeros + 1)) & ((1 << width) - 1))
        bit += zeros + 1 + width
        if index >= numel:
            raise _FoundError(Damage.index, start + (bit >> 3))
        indices.append(index)
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
