"""Compression of a bucket's layers, from gradients or from another body, in one call each.

Two passes over a layer: the first adds the gradient and collects candidates (see
:mod:`~hvd_adaptive.kernels.cpu.candidates`); a NaN or an Inf ends it with nothing changed. The second
stores over the sum what encoding left of the values sent.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, int64
from torch import Tensor

from hvd_adaptive.kernels.checks import check_body, check_layers, check_thresholds
from hvd_adaptive.kernels.cpu.candidates import candidate_room, take_candidates
from hvd_adaptive.kernels.cpu.compiling import kernel
from hvd_adaptive.kernels.cpu.enums import REDSYNC, TRAILING
from hvd_adaptive.kernels.cpu.intrinsics import float32_pointer, prefetch, store_f32
from hvd_adaptive.kernels.cpu.layers import (
    add_at_positions,
    damage_error,
    encode_layer,
    most_values,
    read_but_positions,
    sparse_bound,
)
from hvd_adaptive.kernels.cpu.memory import AHEAD, thread_buffers
from hvd_adaptive.kernels.cpu.streams import SLACK, put_varint
from hvd_adaptive.kernels.cpu.values import bytes_of_values, get_values
from hvd_adaptive.kernels.floats import LARGEST
from hvd_adaptive.kernels.selection import SelectionRule
from hvd_adaptive.wire import ValueFormat


@kernel
def store(x, indices, values, count):
    """Put values in the place of the sums at their indices."""
    for i in range(count):
        prefetch(x + 4 * int64(indices[min(i + AHEAD, count - 1)]))
        store_f32(x + 4 * int64(indices[i]), values[i])


@kernel
def bound_sizes(offsets, counts, value_format, rule):
    """Bytes that the body needs at most, and the most candidates that a layer can have."""
    total, candidates = 0, 0
    for layer in range(len(counts)):
        n = offsets[layer + 1] - offsets[layer]
        k = min(counts[layer], n)
        limit = k
        most = k
        if rule == REDSYNC:
            limit, most = 2 * k + 1, 2 * k
        total += sparse_bound(n, most, value_format)
        candidates = max(candidates, candidate_room(n, limit))
    return total, candidates


@functools.lru_cache(maxsize=256)
def kept_sizes(offsets: bytes, counts: bytes, value_format: int, rule: int) -> tuple[int, int]:
    """As :func:`bound_sizes`; kept, because a bucket has the same ones at every step."""
    edges, wanted = (np.frombuffer(each, np.int64).copy() for each in (offsets, counts))
    bound, candidates = bound_sizes(edges, wanted, value_format, rule)
    return bound, candidates


@kernel
def _compress_layer(x, g, n, k, rule, floor, value_format, out, stats, work):
    """One layer, from the gradient to the payload; returns the address after it."""
    _, indices, values, heads = work
    energy, finite, count = take_candidates(x, g, n, k, rule, floor, work)
    if not finite:
        stats[:] = 0.0
        stats[3] = 1.0
        return put_varint(out, int64(1))
    sent, out = encode_layer(out, indices, values, count, value_format, heads)
    store(x, indices, values, count)
    stats[0], stats[1], stats[2], stats[3] = energy, sent, float(count), 0.0
    return out


@kernel
def _compress_layers(x, offsets, counts, rule, floors, grads, how, out, stats, work):
    """All layers of a bucket; returns the bytes written."""
    start = out
    for layer in range(len(counts)):
        first = offsets[layer]
        n = offsets[layer + 1] - first
        k = min(counts[layer], n)
        g, floor, row = grads[layer], floors[layer], stats[layer]
        out = _compress_layer(x + 4 * first, g, n, k, rule, floor, how, out, row, work)
    return out - start


@kernel
def energy_by_layer(offsets, indices, values, count, stats, column):
    """Add the energies of values of all layers' one vector to a column of their layers' rows."""
    layer = 0
    for i in range(count):
        while int64(indices[i]) >= offsets[layer + 1] - offsets[0]:
            layer += 1
        stats[layer, column] += np.float64(values[i]) * np.float64(values[i])


@kernel
def _note_sent(end, offsets, indices, values, count, value_format, stats):
    """Energy and number of what each layer sends of a body that ends at ``end``, into its row."""
    if count == 0:
        return
    get_values(end - bytes_of_values(count, value_format), values, count, value_format)
    energy_by_layer(offsets, indices, values, count, stats, 1)
    edges = offsets - offsets[0]
    for layer in range(len(stats)):
        cuts = np.searchsorted(indices[:count], edges[layer : layer + 2])
        stats[layer, 2] = float(cuts[1] - cuts[0])


def compress_(
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    values: ValueFormat,
    grads: Sequence[Tensor] | None = None,
    reserve: int = 0,
    rule: SelectionRule = SelectionRule.topk,
    thresholds: npt.NDArray[np.float32] | None = None,
    whole: bool = False,
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.compress_`: the same bytes, at memory speed.

    Releases the GIL. Cost at density 1 %: about two memcpys of the tensor, and for small layers some
    microseconds each. Memory: 24 bytes per value sent by the largest layer (48 for RedSync), of which a
    thread keeps up to 32 MiB.
    """
    offsets, counts = check_layers(x, offsets, counts, grads, whole)
    floors = check_thresholds(rule, thresholds, len(counts))
    layers = len(offsets) - 1
    addresses = np.zeros(layers, np.int64)
    if grads is not None:
        addresses[:] = [grad.data_ptr() for grad in grads]
    spans = offsets[[0, -1]] if whole else offsets
    bound, candidates = kept_sizes(spans.tobytes(), counts.tobytes(), int(values), int(rule))
    buffer = torch.empty(reserve + max(bound, layers) + SLACK, dtype=torch.uint8)
    stats = np.empty((layers, 4))
    how, work = int(values), thread_buffers.arrays(candidates)
    start, out = x.data_ptr(), buffer.data_ptr() + reserve
    if not whole:
        size = _compress_layers(
            start, offsets, counts, int(rule), floors, addresses, how, out, stats, work
        )
        return buffer[: reserve + size], stats
    # Every layer is added and measured by itself first: one that is not finite must stay as it was.
    none = np.zeros(layers, np.int64)
    _compress_layers(
        start,
        offsets,
        none,
        int(SelectionRule.topk),
        none,
        addresses,
        how,
        out,
        stats,
        work,
    )
    if stats[:, 3].any():
        buffer[reserve] = 1
        return buffer[: reserve + 1], stats
    total = np.empty((1, 4))
    size = _compress_layers(
        start, spans, counts, int(rule), floors, np.zeros(1, np.int64), how, out, total, work
    )
    count = int(total[0, 2])
    _note_sent(out + size, offsets, work[1], thread_buffers.decoded(count)[1], count, how, stats)
    return buffer[: reserve + size], stats


