"""Selection: the elements of a layer that a rule sends, as *candidates* in the order of their indices.

One pass forms ``x + gradient``, measures it and collects elements at or above a floor. Every rule sends
the largest elements and differs only in how many: it is a floor, a limit, and what is done with the
candidates; collecting is shared.

The floor of top-k only saves time, it never decides: it is a lower bound of the k-th largest that is
certain (small layers) or was guessed from a sample and is checked afterwards (large layers). What
decides is the exact trimming of the candidates to the k largest. DGC's floor decides where no more
than k reach it.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import carray, int32, int64, uint32, uint64

from hvd_adaptive.kernels.cpu.compiling import fused, inlined, kernel
from hvd_adaptive.kernels.cpu.enums import DGC, FAR, NEAR, REDSYNC, THRESHOLD
from hvd_adaptive.kernels.cpu.intrinsics import (
    LANES,
    add_and_check,
    add_and_survey,
    bits_float,
    check,
    float32_pointer,
    float_bits,
    load_f32,
    prefetch,
    store_f32,
    survey,
    trailing_zeros,
    uint32_pointer,
)
from hvd_adaptive.kernels.cpu.memory import AHEAD, LINE
from hvd_adaptive.kernels.floats import CANCELLED, INF, MAGNITUDE
from hvd_adaptive.kernels.selection import LARGE, SAMPLE, SMALL

BLOCK = 2048
"""Elements handled at once: 8 KiB stay in the first-level cache."""
SPARE = 4096
"""Candidates that a layer may have beyond 3 k before they are trimmed."""


@fused
def magnitude_sum(x, n):
    """The sum of the magnitudes of n elements."""
    a = carray(float32_pointer(x), n)
    total = 0.0
    for i in range(n):
        total += np.float64(abs(a[i]))
    return total


@kernel
def take_back(x, g, n):
    """x -= g for n elements that g was added to; what that leaves of rounding alone becomes 0.

    As error feedback does for a layer that was not finite on another rank.
    """
    a = carray(float32_pointer(x), n)
    b = carray(float32_pointer(g), n)
    for i in range(n):
        rest = a[i] - b[i]
        a[i] = rest if abs(rest) > np.float32(CANCELLED) * abs(b[i]) else np.float32(0)


@kernel
def _bin_of_kth(hist, top, k):
    """The bin of the k-th largest magnitude; 0 where fewer were counted."""
    above = int64(0)
    for b in range(top >> 16, 0, -1):
        above += hist[b]
        if above >= k:
            return b
    return 0


@kernel
def _raise_maxima(x, g, maxima, n):
    """maxima = max(maxima, |x + g|) as bits, for n elements."""
    a = carray(float32_pointer(x), n)
    if g == 0:
        for i in range(n):
            maxima[i] = max(maxima[i], int32(float_bits(a[i]) & uint32(MAGNITUDE)))
        return
    b = carray(float32_pointer(g), n)
    for i in range(n):
        maxima[i] = max(maxima[i], int32(float_bits(a[i] + b[i]) & uint32(MAGNITUDE)))


@kernel
def _certain_floor(x, g, n, k, work):
    """A lower bound of the k-th largest magnitude: the k-th largest of 3 k group maxima.

    On scattered data 1.2 k elements reach it. Group j is every width-th element from j on, so that
    the maxima are formed by vector operations.
    """
    hist, maxima, _, _ = work
    width = max(3 * k + 31, 64) & ~31
    if width > n // 2:
        return 1
    maxima[:width] = 0
    for start in range(0, n, width):
        _raise_maxima(x + 4 * start, g + 4 * start if g else 0, maxima, min(width, n - start))
    top = int32(0)
    for i in range(width):
        top = max(top, maxima[i])
        hist[maxima[i] >> 16] += int32(1)
    b = _bin_of_kth(hist, int64(top), k)
    for i in range(width):
        hist[maxima[i] >> 16] = 0
    return max(1, b << 16)


@kernel
def sample_pitch(n):
    """Elements from one group of 16 of a sample to the next: one in 13, of large layers one in 61.

    Odd strides, because weights have periods of powers of two.
    """
    return SAMPLE * (NEAR if n < LARGE else FAR)


@kernel
def sample_groups(n, pitch):
    """Groups in the sample of n elements."""
    return max(0, (n - SAMPLE - 1) // pitch + 1)


@kernel
def count_groups(x, g, groups, pitch, hist):
    """Count the bins of groups of 16, so many elements apart: (top, elements)."""
    top = int64(0)
    for group in range(groups):
        start = group * pitch
        for line in range(0, 4 * SAMPLE, LINE):
            further = 4 * (start + AHEAD * pitch) + line
            prefetch(x + further)
            if g:
                prefetch(g + further)
        a = carray(float32_pointer(x + 4 * start), SAMPLE)
        b = carray(float32_pointer(g + 4 * start if g else x), SAMPLE)
        for i in range(SAMPLE):
            value = a[i] + b[i] if g else a[i]
            magnitude = int64(float_bits(value)) & MAGNITUDE
            hist[magnitude >> 16] += int32(1)
            top = max(top, magnitude)
    return top, SAMPLE * groups


@kernel
def count_sample(x, g, n, hist):
    """Count the bins of a sample: (top, elements)."""
    pitch = sample_pitch(n)
    return count_groups(x, g, sample_groups(n, pitch), pitch, hist)


@kernel
def _sampled_floor(sample, n, k, hist):
    """A guess at a magnitude that somewhat more than k elements reach."""
    top, seen = sample
    expected = k * seen / n
    b = _bin_of_kth(hist, top, int64(expected + 4 * np.sqrt(expected)) + 2)
    hist[:] = 0
    return max(1, b << 16)


@kernel
def floor_dgc(sample, n, k, hist):
    """``selection.dgc_floor`` of the sample (a test compares the two)."""
    top, seen = sample
    expected = k * seen / n
    deviation = np.sqrt(expected)
    wanted = int64(max(expected + 2 * deviation, 0.7 * expected + 4 * deviation + 2))
    b = _bin_of_kth(hist, top, wanted)
    floor = int64(1)
    if b > 0:
        reached = int64(0)
        for above in range(b, (top >> 16) + 1):
            reached += hist[above]
        floor = (b << 16) + ((reached - wanted) << 16) // int64(hist[b])
    hist[:] = 0
    return floor


@kernel
def known_floor(n, k, limit, rule, threshold):
    """Where to start collecting if that is known without looking at the layer, else -1."""
    if rule == THRESHOLD and k > 0:
        return int64(threshold)
    if limit == 0:
        return int64(INF)
    return int64(1) if limit >= n // 3 else int64(-1)


@kernel
def floor_of_sample(sample, n, k, limit, rule, hist):
    """The same, guessed from what was counted of a sample."""
    return floor_dgc(sample, n, k, hist) if rule == DGC else _sampled_floor(sample, n, limit, hist)


@kernel
def _extremes(values, n):
    """The smallest and the largest magnitude of n elements, as bits."""
    words = carray(uint32_pointer(values), n)
    lowest, top = int32(INF), int32(0)
    for i in range(n):
        magnitude = int32(words[i] & uint32(MAGNITUDE))
        lowest, top = min(lowest, magnitude), max(top, magnitude)
    return int64(lowest), int64(top)


@kernel
def _reaching(values, n, floor):
    """How many of n elements have magnitudes whose bits are at least a number."""
    words = carray(uint32_pointer(values), n)
    bar, found = int32(floor), int32(0)
    for i in range(n):
        found = int32(found + int32(int32(words[i] & uint32(MAGNITUDE)) >= bar))
    return int64(found)


@kernel
def trim_candidates(indices, values, count, k):
    """Keep the k largest of more than k candidates in place, in order; ties go to the lowest index.

    Returns a magnitude as bits that all kept reach; those equal to it may have been too many. Found by
    bisection: to count is so much quicker than to sort into bins that twenty times are, too.
    """
    address = int64(values.ctypes.data)
    low, high = _extremes(address, count)
    above, high = int64(0), high + 1  # reach the upper end; at least k reach the lower one
    while high - low > 1 and above < k:
        middle = (low + high) >> 1
        found = _reaching(address, count, middle)
        if found > k:
            low = middle
        else:
            high, above = middle, found
    wanted, kept = k - above, int64(0)
    for i in range(count):
        magnitude = int64(float_bits(values[i])) & MAGNITUDE
        tie = int64((magnitude == low) & (wanted > 0))
        wanted -= tie
        indices[kept] = indices[i]
        values[kept] = values[i]
        kept += int64(magnitude >= high) | tie
    return high if above == k else low


@inlined
def _add_group(x, g, left, floor, measures):
    """x += g for the next 64 elements (of ``left`` that are there), if all sums are finite.

    Returns (which of them reach the floor, as bits; their energy: finite if they are, and 0 unless
    ``measures``). Where g is 0, nothing is added.
    """
    if left >= LANES and not measures:
        hits, finite = add_and_check(x, g, int32(floor)) if g != 0 else check(x, g, int32(floor))
        return hits, 0.0 if finite else np.inf
    if left >= LANES:
        return add_and_survey(x, g, int32(floor)) if g != 0 else survey(x, g, int32(floor))
    hits, energy = uint64(0), 0.0
    for i in range(left):
        value = load_f32(x + 4 * i) + (load_f32(g + 4 * i) if g != 0 else np.float32(0))
        magnitude = int64(float_bits(value)) & MAGNITUDE
        hits |= uint64(magnitude >= floor) << uint64(i)
        energy += np.float64(value) * np.float64(value)
    if g != 0 and energy < np.inf:
        for i in range(left):
            store_f32(x + 4 * i, load_f32(x + 4 * i) + load_f32(g + 4 * i))
    return hits, energy


@kernel
def collect_block(x, g, first, size, floor, limit, room, so_far, work, measures=True):
    """Add g to x, and collect of the sum what reaches the floor; element 0 is the layer's ``first``.

    Of too many at least the ``limit`` largest: candidates beyond it are trimmed when the room is full.
    From then on the least of those kept is the floor, and an equal does not reach it: its index would
    be higher.

    ``so_far``: energy, which only grows if it ``measures`` that, and count. Returns (elements done,
    floor, energy, count): fewer than ``size`` are done if those after them are not all finite.
    """
    _, indices, values, _ = work
    energy, count = so_far
    for start in range(0, size, LANES):
        here, there = x + 4 * start, g + 4 * start if g != 0 else int64(0)
        # The branches below would otherwise leave the memory idle.
        for line in range(0, 4 * LANES, LINE):
            prefetch(here + 4 * BLOCK + line)
            prefetch((there if g != 0 else here) + 4 * BLOCK + line)
        if count + LANES > room and count > limit:
            floor = trim_candidates(indices, values, count, limit) + 1
            count = limit
        hits, squares = _add_group(here, there, size - start, floor, measures)
        if not squares < np.inf:
            return start, floor, energy, count
        energy += squares
        # The first without a branch: whether there is one, nobody could foresee; two are rare.
        while True:
            i = int64(trailing_zeros(hits)) & (LANES - 1)
            indices[count] = int32(first + start + i)
            values[count] = load_f32(here + 4 * i)
            count += int64(hits != 0)
            hits &= hits - uint64(1)
            if hits == 0:
                break
    return size, floor, energy, count


@kernel
def collect(x, g, n, floor, limit, summing, work):
    """Add g to x, and collect the elements of the sum that reach the floor, as :func:`collect_block`.

    Returns (whether all is finite, sum of magnitudes if ``summing``, energy, count). If not, x is as it
    was but for rounding, and what was collected means nothing.
    """
    room = candidate_room(n, limit)
    energy, total, count = 0.0, 0.0, int64(0)
    for block in range(0, n, BLOCK):
        size = min(BLOCK, n - block)
        here, there = x + 4 * block, g + 4 * block if g != 0 else int64(0)
        done, floor, energy, count = collect_block(
            here, there, block, size, floor, limit, room, (energy, count), work
        )
        if done < size:
            if g != 0:
                take_back(x, g, block + done)
            return False, total, energy, count
        if summing:
            total += magnitude_sum(here, size)
    return True, total, energy, count


@kernel
def candidate_limit(n, k, rule):
    """How many of the largest a rule chooses from, where it is to send k."""
    return min(n, 2 * k + 1) if rule == REDSYNC else k


@kernel
def are_enough(count, k, limit, rule, floor):
    """Whether so many candidates above a guessed floor will do."""
    return floor == 1 or count >= limit or (rule == DGC and 10 * count >= 7 * k)


@kernel
def cut_to_rule(count, n, k, limit, rule, total, work):
    """Keep of the candidates what a rule sends, in order; returns how many."""
    if count > limit:
        trim_candidates(work[1], work[2], count, limit)
        count = limit
    if rule == REDSYNC and count > k:
        count = _cut_redsync(count, k, np.float32(total / n), work)
    return count


@kernel
def take_candidates(x, g, n, k, rule, threshold, work):
    """Add g to x, and take what a rule sends of the sum, as candidates in order; threshold as bits.

    Returns (energy, whether all is finite, count); if not, x is as it was but for rounding.
    """
    limit, summing = candidate_limit(n, k, rule), rule == REDSYNC
    floor = known_floor(n, k, limit, rule, threshold)
    guessed = floor < 0 and n > SMALL
    if guessed:
        floor = floor_of_sample(count_sample(x, g, n, work[0]), n, k, limit, rule, work[0])
    elif floor < 0:
        floor = _certain_floor(x, g, n, limit, work)
    finite, total, energy, count = collect(x, g, n, floor, limit, summing, work)
    if finite and guessed and not are_enough(count, k, limit, rule, floor):
        # too high a guess; x is the sum by now
        finite, total, energy, count = collect(x, int64(0), n, int64(1), limit, summing, work)
    if not finite:
        return energy, False, count
    return energy, True, cut_to_rule(count, n, k, limit, rule, total, work)


@kernel
def _cut_redsync(count, k, mean, work):
    """Keep between k and 2 k of the 2 k + 1 largest, in order; returns how many."""
    hist, indices, values, _ = work
    lowest, top = int64(INF) >> 16, int64(0)
    for i in range(count):
        magnitude = int64(float_bits(values[i])) & MAGNITUDE
        hist[magnitude >> 16] += int32(1)
        lowest, top = min(lowest, magnitude >> 16), max(top, magnitude)
    for b in range((top >> 16) - 1, lowest - 1, -1):
        hist[b] += hist[b + 1]
    floor = _bisect(hist, lowest, count, k, mean, top) << 16
    hist[lowest : (top >> 16) + 1] = 0
    if floor == 0:
        trim_candidates(indices, values, count, k)
        return k
    kept = int64(0)
    for i in range(count):
        indices[kept] = indices[i]
        values[kept] = values[i]
        kept += int64((int64(float_bits(values[i])) & MAGNITUDE) >= floor)
    return kept


@kernel
def _bisect(reached, lowest, count, k, mean, top):
    """``selection.redsync_count``, but it returns the bin of the threshold; 0 if there is none.

    ``reached`` counts the candidates in a bin or a higher one; none is below the ``lowest``.
    """
    low, high, middle = 0.0, np.float64(bits_float(uint32(top))), np.float64(mean)
    low_bin, high_bin = int64(0), (top >> 16) + 1
    while high_bin - low_bin > 1:
        b = max(int64(1), int64(float_bits(np.float32(middle))) >> 16)
        found = int64(reached[b]) if b >= lowest else count
        if k <= found <= 2 * k:
            return b
        if found < k:
            high, high_bin = middle, b
        else:
            low, low_bin = middle, b
        middle = low + (high - low) / 2
    return int64(0)


@kernel
def candidate_room(n, limit):
    """Candidates that a layer may have: three times what is kept of them, and some more."""
    return min(n, 3 * limit + SPARE)
