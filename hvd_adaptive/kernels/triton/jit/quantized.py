"""Quantized layers: add, measure, round, pack; and check, decode, add.

A program has a *tile*: ``ROWS`` blocks of a layer, each padded to ``2^LOG`` elements. Rows of the table
of layers are described in :mod:`hvd_adaptive.kernels.triton.quantized`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from hvd_adaptive.kernels.quantization import LARGEST_BF16 as _LARGEST_BF16
from hvd_adaptive.kernels.quantization import LARGEST_NORM as _LARGEST_NORM
from hvd_adaptive.kernels.quantization import NAN_BF16 as _NAN_BF16
from hvd_adaptive.kernels.quantization import WEIGHT_SHIFT as _WEIGHT_SHIFT
from hvd_adaptive.kernels.triton.jit.arithmetic import (
    INF,
    entry,
    halved_totals,
    load_digits,
    load_gradient,
    magnitude_bits,
    power_of_three,
    random_words,
    store_float,
)
from hvd_adaptive.wire.quantized import LEVELS as _LEVELS
from hvd_adaptive.wire.quantized import NONFINITE as _NONFINITE
from hvd_adaptive.wire.quantized import Norm, Rounding

LARGEST_BF16 = tl.constexpr(_LARGEST_BF16)
LARGEST_NORM = tl.constexpr(_LARGEST_NORM)
NAN_BF16 = tl.constexpr(_NAN_BF16)
WEIGHT_SHIFT = tl.constexpr(_WEIGHT_SHIFT)
LEVELS = tl.constexpr(_LEVELS)
NONFINITE = tl.constexpr(_NONFINITE)

L2 = tl.constexpr(int(Norm.l2))
POWER = tl.constexpr(int(Norm.power))
CLIPPED = tl.constexpr(int(Norm.clipped))
MEAN = tl.constexpr(int(Norm.mean))
SIDES = tl.constexpr(int(Norm.sides))
UNIFORM = tl.constexpr(int(Rounding.uniform))
SIGN = tl.constexpr(int(Rounding.sign))

FIELDS = tl.constexpr(14)
"""Columns of the table of layers."""
BODY_FIELDS = tl.constexpr(5)
"""Columns of the table of bodies: address, first byte, bytes, addresses of levels and of alphabets."""
PLACES = tl.constexpr(6)
"""Columns of what :func:`walk` finds.

