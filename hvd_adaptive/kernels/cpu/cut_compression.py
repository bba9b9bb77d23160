"""Compression of a bucket's layers for several receivers: one selection, and codes for each piece.

As :mod:`~hvd_adaptive.kernels.cpu.compression`, but what is selected of a layer is encoded piece by
piece, as if each were a layer.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from numba import int64
from torch import Tensor

from hvd_adaptive.kernels.checks import check_cuts, check_layers, check_thresholds
from hvd_adaptive.kernels.cpu.candidates import candidate_room, take_candidates
from hvd_adaptive.kernels.cpu.compiling import kernel
from hvd_adaptive.kernels.cpu.compression import compress_, energy_by_layer, store
from hvd_adaptive.kernels.cpu.enums import REDSYNC
from hvd_adaptive.kernels.cpu.layers import encode_layer, sparse_bound
from hvd_adaptive.kernels.cpu.memory import thread_buffers
from hvd_adaptive.kernels.cpu.streams import SLACK, put_varint
from hvd_adaptive.kernels.selection import SelectionRule
from hvd_adaptive.wire import ValueFormat


@kernel
def _bound_sizes(spans, counts, cuts, value_format, rule):
    """Bytes that the pieces need at most, and the most candidates that a span can have."""
    total, candidates, piece = 0, 0, 0
    for span in range(len(counts)):
        n = spans[span + 1] - spans[span]
        k = min(counts[span], n)
        limit, most = k, k
        if rule == REDSYNC:
            limit, most = 2 * k + 1, 2 * k
        candidates = max(candidates, candidate_room(n, limit))
        while piece < len(cuts) - 1 and cuts[piece + 1] <= spans[span + 1]:
            total += sparse_bound(cuts[piece + 1] - cuts[piece], most, value_format)
            piece += 1
    return total, candidates


@kernel
def _encode_pieces(span, last, piece, cuts, how, out, ends, found, heads):
    """The pieces of one span, whose positions count from ``span``: (next piece, energy, address)."""
    indices, values, count = found
    energy, start = 0.0, 0
    while piece < len(cuts) - 1 and cuts[piece + 1] <= last:
        first, stop = cuts[piece] - span, cuts[piece + 1] - span
        end = start
        while end < count and int64(indices[end]) < stop:
            indices[end] -= first
            end += 1
        sent, out = encode_layer(out, indices[start:end], values[start:end], end - start, how, heads)
        for i in range(start, end):
            indices[i] += first
        energy += sent
        ends[piece] = out
        start = end
        piece += 1
    return piece, energy, out


@kernel
def _mark_pieces(last, piece, cuts, out, ends):
    """A mark for every piece of a span that is not finite: (next piece, address)."""
    while piece < len(cuts) - 1 and cuts[piece + 1] <= last:
        out = put_varint(out, int64(1))
        ends[piece] = out
        piece += 1
    return piece, out


@kernel
def _compress_cut(x, spans, counts, rule, floors, grads, cuts, how, out, ends, stats, work, originals):
    """All spans of a bucket, encoded by pieces; ``ends`` are the addresses after each piece."""
    _, indices, values, heads = work
    piece = 0
    for span in range(len(counts)):
        first, last = spans[span], spans[span + 1]
        n, row = last - first, stats[span]
        energy, finite, count = take_candidates(
            x + 4 * first, grads[span], n, min(counts[span], n), rule, floors[span], work
        )
        if not finite:
            row[:] = 0.0
            row[3] = 1.0
            piece, out = _mark_pieces(last, piece, cuts, out, ends)
            continue
        originals[:count] = values[:count]
        found = (indices, values, count)
        piece, sent, out = _encode_pieces(first, last, piece, cuts, how, out, ends, found, heads)
        store(x + 4 * first, indices, values, count)
        row[0], row[1], row[2], row[3] = energy, sent, float(count), 0.0


def compress_cut_(
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    values: ValueFormat,
    cuts: npt.NDArray[np.int64],
    grads: Sequence[Tensor] | None = None,
    rule: SelectionRule = SelectionRule.topk,
    thresholds: npt.NDArray[np.float32] | None = None,
    whole: bool = False,
) -> tuple[Tensor, npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.compress_cut_`. Releases the GIL.

    Cost: as ``compress_``, and some 0.1 microseconds for every piece.
    """
    offsets, counts = check_layers(x, offsets, counts, grads, whole)
    cuts = check_cuts(offsets, cuts, whole)
    floors = check_thresholds(rule, thresholds, len(counts))
    layers = len(offsets) - 1
    spans, stats = offsets, np.zeros((layers, 4))
    addresses = np.zeros(layers, np.int64)
    if grads is not None:
        addresses[:] = [grad.data_ptr() for grad in grads]
    if whole:
        # every layer is added and measured by itself first: one that is not finite stays as it was
        none = np.zeros(layers, np.int64)
        _, stats = compress_(x, offsets, none, values, grads)
        if stats[:, 3].any():
            marks = torch.ones(len(cuts) - 1, dtype=torch.uint8)
            return marks, stats, np.arange(1, len(cuts))
        spans, addresses = offsets[[0, -1]], np.zeros(1, np.int64)
    bound, candidates = _bound_sizes(spans, counts, cuts, int(values), int(rule))
    buffer = torch.empty(bound + len(cuts) + SLACK, dtype=torch.uint8)
    work, ends = thread_buffers.arrays(candidates), np.zeros(len(cuts) - 1, np.int64)
    found = np.zeros((len(counts), 4))
    indices, originals = thread_buffers.decoded(candidates)
    _compress_cut(
        x.data_ptr(), spans, counts, int(rule), floors, addresses, cuts, int(values),
        buffer.data_ptr(), ends, found, work, originals,
    )  # fmt: skip
    ends -= buffer.data_ptr()
    if not whole:
        return buffer[: ends[-1] if len(ends) else 0], found, ends
    count = int(found[0, 2])
    indices[:count] = work[1][:count]
    # less what rounding left: what is sent
    np.subtract(originals[:count], work[2][:count], out=originals[:count])
    energy_by_layer(offsets, indices, originals, count, stats, 1)
    places = np.searchsorted(indices[:count], offsets - offsets[0])
    stats[:, 2] = np.diff(places)
    return buffer[: ends[-1] if len(ends) else 0], stats, ends
