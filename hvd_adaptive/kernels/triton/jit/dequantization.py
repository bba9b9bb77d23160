"""Received quantized layers: check, decode, add; and sum several bodies in one pass.

Rows of the table of bodies are described in :mod:`hvd_adaptive.kernels.triton.quantized`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from hvd_adaptive.kernels.triton.jit.arithmetic import (
    INF,
    entry,
    load_digits,
    load_scale,
    power_of_three,
)
from hvd_adaptive.kernels.triton.jit.quantized import LEVELS, NONFINITE, SIDES

BODY_FIELDS = tl.constexpr(5)
"""Columns of the table of bodies: address, first byte, bytes, addresses of levels and of alphabets."""
PLACES = tl.constexpr(6)
"""Columns of what :func:`walk` finds.

Addresses of the first norm, the first code and the levels; bits, how many levels, what is wrong.
"""
MOST, LEAST = tl.constexpr(0x6F800000), tl.constexpr(0x0F800000)
"""The bits of 2^96 and 2^-96, between which norms are ordinary: see :func:`scales_exactly`."""


@entry
def walk(bodies, numels, norm_bytes, places, layers):
    """Where the layers of each body lie; after the first damaged one all are."""
    number = tl.program_id(0)
    body = bodies + BODY_FIELDS * number
    address, position, size = tl.load(body), tl.load(body + 1), tl.load(body + 2)
    data = address.to(tl.pointer_type(tl.uint8))
    levels = tl.load(body + 3)
    alphabets = tl.load(body + 4).to(tl.pointer_type(tl.int64))
    wrong = position < 0
    for layer in range(layers):
        wrong = wrong | (position >= size)
        bits = tl.load(data + position, mask=position < size, other=0).to(tl.int32)
        marked = bits == NONFINITE
        count = tl.load(alphabets + bits, mask=bits < 9, other=0)
        wrong = wrong | ((count == 0) & (not marked))
        numel = tl.load(numels + layer)
        packed = tl.where(count == 3, (numel + 4) // 5, (numel * bits + 7) // 8)
        norms = position + 1
        codes = norms + tl.load(norm_bytes + layer)
        position = tl.where(marked, norms, codes + packed)
        wrong = wrong | (position > size)
        row = places + (number * layers + layer) * PLACES
        tl.store(row, address + norms)
        tl.store(row + 1, address + codes)
        tl.store(row + 2, levels + 4 * LEVELS * tl.where(marked, 0, bits))
        tl.store(row + 3, bits.to(tl.int64))
        tl.store(row + 4, count)
        tl.store(row + 5, wrong.to(tl.int64))
    # a row of its own says whether bytes are left over
    row = places + (tl.num_programs(0) * layers + number) * PLACES
    tl.store(row + 5, (position != size).to(tl.int64))


@triton.jit
def part_of(numels, first_tiles, layer, tile, TILE: tl.constexpr):
    """(elements of a layer, the first one of a tile, how many it has from there on)."""
    numel = tl.load(numels + layer)
    begin = (tile - tl.load(first_tiles + layer)) * TILE
    return numel, begin, tl.minimum(numel - begin, TILE).to(tl.int32)


@triton.jit
def bits_after(address, bits, count, numel):
    """Whether there are bits after the last code of a layer."""
    codes = address.to(tl.pointer_type(tl.uint8))
    if count == 3:
        rest, last = (numel % 5).to(tl.int32), numel // 5
        byte = tl.load(codes + last, mask=rest > 0, other=0).to(tl.int32)
        found = byte // power_of_three(rest) > 0
    else:
        rest, last = (numel * bits & 7).to(tl.int32), numel * bits >> 3
        byte = tl.load(codes + last, mask=rest > 0, other=0).to(tl.int32)
        found = (byte >> rest) > 0
    return found


@entry
def conclude(places, findings, layers, count, SIZE: tl.constexpr):
    """Of each layer its mark, then what is damaged at all, then the first damaged layer."""
    first, damaged = layers + 0, layers * 0
    for start in range(0, layers, SIZE):
        layer = start + tl.arange(0, SIZE)
        mask = layer < layers
        wrong, marked = tl.zeros((SIZE,), tl.int64), tl.zeros((SIZE,), tl.int64)
        for number in range(count):
            row = places + (number * layers + layer) * PLACES
            bits = tl.load(row + 3, mask=mask, other=0)
            marked = tl.maximum(marked, (bits == NONFINITE).to(tl.int64))
            wrong = tl.maximum(wrong, tl.load(row + 5, mask=mask, other=0))
        tl.store(findings + layer, marked, mask=mask)
        first = tl.minimum(first, tl.min(tl.where(wrong > 0, layer, layers), 0))
        damaged = tl.maximum(damaged, tl.max(wrong, 0).to(tl.int32))
    for number in range(count):
        row = places + (count * layers + number) * PLACES
        damaged = tl.maximum(damaged, tl.load(row + 5).to(tl.int32))
    tl.store(findings + layers, damaged.to(tl.int64))
    tl.store(findings + layers + 1, first.to(tl.int64))


@triton.jit
def bits_from(address, bits, there):
    """64 bits from a byte on, of which the first ``bits`` may be used; no word without these is read.

    ``bits`` are 1 to 32 where a tile is ``there``.
    """
    words = (address >> 2 << 2).to(tl.pointer_type(tl.uint32))
    shift = ((address & 3) << 3).to(tl.int32)
    low = tl.load(words, mask=there, other=0).to(tl.uint64)
    high = tl.load(words + 1, mask=there & (shift + bits > 32), other=0).to(tl.uint64)
    return (low | (high << 32)) >> shift.to(tl.uint64)


@triton.jit
def packed_words(address, first, g, left, bits, WIDE: tl.constexpr):
    """The bits of each group of eight packed codes; 0 where there is none.

    Args:
        address: of the codes of a layer.
        first: number of the first group.
        g: groups from there on, int32.
        left: codes from the first group on, int32.
        bits: of a code.
        WIDE: whether a code may have more than 4 bits.
    """
    own = tl.minimum(tl.maximum(left - 8 * g, 0), 8) * bits  # bits of the group
    byte = address + first * bits + g * bits
    # what lies behind the last code is not its layer's
    if WIDE:
        low = bits_from(byte, tl.minimum(own, 32), own > 0) & 0xFFFFFFFF
        high = bits_from(byte + 4, own - 32, own > 32) & 0xFFFFFFFF
        word = low | (high << 32)
        word = word & ((word * 0 - 1) >> (64 - tl.maximum(own, 1)).to(tl.uint64))
    else:
        word = bits_from(byte, own, own > 0).to(tl.uint32)
        word = word & ((word * 0 - 1) >> (32 - tl.maximum(own, 1)).to(tl.uint32))
    return word


@triton.jit
def unpacked(words, bits, WIDE: tl.constexpr):
    """Eight codes of each group, ``[8, groups]``."""
    shift = (tl.arange(0, 8) * bits)[:, None]
    if WIDE:
        codes = (words[None, :] >> shift.to(tl.uint64)).to(tl.int32)
    else:
        codes = (words[None, :] >> shift.to(tl.uint32)).to(tl.int32)
    return codes & ((1 << bits) - 1)


@triton.jit
def load_norm(address, there):
    """A float32 at any byte."""
    bits = tl.where(there, 32, 0)
    word = (bits_from(address, bits, there) & 0xFFFFFFFF).to(tl.uint32)
    return word.to(tl.float32, bitcast=True)


@triton.jit
def load_norms(norms, block, there, NORM: tl.constexpr):
    """Both norms of blocks, by number; they are the same where a block has one."""
    if NORM == SIDES:
        first = load_norm(norms + 8 * block, there)
        second = load_norm(norms + 8 * block + 4, there)
    else:
        first = load_norm(norms + 4 * block, there)
        second = first
    return first, second


@triton.jit
def worse_of(first, second):
    """The bits of norms that are impossible are the infinity's or more; as int32, which do not wrap."""
    top = tl.maximum(first.to(tl.uint32, bitcast=True), second.to(tl.uint32, bitcast=True))
    return tl.minimum(top, INF).to(tl.int32)


