"""Exactly the largest elements: a histogram of exponents, then of the bits below, of what is left.

A program has a *tile* of one segment, which is a part of a layer that goes to one receiver. Rows of the
table of segments are described in :mod:`hvd_adaptive.kernels.triton.selecting`. Candidates, all that
share the threshold's exponent or have a higher one, are written down in the tile's own part of
``places`` and ``sizes``, so that their order is that of their indices without a scan.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from hvd_adaptive.kernels.triton.jit.arithmetic import load_gradient, magnitude_bits

FIELDS = tl.constexpr(8)
"""Columns of the table of segments."""
BINS = tl.constexpr(256)
"""Of one histogram: exponents, or eight bits of the mantissa."""
EXPONENT = tl.constexpr(23)
PART = tl.constexpr(512)
"""Candidates that are looked at together."""


@triton.jit
def load_tile(x, row, tile, GRADS: tl.constexpr, TILE: tl.constexpr):
    """(element of each place, which places there are, what they hold with the gradient added)."""
    e = (tile - tl.load(row + 3)) * TILE + tl.arange(0, TILE)
    mask = e < tl.load(row + 1)
    total = tl.load(x + tl.load(row) + e, mask=mask, other=0.0)
    if GRADS:
        total = total + load_gradient(tl.load(row + 2), e, mask, GRADS)
    return e, mask, total


@triton.jit
def measure(
    x,
    table,
    tile_segments,
    floors,
    histograms,
    nonzeros,
    reaching,
    bad,
    energies,
    GRADS: tl.constexpr,
    TILE: tl.constexpr,
):
    """First pass: exponents, how many are not zero, how many reach the floor, and the energy."""
    tile = tl.program_id(0)
    row = table + tl.load(tile_segments + tile) * FIELDS
    _, mask, total = load_tile(x, row, tile, GRADS, TILE)
    span = tl.load(row + 5)
    size = magnitude_bits(total)  # 0 where there is no element
    counts = tl.histogram(size >> EXPONENT, BINS, mask=mask)
    bins = tl.arange(0, BINS)
    tl.atomic_add(histograms + span * BINS + bins, counts, mask=counts > 0, sem="relaxed")
    tl.atomic_add(nonzeros + span, tl.sum((size > 0).to(tl.int64), 0), sem="relaxed")
    reached = (size >= tl.load(floors + span).to(tl.int32)).to(tl.int64)
    tl.atomic_add(reaching + span, tl.sum(reached, 0), sem="relaxed")
    nonfinite = tl.max(size, 0) >> EXPONENT == 255
    tl.store(bad + tl.load(row + 4), 1, mask=nonfinite)
    wide = total.to(tl.float64)
    tl.store(energies + tile, tl.sum(wide * wide, 0))


@triton.jit
def choose(histograms, wanted, prefixes, BITS: tl.constexpr):
    """The bin of the element that is the last one wanted, and how many of that bin are.

    Clears the histogram for the next ones. Of nothing wanted the highest bin is chosen.
    """
    span = tl.program_id(0)
    bins = histograms + span * BINS + (BINS - 1 - tl.arange(0, BINS))
    counts = tl.load(bins)
    left = tl.load(wanted + span)
    above = tl.cumsum(counts, 0) < left  # the whole bin is wanted, and more
    number = BINS - 1 - tl.sum(above.to(tl.int32), 0)
    number = tl.minimum(number, (1 << BITS) - 1)
    left = left - tl.sum(tl.where(above, counts, 0).to(tl.int64), 0)
    tl.store(wanted + span, left)
    tl.store(prefixes + span, (tl.load(prefixes + span) << BITS) | number)
    tl.store(bins, tl.zeros((BINS,), tl.int32))


@triton.jit
def split(
    x,
    table,
    tile_segments,
    prefixes,
    bad,
    places,
    sizes,
    found,
    GRADS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Second pass: the sums into ``x``, and candidates into the tile's part of the lists."""
    tile = tl.program_id(0)
    row = table + tl.load(tile_segments + tile) * FIELDS
    if tl.load(bad + tl.load(row + 4)) == 0:
        e, mask, total = load_tile(x, row, tile, GRADS, TILE)
        if GRADS:
            tl.store(x + tl.load(row) + e, total, mask=mask)
        size = magnitude_bits(total)
        floor = tl.maximum(tl.load(prefixes + tl.load(row + 5)).to(tl.int32) << EXPONENT, 1)
        kept = size >= floor
        rank = tl.cumsum(kept.to(tl.int32), 0) - 1
        own = tile.to(tl.int64) * TILE
        tl.store(places + own + rank, e.to(tl.int32), mask=kept)
        tl.store(sizes + own + rank, size, mask=kept)
        tl.store(found + tile, tl.sum(kept.to(tl.int32), 0))
    else:
        tl.store(found + tile, 0)


