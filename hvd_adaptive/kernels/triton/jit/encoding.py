"""Positions and values as bytes; a program has a *block* of 256 selected elements of a piece.

:mod:`hvd_adaptive.wire.sparse` describes the bytes. Neighboring blocks share words of the index stream,
which are put together by atomic ORs into zeros.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.triton.jit.arithmetic import bit_length, entry, store_float
from hvd_adaptive.wire.sparse import CODE_BLOCK as _CODE_BLOCK
from hvd_adaptive.wire.sparse import GROUP as _GROUP
from hvd_adaptive.wire.sparse import GROUP_BYTES as _GROUP_BYTES
from hvd_adaptive.wire.sparse import HEAD_BITS as _HEAD_BITS
from hvd_adaptive.wire.sparse import HEAD_PARAMETER as _HEAD_PARAMETER
from hvd_adaptive.wire.sparse import HEAD_TEUHOLA as _HEAD_TEUHOLA
from hvd_adaptive.wire.sparse import MAX_SCALE as _MAX_SCALE
from hvd_adaptive.wire.sparse import VALUE_BLOCK, ValueFormat

assert VALUE_BLOCK == _CODE_BLOCK, "a program encodes positions and values of the same elements"

BLOCK = tl.constexpr(_CODE_BLOCK)
GROUP = tl.constexpr(_GROUP)
GROUP_BYTES = tl.constexpr(_GROUP_BYTES)
GROUP_BLOCKS = tl.constexpr(_GROUP // _CODE_BLOCK)
HEAD_BITS = tl.constexpr(_HEAD_BITS)
HEAD_PARAMETER = tl.constexpr(_HEAD_PARAMETER)
HEAD_TEUHOLA = tl.constexpr(_HEAD_TEUHOLA)
MAX_SCALE = tl.constexpr(_MAX_SCALE)
FP32 = tl.constexpr(int(ValueFormat.fp32))
FP16 = tl.constexpr(int(ValueFormat.fp16))
BF16 = tl.constexpr(int(ValueFormat.bf16))
INT8 = tl.constexpr(int(ValueFormat.int8))
SIGN = tl.constexpr(int(ValueFormat.sign))
LARGEST_FP16 = tl.constexpr(torch.finfo(torch.float16).max)
LARGEST_BF16 = tl.constexpr(torch.finfo(torch.bfloat16).max)
PIECES = tl.constexpr(256)
"""Pieces that are placed together."""
BLOCKS = tl.constexpr(1024)
"""Blocks whose bits are summed up together."""


@triton.jit
def table_bytes(count):
    """Bytes of the table that says how long each group of so many values is, but the last."""
    groups = (count + GROUP - 1) // GROUP
    return tl.where(groups > 1, GROUP_BYTES * (groups - 1), 0)


@triton.jit
def block_of(block_pieces, first_blocks, counts):
    """(block, its piece, its first element in the piece, how many it has)."""
    block = tl.program_id(0)
    piece = tl.load(block_pieces + block)
    first = (block - tl.load(first_blocks + piece)) * BLOCK
    return block, piece, first, tl.minimum(tl.load(counts + piece) - first, BLOCK)


@triton.jit
def load_gaps(indices, first, size):
    """The gaps of a block, int64; 0 past its end."""
    i = tl.arange(0, BLOCK)
    mask = i < size
    index = tl.load(indices + i, mask=mask, other=0).to(tl.int64)
    before = tl.load(indices + i - 1, mask=mask & (first + i > 0), other=-1).to(tl.int64)
    return tl.where(mask, index - before - 1, 0)


@triton.jit
def choose_heads(block_pieces, first_blocks, capacities, counts, indices, heads, bits_before):
    """The cheapest of four codes of each block, and the bits that it takes with it, 0 if empty."""
    block, piece, first, size = block_of(block_pieces, first_blocks, counts)
    if size > 0:
        gaps = load_gaps(indices + tl.load(capacities + piece) + first, first, size)
        middle = bit_length(tl.sum(gaps, 0) // size) - 1
        r = tl.maximum(middle, 1) - 1
        head = r
        cost = tl.sum(gaps >> r, 0) + size * (r + 1)
        for step in tl.static_range(1, 3):
            other = tl.sum(gaps >> (r + step), 0) + size * (r + step + 1)
            head = tl.where(other < cost, r + step, head)
            cost = tl.minimum(other, cost)
        t = tl.sum(bit_length(gaps + 1) - 1, 0) // size
        widths = bit_length(gaps + (tl.full((BLOCK,), 1, tl.int64) << t)) - 1 - t
        other = 2 * tl.sum(widths, 0) + size * (t + 1)
        head = tl.where(other < cost, t | HEAD_TEUHOLA, head)
        cost = tl.minimum(other, cost)
        tl.store(heads + block, head.to(tl.int32))
        tl.store(bits_before + 1 + block, cost + HEAD_BITS)
    else:
        tl.store(bits_before + 1 + block, size.to(tl.int64) * 0)


@triton.jit
def varint_length(x):
    length = tl.full(x.shape, 1, tl.int64)
    for step in tl.static_range(1, 6):
        length += (x >= (1 << (7 * step))).to(tl.int64)
    return length


@triton.jit
def store_varint(data, x, length, mask):
    for step in tl.static_range(6):
        byte = (x >> (7 * step)) & 127
        byte = tl.where(step < length - 1, byte | 128, byte)
        tl.store(data + step, byte.to(tl.uint8), mask=mask & (step < length))


@triton.jit
def sum_up(numbers, count):
    """Put 0 in place 0, and in the place of each number, which are from 1 on, the sum up to it."""
    i = tl.arange(0, BLOCKS)
    total = tl.full((), 0, tl.int64)
    tl.store(numbers, total)
    for start in range(0, count, BLOCKS):
        place, mask = numbers + 1 + start + i, start + i < count
        found = tl.load(place, mask=mask, other=0)
        tl.store(place, total + tl.cumsum(found, 0), mask=mask)
        total += tl.sum(found, 0)
    tl.debug_barrier()  # threads read what others have written


@entry
def place_pieces(
    body,
    counts,
    wrong,
    piece_spans,
    first_blocks,
    bits_before,
    ends,
    blocks,
    pieces,
    reserve,
    FORMAT: tl.constexpr,
):
    """Where each piece ends, its stream and its values begin; the headers: one program.

    ``ends`` are the bytes of all, then an end, a stream and values of each piece. ``bits_before`` are
    the bits of each block, and then those of all blocks before each.
    """
    sum_up(bits_before, blocks)
    streams, value_starts = ends + 1 + pieces, ends + 1 + 2 * pieces
    end = tl.full((1,), 0, tl.int64) + reserve
    for start in range(0, pieces, PIECES):
        i = start + tl.arange(0, PIECES)
        mask = i < pieces
        count = tl.load(counts + i, mask=mask, other=0)
        marked = tl.load(wrong + tl.load(piece_spans + i, mask=mask, other=0), mask=mask, other=0)
        first = bits_before + tl.load(first_blocks + i, mask=mask, other=0)
        last = bits_before + tl.load(first_blocks + i + 1, mask=mask, other=0)
        bits = tl.load(last, mask=mask, other=0) - tl.load(first, mask=mask, other=0)
        some = count > 0
        stream = (bits + 7) // 8
        table = table_bytes(count)
        header = tl.where(some, (count << 4) | (FORMAT << 1), marked)
        long, more = varint_length(header), tl.where(some, varint_length(stream), 0)
        if FORMAT == FP32:
            size = 4 * count
        elif FORMAT == INT8:
            size = count + 4 * ((count + BLOCK - 1) // BLOCK)
        elif FORMAT == SIGN:
            size = tl.where(some, (count + 7) // 8 + 8, 0)
        else:
            size = 2 * count
        whole = tl.where(mask, long + more + table + tl.where(some, stream, 0) + size, 0)
        place = tl.cumsum(whole, 0) - whole + end
        store_varint(body + place, header, long, mask)
        store_varint(body + place + long, stream, more, mask & some)
        tl.store(streams + i, place + long + more + table, mask=mask)
        tl.store(value_starts + i, place + long + more + table + stream, mask=mask)
        tl.store(ends + 1 + i, place + whole, mask=mask)
        end = end + tl.sum(whole, 0)
    tl.store(ends + tl.arange(0, 1), end)


@entry
def write_stream(
    block_pieces, first_blocks, capacities, counts, indices, heads, bits_before, ends, pieces, words
):
    """The codes of a block into the words of the body, and the bits of a group that ends with it."""
    block, piece, first, size = block_of(block_pieces, first_blocks, counts)
    if size > 0:
        gaps = load_gaps(indices + tl.load(capacities + piece) + first, first, size)
        head = tl.load(heads + block)
        before = tl.load(bits_before + block) - tl.load(bits_before + tl.load(first_blocks + piece))
        stream = tl.load(ends + 1 + pieces + piece)
        start = stream * 8 + before
        r = (head & HEAD_PARAMETER).to(tl.int64)
        i = tl.arange(0, BLOCK)
        if head >= HEAD_TEUHOLA:
            number = gaps + (tl.full((BLOCK,), 1, tl.int64) << r)
            width = bit_length(number) - 1
            zeros = width - r
        else:
            number = gaps
            width = tl.zeros_like(gaps) + r
            zeros = gaps >> r
        low = number & ((tl.full((BLOCK,), 1, tl.int64) << width) - 1)
        one_ends = tl.cumsum(tl.where(i < size, zeros + 1, 0), 0)
        low_ends = tl.cumsum(tl.where(i < size, width, 0), 0) + tl.max(one_ends, 0)
        store_bits(words, start + HEAD_BITS + one_ends - 1, tl.full((BLOCK,), 1, tl.int64), i < size)
        store_bits(words, start + HEAD_BITS + low_ends - width, low, i < size)
        store_bits(words, start + tl.zeros((BLOCK,), tl.int64), tl.zeros_like(gaps) + head, i < 1)
        count = tl.load(counts + piece)
        number = first // BLOCK
        if (number % GROUP_BLOCKS == GROUP_BLOCKS - 1) & (first + BLOCK < count):
            bits = tl.load(bits_before + block + 1) - tl.load(bits_before + block + 1 - GROUP_BLOCKS)
            entry_place = stream - table_bytes(count) + GROUP_BYTES * (number // GROUP_BLOCKS)
            store_bits(words, i * 0 + entry_place * 8, tl.zeros_like(gaps) + bits, i < 1)


@triton.jit
def store_bits(words, place, code, mask):
    """OR codes of up to 32 bits into words that are 0 there."""
    shifted = code << (place & 31)
    word = words + (place >> 5)
    tl.atomic_or(word, (shifted & 0xFFFFFFFF).to(tl.int32), mask=mask, sem="relaxed")
    high = shifted >> 32
    tl.atomic_or(word + 1, high.to(tl.int32), mask=mask & (high != 0), sem="relaxed")


# --- values --------------------------------------------------------------------------------------


@triton.jit
def sum_sides(block_pieces, first_blocks, capacities, counts, values, sums):
    """Of each block, empty ones too: the sums of both signs' magnitudes, and how many are negative."""
    block, piece, first, size = block_of(block_pieces, first_blocks, counts)
    i = tl.arange(0, BLOCK)
    value = tl.load(values + tl.load(capacities + piece) + first + i, mask=i < size, other=0.0)
    wide = value.to(tl.float64)
    tl.store(sums + 3 * block, tl.sum(tl.where(wide > 0, wide, 0.0), 0))
    tl.store(sums + 3 * block + 1, tl.sum(tl.where(wide < 0, -wide, 0.0), 0))
    tl.store(sums + 3 * block + 2, tl.sum((wide < 0).to(tl.float64), 0))


