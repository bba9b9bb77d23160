"""Exactly the largest elements: candidates by a sampled threshold, then histograms of these.

A program has a *tile* of one segment, which is a part of a layer that goes to one receiver. Rows of the
table of segments, and of what is known of spans, are described in
:mod:`hvd_adaptive.kernels.triton.selecting`. The candidates of a tile stand side by side, in order, in
its span's part of a list; the tiles stand there as they came, and ``firsts`` says where.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from hvd_adaptive.kernels.triton.jit.arithmetic import INF, entry, load_gradient, magnitude_bits

FIELDS = tl.constexpr(8)
"""Columns of the table of segments."""
SPAN_FIELDS = tl.constexpr(4)
"""Of what is asked of spans: elements to send, a floor or -1, sample to reach, place of the list."""
BINS = tl.constexpr(256)
"""Of one histogram: eight bits. Triton's take time by their bins."""
TILES = tl.constexpr(128)
"""Of a part of a span."""
SHARE = tl.constexpr(16)
"""Of these those that are looked at together."""
SAMPLE_SHIFT = tl.constexpr(21)
"""A bin of the sample has a quarter of an octave."""
LOWEST_BIN = tl.constexpr(4 * (127 - 52))
"""Of the sample: 2^-52. What is smaller is in the first bin, what is 4096 or more in the last."""
PART = tl.constexpr(1024)
"""Candidates that are looked at together."""
FEW = tl.constexpr(32)
"""Candidates of a tile that are looked at together."""


@triton.jit
def elements_of(row):
    """What is selected from of a segment."""
    return tl.load(row).to(tl.pointer_type(tl.float32))


@triton.jit
def load_tile(row, tile, GRADS: tl.constexpr, TILE: tl.constexpr):
    """(element of each place, which places there are, what they hold with the gradient added)."""
    first = (tile - tl.load(row + 3)) * TILE
    i = tl.arange(0, TILE)
    mask = i < tl.load(row + 1) - first
    total = tl.load(elements_of(row) + first + i, mask=mask, other=0.0)
    if GRADS:
        total = total + load_gradient(tl.load(row + 2), first, i, mask, GRADS)
    return first + i, mask, total


