"""Sums of sparse layers that are compressed again, in one pass: what the owner of a shard does.

All bodies are decoded and checked first, before anything is changed. Then tile by tile: what they hold
is summed in the cache, where the first part of selection finds it (see
:mod:`~hvd_adaptive.kernels.cpu.candidates`). So sums are neither written to memory nor read from it.
A small layer's sums stay in the cache anyway: they are made as a whole.

Bytes and remainders are those of adding and compressing: sums are added in the order of the bodies, and
what is selected from them is selected by the same functions.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, int64, uint32, uint64
from torch import Tensor

from hvd_adaptive.kernels.checks import check_bodies, check_body, check_layers, check_thresholds
from hvd_adaptive.kernels.cpu.candidates import (
    BLOCK,
    are_enough,
    candidate_limit,
    candidate_room,
    collect,
    collect_block,
    count_groups,
    cut_to_rule,
    floor_of_sample,
    known_floor,
    magnitude_sum,
    sample_groups,
    sample_pitch,
    take_back,
    take_candidates,
)
from hvd_adaptive.kernels.cpu.compiling import inlined, kernel
from hvd_adaptive.kernels.cpu.compression import compress_, kept_sizes, store
from hvd_adaptive.kernels.cpu.decompression import (
    add_all_until,
    decode_bodies,
    decompress_sum_,
    find_trailing,
    write_zeros,
)
from hvd_adaptive.kernels.cpu.enums import DGC, FAR, NEAR, REDSYNC, TRAILING
from hvd_adaptive.kernels.cpu.intrinsics import (
    LANES,
    float32_pointer,
    in_far_sample,
    in_near_sample,
    load_f32,
    load_u32,
    prefetch,
    store_f32,
    trailing_zeros,
)
from hvd_adaptive.kernels.cpu.layers import announced_values, damage_error, encode_layer
from hvd_adaptive.kernels.cpu.memory import AHEAD, KEPT, thread_buffers
from hvd_adaptive.kernels.cpu.streams import SLACK, put_varint
from hvd_adaptive.kernels.selection import LARGE, SAMPLE, SMALL, SelectionRule
from hvd_adaptive.kernels.two_passes import sum_and_compress
from hvd_adaptive.wire import ValueFormat

TILE = 4096
"""Elements that are summed at once: 16 KiB, so that what is added to them fits in the cache, too."""

THIN = 4
"""Layers that are so many times smaller than LARGE have a thin sample, too."""


@kernel
def _most_values(edges, numels, expected):
    """The most values that a body holds in all layers."""
    most = int64(1)
    for body in range(len(edges)):
        most = max(most, announced_values(edges[body, 0], edges[body, 1], numels, expected)[1])
    return most


@kernel
def _decode_layers(starts, ends, offsets, expected, decoded, stops, marks):
    """Decode all layers of all bodies: (damage, body, layer, its address).

    A body's values are one row; ``stops[layer + 1]`` are the numbers at which the layer ends in each.
    """
    layers = len(offsets) - 1
    counts = np.empty(len(starts), np.int64)
    for layer in range(layers):
        n = offsets[layer + 1] - offsets[layer]
        damage, body, position, nonfinite = decode_bodies(
            starts, ends, n, expected, decoded, stops[layer], counts
        )
        if damage:
            return damage, body, layer, position
        marks[layer] = nonfinite and n > 0
        stops[layer + 1] = stops[layer] + counts
    body = find_trailing(starts, ends)
    return (TRAILING, body, layers - 1, starts[body]) if body >= 0 else (0, 0, 0, 0)


@kernel
def _sum_tile(here, first, size, sums):
    """Write what the bodies hold of the next elements of a layer to an address."""
    decoded, _, stops, places = sums
    write_zeros(here, size)
    add_all_until(first + size, here - 4 * first, decoded, stops, places, np.float32(1))


@inlined
def _add_sampled(index, value, groups, pitch, sample):
    """Add a value to the sums of a sample's groups, which stand side by side, if it is in a group."""
    group = int64(uint32(index) // uint32(pitch))
    place = int64(index) - group * pitch
    if place < SAMPLE and group < groups:
        there = sample + 4 * (SAMPLE * group + place)
        store_f32(there, load_f32(there) + value)


@inlined
def _add_all_sampled(indices, values, i, stop, groups, near, sample):
    """The same of the values of one body; ``near`` is known where this is inlined."""
    pitch = SAMPLE * (NEAR if near else FAR)  # known: so a division is a multiplication
    while i < stop:
        here = indices + 4 * i
        left = stop - i
        if left >= LANES:
            hits = in_near_sample(here) if near else in_far_sample(here)
        else:
            hits = (uint64(1) << uint64(left)) - uint64(1)
        while hits:
            at = i + int64(trailing_zeros(hits))
            hits &= hits - uint64(1)
            _add_sampled(load_u32(indices + 4 * at), load_f32(values + 4 * at), groups, pitch, sample)
        i += LANES


@kernel
def _sample_sums(x, groups, pitch, sums, sample):
    """What x, where there is one, and all bodies sum to in the sample of a layer, group by group."""
    (indices, values), starts, stops, _ = sums
    here = int64(sample.ctypes.data)
    write_zeros(here, SAMPLE * groups)
    row = 4 * indices.shape[1]
    for body in range(len(stops)):
        where, what = int64(indices.ctypes.data) + body * row, int64(values.ctypes.data) + body * row
        if pitch == SAMPLE * NEAR:
            _add_all_sampled(where, what, starts[body], stops[body], groups, True, here)
        else:
            _add_all_sampled(where, what, starts[body], stops[body], groups, False, here)
    if x == 0:
        return
    for group in range(groups):
        prefetch(x + 4 * pitch * (group + AHEAD))
        kept = carray(float32_pointer(x + 4 * pitch * group), SAMPLE)
        sampled = carray(float32_pointer(here + 4 * SAMPLE * group), SAMPLE)
        for i in range(SAMPLE):
            sampled[i] = kept[i] + sampled[i]


@kernel
def _take_back_sums(x, n, sums, block):
    """x -= what the bodies hold of the first n elements, as :func:`take_back` does."""
    sums[3][:] = sums[1]
    here = int64(block.ctypes.data)
    for first in range(0, n, TILE):
        size = min(TILE, n - first)
        _sum_tile(here, first, size, sums)
        take_back(x + 4 * first, here, size)


@kernel
def _collect_sums(x, n, floor, limit, summing, sums, block, work):
    """:func:`collect` of what the bodies hold, added to x where there is one; without the energy."""
    room, here = candidate_room(n, limit), int64(block.ctypes.data)
    total, count = 0.0, int64(0)
    sums[3][:] = sums[1]
    for tile in range(0, n, TILE):
        end = min(n, tile + TILE)
        _sum_tile(here, tile, end - tile, sums)
        for first in range(tile, end, BLOCK):
            size, total_here = min(BLOCK, end - first), here + 4 * (first - tile)
            a, b = (x + 4 * first, total_here) if x else (total_here, int64(0))
            done, floor, _, count = collect_block(
                a, b, first, size, floor, limit, room, (0.0, count), work, False
            )
            if done < size:
                if x:
                    _take_back_sums(x, first + done, sums, block)
                return False, total, count
            if summing:
                total += magnitude_sum(a, size)
    return True, total, count


@kernel
def _take_large(x, n, k, rule, threshold, sums, room, work):
    """:func:`take_candidates` of a layer of more than SMALL elements: (whether it is finite, count)."""
    block, sample = room
    limit, summing = candidate_limit(n, k, rule), rule == REDSYNC
    floor = known_floor(n, k, limit, rule, threshold)
    guessed = floor < 0
    if guessed:
        # DGC's floor decides; that of the others only saves time, as a thin sample does
        pitch = sample_pitch(n) if rule == DGC else sample_pitch(THIN * n)
        groups, here = sample_groups(n, pitch), int64(sample.ctypes.data)
        _sample_sums(x, groups, pitch, sums, sample)
        counted = count_groups(here, int64(0), groups, SAMPLE, work[0])
        floor = floor_of_sample(counted, n, k, limit, rule, work[0])
    finite, total, count = _collect_sums(x, n, floor, limit, summing, sums, block, work)
    if finite and guessed and not are_enough(count, k, limit, rule, floor):  # too high a guess
        if x:  # it is the sum by now
            finite, total, _, count = collect(x, int64(0), n, int64(1), limit, summing, work)
        else:
            finite, total, count = _collect_sums(x, n, int64(1), limit, summing, sums, block, work)
    return finite, cut_to_rule(count, n, k, limit, rule, total, work) if finite else count


@kernel
def _take_small(x, n, k, rule, threshold, sums, room, work):
    """The same of a small layer."""
    here = int64(room[1].ctypes.data)
    sums[3][:] = sums[1]
    _sum_tile(here, 0, n, sums)
    a, b = (x, here) if x else (here, int64(0))
    _, finite, count = take_candidates(a, b, n, k, rule, threshold, work)
    return finite, count


@kernel
def _reduce_layers(x, offsets, counts, rule, floors, how, decoded, stops, marks, out, room, work):
    """Sum and compress all layers; returns the bytes written. ``marks``: what some body has marked."""
    _, indices, values, heads = work
    start, places = out, np.empty(stops.shape[1], np.int64)
    for layer in range(len(counts)):
        first = offsets[layer]
        n = offsets[layer + 1] - first
        k, floor, here = min(counts[layer], n), floors[layer], x + 4 * first if x else int64(0)
        sums = (decoded, stops[layer], stops[layer + 1], places)
        finite, count = False, int64(0)
        if marks[layer] == 0 and n > SMALL:
            finite, count = _take_large(here, n, k, rule, floor, sums, room, work)
        elif marks[layer] == 0:
            finite, count = _take_small(here, n, k, rule, floor, sums, room, work)
        if not finite:
            marks[layer] = 1
            out = put_varint(out, int64(1))
            continue
        _, out = encode_layer(out, indices, values, count, how, heads)
        if x:
            store(here, indices, values, count)
    return out - start


class _Rooms(threading.local):
    """Of one thread: room for the sums of a small layer, or for those of a large one's sample."""

    def __init__(self) -> None:
        self._sums = np.empty(0, np.float32)

    def sums(self, largest: int) -> npt.NDArray[np.float32]:
        """For layers of up to so many elements."""
        sampled = max(min(largest, LARGE) // NEAR, largest // FAR) + 2 * SAMPLE
        count = max(min(largest, SMALL), sampled)
        if len(self._sums) < count:
            self._sums = np.empty(count, np.float32)
        return self._sums


_rooms = _Rooms()


def _decode(
    edges: npt.NDArray[np.int64], row: int, offsets: npt.NDArray[np.int64], how: int
) -> tuple[tuple[npt.NDArray[np.generic], ...], npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """What :func:`_decode_layers` writes, of bodies between two addresses each; or a WireError."""
    ranks, layers = len(edges), len(offsets) - 1
    starts, ends = edges.T.copy()
    room = thread_buffers.decoded(row * ranks)
    decoded = tuple(each[: row * ranks].reshape(ranks, row) for each in room)
    stops, marks = np.zeros((layers + 1, ranks), np.int64), np.zeros(layers, np.uint8)
    damage, body, layer, position = _decode_layers(
        starts.copy(), ends, offsets, how, decoded, stops, marks
    )
    if damage:
        size, at = int(ends[body] - starts[body]), position - int(starts[body])
        raise damage_error(damage, layer, np.diff(offsets), at, size)
    return decoded, stops, marks


def reduce_(
    bodies: Sequence[Tensor],
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    values: ValueFormat,
    keeps: bool = True,
    reserve: int = 0,
    rule: SelectionRule = SelectionRule.topk,
    thresholds: npt.NDArray[np.float32] | None = None,
    whole: bool = False,
) -> tuple[Tensor, npt.NDArray[np.uint8]]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.reduce_`: in one pass. Releases the GIL.

    In two passes where the layers are one vector, or where the bodies hold more than 2^22 values: what
    they hold is decoded before the pass, and room for no more is kept. Memory: 8 bytes for each of
    these values, and for a large layer 4 for each element of its sample.
    """
    offsets, counts = check_layers(x, offsets, counts, None, whole)
    for body in check_bodies(bodies):
        check_body(body, x)
    numels, how = np.diff(offsets), int(values)
    edges = np.array([(body.data_ptr(), body.data_ptr() + body.numel()) for body in bodies], np.int64)
    row = 0 if whole else _most_values(edges, numels, how)
    if whole or row * len(bodies) > KEPT:
        return sum_and_compress(
            decompress_sum_, compress_, bodies, x, offsets, counts, values,
            keeps, reserve, rule, thresholds, whole,
        )  # fmt: skip
    floors = check_thresholds(rule, thresholds, len(counts))
    decoded, stops, marks = _decode(edges, row, offsets, how)
    bound, candidates = kept_sizes(offsets.tobytes(), counts.tobytes(), how, int(rule))
    buffer = torch.empty(reserve + max(bound, len(counts)) + SLACK, dtype=torch.uint8)
    size = _reduce_layers(
        x.data_ptr() if keeps else 0,
        offsets,
        counts,
        int(rule),
        floors,
        how,
        decoded,
        stops,
        marks,
        buffer.data_ptr() + reserve,
        (thread_buffers.block, _rooms.sums(int(numels.max(initial=0)))),
        thread_buffers.arrays(candidates),
    )
    return buffer[: reserve + size], marks
