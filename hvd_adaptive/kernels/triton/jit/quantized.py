"""Quantized layers: add, measure, round, pack.

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
    load_gradient,
    magnitude_bits,
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