@triton.jit
def decode_tile(
    row, bits, alphabet, begin, left, NORM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """(values of a tile of a layer, ``[8, groups]``, its largest code, its worst norm).

    Args:
        row: of the layer in a body.
        bits: of its codes.
        alphabet: levels.
        begin: number of the first element, a multiple of 8.
        left: elements from there on, int32.
        NORM: of the rule.
        BLOCK: elements of a block.
        TILE: of the tile.
    """
    g, j = tl.arange(0, TILE // 8), tl.arange(0, 8)
    e = 8 * g[None, :] + j[:, None]
    base = begin // BLOCK
    inside = (begin - base * BLOCK).to(tl.int32)
    norms, codes = tl.load(row), tl.load(row + 1)
    if alphabet == 3:
        found = load_digits(codes, begin, e, e < left)
    elif bits > 4:
        found = unpacked(packed_words(codes, begin // 8, g, left, bits, True), bits, True)
    else:
        found = unpacked(packed_words(codes, begin // 8, g, left, bits, False), bits, False)
    if BLOCK % 8 == 0:
        block = base + (inside + 8 * g) // BLOCK
        first, second = load_norms(norms, block, 8 * g < left, NORM)
        worst = tl.max(worse_of(first, second), 0)
        first, second = first[None, :], second[None, :]
    else:
        block = base + (inside + e) // BLOCK
        first, second = load_norms(norms, block, e < left, NORM)
        worst = tl.max(tl.max(worse_of(first, second), 0), 0)
    if NORM == SIDES:
        values = tl.where(found > 0, second, -first)
    else:
        values = tl.load(tl.load(row + 2).to(tl.pointer_type(tl.float32)) + found) * first
    return values, tl.max(tl.max(found, 0), 0), worst


@triton.jit
def is_damaged(row, bits, alphabet, top, worst, begin, numel, TILE: tl.constexpr):
    """Whether a tile has an impossible code or norm, or its layer ends with it and has bits after that.

    Args:
        row: of the layer in a body.
        bits: of its codes.
        alphabet: levels.
        top: the tile's largest code.
        worst: its worst norm.
        begin: number of its first element.
        numel: elements of the layer.
        TILE: of a tile.
    """
    damaged = (top >= alphabet) | (worst >= INF)
    if begin + TILE >= numel:
        damaged = damaged | bits_after(tl.load(row + 1), bits, alphabet, numel)
    return damaged


@entry
def find_damage(
    numels,
    tile_layers,
    first_tiles,
    places,
    layers,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Mark the layers that hold an impossible norm, code or padding."""
    tile, number = tl.program_id(0), tl.program_id(1)
    layer = tl.load(tile_layers + tile)
    row = places + (number * layers + layer) * PLACES
    bits = tl.load(row + 3).to(tl.int32)
    if (tl.load(row + 5) == 0) & (bits != NONFINITE):
        alphabet = tl.load(row + 4).to(tl.int32)
        numel, begin, left = part_of(numels, first_tiles, layer, tile, TILE)
        _, top, worst = decode_tile(row, bits, alphabet, begin, left, NORM, BLOCK, TILE)
        damaged = is_damaged(row, bits, alphabet, top, worst, begin, numel, TILE)
        tl.store(row + 5, 1, mask=damaged)


@entry
def find_alike(places, alike, layers, count, EVEN: tl.constexpr):
    """The bits of a layer's codes where all bodies have the same, in powers of two; else 0.

    ``alike`` ends with whether there is one where they have not. Where levels are ``EVEN``, those of
    one bit are not: they are -1 and 1.
    """
    layer = tl.program_id(0)
    first = places + layer * PLACES
    bits = tl.load(first + 3)
    same = (tl.load(first + 4) != 3) & (bits != NONFINITE)
    if EVEN:
        same = same & (bits > 1)
    for number in range(count):
        row = places + (number * layers + layer) * PLACES
        same = same & (tl.load(row + 3) == bits) & (tl.load(row + 5) == 0)
    tl.store(alike + layer, tl.where(same, bits, 0))
    tl.store(alike + layers, 1, mask=same == 0)


@triton.jit
def word_of(address):
    """(the aligned word that holds the byte at an address, the bytes of that word before it)."""
    return (address >> 2 << 2).to(tl.pointer_type(tl.uint32)), (address & 3).to(tl.int32)


@triton.jit
def joined(low, high, before):
    """The 32 bits of two words after their first ``before`` bytes, modulo 4: one instruction."""
    shift = (before << 3) & 31
    return (low >> shift.to(tl.uint32)) | (high << 1 << (shift ^ 31).to(tl.uint32))


@triton.jit
def groups_of(left, bits, GROUPS: tl.constexpr, WIDE: tl.constexpr):
    """(the first byte of each group of eight codes, a mask of the bits of its codes, the last byte).

    Bytes count from the first of the tile. Groups after the last code read what the last group reads,
    with an empty mask, so that their loads need none.
    """
    g = tl.arange(0, GROUPS)
    own = tl.minimum(tl.maximum(left - 8 * g, 0), 8) * bits
    if WIDE:
        ones = (own * 0 - 1).to(tl.uint64) >> (64 - tl.maximum(own, 1)).to(tl.uint64)
    else:
        ones = (own * 0 - 1).to(tl.uint32) >> (32 - tl.maximum(own, 1)).to(tl.uint32)
    return tl.minimum(g, (left - 1) >> 3) * bits, tl.where(own > 0, ones, 0), (left * bits - 1) >> 3


@triton.jit
def words_of(address, place, last, WIDE: tl.constexpr):
    """A word for each group of eight codes of a tile; bits above those of its codes may be anything.

    Args:
        address: of the tile's first byte.
        place: the first byte of each group, counted from there.
        last: the last byte of the tile, counted from there.
        WIDE: whether a code may have more than 4 bits.
    """
    data, before = word_of(address)
    byte = place + before
    word, end = byte >> 2, (last + before) >> 2
    # a word after the last byte may not be read, and holds no bits of codes
    low = tl.load(data + word)
    high = tl.load(data + word + 1, mask=word < end)
    words = joined(low, high, byte)
    if WIDE:
        third = tl.load(data + word + 2, mask=word + 1 < end)
        words = words.to(tl.uint64) | (joined(high, third, byte).to(tl.uint64) << 32)
    return words


@triton.jit
def blocks_of(begin, left, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """(the number of a tile's first block, the numbers of its blocks from there on, ``[blocks, 1]``).

    Where a tile does not consist of whole blocks, nor a block of whole tiles, there is a number for
    each group of eight codes.
    """
    base = begin // BLOCK
    if BLOCK % TILE == 0:
        number = tl.arange(0, 1)
    elif TILE % BLOCK == 0:
        number = tl.minimum(tl.arange(0, TILE // BLOCK), (left - 1) // BLOCK)
    else:
        inside = (begin - base * BLOCK).to(tl.int32)
        number = (inside + 8 * tl.minimum(tl.arange(0, TILE // 8), (left - 1) >> 3)) // BLOCK
    return base, number[:, None]


@triton.jit
def norms_of(address, number, GROUPS: tl.constexpr):
    """The norm of each group of eight codes; ``number`` are the numbers of norms, ``[norms, 1]``."""
    data, before = word_of(address)
    other, _ = word_of(address + 3)  # a norm's last byte: the word after that may not be read
    norms = joined(tl.load(data + number), tl.load(other + number), before)
    norms = tl.broadcast_to(norms, (number.shape[0], GROUPS // number.shape[0]))
    return tl.reshape(norms, (GROUPS,)).to(tl.float32, bitcast=True)


@triton.jit
def loaded(
    row,
    bits,
    begin,
    place,
    last,
    base,
    number,
    NORM: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """(a word for each group of eight codes, both of its norms), read from one body."""
    words = words_of(tl.load(row + 1) + (begin >> 3) * bits, place, last, WIDE)
    if NORM == SIDES:
        norms = tl.load(row) + 8 * base
        first = norms_of(norms, 2 * number, TILE // 8)
        second = norms_of(norms + 4, 2 * number, TILE // 8)
    else:
        first = norms_of(tl.load(row) + 4 * base, number, TILE // 8)
        second = first
    return words, first, second


@triton.jit
def even_levels(words, bits, WIDE: tl.constexpr):
    """Evenly spaced levels of eight codes of at least two bits, ``[8, groups]``.

    A code is not shifted to the lowest bits: where it is in its word, it is part of the fraction of a
    float32 whose exponent makes the code count in units of ``1 / (top + 1)``. Subtracting the middle
    code in the same units is exact and leaves ``a / (top + 1)``. The level, ``a / top``, is that plus
    ``1 / top`` of that: rounded once, it is the correctly rounded quotient for every ``a`` and up to 8
    bits. Dividing would take longer, and so would a table.
    """
    PART: tl.constexpr = 2 if WIDE else 4  # codes that fit into a fraction
    j = tl.arange(0, 8)[:, None]
    bits = tl.maximum(bits, 2)  # no layer of one bit gets here, but 1 / 0 may be computed for it
    top = (1 << (bits - 1)) - 1
    place = j % PART * bits
    power = (151 - bits - place) << 23
    part = words[None, :] >> (j // PART * PART * bits).to(words.dtype)
    codes = (part.to(tl.uint32).to(tl.int32, bitcast=True) & ((2 * top + 1) << place)) | power
    middle = (top << place) | power
    even = codes.to(tl.float32, bitcast=True) - middle.to(tl.float32, bitcast=True)
    wide = top.to(tl.float32)
    rest = tl.div_rn(wide * 0.0 + 1.0, wide)
    return tl.fma(even, tl.broadcast_to(rest, even.shape), even)


@triton.jit
def values_of(
    row, words, first, second, bits, NORM: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr
):
    """The values of codes, ``[8, groups]``."""
    if NORM == SIDES:
        values = tl.where(unpacked(words, bits, WIDE) > 0, second[None, :], -first[None, :])
    elif EVEN:
        values = even_levels(words, bits, WIDE) * first[None, :]
    else:
        levels = tl.load(row + 2).to(tl.pointer_type(tl.float32))
        values = tl.load(levels + unpacked(words, bits, WIDE)) * first[None, :]
    return values


@triton.jit
def impossible_codes(row, words, bits, EVEN: tl.constexpr, WIDE: tl.constexpr):
    """A word for each group: the highest bit of a code is set if and only if some code has no level.

    Other bits may be anything. With even levels only the code of all ones has none. Adding 1 to every
    code clears the highest bit of the lowest such code; without one, no carry leaves a code and no
    highest bit is cleared.
    """
    if EVEN:
        lowest = words * 0 + 1
        lowest = lowest | (lowest << bits.to(words.dtype))
        lowest = lowest | (lowest << (2 * bits).to(words.dtype))
        lowest = lowest | (lowest << (4 * bits).to(words.dtype))
        found = words & ~(words + lowest)
    else:
        alphabet = tl.load(row + 4).to(tl.int32)
        wrong = tl.max(unpacked(words, bits, WIDE), 0) >= alphabet
        found = wrong.to(words.dtype) << (bits - 1).to(words.dtype)
    return found


@triton.jit
def top_bits(words, bits):
    """Words with nothing left but the highest bit of each of eight codes."""
    top = (words * 0 + 1) << (bits - 1).to(words.dtype)
    top = top | (top << bits.to(words.dtype))
    top = top | (top << (2 * bits).to(words.dtype))
    top = top | (top << (4 * bits).to(words.dtype))
    return words & top


@triton.jit
def any_bits_after(rows, step, count, bits, numel):
    """Whether there are bits after the last code of a layer in one of so many bodies."""
    found = bits < 0
    for number in range(count):
        found = found | bits_after(tl.load(rows + number * step + 1), bits, bits * 0, numel)
    return found


@triton.jit
def norm_range(most, least, first, second):
    """The bits of the largest norm so far, and those of the smallest that is not 0, minus 1.

    Bits order as norms do, and impossible norms are above all others. For 0, minus 1 is the largest.
    """
    bits, others = first.to(tl.uint32, bitcast=True), second.to(tl.uint32, bitcast=True)
    most = tl.maximum(tl.maximum(most, bits), others)
    return most, tl.minimum(tl.minimum(least, bits - 1), others - 1)


@triton.jit
def scales_exactly(factor):
    """Whether scaling a sum gives the bits of scaling each value, if all norms are ordinary or 0.

    A power of two changes exponents alone, unless something overflows or is rounded to a subnormal
    number. Even levels are 1/127 or more, so values with norms of 2^-96 or more are multiples of
    2^-126. Scaled by 2^-20 or more, all sums are multiples of 2^-146, which a float32 can be.
    """
    bits = factor.to(tl.int32, bitcast=True)
    return ((bits & 0x7FFFFF) == 0) & (factor >= 2.0**-20) & (factor <= 1.0)


@triton.jit
def sum_bodies(
    rows,
    step,
    count,
    bits,
    begin,
    left,
    factor,
    NORM: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    SCALES: tl.constexpr,
):
    """(sum of a tile, whether codes are impossible, whether norms are, whether they are not ordinary).

    The sum is still to be multiplied unless this ``SCALES`` each value. Two bodies are read before the
    first is added, or a program would wait for each.
    """
    total = tl.zeros((8, TILE // 8), tl.float32)
    place, kept, last = groups_of(left, bits, TILE // 8, WIDE)
    base, number = blocks_of(begin, left, BLOCK, TILE)
    wrong, most = kept * 0, tl.zeros((TILE // 8,), tl.uint32)
    least = most - 1
    for body in range(0, count, 2):
        row, other = rows + body * step, rows + tl.minimum(body + 1, count - 1) * step
        words, first, second = loaded(row, bits, begin, place, last, base, number, NORM, TILE, WIDE)
        others, third, fourth = loaded(other, bits, begin, place, last, base, number, NORM, TILE, WIDE)
        if not EVEN:  # else what is above the codes changes neither these nor what is found wrong
            words, others = words & kept, others & kept
        values = values_of(row, words, first, second, bits, NORM, EVEN, WIDE)
        total += factor * values if SCALES else values
        wrong |= impossible_codes(row, words, bits, EVEN, WIDE)
        most, least = norm_range(most, least, first, second)
        if body + 1 < count:
            values = values_of(other, others, third, fourth, bits, NORM, EVEN, WIDE)
            total += factor * values if SCALES else values
            wrong |= impossible_codes(other, others, bits, EVEN, WIDE)
            most, least = norm_range(most, least, third, fourth)
    codes = top_bits(wrong & kept, bits) > 0
    norms = (most >= INF).to(tl.int32)
    unusual = ((most > MOST) | (least < LEAST - 1)).to(tl.int32)
    return total, tl.max(codes.to(tl.int32), 0) > 0, tl.max(norms, 0) > 0, tl.max(unusual, 0) > 0


@triton.jit
def sum_alike(
    rows,
    step,
    count,
    bits,
    begin,
    left,
    numel,
    factor,
    NORM: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """(sum of a tile of layers with codes of the same size, whether one is damaged)."""
    total, damaged = tl.zeros((8, TILE // 8), tl.float32), bits < 0
    careful = not (EVEN and scales_exactly(factor))
    if not careful:
        total, damaged, _, careful = sum_bodies(
            rows, step, count, bits, begin, left, factor, NORM, EVEN, BLOCK, TILE, WIDE, False
        )
        total *= factor
    if careful:
        total, codes, norms, _ = sum_bodies(
            rows, step, count, bits, begin, left, factor, NORM, EVEN, BLOCK, TILE, WIDE, True
        )
        damaged = codes | norms
    if begin + TILE >= numel:
        damaged = damaged | any_bits_after(rows, step, count, bits, numel)
    return total, damaged


@entry
def add_alike(
    numels,
    tile_layers,
    first_tiles,
    places,
    outs,
    alike,
    layers,
    count,
    scale,
    NORM: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """As :func:`add_decoded` writes a sum, of layers whose codes have the same size in all bodies."""
    tile = tl.program_id(0)
    layer = tl.load(tile_layers + tile)
    bits = tl.load(alike + layer).to(tl.int32)
    if bits > 0:
        factor = load_scale(scale)
        numel, begin, left = part_of(numels, first_tiles, layer, tile, TILE)
        rows = places + layer * PLACES
        step = layers * PLACES
        if bits > 4:
            total, damaged = sum_alike(
                rows, step, count, bits, begin, left, numel, factor, NORM, EVEN, BLOCK, TILE, True
            )
        else:
            total, damaged = sum_alike(
                rows, step, count, bits, begin, left, numel, factor, NORM, EVEN, BLOCK, TILE, False
            )
        tl.store(rows + 5, 1, mask=damaged)
        i = tl.arange(0, TILE)
        out = tl.load(outs + layer).to(tl.pointer_type(tl.float32)) + begin + i
        tl.store(out, tl.reshape(tl.trans(total), (TILE,)), mask=i < left)


@triton.jit
def decoded_total(
    places,
    layer,
    layers,
    count,
    begin,
    left,
    numel,
    factor,
    ADDS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The sum of a tile of a layer, ``[8, groups]``; where it will not be added, damage is marked.

    A thread has whole groups of eight codes, so that a word is read once for all of them.
    """
    # minus zero, which a literal would not be, changes nothing that it is added to
    start = -2147483648 if ADDS else 0
    total = tl.full((8, TILE // 8), start, tl.int32).to(tl.float32, bitcast=True)
    for number in range(count):
        row = places + (number * layers + layer) * PLACES
        bits, wrong = tl.load(row + 3).to(tl.int32), tl.load(row + 5)
        if bits == NONFINITE:
            total = tl.full((8, TILE // 8), float("nan"), tl.float32)
        elif wrong == 0:
            alphabet = tl.load(row + 4).to(tl.int32)
            values, top, worst = decode_tile(row, bits, alphabet, begin, left, NORM, BLOCK, TILE)
            total = total + factor * values
            if not ADDS:
                damaged = is_damaged(row, bits, alphabet, top, worst, begin, numel, TILE)
                tl.store(row + 5, 1, mask=damaged)
    return total


@entry
def add_decoded(
    numels,
    tile_layers,
    first_tiles,
    places,
    outs,
    alike,
    first_wrong,
    tiles,
    layers,
    count,
    scale,
    ADDS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add ``scale``, which is its bits, times what the bodies hold, one after the other; or write that.

    Where it adds, there is one body, and layers from ``first_wrong`` on are left alone; where it
    writes, layers that are ``alike`` are. A layer that is marked in a body becomes NaN.
    """
    factor = load_scale(scale)
    last_tile = tiles + 0
    if not ADDS:
        last_tile *= tl.load(alike + layers).to(tl.int32)
    for tile in range(tl.program_id(0), last_tile, tl.num_programs(0)):
        layer = tl.load(tile_layers + tile)
        last = layers + 0
        if ADDS:
            last = tl.load(first_wrong).to(tl.int32)
        elif tl.load(alike + layer) > 0:
            last = layer * 0
        if layer < last:
            numel, begin, left = part_of(numels, first_tiles, layer, tile, TILE)
            total = decoded_total(
                places, layer, layers, count, begin, left, numel, factor, ADDS, NORM, BLOCK, TILE
            )
            i = tl.arange(0, TILE)
            out = tl.load(outs + layer).to(tl.pointer_type(tl.float32)) + begin + i
            added = tl.reshape(tl.trans(total), (TILE,))
            if ADDS:
                added = tl.load(out, mask=i < left, other=0.0) + added
            tl.store(out, added, mask=i < left)