@triton.jit
def mean_of(total, count, error):
    """The mean, and whether all sums that are off by ``error`` at most have it, as float32."""
    number = tl.maximum(count, 1.0)
    low = (total * (1.0 - error) / number).to(tl.float32)
    high = (total * (1.0 + error) / number).to(tl.float32)
    return (total / number).to(tl.float32), low != high


@triton.jit
def find_means(first_blocks, capacities, counts, values, sums, means):
    """The mean magnitudes of a piece's positive and negative values.

    They are those of sums in order, which the format fixes. Where another order may round to another
    float32, which is seldom, the values are added one by one.
    """
    piece = tl.program_id(0)
    first, last = tl.load(first_blocks + piece), tl.load(first_blocks + piece + 1)
    plus = tl.zeros((BLOCK,), tl.float64)
    minus = tl.zeros((BLOCK,), tl.float64)
    negative = tl.zeros((BLOCK,), tl.float64)
    for start in range(first, last, BLOCK):
        block = start + tl.arange(0, BLOCK)
        mask = block < last
        plus += tl.load(sums + 3 * block, mask=mask, other=0.0)
        minus += tl.load(sums + 3 * block + 1, mask=mask, other=0.0)
        negative += tl.load(sums + 3 * block + 2, mask=mask, other=0.0)
    count = tl.load(counts + piece)
    below = tl.sum(negative, 0)
    above = count.to(tl.float64) - below
    error = (count + 64).to(tl.float64) * 2.220446049250313e-16  # twice what a rounding is off
    first_mean, unsure = mean_of(tl.sum(plus, 0), above, error)
    second_mean, also = mean_of(tl.sum(minus, 0), below, error)
    if unsure | also:
        total_above = below * 0.0
        total_below = below * 0.0
        own = values + tl.load(capacities + piece)
        for i in range(count):
            wide = tl.load(own + i).to(tl.float64)
            total_above += tl.where(wide > 0, wide, 0.0)
            total_below += tl.where(wide < 0, -wide, 0.0)
        first_mean, _ = mean_of(total_above, above, 0.0)
        second_mean, _ = mean_of(total_below, below, 0.0)
    tl.store(means + 2 * piece, first_mean)
    tl.store(means + 2 * piece + 1, second_mean)


