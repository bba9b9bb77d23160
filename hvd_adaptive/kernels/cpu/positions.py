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
        head = int64(heads[start // CODE_BLOCK])
        word |= uint64(head) << uint64(fill)
        fill += HEAD_BITS
        r = head & HEAD_PARAMETER
        width, mask = r, (int64(1) << r) - 1
        for i in range(start, min(start + CODE_BLOCK, count)):
            store_u64(out, word)
            out += fill >> 3
            word >>= uint64(fill & ~7)
            fill &= 7
            index = int64(indices[i])
            gap = index - previous - 1
            previous = index
            zeros = gap >> r
            if head >= HEAD_TEUHOLA:
                gap += mask + 1
                width = whole_log2(uint64(gap))
                zeros = width - r
            ones = ((gap & ((int64(1) << width) - 1)) << 1) | 1
            zeros += fill
            while zeros > 24:  # room for a one and 31 low bits
                store_u64(out, word)
                out += 3
                word >>= uint64(24)
                zeros -= 24
            word |= uint64(ones) << uint64(zeros)
            fill = zeros + 1 + width
    store_u64(out, word)
    return out + ((fill + 7) >> 3)


@kernel
def _skip_zeros(position, bit, end, most):
    """Count zero bits until a one and its low bits lie within one window: (damage, bit, zeros)."""
    size = 8 * (end - position)
    skipped = 0
    zeros = int64(trailing_zeros(stream_window(position, bit, end)))
    while zeros > 25:
        skipped += 25
        bit += 25
        if bit >= size:
            return TRUNCATED, bit, 0
        if skipped > most:
            return RUN, bit, 0
        zeros = int64(trailing_zeros(stream_window(position, bit, end)))
    return 0, bit, skipped


@kernel
def _name_excess(position, bit, end, n, head, zeros, quotient, width):
    """(damage, its bit) of an index past the end whose code begins at a bit, by the reference's words.

    ``zeros`` of the ``quotient`` were not skipped, as 25 at a time are where a word does not hold all.
    """
    most = _most_zeros(n, head)
    if zeros > 25:
        damage, bit, skipped = _skip_zeros(position, bit, end, most)
        if damage:
            return damage, bit
        zeros -= skipped
    if head >= HEAD_TEUHOLA and quotient > most:
        return RUN, bit
    return INDEX, bit + zeros + 1 + width


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


@inlined
def decode_index(position, end, n, i, bit, index, head, word, left):
    """Decode index i, below n: (damage, bit, index, head, word, left), all but the first as for i + 1.

    ``head`` is what the block begins with; ``word`` holds the stream from ``bit`` on, ``left`` bits.
    """
    if i % CODE_BLOCK == 0:
        head = int64(stream_window(position, bit, end) & uint64(HEAD_PARAMETER | HEAD_TEUHOLA))
        bit += HEAD_BITS
        left = int64(0)
        if head & HEAD_PARAMETER > bit_length(n):
            return PARAMETER, bit, index, head, word, left
    r, grows = head & HEAD_PARAMETER, head >= HEAD_TEUHOLA
    zeros, skipped = int64(trailing_zeros(word)), int64(0)
    if zeros + 1 + r + (zeros if grows else 0) > left:
        damage, bit, skipped = _skip_zeros(position, bit, end, _most_zeros(n, head))
        if damage:
            return damage, bit, index, head, word, left
        word, left = stream_window(position, bit, end), int64(57)
        zeros = int64(trailing_zeros(word))
    quotient = skipped + zeros
    width = min(r + quotient, 62) if grows else r
    index += 1 + (int64(word >> uint64(zeros + 1)) & ((int64(1) << width) - 1))
    index += (int64(1) << width) - (int64(1) << r) if grows else quotient << r
    if index >= n:
        damage, bit = _name_excess(position, bit, end, n, head, zeros, quotient, width)
        return damage, bit, index, head, word, left
    length = zeros + 1 + width
    return 0, bit + length, index, head, word >> uint64(length), left - length


@kernel
def _most_zeros(n, head):
    """The zeros before the one of the longest gap that n elements have room for, or somewhat more."""
    r = head & HEAD_PARAMETER
    return bit_length(n + (int64(1) << r)) - 1 - r if head >= HEAD_TEUHOLA else n >> r


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
    zero = int64(0)
    return _get_positions_rest(position, end, n, indices, 0, count, zero, int64(-1), zero, zero)


@kernel
def _get_positions_rest(position, end, n, indices, start, count, bit, index, head, due):
    """The same from index number ``start`` on; ``bit`` and all after it are those before it."""
    word, left = uint64(0), int64(0)
    while start < count:
        damage, due = check_group(position, count, start, bit, due)
        if damage:
            return damage, position + (bit >> 3)
        stop = min(count, (start // GROUP + 1) * GROUP)
        for i in range(start, stop):
            damage, bit, index, head, word, left = decode_index(
                position, end, n, i, bit, index, head, word, left
            )
            if damage:
                return damage, position + (bit >> 3)
            indices[i] = int32(index)
        start = stop
    return check_positions_end(position, end, bit)


@inlined
def _quick_index(position, n, bit, index, head):
    """Decode an index whose code takes at most 57 bits: (whether it does, and is sound, bit, index).

    At least 8 bytes of the stream are there from ``bit`` on.
    """
    r, grows = head & HEAD_PARAMETER, -(head >> 5)  # all bits or none
    word = load_u64(position + (bit >> 3)) >> uint64(bit & 7)
    zeros = int64(trailing_zeros(word))
    width = r + (zeros & grows)
    length = zeros + 1 + width
    power = int64(1) << (width & 63)
    index += 1 + (int64(word >> uint64((zeros + 1) & 63)) & (power - 1))
    index += ((zeros << r) & ~grows) | ((power - (int64(1) << r)) & grows)
    return (length <= 57) & (index < n), bit + length, index


@kernel
def get_positions_pair(positions, ends, n, indices, counts):
    """Decode counts[j] indices below n from the stream in [positions[j], ends[j]), j being 0 and 1.

    Returns whether both streams are sound. They are decoded in lock step: to decode an index, the
    processor has to wait for the one before, but not for the other stream's.
    """
    one, other = indices
    here, there = positions
    bit, index, head, due = int64(0), int64(-1), int64(0), int64(0)
    bit2, index2, head2, due2 = int64(0), int64(-1), int64(0), int64(0)
    last, last2 = 8 * (ends[0] - here - 8), 8 * (ends[1] - there - 8)
    none, left = uint64(0), int64(0)
    both, i = min(counts[0], counts[1]), int64(0)
    while i < both:
        # What is not quick: the start of a block, a long gap, the last bytes.
        wrong, due = check_group(here, counts[0], i, bit, due)
        wrong2, due2 = check_group(there, counts[1], i, bit2, due2)
        bad, bit, index, head, _, _ = decode_index(here, ends[0], n, i, bit, index, head, none, left)
        bad2, bit2, index2, head2, _, _ = decode_index(
            there, ends[1], n, i, bit2, index2, head2, none, left
        )
        if wrong or wrong2 or bad or bad2:
            return False
        one[i], other[i] = int32(index), int32(index2)
        i += 1
        block = min(both, (i + CODE_BLOCK - 1) // CODE_BLOCK * CODE_BLOCK)
        while i < block and bit <= last and bit2 <= last2:
            fine, next_bit, next_index = _quick_index(here, n, bit, index, head)
            fine2, next_bit2, next_index2 = _quick_index(there, n, bit2, index2, head2)
            if not fine & fine2:
                break
            bit, index, bit2, index2 = next_bit, next_index, next_bit2, next_index2
            one[i], other[i] = int32(index), int32(index2)
            i += 1
    damage, _ = _get_positions_rest(here, ends[0], n, one, both, counts[0], bit, index, head, due)
    damage2, _ = _get_positions_rest(
        there, ends[1], n, other, both, counts[1], bit2, index2, head2, due2
    )
    return damage == 0 and damage2 == 0
