"""Exactly the largest elements: candidates by a sampled threshold, then histograms of these.

The first histogram of a span has bins of 2^12 magnitudes up to nearly two octaves above the sampled
threshold, where the exact one almost always is, and octaves above. :func:`refine` finds the bin of the
threshold and counts the magnitudes in there, until one is left. Atomic additions are scattered over
thousands of bins, and hardly ever wait for one another.

A program has a *tile* of one segment, which is a part of a layer that goes to one receiver. Rows of the
table of segments, and of what is known of spans, are described in
:mod:`hvd_adaptive.kernels.triton.selecting`. The candidates of a tile stand side by side, in order, in
its span's part of a list; the tiles stand there as they came, and ``firsts`` says where.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from hvd_adaptive.kernels.triton.jit.arithmetic import (
    INF,
    MAGNITUDE,
    entry,
    load_gradient,
    magnitude_bits,
)

FIELDS = tl.constexpr(8)
"""Columns of the table of segments."""
SPAN_FIELDS = tl.constexpr(4)
"""Of what is asked of spans: elements to send, a floor or -1, sample to reach, place of the list."""
SAMPLE_BINS = tl.constexpr(256)
"""Of the histogram of a sample. Triton's take time by their bins."""
LOG_BINS = tl.constexpr(12)
BINS = tl.constexpr(4096)
"""Of a histogram of candidates."""
SMALL = tl.constexpr(4096)
"""Candidates of a span at most that one program holds, which needs no histogram of them."""
NEAR_BINS = tl.constexpr(4096 - 256)
NEAR_BITS = tl.constexpr(12)
"""Of magnitudes that share a bin of the first histogram, if they are not far above the floor."""
FAR_BITS = tl.constexpr(23)
"""If they are: an octave."""
WIDE_BITS = tl.constexpr(31 - 12)
"""If the floor says nothing: the highest twelve of 31 bits choose the bin."""
STEPS = tl.constexpr(3)
"""Launches of :func:`refine`, after which 23 bits at most are unknown, then 23 - 12 = 11, then none."""
CLEARED = tl.constexpr(512)
"""Bins that one program of one warp clears at once."""
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
SMALL_PART = tl.constexpr(256)
"""Those that a program of one warp looks at together."""
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
def bin_of(counts, left):
    """The bin of the last of the ``left`` largest elements, and how many are in higher bins.

    It is -1 if there are fewer elements, and the highest bin if ``left`` is 0.
    """
    lower = tl.cumsum(counts, 0) - counts
    reaching = tl.sum(counts, 0) - lower >= left
    return tl.sum(reaching.to(tl.int32), 0) - 1, tl.sum(tl.where(reaching, 0, counts), 0)


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
    quarter = tl.minimum(tl.maximum(quarter, 0), SAMPLE_BINS - 1)
    flat = tl.reshape(quarter, (TILES * SAMPLE,))
    counts = tl.histogram(flat, SAMPLE_BINS, mask=tl.reshape(mask, (TILES * SAMPLE,)))
    bins = histograms + span * SAMPLE_BINS + tl.arange(0, SAMPLE_BINS)
    tl.atomic_add(bins, counts, mask=counts > 0, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(tickets + span, 1, sem="acq_rel") == tl.load(span_parts + 1 + span) - 1:
        # all others have added theirs, in the cache of all
        needed = tl.load(asked + span * SPAN_FIELDS + 2).to(tl.int32)
        number, _ = bin_of(tl.load(bins, cache_modifier=".cg"), needed)
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


@triton.jit
def load_candidates(values, place, there):
    """(values, their magnitudes, -1 where there is none)."""
    value = tl.load(values + place, mask=there, other=0.0)
    return value, tl.where(there, magnitude_bits(value), -1)


@triton.jit
def first_bin(size, floor):
    """The bin of a candidate in its span's first histogram."""
    above = size - floor
    near = above >> NEAR_BITS
    far = NEAR_BINS + ((above - (NEAR_BINS << NEAR_BITS)) >> FAR_BITS)
    return tl.where(floor > 1, tl.where(near < NEAR_BINS, near, far), size >> WIDE_BITS)


@triton.jit
def range_of(number, floor):
    """(the least magnitude in such a bin, how many of its low bits differ there)."""
    near, far = number << NEAR_BITS, (number - NEAR_BINS) << FAR_BITS
    is_near = number < NEAR_BINS
    low = floor + tl.where(is_near, near, far + (NEAR_BINS << NEAR_BITS))
    low = tl.where(floor > 1, low, number << WIDE_BITS)
    return low, tl.where(floor > 1, tl.where(is_near, NEAR_BITS, FAR_BITS), WIDE_BITS)


@triton.jit
def count_bins(bins, number, there):
    """Add to a histogram what falls into bins of such numbers.

    By one addition where all do into one, as equal magnitudes do: many would be made in turn.
    """
    first = tl.min(tl.where(there, number, BINS), 0)
    if first == tl.max(tl.where(there, number, -1), 0):
        tl.atomic_add(bins + first, tl.sum(there.to(tl.int32), 0), sem="relaxed")
    else:
        tl.atomic_add(bins + number, 1, mask=there, sem="relaxed")


@entry
def count_candidates(
    table,
    tile_segments,
    asked,
    part_spans,
    part_numbers,
    span_parts,
    span_tiles,
    floors,
    listed,
    listed_again,
    places,
    values,
    firsts,
    found,
    histogram_rows,
    histograms,
    following,
    TILE: tl.constexpr,
):
    """The first histogram of each span; of spans with too few candidates these are listed again.

    All elements but zeros are then candidates. The ``following`` histograms are cleared where they may
    be needed. A span of ``SMALL`` elements or fewer has none of either.
    """
    span, first, end = tiles_of_part(tl.program_id(0), part_spans, part_numbers, span_tiles)
    number, at_once = tl.load(part_numbers + tl.program_id(0)), tl.num_programs(1)
    row = tl.load(histogram_rows + span)
    bins, count = histograms + row * BINS, tl.load(listed + span)
    short = is_short(asked, floors, listed, span)
    if short:
        for tile in range(first + tl.program_id(1), end, at_once):
            if tl.load(found + tile) >= 0:
                segment = table + tl.load(tile_segments + tile) * FIELDS
                e, _, total = load_tile(segment, tile, 0, TILE)
                size = magnitude_bits(total)
                kept = size > 0
                write_candidates(
                    e, total, kept, span, tile, asked, listed_again, places, values, firsts, found
                )
                if row >= 0:
                    count_bins(bins, first_bin(size, 1), kept)
    elif count > SMALL:
        own, floor = values + tl.load(asked + span * SPAN_FIELDS + 3), tl.load(floors + span)
        start = (number * at_once + tl.program_id(1)) * SMALL_PART
        for place in range(start, count, tl.load(span_parts + 1 + span) * at_once * SMALL_PART):
            i = place + tl.arange(0, SMALL_PART)
            size = load_candidates(own, i, i < count)[1]
            count_bins(bins, first_bin(size, floor), i < count)
    if (row >= 0) & (short | (count > SMALL)) & (number == 0):
        for place in range(tl.program_id(1) * CLEARED, BINS, at_once * CLEARED):
            i = place + tl.arange(0, CLEARED)
            tl.store(following + row * BINS + i, tl.zeros((CLEARED,), tl.int32))


@triton.jit
def threshold_of_few(own, count, left):
    """(the ``left``-th largest magnitude of so few candidates, how many that have it are sent)."""
    i = tl.arange(0, SMALL)
    size = load_candidates(own, i, i < count)[1]
    low = left * 0
    for step in range(31):
        tried = low | (1 << (30 - step))
        low = tl.where(tl.sum((size >= tried).to(tl.int32), 0) >= left, tried, low)
    return low, left - tl.sum((size > low).to(tl.int32), 0)


@triton.jit
def first_range(own, bins, floor, count, left, leading):
    """What the first histogram, or a few candidates themselves, say of a span's threshold.

    Args:
        own: candidates of the span.
        bins: the first histogram of them; it is read if they are more than ``SMALL``.
        floor: the least magnitude that they may have.
        count: how many there are.
        left: how many of them are sent.
        leading: whether the program says the others of its span what is found.

    Returns:
        (least magnitude that the threshold may have, how many of its low bits are not known, how many
        of the candidates that have the others are sent). None is sent of those with the threshold where
        all larger ones are what is asked for.
    """
    bits = left * 0
    if (left == 0) | (left == count):
        low = tl.where(left == 0, MAGNITUDE, floor - 1)
        left = left * 0
    else:
        low = left * 0
        if count > SMALL:
            number, above = bin_of(tl.load(bins + tl.arange(0, BINS)), left)
            low, bits = range_of(number, floor)
            left -= above
        elif leading:
            low, left = threshold_of_few(own, count, left)
    return low, bits, left


@triton.jit
def count_between(own, first, count, stride, low, bits, bins):
    """Add the candidates in a range of 2^bits magnitudes to a histogram, which has bins for all."""
    shift = tl.maximum(bits - LOG_BINS, 0)
    for start in range(first, count, stride):
        i = start + tl.arange(0, PART)
        above = load_candidates(own, i, i < count)[1] - low
        count_bins(bins, above >> shift, (above >= 0) & (above >> bits == 0))


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
    histogram_rows,
    counted,
    following,
    spare,
    before,
    after,
    FIRST: tl.constexpr,
):
    """The next bits of the threshold, by the histogram that was counted before.

    All programs of a span find them, and count the following histogram of the candidates that share
    them; the first one clears the one after it, if that will be needed. What is known ``before`` and
    ``after`` has a row for each of what :func:`first_range` returns; in the end no bits are unknown.
    """
    part = tl.program_id(0)
    span, number = tl.load(part_spans + part), tl.load(part_numbers + part)
    spans, parts = tl.load(span_parts), tl.load(span_parts + 1 + span)
    row = asked + span * SPAN_FIELDS
    short = is_short(asked, floors, listed, span)
    count = tl.where(short, tl.load(listed_again + span), tl.load(listed + span))
    own, place = values + tl.load(row + 3), tl.load(histogram_rows + span) * BINS
    if FIRST:
        floor = tl.where(short, 1, tl.load(floors + span))
        left = tl.minimum(tl.load(row), count.to(tl.int64))
        left = tl.where(tl.load(wrong + span) > 0, 0, left).to(tl.int32)
        low, bits, left = first_range(own, counted + place, floor, count, left, number == 0)
    else:
        known = before + span
        low, bits, left = tl.load(known), tl.load(known + spans), tl.load(known + 2 * spans)
        shift = tl.maximum(bits - LOG_BINS, 0)
        if (shift > 0) | ((bits > 0) & (number == 0)):
            chosen, above = bin_of(tl.load(counted + place + tl.arange(0, BINS)), left)
            low += chosen << shift
            left -= above
        bits = shift
    if bits > 0:
        count_between(own, number * PART, count, parts * PART, low, bits, following + place)
    if number == 0:
        tl.store(after + span, low)
        tl.store(after + spans + span, bits)
        tl.store(after + 2 * spans + span, left)
        if bits > LOG_BINS:
            tl.store(spare + place + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))


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