@triton.jit
def store_half(data, word, mask):
    tl.store(data, (word & 255).to(tl.uint8), mask=mask)
    tl.store(data + 1, ((word >> 8) & 255).to(tl.uint8), mask=mask)


@triton.jit
def write_int8(place, value, mask):
    """A scale and a byte per value; returns what they decode to."""
    i = tl.arange(0, BLOCK)
    top = tl.max(tl.abs(value), 0)
    scale = tl.div_rn(top, top * 0.0 + 127.0)
    least = (tl.full((1,), 1, tl.int32)).to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.maximum(least, scale), MAX_SCALE)
    share = tl.div_rn(value, tl.broadcast_to(scale, (BLOCK,)))
    code = (share + 12582912.0) - 12582912.0  # to the nearest whole number, ties to even
    code = tl.minimum(tl.maximum(code, -127.0), 127.0)
    store_float(place + tl.zeros((1,), tl.int64), scale, tl.full((1,), 1, tl.int1))
    tl.store(place + 4 + i, code.to(tl.int32).to(tl.uint8), mask=mask)
    return code * scale


@triton.jit
def write_signs(data, means, value, first, size):
    """A bit per value, and before the first block the means; returns what they decode to."""
    i = tl.arange(0, BLOCK)
    negative = value < 0
    above, below = tl.load(means), tl.load(means + 1)
    bits = tl.reshape(negative.to(tl.int32) << (i & 7), (BLOCK // 8, 8))
    byte = tl.arange(0, BLOCK // 8)
    tl.store(data + 8 + first // 8 + byte, tl.sum(bits, 1).to(tl.uint8), mask=byte * 8 < size)
    two = tl.arange(0, 2)
    store_float(data + 4 * two, tl.where(two == 0, above, below), two * 0 + first == 0)
    return tl.where(negative, -below, above)


@entry
def write_values(
    block_pieces,
    first_blocks,
    capacities,
    counts,
    indices,
    values,
    means,
    ends,
    pieces,
    addresses,
    body,
    FORMAT: tl.constexpr,
):
    """The bytes of a block's values; what they decode to into ``values``, and what is left.

    That goes to the elements of the piece, which are at ``addresses``.
    """
    _, piece, first, size = block_of(block_pieces, first_blocks, counts)
    if size > 0:
        i = tl.arange(0, BLOCK)
        mask = i < size
        own = tl.load(capacities + piece) + first
        value = tl.load(values + own + i, mask=mask, other=0.0)
        data = body + tl.load(ends + 1 + 2 * pieces + piece)
        if FORMAT == FP32:
            store_float(data + 4 * (first + i), value, mask)
            result = value
        elif FORMAT == FP16:
            half = tl.minimum(tl.maximum(value, -LARGEST_FP16), LARGEST_FP16).to(tl.float16)
            store_half(data + 2 * (first + i), half.to(tl.uint16, bitcast=True).to(tl.int32), mask)
            result = half.to(tl.float32)
        elif FORMAT == BF16:
            word = tl.minimum(tl.maximum(value, -LARGEST_BF16), LARGEST_BF16).to(
                tl.uint32, bitcast=True
            )
            word = (word + 0x7FFF + ((word >> 16) & 1)) >> 16  # to the nearest, ties to even
            store_half(data + 2 * (first + i), word, mask)
            result = (word << 16).to(tl.float32, bitcast=True)
        elif FORMAT == INT8:
            result = write_int8(data + first // BLOCK * (BLOCK + 4), value, mask)
        else:
            result = write_signs(data, means + 2 * piece, value, first, size)
        tl.store(values + own + i, result, mask=mask)
        index = tl.load(indices + own + i, mask=mask, other=0).to(tl.int64)
        x = tl.load(addresses + piece).to(tl.pointer_type(tl.float32))
        tl.store(x + index, value - result, mask=mask)


# --- what the host reads -------------------------------------------------------------------------


@entry
def read_statistics(sums, counts, nonfinite, ends, found, layers, number, SIZE: tl.constexpr):
    """Of each layer energy, energy sent, number sent and mark, and then ``number`` ends, as float64.

    A program has a layer, and the last one the ends.
    """
    layer = tl.program_id(0)
    if layer < layers:
        row = found + 4 * layer
        tl.store(row, tl.load(sums + 2 * layer))
        tl.store(row + 1, tl.load(sums + 2 * layer + 1))
        tl.store(row + 2, tl.load(counts + layer).to(tl.float64))
        tl.store(row + 3, tl.load(nonfinite + layer).to(tl.float64))
    else:
        i = tl.arange(0, SIZE)
        for piece in range(0, number, SIZE):
            end = tl.load(ends + piece + i, mask=piece + i < number, other=0)
            tl.store(found + 4 * layers + piece + i, end.to(tl.float64), mask=piece + i < number)