Addresses of the first norm, the first code and the levels; bits, how many levels, what is wrong.
"""
TAG = tl.constexpr(0x4B000000)
"""Makes 8388608 and a code of its bits, as a float32."""
SMALLEST = tl.constexpr(1.1754943508222875e-38)
"""The least float32 that has all its bits: 2^-126."""


@triton.jit
def places_of(numel, tile, BLOCK: tl.constexpr, ROWS: tl.constexpr, LOG: tl.constexpr):
    """(block of each row, first element, places from there on, which of them there are) of a tile."""
    rows = tl.arange(0, ROWS)
    first = tile.to(tl.int64) * (ROWS * BLOCK)
    column = tl.arange(0, 1 << LOG)
    i = rows[:, None] * BLOCK + column[None, :]
    # a tile has at most 2^16 elements
    left = tl.minimum(numel - first, ROWS * BLOCK).to(tl.int32)
    return tile.to(tl.int64) * ROWS + rows, first, i, (column < BLOCK)[None, :] & (i < left)


@triton.jit
def load_sum(row, first, i, mask, GRADS: tl.constexpr):
    """What a layer holds, its gradient added; 0 elsewhere. Whether all of it is finite."""
    x = tl.load(row).to(tl.pointer_type(tl.float32))
    total = tl.load(x + first + i, mask=mask, other=0.0)
    if GRADS:
        total = total + load_gradient(tl.load(row + 2), first, i, mask, GRADS)
    finite = tl.max(tl.max(magnitude_bits(total), 1), 0) < INF
    return tl.where(finite, total, 0.0), finite


@triton.jit
def norm_of(total, sizes, top, clip, NORM: tl.constexpr):
    """The norm that a sum over a row makes; it never falls where the sum rises."""
    if NORM == L2:
        norm = tl.minimum(tl.sqrt(total), LARGEST_NORM).to(tl.float32)
    elif NORM == CLIPPED:
        mean = total / tl.maximum(sizes, 1).to(tl.float64)
        limit = tl.minimum(clip * tl.sqrt(mean), LARGEST_NORM).to(tl.float32)
        norm = tl.minimum(top.to(tl.float32, bitcast=True), limit)
    else:
        norm = (total / tl.maximum(sizes, 1).to(tl.float64)).to(tl.float32)
    return norm


@triton.jit
def summed_norm(parts, sizes, top, clip, NORM: tl.constexpr, ROWS: tl.constexpr, LOG: tl.constexpr):
    """The norm of the sum of each row, float64 and not negative, in the order that the format fixes.

    A sum in any order is off by so little that it seldom makes another float32; only where it may are
    the halves added up.
    """
    total = tl.sum(parts, 1)
    error = (1 << LOG) * 2.3e-16  # twice what a rounding is off, for each element
    norm = norm_of(total * (1.0 - error), sizes, top, clip, NORM)
    other = norm_of(total * (1.0 + error), sizes, top, clip, NORM)
    if tl.max((norm != other).to(tl.int32), 0) > 0:
        norm = norm_of(halved_totals(parts, ROWS, LOG), sizes, top, clip, NORM)
    return norm


@triton.jit
def norms_of(rows, sizes, clip, NORM: tl.constexpr, ROWS: tl.constexpr, LOG: tl.constexpr):
    """The norms of each row; both are the same where a block has one."""
    wide = rows.to(tl.float64)
    top = tl.max(magnitude_bits(rows), 1)
    if NORM == SIDES:
        below = tl.sum((rows < 0).to(tl.int32), 1)
        minus, plus = tl.where(wide < 0, -wide, 0.0), tl.where(wide > 0, wide, 0.0)
        first = summed_norm(minus, below, top, clip, MEAN, ROWS, LOG)
        second = summed_norm(plus, sizes - below, top, clip, MEAN, ROWS, LOG)
    else:
        if (NORM == L2) | (NORM == CLIPPED):
            first = summed_norm(wide * wide, sizes, top, clip, NORM, ROWS, LOG)
        elif NORM == MEAN:
            first = summed_norm(tl.abs(wide), sizes, top, clip, NORM, ROWS, LOG)
        elif NORM == POWER:
            first = ((top + 0x7FFFFF) & INF).to(tl.float32, bitcast=True)
        else:
            first = top.to(tl.float32, bitcast=True)
        first = tl.minimum(first, LARGEST_NORM)
        second = first
    return first, second


@triton.jit
def shares_of(rows, norms):
    """Each row divided by its norm, in [-1, 1].

    A quotient of two float32 is so far from the middle of two others that a float64 that is almost the
    quotient rounds to it, unless it has lost bits; then the division is the slow one.
    """
    divisor = tl.where(norms > 0, norms, 1.0)
    inverse = 1.0 / divisor.to(tl.float64)
    shares = (rows.to(tl.float64) * inverse[:, None]).to(tl.float32)
    tiny = (tl.abs(shares) < SMALLEST) & (rows != 0)
    if tl.max(tl.max(tiny.to(tl.int32), 1), 0) > 0:
        shares = tl.div_rn(rows, tl.broadcast_to(divisor[:, None], rows.shape))
    return tl.minimum(tl.maximum(shares, -1.0), 1.0)


@triton.jit
def lower_levels(levels, count, shares):
    """Of each share the level below it, as a number; the last but one at most."""
    found = tl.zeros_like(shares).to(tl.int32)
    for step in tl.static_range(8):
        tried = found + (128 >> step)
        level = tl.load(levels + tried - 1, mask=tried <= count, other=2.0)
        found = tl.where(level <= shares, tried, found)
    return tl.minimum(tl.maximum(found - 1, 0), count - 2)


@triton.jit
def rounded(rows, shares, random, levels, count, ROUNDING: tl.constexpr):
    """The codes: one of the two levels around a share, so that the expectation is the share."""
    if ROUNDING == SIGN:
        codes = (rows >= 0).to(tl.int32)
    elif ROUNDING == UNIFORM:
        # one bit has no zero: its levels are -1 and 1
        top = (count - 1) // 2
        scaled = tl.where(top > 0, shares * top.to(tl.float32), (shares + 1.0) * 0.5)
        # the nearest whole number without a conversion, which takes eight times as long as a sum
        shifted = scaled + 12582912.0
        nearest = shifted - 12582912.0
        above = nearest > scaled
        part = scaled - tl.where(above, nearest - 1.0, nearest)
        whole = shifted.to(tl.int32, bitcast=True) - 0x4B400000 - above.to(tl.int32)
        codes = whole + top + (random < part).to(tl.int32)
    else:
        lower = lower_levels(levels, count, shares)
        first, second = tl.load(levels + lower), tl.load(levels + lower + 1)
        part = tl.div_rn(shares - first, second - first)
        codes = lower + (random < part).to(tl.int32)
    return codes


@triton.jit
def decoded(codes, first, second, levels, mask, NORM: tl.constexpr):
    """What the codes of rows decode to."""
    if NORM == SIDES:
        values = tl.where(codes > 0, second[:, None], -first[:, None])
    else:
        values = tl.load(levels + codes, mask=mask, other=0.0) * first[:, None]
    return values


@triton.jit
def store_packed(place, first, codes, bits, numel, SIZE: tl.constexpr):
    """The codes of a tile at their width; ``first`` is a multiple of 8, so 8 codes are whole bytes.

    Args:
        place: of the layer's first code.
        first: number of the tile's first code.
        codes: of any shape; 0 where there is none.
        bits: of a code.
        numel: codes of the layer.
        SIZE: of the tile.
    """
    j = tl.arange(0, 8)
    groups = tl.reshape(codes, (SIZE // 8, 8))
    if bits <= 4:
        words = tl.sum(groups << (bits * j)[None, :], 1).to(tl.uint32).to(tl.int64)
    else:
        words = tl.sum(groups.to(tl.int64) << (bits * j)[None, :], 1)
    byte = tl.arange(0, SIZE // 8)[:, None] * bits + j[None, :]
    done = first * bits >> 3
    left = tl.minimum((numel * bits + 7 >> 3) - done, SIZE).to(tl.int32)
    there = (j[None, :] < bits) & (byte < left)
    tl.store(place + done + byte, ((words[:, None] >> (8 * j)[None, :]) & 255).to(tl.uint8), mask=there)


@triton.jit
def store_norms(place, block, first, second, exists, NORM: tl.constexpr):
    """The norms of blocks, one or two of each."""
    if NORM == SIDES:
        store_float(place + 8 * block, first, exists)
        store_float(place + 8 * block + 4, second, exists)
    else:
        store_float(place + 4 * block, first, exists)


@entry
def quantize(
    table,
    tile_layers,
    codes,
    energies,
    clip,
    GRADS: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDING: tl.constexpr,
    PACKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LOG: tl.constexpr,
):
    """Headers, norms and codes into the body, and what is left into its place.

    Codes go into the body where ``PACKS``, but for those of base 3; else into ``codes``, a byte each. A
    tile with a NaN or an Inf is left as it is: its codes are those of zeros, its energy is infinite.
    """
    tile = tl.program_id(0)
    layer = tl.load(tile_layers + tile)
    row = table + layer * FIELDS
    numel, bits = tl.load(row + 1), tl.load(row + 7).to(tl.int32)
    first_tile, body = tl.load(row + 9), tl.load(row + 10).to(tl.pointer_type(tl.uint8))
    tl.store(body, bits.to(tl.uint8), mask=tile == first_tile)
    block, begin, i, mask = places_of(numel, tile - first_tile, BLOCK, ROWS, LOG)
    rows, finite = load_sum(row, begin, i, mask, GRADS)
    sizes = tl.minimum(tl.maximum(numel - block * BLOCK, 0), BLOCK).to(tl.int32)
    first, second = norms_of(rows, sizes, clip, NORM, ROWS, LOG)
    store_norms(body + 1, block, first, second, sizes > 0, NORM)
    number = begin.to(tl.uint32) + i.to(tl.uint32)
    words = random_words(number, tl.load(row + 3), tl.load(row + 4))
    words = (words ^ tl.load(row + 6).to(tl.uint32)) + tl.load(row + 5).to(tl.uint32)
    random = (words >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    own = tl.load(row + 12).to(tl.pointer_type(tl.float32))
    count = tl.load(row + 8).to(tl.int32)
    found = rounded(rows, shares_of(rows, first), random, own, count, ROUNDING)
    values = decoded(found, first, second, own, mask, NORM)
    x = tl.load(row).to(tl.pointer_type(tl.float32)) + begin
    if finite:
        tl.store(x + i, rows - values, mask=mask)
    apart = count == 3
    if PACKS:
        if not apart:
            place = body + 1 + tl.load(row + 13)
            store_packed(place, begin, tl.where(mask, found, 0), bits, numel, ROWS * BLOCK)
    else:
        apart = count > 0
    if apart:
        tl.store(codes + (tl.load(row + 11) + begin) + i, found.to(tl.uint8), mask=mask)
    wide = rows.to(tl.float64)
    sent = tl.where(mask, values, 0.0).to(tl.float64)
    energy = tl.sum(tl.sum(wide * wide, 1), 0)
    tl.store(energies + 2 * tile, tl.where(finite, energy, float("inf")))
    tl.store(energies + 2 * tile + 1, tl.sum(tl.sum(sent * sent, 1), 0))


@entry
def pack(table, tile_layers, first_tiles, codes, SIZE: tl.constexpr):
    """Codes, a byte each, at their true width: a program writes ``SIZE`` bytes."""
    tile = tl.program_id(0)
    layer = tl.load(tile_layers + tile)
    row = table + layer * FIELDS
    numel, bits = tl.load(row + 1), tl.load(row + 7).to(tl.int32)
    count = tl.load(row + 8)
    byte = (tile - tl.load(first_tiles + layer)) * SIZE + tl.arange(0, SIZE).to(tl.int64)
    source = codes + tl.load(row + 11)
    word = tl.zeros((SIZE,), tl.int32)
    if count == 3:
        for digit in tl.static_range(5):
            e = byte * 5 + (4 - digit)
            word = word * 3 + tl.load(source + e, mask=e < numel, other=0).to(tl.int32)
        size = (numel + 4) // 5
    else:
        first = byte * 8 // bits
        for step in tl.static_range(8):
            e = first + step
            shift = (e * bits - byte * 8).to(tl.int32)
            code = tl.load(source + e, mask=(e < numel) & (shift < 8), other=0).to(tl.int32)
            word = word | tl.where(shift < 0, code >> (-shift & 7), code << (shift & 7))
        size = (numel * bits + 7) // 8
    place = (tl.load(row + 10) + 1 + tl.load(row + 13)).to(tl.pointer_type(tl.uint8))
    tl.store(place + byte, (word & 255).to(tl.uint8), mask=byte < size)


# --- decoding ------------------------------------------------------------------------------------


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
def worst_of(first, second):
    """The bits of norms that are impossible are the infinity's or more; as int32, which do not wrap."""
    top = tl.maximum(first.to(tl.uint32, bitcast=True), second.to(tl.uint32, bitcast=True))
    return tl.max(tl.minimum(top, INF).to(tl.int32), 0)


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
        worst = worst_of(first, second)
        first, second = first[None, :], second[None, :]
    else:
        block = base + (inside + e) // BLOCK
        first, second = load_norms(norms, block, e < left, NORM)
        worst = tl.max(worst_of(first, second), 0)
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
        numel, alphabet = tl.load(numels + layer), tl.load(row + 4).to(tl.int32)
        begin = (tile - tl.load(first_tiles + layer)) * TILE
        left = tl.minimum(numel - begin, TILE).to(tl.int32)
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
def added(
    total,
    wrong,
    row,
    words,
    first,
    second,
    bits,
    factor,
    middle,
    share,
    rest,
    NORM: tl.constexpr,
    ALONE: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """(``total`` and ``factor`` times values; of each group whether it is damaged)."""
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
    norm = tl.maximum(first.to(tl.uint32, bitcast=True), second.to(tl.uint32, bitcast=True))
    impossible = tl.minimum(norm, INF).to(tl.int32) >= INF
    wrong = wrong | ((tl.max(codes, 0) >= alphabet) | impossible).to(tl.int32)
    return total + factor * values, wrong


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

    Two bodies are read before the first is added, or a program would wait for each. Where there is no
    second one, zeros are added.
    """
    total = tl.zeros((8, TILE // 8), tl.float32)
    wrong = tl.zeros((TILE // 8,), tl.int32)
    middle, share, rest = even_steps(bits)
    for number in range(0, count, 2):
        row = rows + number * step
        other = rows + tl.minimum(number + 1, count - 1) * step
        more = tl.where(number + 1 < count, left, 0)
        words, first, second = loaded(row, bits, begin, left, NORM, BLOCK, TILE, WIDE)
        others, third, fourth = loaded(other, bits, begin, more, NORM, BLOCK, TILE, WIDE)
        total, wrong = added(
            total,
            wrong,
            row,
            words,
            first,
            second,
            bits,
            factor,
            middle,
            share,
            rest,
            NORM,
            BLOCK % TILE == 0,
            EVEN,
            WIDE,
        )
        total, wrong = added(
            total,
            wrong,
            other,
            others,
            third,
            fourth,
            bits,
            factor,
            middle,
            share,
            rest,
            NORM,
            BLOCK % TILE == 0,
            EVEN,
            WIDE,
        )
    damaged = tl.max(wrong, 0) > 0
    if begin + TILE >= numel:
        for number in range(count):
            row = rows + number * step
            damaged = damaged | bits_after(tl.load(row + 1), bits, bits * 0, numel)
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
        factor = tl.load(scale).to(tl.int32).to(tl.float32, bitcast=True)
        numel = tl.load(numels + layer)
        begin = (tile - tl.load(first_tiles + layer)) * TILE
        left = tl.minimum(numel - begin, TILE).to(tl.int32)
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
    factor = tl.load(scale).to(tl.int32).to(tl.float32, bitcast=True)
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
            numel = tl.load(numels + layer)
            begin = (tile - tl.load(first_tiles + layer)) * TILE
            left = tl.minimum(numel - begin, TILE).to(tl.int32)
            total = decoded_total(
                places, layer, layers, count, begin, left, numel, factor, ADDS, NORM, BLOCK, TILE
            )
            i = tl.arange(0, TILE)
            out = tl.load(outs + layer).to(tl.pointer_type(tl.float32)) + begin + i
            added = tl.reshape(tl.trans(total), (TILE,))
            if ADDS:
                added = tl.load(out, mask=i < left, other=0.0) + added
            tl.store(out, added, mask=i < left)


# --- others --------------------------------------------------------------------------------------


@entry
def round_to_bf16(out, x, numel, key, SIZE: tl.constexpr):
    """Random bits, added to the lower half, carry into the upper half that is kept."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = i < numel
    word = tl.load(x + i, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    noise = (random_words(i, tl.load(key), tl.load(key + 1)) >> 16).to(tl.int32)
    result = (tl.minimum(magnitude, LARGEST_BF16) + noise) >> 16
    result = tl.where(magnitude > INF, NAN_BF16, result)
    tl.store(out + i, (result | ((word >> 16) & -0x8000)).to(tl.int16), mask=mask)


@entry
def weigh_shares(
    x,
    numel,
    weights,
    beyond,
    clip,
    SQUARED: tl.constexpr,
    COPIES: tl.constexpr,
    BINS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LOG: tl.constexpr,
):
    """The histogram of ``|x| / norm``, and the squared error of what is above its norm."""
    tile = tl.program_id(0)
    block, begin, i, mask = places_of(numel, tile, BLOCK, ROWS, LOG)
    rows = tl.load(x + begin + i, mask=mask, other=0.0)
    sizes = tl.minimum(tl.maximum(numel - block * BLOCK, 0), BLOCK).to(tl.int32)
    norms, _ = norms_of(rows, sizes, clip, NORM, ROWS, LOG)
    shares = magnitude_bits(shares_of(rows, norms)) >> WEIGHT_SHIFT
    wide = norms.to(tl.float64)
    if SQUARED:
        worth = wide * wide
    else:
        worth = tl.full((ROWS,), 1.0, tl.float64)
    worth = tl.broadcast_to(worth[:, None], rows.shape)
    weights += tile % COPIES * BINS  # or all programs would wait for the same words
    tl.atomic_add(weights + shares, worth, mask=mask, sem="relaxed")
    over = tl.abs(rows).to(tl.float64) - wide[:, None]
    over = tl.where(mask & (over > 0), over, 0.0)
    tl.store(beyond + tile, tl.sum(tl.sum(over * over, 1), 0))
