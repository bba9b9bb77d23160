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
    load_codes,
    load_float,
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

FIELDS = tl.constexpr(10)
"""Columns of the table of layers."""
PLACES = tl.constexpr(4)
"""Columns of what :func:`walk` finds: first norm, first code, bits, what is wrong."""


@triton.jit
def places_of(numel, tile, BLOCK: tl.constexpr, ROWS: tl.constexpr, LOG: tl.constexpr):
    """(block of each row, element of each place, which places there are) of a layer's tile."""
    block = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 1 << LOG)
    e = block[:, None] * BLOCK + column[None, :]
    return block, e, (column < BLOCK)[None, :] & (e < numel)


@triton.jit
def load_sum(x, row, offset, e, mask, GRADS: tl.constexpr):
    """What a layer holds, its gradient added; 0 elsewhere."""
    total = tl.load(x + offset + e, mask=mask, other=0.0)
    if GRADS:
        total = total + load_gradient(tl.load(row + 2), e, mask, GRADS)
    return total


@triton.jit
def find_nonfinite(
    x,
    table,
    tile_layers,
    bad,
    GRADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LOG: tl.constexpr,
):
    """Set ``bad`` of the layers whose sums hold a NaN or an Inf."""
    tile = tl.program_id(0)
    layer = tl.load(tile_layers + tile)
    row = table + layer * FIELDS
    offset, numel = tl.load(row), tl.load(row + 1)
    _, e, mask = places_of(numel, tile - tl.load(row + 9), BLOCK, ROWS, LOG)
    total = load_sum(x, row, offset, e, mask, GRADS)
    top = tl.max(tl.max(magnitude_bits(total), 1), 0)
    tl.store(bad + layer, 1, mask=top >= INF)


@triton.jit
def norms_of(rows, sizes, clip, NORM: tl.constexpr, ROWS: tl.constexpr, LOG: tl.constexpr):
    """The norms of each row; both are the same where a block has one."""
    wide = rows.to(tl.float64)
    if NORM == SIDES:
        below = tl.sum((rows < 0).to(tl.int32), 1)
        minus = halved_totals(tl.where(wide < 0, -wide, 0.0), ROWS, LOG)
        plus = halved_totals(tl.where(wide > 0, wide, 0.0), ROWS, LOG)
        first = (minus / tl.maximum(below, 1).to(tl.float64)).to(tl.float32)
        second = (plus / tl.maximum(sizes - below, 1).to(tl.float64)).to(tl.float32)
    else:
        top = tl.max(magnitude_bits(rows), 1)
        if NORM == L2:
            root = tl.sqrt(halved_totals(wide * wide, ROWS, LOG))
            first = tl.minimum(root, LARGEST_NORM).to(tl.float32)
        elif NORM == POWER:
            first = ((top + 0x7FFFFF) & INF).to(tl.float32, bitcast=True)
        elif NORM == CLIPPED:
            mean = halved_totals(wide * wide, ROWS, LOG) / tl.maximum(sizes, 1).to(tl.float64)
            limit = tl.minimum(clip * tl.sqrt(mean), LARGEST_NORM).to(tl.float32)
            first = tl.minimum(top.to(tl.float32, bitcast=True), limit)
        elif NORM == MEAN:
            total = halved_totals(tl.abs(wide), ROWS, LOG)
            first = (total / tl.maximum(sizes, 1).to(tl.float64)).to(tl.float32)
        else:
            first = top.to(tl.float32, bitcast=True)
        first = tl.minimum(first, LARGEST_NORM)
        second = first
    return first, second


@triton.jit
def shares_of(rows, norms):
    """Each row divided by its norm, in [-1, 1]."""
    divisor = tl.where(norms > 0, norms, 1.0)[:, None]
    shares = tl.div_rn(rows, tl.broadcast_to(divisor, rows.shape))
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
    else:
        top = (count - 1) // 2
        if (ROUNDING == UNIFORM) & (top > 0):
            scaled = shares * top.to(tl.float32)
            whole = scaled.to(tl.int32)  # towards zero: the library's floor flushes denormals
            whole = tl.where(whole.to(tl.float32) > scaled, whole - 1, whole)
            codes = whole + top + (random < scaled - whole.to(tl.float32)).to(tl.int32)
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


