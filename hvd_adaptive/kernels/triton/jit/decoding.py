"""Received sparse bodies: headers, positions and values; every length and index is checked.

A row of ``places`` is for one span of one body, which is a layer, or all of them. A program has a
*group* of a span's values, of which the table in front of the index stream says where it begins: groups
are decoded side by side, as positions that count from the group before. Each body has ``room`` *slots*
for its groups; what is in one is the number of a span, counted from 1, or 0.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from hvd_adaptive.kernels.triton.jit.arithmetic import (
    bit_length,
    entry,
    load_float,
    load_scale,
    load_word,
)
from hvd_adaptive.kernels.triton.jit.encoding import (
    BF16,
    BLOCK,
    FP16,
    FP32,
    GROUP,
    HEAD_BITS,
    HEAD_PARAMETER,
    HEAD_TEUHOLA,
    INT8,
    SIGN,
    table_bytes,
)

FIELDS = tl.constexpr(8)
"""Columns: stream, values, count, format, mark, what is wrong, first index, first slot."""
BODY_FIELDS = tl.constexpr(3)
"""Columns of the table of bodies: address, bytes, first index."""
WINDOW = tl.constexpr(32)
"""Words of zeros and ones that are looked at together: most blocks have fewer."""
LONGEST = tl.constexpr(31)
"""The most low bits of a code."""
WORDS = tl.constexpr(128)
"""Of 32 bits: entries of a table that are looked at together."""
WORD_BITS = tl.constexpr(32)
FETCHED = tl.constexpr(1024)
"""Words that are brought into the cache at once."""
MOST_FETCHED = tl.constexpr(1 << 18)
"""Bits of a group that are: more than it takes but if its positions are far apart."""


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
def walk(bodies, numels, places, slots, spans, room, expected):
    """Where the spans of each body lie, and which span a slot is for; none after the first damage."""
    number = tl.program_id(0)
    data = tl.load(bodies + BODY_FIELDS * number).to(tl.pointer_type(tl.uint8))
    size = tl.load(bodies + BODY_FIELDS * number + 1)
    base = tl.load(bodies + BODY_FIELDS * number + 2)
    slot = number.to(tl.int64) * room
    position = size * 0
    wrong = size * 0
    for span in range(spans):
        header, after, cut = read_varint(data, position, size)
        count, code, marked = header >> 4, (header >> 1) & 7, header & 1
        stream_bytes, table, short = read_varint(data, after, size)
        some = (count > 0).to(tl.int64)
        wrong = wrong | cut | ((code != 0).to(tl.int64) & (1 - some))
        numel = tl.load(numels + span)
        bad = ((count > numel) | (code > SIGN)).to(tl.int64) | marked | short
        bad = bad | ((expected >= 0) & (code != expected)).to(tl.int64)
        # each code has a bit at least
        bad = bad | (stream_bytes > size).to(tl.int64) | (count > 8 * stream_bytes).to(tl.int64)
        stream = table + table_bytes(count)
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
        tl.store(row + 7, slot)
        groups = (count + GROUP - 1) // GROUP
        for first in range(0, groups, WORDS):
            group = first + tl.arange(0, WORDS)
            tl.store(slots + slot + group, group * 0 + span + 1, mask=group < groups)
        base = base + count
        slot = slot + groups
    # a row of its own says whether bytes are left over
    row = places + (tl.num_programs(0) * spans + number) * FIELDS
    tl.store(row, (position != size).to(tl.int64))


@triton.jit
def find_group(places, slots, number, spans, room, slot):
    """(place of a body's slot, its span or -1, the row of that, the number of the group in there)."""
    place = number * room + slot
    span = tl.load(slots + place) - 1
    row = places + (number * spans + tl.maximum(span, 0)) * FIELDS
    return place, span, row, place - tl.load(row + 7)


@triton.jit
def words_at(data, bit, end):
    """(address of the aligned word that holds a bit, the bit's place in it, bits until byte ``end``).

    A word may begin before the bytes or end after them, but never holds none of them: it can be read.
    """
    byte = data + (bit >> 3)
    word = byte - (byte & 3)
    place = ((byte & 3) * 8 + (bit & 7)).to(tl.int32)
    left = tl.minimum(tl.maximum(data + end - word, 0) * 8, 1 << 30).to(tl.int32)
    return word.to(tl.pointer_type(tl.uint32)), place, left


@triton.jit
def load_bits(words, place, left):
    """The 32 bits from some places on, as uint32; anything after the bits that are left."""
    word = place // WORD_BITS
    low = tl.load(words + word, mask=word * WORD_BITS < left, other=0).to(tl.uint64)
    high = tl.load(words + word + 1, mask=(word + 1) * WORD_BITS < left, other=0).to(tl.uint64)
    return (((high << WORD_BITS) | low) >> (place & 31).to(tl.uint64)).to(tl.uint32)


@triton.jit
def load_window(words, place, left):
    """The same, but zeros after the bits that are left."""
    there = left - place
    last = ((there * 0 + 1) << tl.minimum(tl.maximum(there, 0), 31)).to(tl.uint32) - 1
    window = load_bits(words, place, left)
    return tl.where(there >= WORD_BITS, window, window & last)


@triton.jit
def ones_in(word):
    """How many ones 32 bits have, int32."""
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    return ((eights * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def gap_of(low, zeros, r, grows):
    """The gap of a code with so many zeros, int64; ``low`` are the 32 bits after its one.

    One that is longer than any layer is 2^31, so that the sum of a group's does not overflow.
    """
    width = r + zeros * grows
    long = width > LONGEST
    width = tl.minimum(width, LONGEST)
    one = zeros * 0 + 1
    high = tl.where(grows == 1, (one << width) - (one << r), zeros << r)
    gap = high + (low.to(tl.int64) & ((one << width) - 1))
    return tl.minimum(tl.where(long, one << LONGEST, gap), one << LONGEST)


@triton.jit
def shortened(length):
    """As int32; what does not fit is longer than any layer."""
    return tl.minimum(length, 0x7FFFFFFF).to(tl.int32)


@triton.jit
def sum_of_words(data, count):
    """The sum of so many uint32 at any byte."""
    i = tl.arange(0, WORDS)
    total = count * 0
    for first in range(0, count, WORDS):
        words = load_word(data + 4 * (first + i), first + i < count)
        total += tl.sum(words.to(tl.int64), 0)
    return total


@triton.jit
def fetch(data, bit, limit):
    """The largest word between two bits, or of the first ones: all of them are then in the cache."""
    i = tl.arange(0, FETCHED)
    words, _, left = words_at(data, bit, (limit + 7) // 8)
    found = tl.zeros((FETCHED,), tl.uint32)
    for first in range(0, tl.minimum(left, MOST_FETCHED) // WORD_BITS, FETCHED):
        place = first + i
        found = tl.maximum(found, tl.load(words + place, mask=place * WORD_BITS < left, other=0))
    return tl.max(found.to(tl.int64), 0)


@triton.jit
def find_ones(data, bit, limit, end, size, numel, out):
    """Write the zeros before each of so many ones, all since ``bit``; returns how many ones there are.

    Or more. It ends at ``limit``, and where there are more zeros than a layer has elements.
    """
    i, place = tl.arange(0, WINDOW), tl.arange(0, WORD_BITS)
    lower = ((place * 0 + 1).to(tl.uint32) << place.to(tl.uint32)) - 1
    begin, found = bit, bit * 0
    while (found < size) & (bit < limit) & (bit - begin - found <= numel):
        words, first, left = words_at(data, bit, end)
        window = load_window(words, first + i * WORD_BITS, left)
        ones = ones_in(window)
        rank = (tl.cumsum(ones, 0) - ones)[:, None] + ones_in(window[:, None] & lower[None, :])
        shown = ((window[:, None] >> place.to(tl.uint32)[None, :]) & 1) > 0
        number = found + rank
        zeros = bit - begin + (i[:, None] * WORD_BITS + place[None, :]) - number
        tl.store(out + number, shortened(zeros), mask=shown & (number < size))
        found += tl.sum(ones, 0)
        bit += WINDOW * WORD_BITS
    return found


@triton.jit
def write_block(data, bit, end, head, size, out, total):
    """Zeros before ones become lengths, summed up from ``total`` on: (bit after low bits, last sum).

    Args:
        data: of the body.
        bit: at which the block's zeros and ones begin.
        end: byte at which the stream does.
        head: what the block begins with.
        size: indices of the block.
        out: of its first index.
        total: of the blocks before.
    """
    j = tl.arange(0, BLOCK)
    mask = j < size
    passed = tl.load(out + j, mask=mask, other=0)
    before = tl.load(out + j - 1, mask=mask & (j > 0), other=0)
    tl.debug_barrier()  # other threads write what has been read here
    last = tl.max(passed, 0).to(tl.int64)
    r, grows = head & HEAD_PARAMETER, (head & HEAD_TEUHOLA) // HEAD_TEUHOLA
    words, place, left = words_at(data, bit + last + size, end)
    # what has too many zeros is damage whatever its low bits are
    place += r * j + tl.minimum(before, BLOCK * LONGEST) * grows
    low = load_bits(words, place, left)
    lengths = 1 + gap_of(low, (passed - before).to(tl.int64), r, grows)
    sums = total + tl.cumsum(tl.where(mask, lengths, 0), 0)
    tl.store(out + j, shortened(sums), mask=mask)
    return bit + last + size + r * size + last * grows, tl.max(sums, 0)


@entry
def decode_positions(bodies, numels, places, slots, indices, totals, spans, room):
    """The gaps of a group, each with the element after it: the sums of these lengths.

    A block is decoded after the other, all of its codes at once.
    """
    number = tl.program_id(1).to(tl.int64)
    slot, span, row, group = find_group(places, slots, number, spans, room, tl.program_id(0))
    if span >= 0:
        data = tl.load(bodies + BODY_FIELDS * number)
        stream, end, count = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        numel = tl.load(numels + span)
        out = indices + tl.load(row + 6) + group * GROUP
        table = (data + stream - table_bytes(count)).to(tl.pointer_type(tl.uint8))
        bit = stream * 8 + sum_of_words(table, group)
        is_last = (group + 1) * GROUP >= count
        limit = bit + load_word(table + 4 * group, group * GROUP + GROUP < count).to(tl.int64)
        limit = tl.where(is_last, end * 8, limit)
        size = tl.minimum(count - group * GROUP, GROUP)
        wrong = (limit > end * 8).to(tl.int64)
        # what is loaded at once needs not be waited for again and again; stored, or it were not loaded
        tl.store(totals + slot, fetch(data, bit, tl.minimum(limit, end * 8)))
        done, total = count * 0, count * 0
        while (done < size) & (wrong == 0):
            words, place, left = words_at(data, bit, end)
            head = load_window(words, place, left).to(tl.int32) & (HEAD_PARAMETER | HEAD_TEUHOLA)
            bit += HEAD_BITS
            ahead = tl.minimum(size - done, BLOCK)
            found = find_ones(data, bit, limit, end, ahead, numel, out + done)
            tl.debug_barrier()  # threads read what others have written
            too_large = (head & HEAD_PARAMETER) > bit_length(numel)
            wrong = (too_large | (found < ahead)).to(tl.int64)
            if wrong == 0:
                bit, total = write_block(data, bit, end, head, ahead, out + done, total)
                wrong = (total > numel).to(tl.int64)
            done += ahead
        words, place, left = words_at(data, bit, end)
        rest = load_window(words, place, left)
        bad_end = tl.where(is_last, ((bit + 7) // 8 != end) | (rest != 0), bit != limit)
        wrong = wrong | bad_end.to(tl.int64)
        tl.store(totals + slot, tl.where(wrong > 0, 0, total))
        tl.store(row + 5, 1, mask=wrong > 0)


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
def place_and_check(bodies, numels, places, slots, indices, totals, spans, room, SIZE: tl.constexpr):
    """Positions from sums of lengths; whether they and values are sound, and nothing after signs."""
    number = tl.program_id(1).to(tl.int64)
    slot, span, row, group = find_group(places, slots, number, spans, room, tl.program_id(0))
    if span >= 0:
        count = tl.load(row + 2)
        last = sum_of_totals(totals + slot - group, group) - 1
        total = tl.load(totals + slot)
        outside = last + total >= tl.load(numels + span)
        tl.store(row + 5, 1, mask=outside)
        data = tl.load(bodies + BODY_FIELDS * number).to(tl.pointer_type(tl.uint8))
        start, code, base = tl.load(row + 1), tl.load(row + 3), tl.load(row + 6)
        first, worst = group * GROUP, (span * 0).to(tl.int32)
        # of a damaged group, whose sum is 0, not all lengths were written
        size = tl.where(outside | (total == 0), 0, tl.minimum(count - first, GROUP))
        for part in range(0, size, SIZE):
            i = first + part + tl.arange(0, SIZE)
            mask = i < count
            index = last.to(tl.int32) + tl.load(indices + base + i, mask=mask, other=0)
            tl.store(indices + base + i, index, mask=mask)
            value = load_values(data, start, code, i, mask)
            magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            worst = tl.maximum(worst, tl.max(tl.where(mask, magnitude, 0), 0))
        tl.store(row + 5, 1, mask=worst >= 0x7F800000)
        if (code == SIGN) & (group == 0):
            # both means, also if one of them is that of no value, and what is left of the last byte
            two = tl.arange(0, 2)
            mean = load_float(data + start + 4 * two, two < 2).to(tl.int32, bitcast=True)
            tl.store(row + 5, 1, mask=tl.max(mean & 0x7FFFFFFF, 0) >= 0x7F800000)
            rest = count & 7
            byte = tl.load(data + start + 8 + count // 8, mask=rest > 0, other=0).to(tl.int64)
            tl.store(row + 5, 1, mask=(byte >> rest) > 0)


@triton.jit
def sum_of_totals(totals, count):
    """The sum of so many int64."""
    i = tl.arange(0, WORDS)
    total = count * 0
    for first in range(0, count, WORDS):
        total += tl.sum(tl.load(totals + first + i, mask=first + i < count, other=0), 0)
    return total


@entry
def summarize(places, found, count, spans, SIZE: tl.constexpr):
    """Marks of spans before the first damage, whether anything is damaged, and the first such span.

    A program reads the rows of all ``count`` bodies.
    """
    i = tl.arange(0, SIZE)
    first_wrong = tl.full((), 0, tl.int64) + spans
    for start in range(0, spans, SIZE):
        span = start + i
        for number in range(count):
            row = places + (number * spans + span) * FIELDS
            wrong = tl.load(row + 5, mask=span < spans, other=0)
            first_wrong = tl.minimum(first_wrong, tl.min(tl.where(wrong > 0, span, spans), 0))
    damaged = (first_wrong < spans).to(tl.int64)
    for start in range(0, count, SIZE):
        row = places + (count * spans + start + i) * FIELDS
        damaged = damaged | tl.max(tl.load(row, mask=start + i < count, other=0), 0)
    for start in range(0, spans, SIZE):
        span = start + i
        marks = tl.zeros((SIZE,), tl.int64)
        for number in range(count):
            row = places + (number * spans + span) * FIELDS
            marks = marks | tl.load(row + 4, mask=span < first_wrong, other=0)
        tl.store(found + span, marks, mask=span < spans)
    tl.store(found + spans, damaged)
    tl.store(found + spans + 1, first_wrong)


@entry
def list_values(bodies, places, slots, values, spans, room, SIZE: tl.constexpr):
    """The values of all spans of one body, side by side, as float32."""
    number = tl.program_id(0).to(tl.int64) * 0
    _, span, row, group = find_group(places, slots, number, spans, room, tl.program_id(0))
    count = tl.load(row + 2)
    first = group * GROUP + tl.program_id(1) * SIZE
    if (span >= 0) & (first < count):
        data = tl.load(bodies).to(tl.pointer_type(tl.uint8))
        i = first + tl.arange(0, SIZE)
        mask = i < count
        value = load_values(data, tl.load(row + 1), tl.load(row + 3), i, mask)
        tl.store(values + tl.load(row + 6) + i, value, mask=mask)


@entry
def add_values(
    bodies,
    places,
    slots,
    indices,
    outs,
    edges,
    found,
    layers,
    number,
    spans,
    room,
    scale,
    CLEARS: tl.constexpr,
    WHOLE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Add ``scale`` times the values of a body, or clear their places, up to the first damage."""
    own = tl.program_id(0).to(tl.int64) * 0 + number
    _, span, row, group = find_group(places, slots, own, spans, room, tl.program_id(0))
    count = tl.load(row + 2)
    first = group * GROUP + tl.program_id(1) * SIZE
    if (span >= 0) & (first < count) & (span < tl.load(found + spans + 1)):
        i = first + tl.arange(0, SIZE)
        mask = i < count
        index = tl.load(indices + tl.load(row + 6) + i, mask=mask, other=0).to(tl.int64)
        if WHOLE:
            # the layer, by bisection: the last one that begins at the index or before
            low = index * 0
            high = low + layers
            for _step in tl.static_range(16):
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
            data = tl.load(bodies + BODY_FIELDS * own).to(tl.pointer_type(tl.uint8))
            value = load_values(data, tl.load(row + 1), tl.load(row + 3), i, mask)
            factor = load_scale(scale)
            tl.store(place, tl.load(place, mask=mask, other=0.0) + value * factor, mask=mask)


@triton.jit
def first_from(indices, count, least):
    """How many of so many rising indices are below some others, by bisection."""
    low, high = count * 0, count
    for _step in tl.static_range(32):
        middle = (low + high) // 2
        below = tl.load(indices + middle, mask=low < high, other=0).to(tl.int64) < least
        low = tl.where((low < high) & below, middle + 1, low)
        high = tl.where((low < high) & (below == 0), middle, high)
    return low


@entry
def find_starts(
    places,
    indices,
    tile_layers,
    first_tiles,
    starts,
    spans,
    tiles,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Of each tile of the outputs, where its values begin in a body's list of its layer."""
    number = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = tile < tiles
    span = tl.load(tile_layers + tile, mask=there, other=0)
    row = places + (number * spans + span) * FIELDS
    count = tl.load(row + 2, mask=there, other=0)
    own = indices + tl.load(row + 6, mask=there, other=0)
    begin = (tile - tl.load(first_tiles + span, mask=there, other=0)) * TILE
    tl.store(starts + number * tiles + tile, first_from(own, count, begin).to(tl.int32), mask=there)


@entry
def write_sums(
    places,
    indices,
    tile_layers,
    first_tiles,
    starts,
    bodies,
    numels,
    outs,
    found,
    count,
    spans,
    scale,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """``scale`` times the sum of all bodies into a tile of the outputs, up to the first damage.

    All threads of a program wait between bodies: these are added one after the other.
    """
    tile = tl.program_id(0)
    span = tl.load(tile_layers + tile)
    if span < tl.load(found + spans + 1):
        factor = load_scale(scale)
        begin = (tile - tl.load(first_tiles + span)) * TILE
        out = tl.load(outs + span).to(tl.pointer_type(tl.float32))
        i, left = tl.arange(0, TILE), tl.load(numels + span) - begin
        tl.store(out + begin + i, tl.zeros((TILE,), tl.float32), mask=i < left)
        for number in range(count):
            row = places + (number * spans + span) * FIELDS
            data = tl.load(bodies + BODY_FIELDS * number).to(tl.pointer_type(tl.uint8))
            own, start, code = indices + tl.load(row + 6), tl.load(row + 1), tl.load(row + 3)
            bounds = starts + (number * tl.num_programs(0) + tile)
            end = tl.load(row + 2).to(tl.int32)
            if left > TILE:
                end = tl.load(bounds + 1)
            tl.debug_barrier()
            for first in range(tl.load(bounds), end, SIZE):
                place = first + tl.arange(0, SIZE)
                mask = place < end
                target = out + tl.load(own + place, mask=mask, other=0).to(tl.int64)
                value = load_values(data, start, code, place.to(tl.int64), mask)
                held = tl.load(target, mask=mask, other=0.0)
                tl.store(target, held + value * factor, mask=mask)