@kernel
def _recompress_layer(position, end, x, n, k, rule, floor, how, out, stats, decoded, work):
    """Decode a layer, encode what the rule takes of its values, and add the others to x.

    Returns (damage, next address or that of the damage, next address of the output, count decoded).
    """
    old_indices, old_values = decoded
    damage, position, middle, after, count = read_but_positions(
        position, end, n, how, old_indices, old_values
    )
    if damage:
        return damage, position, out, count
    if count < 0:
        stats[:] = 0.0
        stats[3] = 1.0
        return 0, position, put_varint(out, int64(1)), count
    _, indices, values, heads = work
    old, one = int64(old_values.ctypes.data), np.float32(1)
    energy, _, kept = take_candidates(old, 0, count, min(k, count), rule, floor, work)
    for i in range(kept):
        old_values[indices[i]] = np.float32(0)
    damage, where = add_at_positions(position, middle, x, n, count, one, old_indices, old_values)
    if damage:
        return damage, where, out, count
    for i in range(kept):
        indices[i] = old_indices[indices[i]]
    sent, out = encode_layer(out, indices, values, kept, how, heads)
    target = carray(float32_pointer(x), n)
    for i in range(kept):
        target[indices[i]] += values[i]
    largest = np.float32(LARGEST)
    for i in range(count):  # rounding up the largest of all magnitudes would give Inf
        target[old_indices[i]] = min(max(target[old_indices[i]], -largest), largest)
    stats[0], stats[1], stats[2], stats[3] = energy, sent, float(kept), 0.0
    return 0, after, out, count


@kernel
def _recompress_layers(body, size, x, offsets, counts, rule, floors, how, out, stats, decoded, work):
    """All layers of a bucket; returns (damage, layer, position, bytes written, last layer's count)."""
    position, end, start, count = body, body + size, out, int64(0)
    for layer in range(len(counts)):
        first = offsets[layer]
        n = offsets[layer + 1] - first
        k, floor, row = counts[layer], floors[layer], stats[layer]
        damage, position, out, count = _recompress_layer(
            position, end, x + 4 * first, n, k, rule, floor, how, out, row, decoded, work
        )
        if damage:
            return damage, layer, position - body, 0, 0
    if position != end:
        return TRAILING, len(counts) - 1, position - body, 0, 0
    return 0, 0, 0, out - start, count


def recompress_(
    body: Tensor,
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    values: ValueFormat,
    reserve: int = 0,
    rule: SelectionRule = SelectionRule.topk,
    thresholds: npt.NDArray[np.float32] | None = None,
    whole: bool = False,
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.recompress_`. Releases the GIL.

    Cost: about 6 ns for every value in ``body``.
    """
    offsets, counts = check_layers(x, offsets, counts, None, whole)
    floors = check_thresholds(rule, thresholds, len(counts))
    check_body(body, x)
    spans = offsets[[0, -1]] if whole else offsets
    numels, size = np.diff(spans), body.numel()
    start, how = body.data_ptr(), int(values)
    most = most_values(start, start + size, numels, how)
    counts = np.minimum(counts, most)
    bound, candidates = bound_sizes(spans, counts, how, int(rule))
    buffer = torch.empty(reserve + bound + SLACK, dtype=torch.uint8)
    stats = np.empty((len(counts), 4))
    decoded, work = thread_buffers.decoded(most), thread_buffers.arrays(candidates)
    out = buffer.data_ptr() + reserve
    damage, layer, position, written, count = _recompress_layers(
        start,
        size,
        x.data_ptr(),
        spans,
        counts,
        int(rule),
        floors,
        how,
        out,
        stats,
        decoded,
        work,
    )
    if damage:
        raise damage_error(damage, layer, numels, position, size)
    if whole:
        sent, nonfinite = int(stats[0, 2]), stats[0, 3]
        stats = np.zeros((len(offsets) - 1, 4))
        stats[:, 3] = nonfinite
        # again: what was in x has taken the values' places
        read_but_positions(start, start + size, int(numels[0]), how, *decoded)
        energy_by_layer(offsets, *decoded, count, stats, 0)
        _note_sent(out + written, offsets, work[1], decoded[1], sent, how, stats)
    return buffer[: reserve + written], stats
