"""Received sparse bodies: headers, positions and values; every length and index is checked.

A row of ``places`` is for one span of one body, which is a layer, or all of them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from hvd_adaptive.kernels.triton.jit.arithmetic import bit_length, entry, load_float
from hvd_adaptive.kernels.triton.jit.encoding import (
    BF16,
    BLOCK,
    FP16,
    FP32,
    HEAD_BITS,
    HEAD_PARAMETER,
    HEAD_TEUHOLA,
    INT8,
    SIGN,
)

FIELDS = tl.constexpr(8)
"""Columns: stream, values, count, format, mark, what is wrong, place in the indices, unused."""
BODY_FIELDS = tl.constexpr(3)
"""Columns of the table of bodies: address, bytes, place of its first index."""
WINDOW = tl.constexpr(4096)
"""Bits that are looked at together; some 256 codes of selections of 1 %."""
LAST_BIT = tl.constexpr(4095)
LONGEST = tl.constexpr(31)
"""The most low bits of a code."""


@triton.jit
def read_varint(data, position, size):
    """(number, position after it, whether it is cut short or longer than it need be)."""
    value, length, last = position * 0, position * 0, position * 0
    reading = position * 0 + 1
    for step in tl.static_range(9):
        byte = tl.load(data + position + step, mask=position + step < size, other=0).to(tl.int64)
        value = tl.where(reading == 1, value | ((byte & 127) << (7 * step)), value)
        length = tl.where(reading == 1, length + 1, length)
        last = tl.where(reading == 1, byte, last)
        reading = tl.where(byte < 128, 0, reading)
    wrong = (reading == 1) | (position + length > size) | ((last == 0) & (length > 1))
    return value, position + length, wrong.to(tl.int64)


@triton.jit
def bytes_of(count, code):
    """Bytes that ``count`` values take."""
    blocks = (count + BLOCK - 1) // BLOCK
    size = tl.where(code == FP32, 4 * count, 2 * count)
    size = tl.where(code == INT8, count + 4 * blocks, size)
    return tl.where(code == SIGN, (count + 7) // 8 + 8, size)


@entry
def walk(bodies, numels, places, spans, expected):
    """Where the spans of each body lie; after the first damaged one all are."""
    number = tl.program_id(0)
    data = tl.load(bodies + BODY_FIELDS * number).to(tl.pointer_type(tl.uint8))
    size = tl.load(bodies + BODY_FIELDS * number + 1)
    base = tl.load(bodies + BODY_FIELDS * number + 2)
    position = size * 0
    wrong = size * 0
    for span in range(spans):
        header, after, cut = read_varint(data, position, size)
        count, code, marked = header >> 4, (header >> 1) & 7, header & 1
        stream_bytes, stream, short = read_varint(data, after, size)
        some = (count > 0).to(tl.int64)
        wrong = wrong | cut | ((code != 0).to(tl.int64) & (1 - some))
        numel = tl.load(numels + span)
        bad = ((count > numel) | (code > SIGN)).to(tl.int64) | marked | short
        bad = bad | ((expected >= 0) & (code != expected)).to(tl.int64)
        # each code has a bit at least
        bad = bad | (stream_bytes > size).to(tl.int64) | (count > 8 * stream_bytes).to(tl.int64)
        values = stream + stream_bytes
        end = values + bytes_of(count, code)
        bad = bad | (end > size).to(tl.int64)
        wrong = wrong | (bad & some)
        position = tl.where(wrong > 0, size, tl.where(count > 0, end, after))
        row = places + (number * spans + span) * FIELDS
        count = tl.where(wrong > 0, 0, count)
        tl.store(row, stream)
        tl.store(row + 1, values)
        tl.store(row + 2, count)
        tl.store(row + 3, code)
        tl.store(row + 4, tl.where(wrong > 0, 0, marked))
        tl.store(row + 5, wrong)
        tl.store(row + 6, base)
        base = base + count
    # a row of its own says whether bytes are left over
    row = places + (tl.num_programs(0) * spans + number) * FIELDS
    tl.store(row, (position != size).to(tl.int64))


@triton.jit
def load_window(data, bit, end):
    """The 32 bits from ``bit`` on, int64; zeros from byte ``end`` on."""
    byte, shift = bit >> 3, bit & 7
    word = tl.load(data + byte, mask=byte < end, other=0).to(tl.int64)
    for step in tl.static_range(1, 5):
        more = tl.load(data + byte + step, mask=byte + step < end, other=0).to(tl.int64)
        word = word | (more << (8 * step))
    return (word >> shift) & 0xFFFFFFFF


@triton.jit
def first_one(window):
    """Zeros before the first one bit of 32; at least 31 where there is none."""
    lowest = (window & -window).to(tl.float32)  # exact: a power of two
    exponent = (lowest.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.where(window == 0, 31, exponent).to(tl.int64)


@triton.jit
def find_codes(data, bit, end, r, grows):
    """Starts of the next codes, up to 256, and where each ends, in bits from ``bit`` on.

    A code that is not complete in the window ends at its last bit. Where a code leads to from each bit
    is known at once; the ``j``-th code is found by doubling: ``j`` jumps are as many of 1, 2, 4 ...
    """
    p = tl.arange(0, WINDOW)
    window = load_window(data, bit + p, end)
    zeros = first_one(window)
    length = zeros + 1 + r + zeros * grows
    following = tl.where((window == 0) | (p + length >= LAST_BIT), LAST_BIT, p + length).to(tl.int32)
    following = tl.where(p == LAST_BIT, LAST_BIT, following)
    jumps = following
    j = tl.arange(0, BLOCK)
    start = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(8):
        there = tl.gather(jumps, start, 0)
        start = tl.where((j >> step) & 1 > 0, there, start)
        if step < 7:
            jumps = tl.gather(jumps, jumps, 0)
    return start, tl.gather(following, start, 0)


@triton.jit
def code_at(data, bit, end, r, grows):
    """(gap, whether it is longer than any) of the codes that begin at some bits."""
    zeros = first_one(load_window(data, bit, end))
    width = r + zeros * grows
    wrong = width > LONGEST
    width = tl.minimum(width, LONGEST)
    one = zeros * 0 + 1
    low = load_window(data, bit + zeros + 1, end) & ((one << width) - 1)
    gap = tl.where(grows == 1, (one << width) - (one << r), zeros << r)
    return gap + low, wrong


@entry
def decode_positions(bodies, numels, places, indices, spans):
    """The indices of a span: one block of 256 codes after the other, the codes of a block at once."""
    number, span = tl.program_id(0), tl.program_id(1)
    row = places + (number * spans + span) * FIELDS
    count = tl.load(row + 2)
    if count > 0:
        data = tl.load(bodies + BODY_FIELDS * number).to(tl.pointer_type(tl.uint8))
        stream, end, base = tl.load(row), tl.load(row + 1), tl.load(row + 6)
        numel = tl.load(numels + span)
        bit, last, size = stream * 8, count * 0 - 1, end * 8
        done, wrong, r, grows = count * 0, count * 0, count * 0, count * 0
        j = tl.arange(0, BLOCK)
        while (done < count) & (wrong == 0):
            if done % BLOCK == 0:
                head = load_window(data, bit, end)
                r, grows = head & HEAD_PARAMETER, (head & HEAD_TEUHOLA) // HEAD_TEUHOLA
                bit += HEAD_BITS
                wrong = (r > bit_length(numel)).to(tl.int64)
            left = tl.minimum(BLOCK - done % BLOCK, count - done)
            starts, ends = find_codes(data, bit, end, r, grows)
            complete = (ends < LAST_BIT) & (j < left)
            found = tl.sum(complete.to(tl.int64), 0)
            if found > 0:
                gaps, long = code_at(data, bit + starts, end, r, grows)
                steps = tl.where(complete, gaps + 1, 0)
                reached = last + tl.cumsum(steps, 0)
                outside = complete & (long | (reached >= numel))
                wrong = wrong | tl.max(outside.to(tl.int64), 0)
                tl.store(
                    indices + base + done + j, reached.to(tl.int32), mask=complete & (reached < numel)
                )
                last = last + tl.sum(steps, 0)
                bit = bit + tl.max(tl.where(complete, ends, 0), 0)
                done = done + found
            else:
                # a run of zeros that is longer than a window
                one = bit
                while (load_window(data, one, end) == 0) & (one < size):
                    one += 32
                one = one + first_one(load_window(data, one, end))
                zeros = one - bit
                wrong = wrong | (one >= size).to(tl.int64) | (zeros >> LONGEST)
                wrong = wrong | (grows & (zeros + r > LONGEST).to(tl.int64))
                zeros = tl.where(wrong > 0, 0, zeros)
                width = r + zeros * grows
                low = load_window(data, one + 1, end) & ((zeros * 0 + 1 << width) - 1)
                gap = tl.where(grows == 1, (zeros * 0 + 1 << width) - (zeros * 0 + 1 << r), zeros << r)
                last = last + 1 + gap + low
                wrong = wrong | (last >= numel).to(tl.int64)
                index = tl.where(wrong > 0, 0, last)
                tl.store(indices + base + done, index.to(tl.int32))
                bit = one + 1 + width
                done += 1
        rest = load_window(data, bit, end)
        wrong = wrong | ((bit + 7) // 8 != end).to(tl.int64) | (rest != 0).to(tl.int64)
        tl.store(row + 5, wrong)


@triton.jit
def load_values(data, start, code, i, mask):
    """Values of a span by number, in any format."""
    if code == FP32:
        value = load_float(data + start + 4 * i, mask)
    elif (code == FP16) | (code == BF16):
        low = tl.load(data + start + 2 * i, mask=mask, other=0).to(tl.uint32)
        word = low | (tl.load(data + start + 2 * i + 1, mask=mask, other=0).to(tl.uint32) << 8)
        half = word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        value = tl.where(code == BF16, (word << 16).to(tl.float32, bitcast=True), half)
    elif code == INT8:
        place = data + start + i // BLOCK * (BLOCK + 4)
        scale = load_float(place, mask)
        number = tl.load(place + 4 + i % BLOCK, mask=mask, other=0).to(tl.int8, bitcast=True)
        value = number.to(tl.float32) * scale
    else:
        two = i * 0
        above, below = load_float(data + start + two, mask), load_float(data + start + 4 + two, mask)
        byte = tl.load(data + start + 8 + i // 8, mask=mask, other=0).to(tl.int64)
        value = tl.where((byte >> (i & 7)) & 1 > 0, -below, above)
    return value


@entry
def check_values(bodies, places, spans, SIZE: tl.constexpr):
    """Mark spans that hold a value that is not finite, or signs of no value."""
    number, span = tl.program_id(0), tl.program_id(1)
    row = places + (number * spans + span) * FIELDS
    count, code = tl.load(row + 2), tl.load(row + 3)
    if count > 0:
        data = tl.load(bodies + BODY_FIELDS * number).to(tl.pointer_type(tl.uint8))
        start = tl.load(row + 1)
        for first in range(tl.program_id(2).to(tl.int64) * SIZE, count, tl.num_programs(2) * SIZE):
            i = first + tl.arange(0, SIZE).to(tl.int64)
            value = load_values(data, start, code, i, i < count)
            size = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            worst = tl.max(tl.where(i < count, size, 0), 0)
            tl.store(row + 5, 1, mask=worst >= 0x7F800000)
        if code == SIGN:
            # both means, also if one of them is that of no value, and what is left of the last byte
            two = tl.arange(0, 2)
            mean = load_float(data + start + 4 * two, two < 2).to(tl.int32, bitcast=True)
            tl.store(row + 5, 1, mask=tl.max(mean & 0x7FFFFFFF, 0) >= 0x7F800000)
            rest = count & 7
            byte = tl.load(data + start + 8 + count // 8, mask=rest > 0, other=0).to(tl.int64)
            tl.store(row + 5, 1, mask=(byte >> rest) > 0)


@entry
def list_values(bodies, places, values, spans, SIZE: tl.constexpr):
    """The values of all spans of one body, side by side, as float32."""
    span = tl.program_id(0).to(tl.int64)
    row = places + span * FIELDS
    count, code = tl.load(row + 2), tl.load(row + 3)
    if (count > 0) & (span < spans):
        data = tl.load(bodies).to(tl.pointer_type(tl.uint8))
        start, base = tl.load(row + 1), tl.load(row + 6)
        for first in range(tl.program_id(1).to(tl.int64) * SIZE, count, tl.num_programs(1) * SIZE):
            i = first + tl.arange(0, SIZE).to(tl.int64)
            mask = i < count
            tl.store(values + base + i, load_values(data, start, code, i, mask), mask=mask)


@entry
def add_values(
    bodies,
    places,
    indices,
    outs,
    edges,
    layers,
    first_wrong,
    number,
    spans,
    scale,
    CLEARS: tl.constexpr,
    WHOLE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Add ``scale`` times the values of a body, or clear their places, up to ``first_wrong``."""
    span = tl.program_id(0).to(tl.int64)
    row = places + (number * spans + span) * FIELDS
    count, code = tl.load(row + 2), tl.load(row + 3)
    if (count > 0) & (span < tl.load(first_wrong)):
        data = tl.load(bodies + BODY_FIELDS * number).to(tl.pointer_type(tl.uint8))
        start, base = tl.load(row + 1), tl.load(row + 6)
        for first in range(tl.program_id(1).to(tl.int64) * SIZE, count, tl.num_programs(1) * SIZE):
            i = first + tl.arange(0, SIZE).to(tl.int64)
            mask = i < count
            index = tl.load(indices + base + i, mask=mask, other=0).to(tl.int64)
            if WHOLE:
                # the layer, by bisection: the last one that begins at the index or before
                low = index * 0
                high = low + layers
                for _ in tl.static_range(16):
                    middle = (low + high) // 2
                    before = tl.load(edges + middle) <= index
                    low = tl.where(before, middle, low)
                    high = tl.where(before, high, middle)
                index = index - tl.load(edges + low)
                place = tl.load(outs + low).to(tl.pointer_type(tl.float32)) + index
            else:
                place = tl.load(outs + span).to(tl.pointer_type(tl.float32)) + index
            if CLEARS:
                tl.store(place, tl.zeros((SIZE,), tl.float32), mask=mask)
            else:
                value = load_values(data, start, code, i, mask)
                tl.store(place, tl.load(place, mask=mask, other=0.0) + value * scale, mask=mask)
