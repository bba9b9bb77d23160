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
TAG = tl.constexpr(0x4B000000)
"""Makes 8388608 and a code of its bits, as a float32."""


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
def loaded(
    row,
    bits,
    begin,
    left,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """(the bits of each group of eight codes, both of its norms) of a tile.

    ``[groups]``; the norms are numbers where the tile lies in one block.
    """
    g = tl.arange(0, TILE // 8)
    base = begin // BLOCK
    words = packed_words(tl.load(row + 1), begin // 8, g, left, bits, WIDE)
    if BLOCK % TILE == 0:
        first, second = load_norms(tl.load(row), base, left > 0, NORM)
    else:
        block = base + ((begin - base * BLOCK).to(tl.int32) + 8 * g) // BLOCK
        first, second = load_norms(tl.load(row), block, 8 * g < left, NORM)
    return words, first, second


@triton.jit
def even_steps(bits):
    """(the middle code as a float32 that codes are, parts of a level) of codes of at least two bits.

    Levels are ``a / top`` for whole numbers ``a``, as float32. ``a / (top + 1)`` is exact, and what is
    left of ``a / top`` is so small that the sum is rounded as the quotient is; a quotient, or a look-up
    in a table, would take longer.
    """
    top = tl.maximum(((bits * 0 + 1) << (bits - 1)) - 1, 1)  # of one bit it is not asked for
    wide = top.to(tl.float32)
    share = tl.div_rn(wide * 0.0 + 1.0, wide + 1.0)
    return (8388608 + top).to(tl.float32), share, tl.div_rn(wide * 0.0 + 1.0, wide) * share


@triton.jit
def values_of(
    wrong,
    row,
    words,
    first,
    second,
    bits,
    middle,
    share,
    rest,
    NORM: tl.constexpr,
    ALONE: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """(values, ``[8, groups]``; of each group whether it is damaged, or ``wrong`` before)."""
    codes = unpacked(words, bits, WIDE)
    alphabet = tl.load(row + 4).to(tl.int32)
    if EVEN:
        codes = codes | TAG
        alphabet = alphabet | TAG
    norms, others = first, second
    if not ALONE:
        norms, others = first[None, :], second[None, :]
    if NORM == SIDES:
        values = tl.where(codes > 0, others, -norms)
    elif EVEN:
        number = codes.to(tl.float32, bitcast=True) - middle
        values = (number * share + number * rest) * norms
    else:
        levels = tl.load(row + 2).to(tl.pointer_type(tl.float32))
        values = tl.load(levels + codes) * norms
    impossible = worse_of(first, second) >= INF
    wrong = wrong | ((tl.max(codes, 0) >= alphabet) | impossible).to(tl.int32)
    return values, wrong


@triton.jit
def any_bits_after(rows, step, count, bits, numel):
    """Whether there are bits after the last code of a layer in one of so many bodies."""
    found = bits < 0
    for number in range(count):
        found = found | bits_after(tl.load(rows + number * step + 1), bits, bits * 0, numel)
    return found


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
    """(sum of a tile of layers with codes of the same size, whether one is damaged).

    Two bodies are read before the first is added, and zeros if there is no second one: or a program
    would wait for each.
    """
    total = tl.zeros((8, TILE // 8), tl.float32)
    wrong = tl.zeros((TILE // 8,), tl.int32)
    middle, share, rest = even_steps(bits)
    ALONE: tl.constexpr = BLOCK % TILE == 0
    for number in range(0, count, 2):
        row = rows + number * step
        other = rows + tl.minimum(number + 1, count - 1) * step
        more = tl.where(number + 1 < count, left, 0)
        words, first, second = loaded(row, bits, begin, left, NORM, BLOCK, TILE, WIDE)
        others, third, fourth = loaded(other, bits, begin, more, NORM, BLOCK, TILE, WIDE)
        values, wrong = values_of(
            wrong, row, words, first, second, bits, middle, share, rest, NORM, ALONE, EVEN, WIDE
        )
        total = total + factor * values
        values, wrong = values_of(
            wrong, other, others, third, fourth, bits, middle, share, rest, NORM, ALONE, EVEN, WIDE
        )
        total = total + factor * values
    damaged = tl.max(wrong, 0) > 0
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
