"""One layer of a sparse body: its largest size, writing, reading, and adding it to an output."""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray, int64, uint64

from hvd_adaptive.kernels.cpu.compiling import kernel
from hvd_adaptive.kernels.cpu.enums import COUNT, FORMAT, SIGN, TRUNCATED
from hvd_adaptive.kernels.cpu.intrinsics import float32_pointer, load_f32, prefetch, store_f32
from hvd_adaptive.kernels.cpu.memory import AHEAD
from hvd_adaptive.kernels.cpu.positions import (
    check_positions_end,
    choose_codes,
    get_positions,
    group_table_bytes,
    next_block,
    put_positions,
)
from hvd_adaptive.kernels.cpu.streams import bit_length, get_varint, put_varint, varint_bytes
from hvd_adaptive.kernels.cpu.values import bytes_of_values, put_values, read_values
from hvd_adaptive.wire.sparse import CODE_BLOCK, HEAD_BITS, damaged


@kernel
def sparse_bound(numel, count, value_format):
    """``wire.sparse.max_sparse_bytes`` (a test compares the two)."""
    count = min(count, numel)
    if count <= 0:
        return 1
    rest = numel - count
    r = max(0, bit_length(rest // count) - 1)
    blocks = (count + CODE_BLOCK - 1) // CODE_BLOCK
    index_bytes = ((rest >> r) + count * (r + 1) + HEAD_BITS * blocks + 7) // 8
    return (
        varint_bytes(count << 4)
        + varint_bytes(index_bytes)
        + group_table_bytes(count)
        + index_bytes
        + bytes_of_values(count, value_format)
    )


@kernel
def encode_layer(out, indices, values, count, value_format, heads):
    """Write one layer and leave in its values what rounding left out. Returns (energy, address)."""
    out = put_varint(out, (count << 4) | (value_format << 1 if count else 0))
    if count == 0:
        return 0.0, out
    index_bytes = (choose_codes(indices, count, heads) + 7) >> 3
    out = put_varint(out, index_bytes)
    out = put_positions(out, indices, count, heads)
    return put_values(out, values, count, value_format)


@kernel
def read_head(position, end, n, expected):
    """What a layer's bytes announce: (damage, next address or that of the damage, count, how, bytes).

    Count -1 marks a nonfinite layer; ``bytes`` are those of the index stream, which comes next: the
    table of its groups is in front of the next address.
    """
    header, after = get_varint(position, end)
    if header < 0:
        return -header, after, 0, 0, 0
    count, value_format = header >> 4, (header >> 1) & 7
    if count == 0:
        if value_format != 0:
            return FORMAT, position, 0, 0, 0
        return 0, after, -(header & 1), 0, 0
    if count > n or header & 1:
        return COUNT, position, 0, 0, 0
    if value_format > SIGN or (value_format != expected and expected >= 0):
        return FORMAT, position, 0, 0, 0
    index_bytes, position = get_varint(after, end)
    if index_bytes < 0:
        return -index_bytes, position, 0, 0, 0
    position += group_table_bytes(count)
    value_bytes = bytes_of_values(count, value_format)
    if index_bytes > end - position or value_bytes > end - position - index_bytes:
        return TRUNCATED, end, 0, 0, 0
    return 0, position, count, value_format, index_bytes


@kernel
def announced_values(position, end, numels, expected):
    """Values of a body's layers before the first that is announced wrongly: (most of a layer, sum)."""
    most, total = int64(0), int64(0)
    for layer in range(len(numels)):
        damage, position, count, value_format, index_bytes = read_head(
            position, end, numels[layer], expected
        )
        if damage:
            break
        if count > 0:
            position += index_bytes + bytes_of_values(count, value_format)
            most = max(most, count)
            total += count
    return most, total


@kernel
def most_values(position, end, numels, expected):
    """The most that a layer of a body holds, of those before the first that is announced wrongly."""
    return announced_values(position, end, numels, expected)[0]


@kernel
def decode_layer(position, end, n, expected, indices, values):
    """Decode and check one layer without writing to its output.

    Returns (damage, next address or that of the damage, count); count -1 marks a nonfinite layer.
    """
    damage, position, count, value_format, index_bytes = read_head(position, end, n, expected)
    if damage or count <= 0:
        return damage, position, count
    damage, position = get_positions(position, position + index_bytes, n, indices, count)
    if damage == 0:
        damage, position = read_values(position, values, count, value_format)
    return damage, position, count


@kernel
def read_but_positions(position, end, n, expected, indices, values):
    """Decode and check a layer but for its positions: (damage, address, end of these, next, count).

    The address is that of the positions or of the damage; count -1 marks a nonfinite layer.
    """
    damage, position, count, value_format, index_bytes = read_head(position, end, n, expected)
    middle = position + index_bytes
    if damage or count <= 0:
        return damage, position, middle, middle, count
    damage, after = read_values(middle, values, count, value_format)
    if damage:  # that of the positions is reported first
        found, where = get_positions(position, middle, n, indices, count)
        damage, position = (found, where) if found else (damage, after)
    return damage, position, middle, after, count


@kernel
def _exchange(out, i, scale, indices, values):
    """Add value i to an output; what was there takes its place among the values."""
    at = uint64(i)  # else Numba asks whether it counts from the end
    place = out + 4 * int64(indices[at])
    before = load_f32(place)
    store_f32(place, before + scale * values[at])
    values[at] = before


@kernel
def add_at_positions(position, end, out, n, count, scale, indices, values):
    """Decode count positions and add the values to an output of n; damaged, it is as it was.

    Returns (damage, its address). The values are spoilt. A value is added when the block after its own
    has been decoded, so that its place in the output is in the cache by then.
    """
    bit, index, due = int64(0), int64(-1), int64(0)
    damage, done = int64(0), int64(0)
    for first in range(0, count, CODE_BLOCK):
        damage, bit, index, due = next_block(
            position, end, n, indices, first, count, bit, index, due, out
        )
        if damage:
            break
        while done < first:
            _exchange(out, done, scale, indices, values)
            done += 1
    where = position + (bit >> 3)
    if damage == 0:
        damage, where = check_positions_end(position, end, bit)
    if damage:
        for i in range(done):
            store_f32(out + 4 * int64(indices[i]), values[i])
        return damage, where
    for i in range(done, count):
        _exchange(out, i, scale, indices, values)
    return damage, where


@kernel
def add_layer(position, end, out, n, scale, expected, indices, values):
    """Decode one layer into its output: (damage, next address or that of the damage, mark).

    The mark is -1 for a layer that is not finite, else 0: that many values are left to be added.
    """
    damage, position, middle, after, count = read_but_positions(
        position, end, n, expected, indices, values
    )
    if damage or count <= 0:
        return damage, position, count
    damage, where = add_at_positions(position, middle, out, n, count, scale, indices, values)
    return damage, where if damage else after, int64(0)


@kernel
def scatter_values(out, n, first, i, count, scale, clear, indices, values):
    """Put what is left from value i on and lies in [first, first + n) into an output.

    Returns the first value that lies beyond. ``clear`` stores zeros instead of adding.
    """
    end = i
    while end < count and int64(indices[end]) < first + n:
        end += 1
    target = carray(float32_pointer(out), n)
    for j in range(i, end):
        prefetch(out + 4 * (int64(indices[min(j + AHEAD, end - 1)]) - first))
        index = int64(indices[j]) - first
        target[index] = np.float32(0) if clear else target[index] + scale * values[j]
    return end


def damage_error(
    damage: int, layer: int, numels: npt.NDArray[np.int64], position: int, size: int
) -> Exception:
    layer = max(layer, 0)
    return damaged(damage, layer, int(numels[layer]) if len(numels) else 0, min(position, size), size)
