"""Positions as coded gaps: the choice of a code, writing, and reading with every bound checked."""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

from numba import int32, int64, uint32, uint64

from hvd_adaptive.kernels.cpu.compiling import inlined, kernel
from hvd_adaptive.kernels.cpu.enums import GROUP as WRONG_GROUP
from hvd_adaptive.kernels.cpu.enums import INDEX, LENGTH, PADDING, PARAMETER, RUN, TRUNCATED
from hvd_adaptive.kernels.cpu.intrinsics import (
    load_u32,
    load_u64,
    prefetch,
    store_u32,
    store_u64,
    trailing_zeros,
    whole_log2,
)
from hvd_adaptive.kernels.cpu.streams import bit_length, stream_window
from hvd_adaptive.wire.sparse import (
    CODE_BLOCK,
    GROUP,
    GROUP_BYTES,
    HEAD_BITS,
    HEAD_PARAMETER,
    HEAD_TEUHOLA,
)


@kernel
def group_table_bytes(count):
    """``wire.sparse.group_table_bytes``, as a kernel."""
    return GROUP_BYTES * (max(count - 1, 0) // GROUP)


@kernel
def choose_codes(indices, count, heads):
    """What every block of gaps begins with; returns the bits of the whole stream."""
    bits = 0
    previous = -1
    for start in range(0, count, CODE_BLOCK):
        size = min(CODE_BLOCK, count - start)
        total = int64(indices[start + size - 1]) - previous - size
        middle = max(1, bit_length(total // size) - 1)
        # quotient sums for middle - 1, middle and middle + 1
        first = int64(indices[start]) - previous - 1
        low, mid, high = first >> (middle - 1), first >> middle, first >> (middle + 1)
        logs = whole_log2(uint64(first + 1))
        for i in range(start + 1, start + size):
            gap = int64(indices[i] - indices[i - 1] - int32(1))
            low += gap >> (middle - 1)
            mid += gap >> middle
            high += gap >> (middle + 1)
            logs += whole_log2(uint64(gap + 1))
        best, cost = middle - 1, low + size * middle
        if mid + size * (middle + 1) < cost:
            best, cost = middle, mid + size * (middle + 1)
        if high + size * (middle + 2) < cost:
            best, cost = middle + 1, high + size * (middle + 2)
        r = logs // size
        logs = whole_log2(uint64(first + (int64(1) << r)))
        for i in range(start + 1, start + size):
            gap = int64(indices[i] - indices[i - 1] - int32(1))
            logs += whole_log2(uint64(gap + (int64(1) << r)))
        if 2 * logs + size * (1 - r) < cost:
            best, cost = r | HEAD_TEUHOLA, 2 * logs + size * (1 - r)
        heads[start // CODE_BLOCK] = best
        bits += HEAD_BITS + cost
        previous = int64(indices[start + size - 1])
    return bits


@kernel
def put_positions(out, indices, count, heads):
    """Write the table of groups and the index stream.

    Whole 8-byte words are stored, so SLACK bytes past it are touched.
    """
    word, fill = uint64(0), int64(0)
    previous = int64(-1)
    entry = out
    out += group_table_bytes(count)
    group_start = 8 * out
    for start in range(0, count, CODE_BLOCK):
        if start % GROUP == 0 and start > 0:
            store_u32(entry, uint32(8 * out + fill - group_start))
            entry += GROUP_BYTES
            group_start = 8 * out + fill
        size = min(CODE_BLOCK, count - start)
        head = int64(heads[start // CODE_BLOCK])
        word |= uint64(head) << uint64(fill)
        out, word, fill = _put_ones(out, word, fill + HEAD_BITS, indices, start, size, previous, head)
        out, word, fill = _put_lows(out, word, fill, indices, start, size, previous, head)
        previous = int64(indices[start + size - 1])
    store_u64(out, word)
    return out + ((fill + 7) >> 3)


@inlined
def _flushed(out, word, fill):
    """(address, word, bits in it) once the whole bytes of the word are written: seven bits are left."""
    store_u64(out, word)
    return out + (fill >> 3), word >> uint64(fill & ~7), fill & 7


@inlined
def _parts(gap, head):
    """(zeros before the one, low bits, how many) of a gap's code."""
    r = head & HEAD_PARAMETER
    width = r
    zeros = gap >> r
    if head >= HEAD_TEUHOLA:
        gap += int64(1) << r
        width = whole_log2(uint64(gap))
        zeros = width - r
    return zeros, gap & ((int64(1) << width) - 1), width


@kernel
def _put_ones(out, word, fill, indices, start, size, previous, head):
    """Write a block's zeros and ones: (address, word, bits in it)."""
    for i in range(start, start + size):
        index = int64(indices[i])
        zeros, _, _ = _parts(index - previous - 1, head)
        previous = index
        fill += zeros
        while fill > 55:
            store_u64(out, word)
            out += 7
            word >>= uint64(56)
            fill -= 56
        word |= uint64(1) << uint64(fill)
        fill += 1
    return _flushed(out, word, fill)


@kernel
def _put_lows(out, word, fill, indices, start, size, previous, head):
    """Write a block's low bits: (address, word, bits in it)."""
    for i in range(start, start + size):
        index = int64(indices[i])
        _, low, width = _parts(index - previous - 1, head)
        previous = index
        word |= uint64(low) << uint64(fill)
        fill += width
        if fill > 32:
            out, word, fill = _flushed(out, word, fill)
    return _flushed(out, word, fill)


@inlined
def check_group(position, count, i, bit, due):
    """(damage, ``due``): if a group ends before index i, whether it does so at the bit that is due.

    ``due`` is the bit at which the group before that ended. The table lies in front of ``position``.
    """
    if i % GROUP == 0 and i > 0:
        entry = i // GROUP - 1
        due += int64(load_u32(position - group_table_bytes(count) + GROUP_BYTES * entry))
        if bit != due:
            return WRONG_GROUP, due
    return 0, due


@kernel
def next_block(position, end, n, indices, first, count, bit, index, due, out):
    """Decode the block of indices that begins with number ``first``: (damage, bit, index, ``due``).

    Args:
        position: of the stream, behind the table of groups.
        end: of the stream.
        n: elements of the layer; indices are below it.
        indices: of which a block is written.
        first: a multiple of CODE_BLOCK.
        count: indices of the layer.
        bit: at which the block begins, and then the next one; a damaged block's own.
        index: the last one of the block before, -1 at first, and then of this.
        due: see :func:`check_group`.
        out: address of an output whose elements at the indices are fetched; 0 if there is none.
    """
    damage, due = check_group(position, count, first, bit, due)
    if damage:
        return damage, bit, index, due
    head = int64(stream_window(position, bit, end) & uint64(HEAD_PARAMETER | HEAD_TEUHOLA))
    r = head & HEAD_PARAMETER
    if r > bit_length(n):
        return PARAMETER, bit, index, due
    size, ones = min(CODE_BLOCK, count - first), bit + HEAD_BITS
    found, lows = _find_ones(position, end, ones, indices, first, size)
    grows, most = head >= HEAD_TEUHOLA, _most_zeros(n, head)
    # with more zeros than that in all codes together, one gap is too long; and int32 holds no more
    fine = found == size and lows - ones - size <= (size * most if grows else most)
    after, last = lows, index
    if fine and grows:
        fine, after, last = _grown_indices(
            position, end, r, most, lows, indices, first, size, index, out
        )
    elif fine:
        after, last = _even_indices(position, end, r, lows, indices, first, size, index, out)
    if not fine or last >= n:
        return _name_damage(position, end, n, head, ones, size), bit, index, due
    return 0, after, last, due


@kernel
def _find_ones(position, end, bit, indices, first, size):
    """Find so many ones: (how many there are before the stream ends, bit after the last).

    Indices become the zeros before each, counted from ``bit`` on.
    """
    last, found = 8 * (end - position), int64(0)
    before = int64(0)
    while bit < last:
        word, at = stream_window(position, bit, end), int64(0)
        while word != 0:
            at = int64(trailing_zeros(word))
            word &= word - uint64(1)
            indices[first + found] = int32(before + at - found)
            found += 1
            if found == size:
                return found, bit + at + 1
        there = 64 - (bit & 7)
        bit += there
        before += there
    return found, bit


@inlined
def _bits_at(position, bit, end, inside):
    """57 bits and more, quicker where they are known to lie inside the stream."""
    if inside:
        return load_u64(position + (bit >> 3)) >> uint64(bit & 7)
    return stream_window(position, bit, end)


@kernel
def _even_indices(position, end, r, bit, indices, first, size, index, out):
    """Indices from zeros and the low bits of Rice's code: (bit after these, last index)."""
    mask = (uint64(1) << uint64(r)) - uint64(1)
    last, inside = index, bit + size * r <= 8 * (end - position - 8)
    for i in range(first, first + size):
        index += 1 + int64(_bits_at(position, bit, end, inside) & mask)
        bit += r
        last = index + (int64(indices[i]) << r)
        indices[i] = int32(last)
        if out:
            prefetch(out + 4 * last)
    return bit, last


@kernel
def _grown_indices(position, end, r, most, bit, indices, first, size, index, out):
    """The same of Teuhola's code: (whether no gap has more than so many zeros, bit, last index)."""
    before, fine = int64(0), True
    inside = bit + size * (r + most) <= 8 * (end - position - 8)
    for i in range(first, first + size):
        zeros = int64(indices[i]) - before
        before += zeros
        fine &= zeros <= most
        width = r + min(zeros, most)
        power = int64(1) << width
        low = int64(_bits_at(position, bit, end, inside) & uint64(power - 1))
        index += 1 + low + power - (int64(1) << r)
        bit += width
        indices[i] = int32(index)
        if out:
            prefetch(out + 4 * index)
    return fine, bit, index


@kernel
def _most_zeros(n, head):
    """The zeros before the one of the longest gap that n elements have room for, or somewhat more."""
    r = head & HEAD_PARAMETER
    return bit_length(n + (int64(1) << r)) - 1 - r if head >= HEAD_TEUHOLA else n >> r


@kernel
def _name_damage(position, end, n, head, bit, size):
    """What is wrong first in a damaged block whose zeros and ones begin at a bit."""
    last, most = 8 * (end - position), _most_zeros(n, head)
    for _ in range(size):
        one = bit
        while one < last and stream_window(position, one, end) == 0:
            one += 64 - (one & 7)
        if one < last:
            one += int64(trailing_zeros(stream_window(position, one, end)))
        if min(one, last) - bit > most:
            return RUN
        if one >= last:
            return TRUNCATED
        bit = one + 1
    return INDEX


@kernel
def check_positions_end(position, end, bit):
    """(damage, address) of a stream in [position, end) whose last index ends before a bit."""
    if bit > 8 * (end - position):
        return TRUNCATED, end
    if (bit + 7) >> 3 != end - position:
        return LENGTH, position + (bit >> 3)
    if stream_window(position, bit, end) != 0:
        return PADDING, end - 1
    return 0, end


@kernel
def get_positions(position, end, n, indices, count):
    """Decode count indices below n from the stream in [position, end); returns (damage, address).

    The table of groups lies in front of the stream.
    """
    bit, index, due = int64(0), int64(-1), int64(0)
    for first in range(0, count, CODE_BLOCK):
        damage, bit, index, due = next_block(
            position, end, n, indices, first, count, bit, index, due, int64(0)
        )
        if damage:
            return damage, position + (bit >> 3)
    return check_positions_end(position, end, bit)