@entry
def quantize(
    x,
    table,
    tile_layers,
    bad,
    starts,
    levels,
    body,
    codes,
    energies,
    origin,
    clip,
    GRADS: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LOG: tl.constexpr,
):
    """Headers and norms of finite layers into ``body``, their codes as bytes, remainders into ``x``."""
    tile = tl.program_id(0)
    layer = tl.load(tile_layers + tile)
    row = table + layer * FIELDS
    offset, numel, bits = tl.load(row), tl.load(row + 1), tl.load(row + 7).to(tl.int32)
    start, first_tile = tl.load(starts + layer), tl.load(row + 9)
    marked = tl.load(bad + layer) != 0
    header = tl.where(marked, NONFINITE, bits).to(tl.uint8)
    tl.store(body + start, header, mask=tile == first_tile)
    if not marked:
        block, e, mask = places_of(numel, tile - first_tile, BLOCK, ROWS, LOG)
        rows = load_sum(x, row, offset, e, mask, GRADS)
        sizes = tl.minimum(tl.maximum(numel - block * BLOCK, 0), BLOCK).to(tl.int32)
        first, second = norms_of(rows, sizes, clip, NORM, ROWS, LOG)
        place = body + start + 1
        exists = sizes > 0
        if NORM == SIDES:
            store_float(place + 8 * block, first, exists)
            store_float(place + 8 * block + 4, second, exists)
        else:
            store_float(place + 4 * block, first, exists)
        words = random_words(e, tl.load(row + 3), tl.load(row + 4))
        words = (words ^ tl.load(row + 6).to(tl.uint32)) + tl.load(row + 5).to(tl.uint32)
        random = (words >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
        own = levels + bits * LEVELS
        count = tl.load(row + 8).to(tl.int32)
        found = rounded(rows, shares_of(rows, first), random, own, count, ROUNDING)
        values = decoded(found, first, second, own, mask, NORM)
        tl.store(x + offset + e, rows - values, mask=mask)
        tl.store(codes + (offset - origin) + e, found.to(tl.uint8), mask=mask)
        wide = rows.to(tl.float64)
        sent = tl.where(mask, values, 0.0).to(tl.float64)
        tl.store(energies + 2 * tile, tl.sum(tl.sum(wide * wide, 1), 0))
        tl.store(energies + 2 * tile + 1, tl.sum(tl.sum(sent * sent, 1), 0))


@entry
def pack(
    table, tile_layers, first_tiles, bad, starts, body, codes, norm_bytes, origin, SIZE: tl.constexpr
):
    """Codes, a byte each, at their true width: a program writes ``SIZE`` bytes."""
    tile = tl.program_id(0)
    layer = tl.load(tile_layers + tile)
    row = table + layer * FIELDS
    numel, bits = tl.load(row + 1), tl.load(row + 7).to(tl.int32)
    count = tl.load(row + 8)
    byte = (tile - tl.load(first_tiles + layer)) * SIZE + tl.arange(0, SIZE).to(tl.int64)
    source = codes + (tl.load(row) - origin)
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
    place = body + tl.load(starts + layer) + 1 + tl.load(norm_bytes + layer)
    # the interpreter cannot combine a comparison of scalars with one of tiles
    end = tl.where(tl.load(bad + layer) == 0, size, 0)
    tl.store(place + byte, (word & 255).to(tl.uint8), mask=byte < end)


# --- decoding ------------------------------------------------------------------------------------


@entry
def walk(bodies, alphabets, numels, norm_bytes, places, layers):
    """Where the layers of each body lie; after the first damaged one all are."""
    number = tl.program_id(0)
    data = tl.load(bodies + 3 * number).to(tl.pointer_type(tl.uint8))
    position, size = tl.load(bodies + 3 * number + 1), tl.load(bodies + 3 * number + 2)
    alphabets += number * 9
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
        tl.store(row, norms)
        tl.store(row + 1, codes)
        tl.store(row + 2, bits.to(tl.int64))
        tl.store(row + 3, wrong.to(tl.int64))
    # a row of its own says whether bytes are left over
    row = places + (tl.num_programs(0) * layers + number) * PLACES
    tl.store(row, (position != size).to(tl.int64))


@entry
def find_damage(
    bodies,
    alphabets,
    numels,
    tile_layers,
    first_tiles,
    places,
    layers,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LOG: tl.constexpr,
):
    """Mark the layers that hold an impossible norm, code or padding."""
    tile, number = tl.program_id(0), tl.program_id(1)
    layer = tl.load(tile_layers + tile)
    row = places + (number * layers + layer) * PLACES
    bits = tl.load(row + 2).to(tl.int32)
    if (tl.load(row + 3) == 0) & (bits != NONFINITE):
        data = tl.load(bodies + 3 * number).to(tl.pointer_type(tl.uint8))
        numel = tl.load(numels + layer)
        block, e, mask = places_of(numel, tile - tl.load(first_tiles + layer), BLOCK, ROWS, LOG)
        norms, exists = data + tl.load(row), block * BLOCK < numel
        top = tl.zeros((ROWS,), tl.uint32)
        for each in tl.static_range(NORMS):
            norm = load_float(norms + 4 * (NORMS * block + each), exists)
            top = tl.maximum(top, norm.to(tl.uint32, bitcast=True))
        damaged = tl.max(top, 0) >= INF  # so are negative ones, by their upper bit
        codes = data + tl.load(row + 1)
        count = tl.load(alphabets + number * 9 + bits).to(tl.int32)
        found = load_codes(codes, e, bits, count, mask)
        damaged = damaged | (tl.max(tl.max(tl.where(mask, found, 0), 1), 0) >= count)
        if count == 3:
            rest, last = (numel % 5).to(tl.int32), numel // 5
            byte = tl.load(codes + last, mask=rest > 0, other=0).to(tl.int32)
            damaged = damaged | (byte // power_of_three(rest) > 0)
        else:
            rest, last = (numel * bits & 7).to(tl.int32), numel * bits >> 3
            byte = tl.load(codes + last, mask=rest > 0, other=0).to(tl.int32)
            damaged = damaged | ((byte >> rest) > 0)
        tl.store(row + 3, 1, mask=damaged)


@entry
def add_decoded(
    bodies,
    alphabets,
    levels,
    numels,
    tile_layers,
    first_tiles,
    places,
    outs,
    first_wrong,
    layers,
    count,
    scale,
    ADDS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LOG: tl.constexpr,
):
    """Add ``scale`` times what the bodies hold, one after the other; or write the sum, of zeros on.

    Layers from ``first_wrong`` on are left alone. One that is marked in a body becomes NaN.
    """
    tile = tl.program_id(0)
    layer = tl.load(tile_layers + tile)
    if layer < tl.load(first_wrong):
        numel = tl.load(numels + layer)
        block, e, mask = places_of(numel, tile - tl.load(first_tiles + layer), BLOCK, ROWS, LOG)
        exists = block * BLOCK < numel
        out = tl.load(outs + layer).to(tl.pointer_type(tl.float32)) + e
        if ADDS:
            total = tl.load(out, mask=mask, other=0.0)
        else:
            total = tl.zeros((ROWS, 1 << LOG), tl.float32)
        for number in range(count):
            row = places + (number * layers + layer) * PLACES
            bits = tl.load(row + 2).to(tl.int32)
            if bits == NONFINITE:
                total = tl.full((ROWS, 1 << LOG), float("nan"), tl.float32)
            else:
                data = tl.load(bodies + 3 * number).to(tl.pointer_type(tl.uint8))
                norms = data + tl.load(row)
                if NORM == SIDES:
                    first = load_float(norms + 8 * block, exists)
                    second = load_float(norms + 8 * block + 4, exists)
                else:
                    first = load_float(norms + 4 * block, exists)
                    second = first
                alphabet = tl.load(alphabets + number * 9 + bits).to(tl.int32)
                codes = load_codes(data + tl.load(row + 1), e, bits, alphabet, mask)
                own = levels + (number * 9 + bits) * LEVELS
                total = total + scale * decoded(codes, first, second, own, mask, NORM)
        tl.store(out, total, mask=mask)


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
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LOG: tl.constexpr,
):
    """The histogram of ``|x| / norm``, and the squared error of what is above its norm."""
    tile = tl.program_id(0)
    block, e, mask = places_of(numel, tile, BLOCK, ROWS, LOG)
    rows = tl.load(x + e, mask=mask, other=0.0)
    sizes = tl.minimum(tl.maximum(numel - block * BLOCK, 0), BLOCK).to(tl.int32)
    norms, _ = norms_of(rows, sizes, clip, NORM, ROWS, LOG)
    shares = magnitude_bits(shares_of(rows, norms)) >> WEIGHT_SHIFT
    wide = norms.to(tl.float64)
    if SQUARED:
        worth = wide * wide
    else:
        worth = tl.full((ROWS,), 1.0, tl.float64)
    worth = tl.broadcast_to(worth[:, None], rows.shape)
    tl.atomic_add(weights + shares, worth, mask=mask, sem="relaxed")
    over = tl.abs(rows).to(tl.float64) - wide[:, None]
    over = tl.where(mask & (over > 0), over, 0.0)
    tl.store(beyond + tile, tl.sum(tl.sum(over * over, 1), 0))