@triton.jit
def add_counts(bins, counts, ticket, programs):
    """Add to a histogram; whether all others of so many programs have: it may then be read."""
    tl.atomic_add(bins + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")
    tl.debug_barrier()
    return tl.atomic_add(ticket, 1, sem="acq_rel") == programs - 1


@triton.jit
def take_counts(bins, ticket):
    """What a histogram holds, the highest bin first; it is cleared for the next one."""
    place = bins + (BINS - 1 - tl.arange(0, BINS))
    counts = tl.load(place, cache_modifier=".cg")  # others added to it in the cache of all
    tl.store(place, tl.zeros((BINS,), tl.int32))
    tl.store(ticket, 0)
    return counts


@triton.jit
def bin_of(counts, left):
    """The bin of the element that is the last of ``left``, and how many are above it.

    Args:
        counts: of the bins, the highest first.
        left: elements; of none the highest bin is chosen.
    """
    above = tl.cumsum(counts, 0) < left  # the whole bin is wanted, and more
    number = BINS - 1 - tl.sum(above.to(tl.int32), 0)
    return number, tl.sum(tl.where(above, counts, 0), 0)


@triton.jit
def tiles_of_part(part, part_spans, part_numbers, span_tiles):
    """(span, its first tile in the part, where its tiles end)."""
    span = tl.load(part_spans + part)
    first = tl.load(span_tiles + span) + tl.load(part_numbers + part) * TILES
    return span, first, tl.minimum(first + TILES, tl.load(span_tiles + span + 1))


@entry
def sample(
    table,
    tile_segments,
    asked,
    part_spans,
    part_numbers,
    span_parts,
    span_tiles,
    histograms,
    tickets,
    floors,
    GRADS: tl.constexpr,
    TILE: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Foresee of each span how large its candidates are; bits of a magnitude, 1 or more."""
    span, first_tile, end = tiles_of_part(tl.program_id(0), part_spans, part_numbers, span_tiles)
    given = tl.load(asked + span * SPAN_FIELDS + 1)
    tile = first_tile + tl.arange(0, TILES)
    there = tile < tl.where(given < 0, end, 0)
    row = table + tl.load(tile_segments + tile, mask=there, other=0) * FIELDS
    first = (tile - tl.load(row + 3)) * TILE
    size = tl.minimum(tl.load(row + 1) - first, TILE)
    # a tile is not sampled where it begins: rows of a matrix may, and their first elements are alike
    first += (size - tl.minimum(size, SAMPLE)) * (tile % 7) // 7
    i = tl.arange(0, SAMPLE)[None, :]
    mask = there[:, None] & (i < size[:, None])
    x = tl.load(row, mask=there, other=0).to(tl.pointer_type(tl.float32))
    total = tl.load((x + first)[:, None] + i, mask=mask, other=0.0)
    if GRADS:
        total = total + load_gradient(tl.load(row + 2)[:, None], first[:, None], i, mask, GRADS)
    quarter = (magnitude_bits(total) >> SAMPLE_SHIFT) - LOWEST_BIN
    quarter = tl.minimum(tl.maximum(quarter, 0), BINS - 1)
    flat = tl.reshape(quarter, (TILES * SAMPLE,))
    counts = tl.histogram(flat, BINS, mask=tl.reshape(mask, (TILES * SAMPLE,)))
    bins = histograms + span * BINS
    if add_counts(bins, counts, tickets + span, tl.load(span_parts + 1 + span)):
        needed = tl.load(asked + span * SPAN_FIELDS + 2).to(tl.int32)
        number, _ = bin_of(take_counts(bins, tickets + span), needed)
        floor = tl.where(number > 0, (number + LOWEST_BIN) << SAMPLE_SHIFT, 1)
        tl.store(floors + span, tl.where(given < 0, floor, tl.maximum(given.to(tl.int32), 1)))


@triton.jit
def write_candidates(e, total, kept, span, tile, asked, listed, places, values, firsts, found):
    """The elements of a tile that may be sent, into the list of its span."""
    ranks = tl.cumsum(kept.to(tl.int32), 0)
    count = tl.max(ranks, 0)
    first = tl.load(asked + span * SPAN_FIELDS + 3)
    first = first + tl.atomic_add(listed + span, count, sem="relaxed").to(tl.int64)
    tl.store(places + first + ranks - 1, e.to(tl.int32), mask=kept)
    tl.store(values + first + ranks - 1, total, mask=kept)
    tl.store(firsts + tile, first)
    tl.store(found + tile, count)


@entry
def sift(
    table,
    tile_segments,
    asked,
    floors,
    bad,
    wrong,
    energies,
    listed,
    places,
    values,
    firsts,
    found,
    GRADS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The pass over the gradients: the sums into their place, and candidates into the lists.

    A tile with a NaN or an Inf is left as it is, and marks its layer.
    """
    tile = tl.program_id(0)
    row = table + tl.load(tile_segments + tile) * FIELDS
    span = tl.load(row + 5)
    e, mask, total = load_tile(row, tile, GRADS, TILE)
    size = magnitude_bits(total)  # 0 where there is no element
    if tl.max(size, 0) >= INF:
        tl.store(bad + tl.load(row + 4), 1)
        tl.store(wrong + span, 1)
        tl.store(found + tile, -1)
    else:
        if GRADS:
            tl.store(elements_of(row) + e, total, mask=mask)
        kept = size >= tl.load(floors + span)
        write_candidates(e, total, kept, span, tile, asked, listed, places, values, firsts, found)
        wide = total.to(tl.float64)
        tl.store(energies + 2 * tile, tl.sum(wide * wide, 0))


@triton.jit
def is_short(asked, floors, listed, span):
    """Whether a sample promised more candidates than there are."""
    row = asked + span * SPAN_FIELDS
    sampled = (tl.load(row + 1) < 0) & (tl.load(floors + span) > 1)
    return sampled & (tl.load(listed + span) < tl.load(row))


@entry
def sift_again(
    table,
    tile_segments,
    asked,
    part_spans,
    part_numbers,
    span_tiles,
    floors,
    listed,
    listed_again,
    places,
    values,
    firsts,
    found,
    TILE: tl.constexpr,
):
    """Of spans with too few candidates: all elements but zeros."""
    span, first, end = tiles_of_part(tl.program_id(0), part_spans, part_numbers, span_tiles)
    if is_short(asked, floors, listed, span):
        for tile in range(first + tl.program_id(1), end, tl.num_programs(1)):
            if tl.load(found + tile) >= 0:
                row = table + tl.load(tile_segments + tile) * FIELDS
                e, _, total = load_tile(row, tile, 0, TILE)
                kept = magnitude_bits(total) > 0
                write_candidates(
                    e, total, kept, span, tile, asked, listed_again, places, values, firsts, found
                )


@entry
def refine(
    part_spans,
    part_numbers,
    span_parts,
    asked,
    floors,
    wrong,
    listed,
    listed_again,
    values,
    histograms,
    tickets,
    prefixes,
    quotas,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
):
    """The next bits of the threshold: a histogram of candidates that share those before.

    ``prefixes`` and ``quotas`` have a row for each step: what is known of the threshold, and how many
    of the candidates that have it so far are sent.
    """
    part = tl.program_id(0)
    span = tl.load(part_spans + part)
    spans, parts = tl.load(span_parts), tl.load(span_parts + 1 + span)
    row = asked + span * SPAN_FIELDS
    short = is_short(asked, floors, listed, span)
    count = tl.where(short, tl.load(listed_again + span), tl.load(listed + span))
    if FIRST:
        prefix = count * 0
        left = tl.minimum(tl.load(row), count.to(tl.int64))
        left = tl.where(tl.load(wrong + span) > 0, 0, left).to(tl.int32)
    else:
        prefix, left = tl.load(prefixes + span), tl.load(quotas + span)
    own = values + tl.load(row + 3)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(tl.load(part_numbers + part) * PART, count, parts * PART):
        i = start + tl.arange(0, PART)
        size = magnitude_bits(tl.load(own + i, mask=i < count, other=0.0))
        inside = i < count
        if not FIRST:
            inside = inside & (size >> (SHIFT + BITS) == prefix)
        counts += tl.histogram((size >> SHIFT) & ((1 << BITS) - 1), BINS, mask=inside)
    bins = histograms + span * BINS
    if add_counts(bins, counts, tickets + span, parts):
        number, above = bin_of(take_counts(bins, tickets + span), left)
        number = tl.minimum(number, (1 << BITS) - 1)
        tl.store(prefixes + spans + span, (prefix << BITS) | number)
        tl.store(quotas + spans + span, left - above)


@triton.jit
def tiles_of_share(part_spans, part_numbers, span_tiles):
    """(tiles, which of them there are) of a program that looks at a share of a part's tiles."""
    part = tiles_of_part(tl.program_id(0), part_spans, part_numbers, span_tiles)
    tile = part[1] + tl.program_id(1) * SHARE + tl.arange(0, SHARE)
    return tile, tile < part[2]


@triton.jit
def places_from(first, count, start):
    """(places in a list, which of them there are) of some elements of each tile, from one on."""
    i = start + tl.arange(0, FEW)[None, :]
    return first[:, None] + i, i < count[:, None]


@triton.jit
def load_candidates(values, place, there):
    """(values, their magnitudes, -1 where there is none)."""
    value = tl.load(values + place, mask=there, other=0.0)
    return value, tl.where(there, magnitude_bits(value), -1)


@entry
def count_selected(
    part_spans, part_numbers, span_tiles, thresholds, values, firsts, found, counts, tiles
):
    """How many candidates of a tile are above the threshold, and how many on it."""
    tile, there = tiles_of_share(part_spans, part_numbers, span_tiles)
    span = tl.load(part_spans + tl.program_id(0))
    count = tl.load(found + tile, mask=there, other=0)
    first = tl.load(firsts + tile, mask=there, other=0)
    threshold = tl.load(thresholds + span)
    above, on = tl.zeros((SHARE, FEW), tl.int32), tl.zeros((SHARE, FEW), tl.int32)
    for start in range(0, tl.max(count, 0), FEW):
        place, listed = places_from(first, count, start)
        size = load_candidates(values, place, listed)[1]
        above += (size > threshold).to(tl.int32)
        on += (size == threshold).to(tl.int32)
    tl.store(counts + tile, tl.sum(above, 1), mask=there)
    tl.store(counts + tiles + tile, tl.sum(on, 1), mask=there)


@triton.jit
def sent_before(sums, tiles, tile, first, quota, mask):
    """Elements of a span that are sent of its tiles before one.

    ``sums`` go on from tile to tile, and from the last tile's count to the first one's ties.
    """
    greater = tl.load(sums + tile - 1, mask=mask & (tile > 0), other=0)
    greater -= tl.load(sums + first - 1, mask=mask & (first > 0), other=0)
    ties = tl.load(sums + tiles + tile - 1, mask=mask & (tiles + tile > 0), other=0)
    ties -= tl.load(sums + tiles + first - 1, mask=mask & (tiles + first > 0), other=0)
    return greater + tl.minimum(ties, quota), ties


@triton.jit
def sent_between(sums, tiles, edges, owner_spans, span_tiles, quotas, i, mask):
    """Elements that are sent of a piece, or of a layer: those of its tiles."""
    span = tl.load(owner_spans + i, mask=mask, other=0)
    first = tl.load(span_tiles + span, mask=mask, other=0)
    quota = tl.load(quotas + span, mask=mask, other=0).to(tl.int64)
    start = tl.load(edges + i, mask=mask, other=0)
    end = tl.load(edges + i + 1, mask=mask, other=0)
    before, _ = sent_before(sums, tiles, start, first, quota, mask)
    after, _ = sent_before(sums, tiles, end, first, quota, mask)
    return after - before


@entry
def place(
    sums,
    quotas,
    span_tiles,
    tile_spans,
    tile_pieces,
    piece_tiles,
    piece_spans,
    layer_tiles,
    layer_spans,
    capacities,
    ties_before,
    selected,
    targets,
    piece_counts,
    layer_counts,
    sizes,
    SIZE: tl.constexpr,
):
    """How many elements each tile, piece and layer sends, and where those of a tile go."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tiles, pieces, layers = tl.load(sizes), tl.load(sizes + 1), tl.load(sizes + 2)
    mask = i < tiles
    span = tl.load(tile_spans + i, mask=mask, other=0)
    piece = tl.load(tile_pieces + i, mask=mask, other=0)
    first = tl.load(span_tiles + span, mask=mask, other=0)
    start = tl.load(piece_tiles + piece, mask=mask, other=0)
    quota = tl.load(quotas + span, mask=mask, other=0).to(tl.int64)
    before, ties = sent_before(sums, tiles, i, first, quota, mask)
    after, _ = sent_before(sums, tiles, i + 1, first, quota, mask)
    of_piece, _ = sent_before(sums, tiles, start, first, quota, mask)
    tl.store(ties_before + i, ties, mask=mask)
    tl.store(selected + i, after - before, mask=mask)
    capacity = tl.load(capacities + piece, mask=mask, other=0)
    tl.store(targets + i, before - of_piece + capacity, mask=mask)
    mask = i < pieces
    sent = sent_between(sums, tiles, piece_tiles, piece_spans, span_tiles, quotas, i, mask)
    tl.store(piece_counts + i, sent, mask=mask)
    mask = i < layers
    sent = sent_between(sums, tiles, layer_tiles, layer_spans, span_tiles, quotas, i, mask)
    tl.store(layer_counts + i, sent, mask=mask)


@entry
def compact(
    table,
    tile_segments,
    part_spans,
    part_numbers,
    span_tiles,
    thresholds,
    quotas,
    places,
    candidates,
    firsts,
    found,
    ties_before,
    targets,
    indices,
    values,
):
    """Indices, which count from the piece on, and values of what is selected, in order."""
    tile, there = tiles_of_share(part_spans, part_numbers, span_tiles)
    span = tl.load(part_spans + tl.program_id(0))
    row = table + tl.load(tile_segments + tile, mask=there, other=0) * FIELDS
    base = tl.load(row + 6)
    count = tl.load(found + tile, mask=there, other=0)
    first = tl.load(firsts + tile, mask=there, other=0)
    threshold = tl.load(thresholds + span)
    left = tl.load(quotas + span).to(tl.int64) - tl.load(ties_before + tile, mask=there, other=0)
    target = tl.load(targets + tile, mask=there, other=0)
    for start in range(0, tl.max(count, 0), FEW):
        place, listed = places_from(first, count, start)
        value, size = load_candidates(candidates, place, listed)
        on = (size == threshold).to(tl.int32)
        chosen = (size > threshold) | ((size == threshold) & (tl.cumsum(on, 1) <= left[:, None]))
        e = tl.load(places + place, mask=chosen, other=0).to(tl.int64)
        taken = chosen.to(tl.int32)
        rank = target[:, None] + tl.cumsum(taken, 1) - 1
        tl.store(indices + rank, (base[:, None] + e).to(tl.int32), mask=chosen)
        tl.store(values + rank, value, mask=chosen)
        left = left - tl.sum(on, 1)
        target = target + tl.sum(taken, 1)


@entry
def energy_of_selected(part_spans, part_numbers, span_tiles, values, targets, selected, energies):
    """The energy of what a tile sends, as it is decoded."""
    tile, there = tiles_of_share(part_spans, part_numbers, span_tiles)
    count = tl.load(selected + tile, mask=there, other=0)
    first = tl.load(targets + tile, mask=there, other=0)
    energy = tl.zeros((SHARE, FEW), tl.float64)
    for start in range(0, tl.max(count, 0).to(tl.int32), FEW):
        place, listed = places_from(first, count, start)
        wide = tl.load(values + place, mask=listed, other=0.0).to(tl.float64)
        energy += wide * wide
    tl.store(energies + 2 * tile + 1, tl.sum(energy, 1), mask=there)


@entry
def take_back(table, tile_segments, bad, found, GRADS: tl.constexpr, TILE: tl.constexpr):
    """Of marked layers: subtract the gradient again where it was added."""
    tile = tl.program_id(0)
    row = table + tl.load(tile_segments + tile) * FIELDS
    if (tl.load(bad + tl.load(row + 4)) > 0) & (tl.load(found + tile) >= 0):
        e, mask, total = load_tile(row, tile, 0, TILE)
        grad = load_gradient(tl.load(row + 2), 0, e, mask, GRADS)
        tl.store(elements_of(row) + e, total - grad, mask=mask)
