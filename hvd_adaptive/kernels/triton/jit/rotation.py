"""Randomized Hadamard rotation: a program has ``ROWS`` chunks of ``2^LOG`` elements of one layer."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from hvd_adaptive.kernels.rotation import LARGEST_BACK as _LARGEST_BACK
from hvd_adaptive.kernels.rotation import LARGEST_ROTATED as _LARGEST_ROTATED
from hvd_adaptive.kernels.triton.jit.arithmetic import (
    entry,
    load_gradient,
    magnitude_bits,
    random_words,
)

LARGEST_BACK = tl.constexpr(_LARGEST_BACK)
LARGEST_ROTATED = tl.constexpr(_LARGEST_ROTATED)


@triton.jit
def load_layer(addresses, layer, e, mask):
    """(where elements of a layer are, what they hold)."""
    place = tl.load(addresses + layer).to(tl.pointer_type(tl.float32)) + e
    return place, tl.load(place, mask=mask, other=0.0)


@entry
def find_largest(
    layers, grads, numels, tile_layers, first_tiles, tops, GRADS: tl.constexpr, SIZE: tl.constexpr
):
    """The bits of each layer's largest magnitude, its gradient added."""
    tile = tl.program_id(0)
    layer = tl.load(tile_layers + tile)
    e = (tile - tl.load(first_tiles + layer)) * SIZE + tl.arange(0, SIZE)
    mask = e < tl.load(numels + layer)
    _, total = load_layer(layers, layer, e, mask)
    if GRADS:
        total = total + load_gradient(tl.load(grads + layer), 0, e, mask, GRADS)
    tl.atomic_max(tops + layer, tl.max(magnitude_bits(total), 0), sem="relaxed")


@triton.jit
def butterflies(rows, ROWS: tl.constexpr, LOG: tl.constexpr):
    """Each row times the Hadamard matrix, over the square root of its length."""
    for step in tl.static_range(LOG):
        pairs = tl.reshape(rows, ((ROWS << LOG) >> (step + 1), 2, 1 << step))
        low, high = tl.split(tl.permute(pairs, (0, 2, 1)))
        rows = tl.permute(tl.join(low + high, low - high), (0, 2, 1))
    return tl.reshape(rows, (ROWS, 1 << LOG)) * (1.0 / (1 << (LOG // 2)))


@entry
def rotate(
    layers,
    others,
    tile_layers,
    first_tiles,
    firsts,
    counts,
    tops,
    key,
    BACK: tl.constexpr,
    OTHERS: tl.constexpr,
    ROWS: tl.constexpr,
    LOG: tl.constexpr,
):
    """Rotate layers that are not too large, gradients added; or back, in place or added to others."""
    tile = tl.program_id(0)
    layer = tl.load(tile_layers + tile)
    row = (tile - tl.load(first_tiles + layer)) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 1 << LOG)
    e = tl.load(firsts + layer) + (row[:, None] << LOG) + column[None, :]
    mask = (row < tl.load(counts + layer))[:, None] & (column >= 0)[None, :]
    words = random_words(column, tl.load(key), tl.load(key + 1))
    signs = 1.0 - 2.0 * (words >> 31).to(tl.float32)[None, :]
    place, rows = load_layer(layers, layer, e, mask)
    if BACK:
        rows = tl.where(rows > LARGEST_BACK, LARGEST_BACK, rows)
        rows = tl.where(rows < -LARGEST_BACK, -LARGEST_BACK, rows)
        back = butterflies(rows, ROWS, LOG) * signs
        if OTHERS:
            place, other = load_layer(others, layer, e, mask)
            back = other + back
        tl.store(place, back, mask=mask)
    else:
        top = tl.load(tops + layer).to(tl.float32, bitcast=True)
        if top <= LARGEST_ROTATED:
            if OTHERS:
                rows = rows + load_gradient(tl.load(others + layer), 0, e, mask, OTHERS)
            tl.store(place, butterflies(rows * signs, ROWS, LOG), mask=mask)