@triton.jit
def refine(
    table,
    tile_segments,
    prefixes,
    sizes,
    found,
    histograms,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of candidates whose upper bits are the threshold's: a histogram of the next bits."""
    tile = tl.program_id(0)
    span = tl.load(table + tl.load(tile_segments + tile) * FIELDS + 5)
    count = tl.load(found + tile)
    prefix = tl.load(prefixes + span).to(tl.int32)
    own = sizes + tile.to(tl.int64) * TILE
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, count, PART):
        i = start + tl.arange(0, PART)
        size = tl.load(own + i, mask=i < count, other=-1)
        inside = size >> (SHIFT + BITS) == prefix
        counts += tl.histogram((size >> SHIFT) & ((1 << BITS) - 1), BINS, mask=inside)
    bins = tl.arange(0, BINS)
    tl.atomic_add(histograms + span * BINS + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def count_selected(table, tile_segments, prefixes, sizes, found, greater, ties, TILE: tl.constexpr):
    """How many candidates of a tile are above the threshold, and how many on it."""
    tile = tl.program_id(0)
    span = tl.load(table + tl.load(tile_segments + tile) * FIELDS + 5)
    count = tl.load(found + tile)
    threshold = tl.load(prefixes + span).to(tl.int32)
    own = sizes + tile.to(tl.int64) * TILE
    above, on = tl.zeros((PART,), tl.int32), tl.zeros((PART,), tl.int32)
    for start in range(0, count, PART):
        i = start + tl.arange(0, PART)
        size = tl.load(own + i, mask=i < count, other=-1)
        above += (size > threshold).to(tl.int32)
        on += (size == threshold).to(tl.int32)
    tl.store(greater + tile, tl.sum(above, 0).to(tl.int64))
    tl.store(ties + tile, tl.sum(on, 0).to(tl.int64))


@triton.jit
def compact(
    x,
    table,
    tile_segments,
    prefixes,
    quotas,
    places,
    sizes,
    found,
    ties_before,
    targets,
    indices,
    values,
    TILE: tl.constexpr,
):
    """Indices, which count from the piece on, and values of what is selected, in order."""
    tile = tl.program_id(0)
    row = table + tl.load(tile_segments + tile) * FIELDS
    span = tl.load(row + 5)
    count = tl.load(found + tile)
    threshold = tl.load(prefixes + span).to(tl.int32)
    left = tl.load(quotas + span) - tl.load(ties_before + tile)
    offset, base = tl.load(row), tl.load(row + 6)
    own, target = tile.to(tl.int64) * TILE, tl.load(targets + tile)
    for start in range(0, count, PART):
        i = start + tl.arange(0, PART)
        size = tl.load(sizes + own + i, mask=i < count, other=-1)
        on = (size == threshold).to(tl.int64)
        chosen = (size > threshold) | ((size == threshold) & (tl.cumsum(on, 0) <= left))
        e = tl.load(places + own + i, mask=chosen, other=0).to(tl.int64)
        rank = tl.cumsum(chosen.to(tl.int64), 0)
        tl.store(indices + target + rank - 1, (base + e).to(tl.int32), mask=chosen)
        value = tl.load(x + offset + e, mask=chosen, other=0.0)
        tl.store(values + target + rank - 1, value, mask=chosen)
        left = left - tl.sum(on, 0)
        target = target + tl.sum(chosen.to(tl.int64), 0)


@triton.jit
def energy_of_selected(values, targets, selected, energies, TILE: tl.constexpr):
    """The energy of what a tile sends, as it is decoded."""
    tile = tl.program_id(0)
    i = tl.arange(0, TILE)
    mask = i < tl.load(selected + tile)
    wide = tl.load(values + tl.load(targets + tile) + i, mask=mask, other=0.0).to(tl.float64)
    tl.store(energies + tile, tl.sum(wide * wide, 0))
