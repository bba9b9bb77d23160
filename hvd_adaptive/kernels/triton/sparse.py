"""Sparse layers on a GPU: exactly the largest elements, and their positions and values as bytes.

:class:`hvd_adaptive.kernels.base.SparseKernels` says what each function does; how elements are
selected is in :mod:`hvd_adaptive.kernels.triton.selecting`. Memory traffic of compression, in words of
4 bytes per element: ``x`` and the gradients are read and ``x`` is written once, 3 in all. Candidates, a
few more than are sent, are written and read some times more. Their lists take 8 bytes per element while
a bucket is compressed; most of that memory is never touched.

The host waits once per call, for the sizes and the statistics. With the rules ``dgc`` and ``redsync``
it also waits for what the sample, or the bisection, says of each layer, of a copy of the sums.

Damage is only found here; what it is, and where, the reference then says.

What is not here is that of the reference: :func:`position_bits`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.checks import (
    check_bodies,
    check_body,
    check_cuts,
    check_layers,
    check_outs,
    check_thresholds,
)
from hvd_adaptive.kernels.floats import LARGEST
from hvd_adaptive.kernels.reference import sparse as reference
from hvd_adaptive.kernels.reference.sparse import count_to_send
from hvd_adaptive.kernels.selection import SelectionRule
from hvd_adaptive.kernels.triton import recording
from hvd_adaptive.kernels.triton.jit import encoding as jit
from hvd_adaptive.kernels.triton.launching import (
    gradient_code,
    launch,
    read_back,
    sums_between,
    upload,
)
from hvd_adaptive.kernels.triton.receiving import Use, decode
from hvd_adaptive.kernels.triton.selecting import Additions, Segments, Selection, segments_of
from hvd_adaptive.kernels.triton.spectra import (
    moments,
    refined_spectrum,
    sample_spectrum,
    spectrum,
    summary,
)
from hvd_adaptive.kernels.two_passes import sum_and_compress
from hvd_adaptive.wire import ValueFormat
from hvd_adaptive.wire.sparse import max_sparse_bytes

__all__ = [
    "clear_",
    "compress_",
    "compress_cut_",
    "decompress_add_",
    "decompress_sum_",
    "moments",
    "position_bits",
    "recompress_",
    "reduce_",
    "refined_spectrum",
    "sample_spectrum",
    "spectrum",
    "summary",
]

position_bits = reference.position_bits

Int64s = npt.NDArray[np.int64]

_COUNTING = (SelectionRule.dgc, SelectionRule.redsync)
"""Rules that first say how many elements to send, which are then the largest."""
_WARPS = 2
"""Of a program that has a block of 256 values."""


def compress_(
    x: Tensor,
    offsets: Int64s,
    counts: Int64s,
    values: ValueFormat,
    grads: Sequence[Tensor] | None = None,
    reserve: int = 0,
    rule: SelectionRule = SelectionRule.topk,
    thresholds: npt.NDArray[np.float32] | None = None,
    whole: bool = False,
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.compress_`."""
    offsets, counts = check_layers(x, offsets, counts, grads, whole, halves=True)
    floors = _floors(rule, thresholds, len(counts))
    cuts = offsets[[0, -1]] if whole else offsets
    data, stats, _ = _compress_(x, offsets, cuts, counts, values, grads, reserve, rule, floors, whole)
    return data, stats


def compress_cut_(
    x: Tensor,
    offsets: Int64s,
    counts: Int64s,
    values: ValueFormat,
    cuts: Int64s,
    grads: Sequence[Tensor] | None = None,
    rule: SelectionRule = SelectionRule.topk,
    thresholds: npt.NDArray[np.float32] | None = None,
    whole: bool = False,
) -> tuple[Tensor, npt.NDArray[np.float64], Int64s]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.compress_cut_`."""
    offsets, counts = check_layers(x, offsets, counts, grads, whole, halves=True)
    cuts = check_cuts(offsets, cuts, whole)
    floors = _floors(rule, thresholds, len(counts))
    return _compress_(x, offsets, cuts, counts, values, grads, 0, rule, floors, whole)


def _floors(
    rule: SelectionRule, thresholds: npt.NDArray[np.float32] | None, spans: int
) -> Int64s | None:
    """The thresholds as bits; None for a rule that has none."""
    if thresholds is None and rule != SelectionRule.threshold:
        return None
    return check_thresholds(rule, thresholds, spans)


def _compress_(
    x: Tensor,
    offsets: Int64s,
    cuts: Int64s,
    counts: Int64s,
    values: ValueFormat,
    grads: Sequence[Tensor] | None,
    reserve: int,
    rule: SelectionRule,
    floors: Int64s | None,
    whole: bool,
) -> tuple[Tensor, npt.NDArray[np.float64], Int64s]:
    """Select from each span, encode each piece."""
    device, layers = x.device, len(offsets) - 1
    if len(cuts) < 2:
        nothing = torch.zeros(reserve, dtype=torch.uint8, device=device)
        return nothing, np.zeros((layers, 4)), np.zeros(0, np.int64)
    if rule in _COUNTING:
        counts = _counted(x, offsets, counts, grads, rule, whole)
    segments = segments_of(offsets, cuts, counts, whole, device)
    gradients = gradient_code(grads)

    def work(sent: Tensor) -> tuple[tuple[Additions, Tensor], Tensor]:
        selection = Selection(segments, sent, gradients)
        data, ends = _encode(segments, selection, values, reserve, np.diff(cuts), selection.indices)
        return (selection.additions, data), _statistics(segments, selection, ends)

    key, given = (segments, gradients, values, reserve), segments.given(x, grads, floors)
    (additions, data), told = recording.run(key, given, device, work)
    return _taken(additions, data, told)


def _statistics(segments: Segments, selection: Selection, ends: Tensor) -> Tensor:
    """Statistics of each layer, the number of bytes, and where each piece ends; float64."""
    layers, number = segments.layers, segments.pieces + 1
    sums = sums_between(selection.energies(), segments.layer_ranges)
    found = torch.empty(4 * layers + number, dtype=torch.float64, device=ends.device)
    launch(
        *(jit.read_statistics, (layers + 1,), ends.device, sums, selection.layer_counts),
        *(selection.nonfinite, ends, found, layers, number),
        SIZE=1024,
    )
    return found


def _taken(
    additions: Additions, data: Tensor, told: npt.NDArray[np.float64]
) -> tuple[Tensor, npt.NDArray[np.float64], Int64s]:
    """The bytes, the statistics of each layer, and where each piece ends.

    Args:
        additions: of gradients, which are taken back from layers that are not finite.
        data: room with the bytes; these are copied, and the room may be used again.
        told: what :func:`_statistics` found; exact to 2^53.
    """
    layers = additions.segments.layers
    stats, places = told[: 4 * layers].reshape(layers, 4), told[4 * layers :].astype(np.int64)
    if np.count_nonzero(stats[:, 3]):
        stats[stats[:, 3] != 0, :3] = 0
        additions.take_back()
    return data[: int(places[0])].clone(), stats, places[1:]


def _counted(
    x: Tensor,
    offsets: Int64s,
    counts: Int64s,
    grads: Sequence[Tensor] | None,
    rule: SelectionRule,
    whole: bool,
) -> Int64s:
    """How many the rules send that ask a sample, or bisect: of each span; 0 where it is not finite."""
    total = x[offsets[0] : offsets[-1]].clone()
    edges = (offsets - offsets[0]).tolist()
    for layer, grad in enumerate(grads or ()):
        total[edges[layer] : edges[layer + 1]] += grad.view(-1)
    spans = [(0, edges[-1])] if whole else [*itertools.pairwise(edges)]
    found = np.zeros(len(spans), np.int64)
    for span, (start, end) in enumerate(spans):
        part = total[start:end]
        if bool(part.isfinite().all()):
            found[span] = count_to_send(part, int(counts[span]), rule, 1)
    return found


def _encode(
    segments: Segments,
    selection: Selection,
    values: ValueFormat,
    reserve: int,
    numels: Int64s,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """(room with the bytes of all pieces, their number and where each piece ends, on the device).

    What is left of the elements that are sent goes into their place.

    Args:
        segments: of the elements that were selected from.
        selection: from them.
        values: how values are sent.
        reserve: bytes in front.
        numels: elements of the vector that each piece's positions are of.
        positions: what is sent as the positions of the selected elements.
    """
    device, pieces, grid = positions.device, segments.pieces, (segments.blocks,)
    most = reserve + _room(numels.tobytes(), segments.most.tobytes(), values)
    words = torch.zeros(most // 4 + 2, dtype=torch.int32, device=device)
    body = words.view(torch.uint8)
    heads = torch.empty(segments.blocks, dtype=torch.int32, device=device)
    bits = torch.empty(segments.blocks + 1, dtype=torch.int64, device=device)
    placed = (segments.block_pieces, segments.first_blocks, segments.capacities, selection.counts)
    launch(jit.choose_heads, grid, device, *placed, positions, heads, bits, num_warps=_WARPS)
    ends = torch.empty(1 + 3 * pieces, dtype=torch.int64, device=device)
    launch(
        *(jit.place_pieces, (1,), device, body, selection.counts, selection.wrong),
        *(segments.piece_spans, segments.first_blocks, bits, ends, segments.blocks, pieces, reserve),
        FORMAT=int(values),
    )
    launch(
        *(jit.write_stream, grid, device, *placed, positions, heads, bits, ends, pieces, words),
        num_warps=_WARPS,
    )
    means = selection.values  # of no use but for signs
    if values is ValueFormat.sign:
        means = torch.empty((pieces, 2), dtype=torch.float32, device=device)
        sums = torch.empty((segments.blocks, 3), dtype=torch.float64, device=device)
        launch(jit.sum_sides, grid, device, *placed, selection.values, sums)
        launch(jit.find_means, (pieces,), device, *placed[1:], selection.values, sums, means)
    launch(
        *(jit.write_values, grid, device, *placed, selection.indices, selection.values, means),
        *(ends, pieces, selection.addresses, body),
        FORMAT=int(values),
        num_warps=_WARPS,
    )
    return body, ends


@functools.lru_cache(maxsize=256)
def _room(numels: bytes, counts: bytes, values: ValueFormat) -> int:
    """Bytes that pieces take at most; kept, because a bucket has the same ones at every step."""
    sizes = zip(*(np.frombuffer(each, np.int64).tolist() for each in (numels, counts)), strict=True)
    return sum(max_sparse_bytes(numel, count, values) for numel, count in sizes)


def decompress_add_(
    body: Tensor,
    outs: Sequence[Tensor],
    scale: float,
    values: ValueFormat | None = None,
    whole: bool = False,
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.decompress_add_`."""
    return _add_([body], outs, scale, values, whole, Use.add)


def decompress_sum_(
    bodies: Sequence[Tensor],
    outs: Sequence[Tensor],
    scale: float,
    values: ValueFormat | None = None,
    whole: bool = False,
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.decompress_sum_`."""
    return _add_(check_bodies(bodies), outs, scale, values, whole, Use.sum)


def _add_(
    bodies: Sequence[Tensor],
    outs: Sequence[Tensor],
    scale: float,
    values: ValueFormat | None,
    whole: bool,
    use: Use,
) -> npt.NDArray[np.uint8]:
    """Add bodies one after the other; WireError for the first that is damaged."""
    numels = check_outs(bodies[0], outs, whole)
    for body in bodies[1:]:
        check_body(body, bodies[0])
    if use is Use.sum and whole and outs:
        torch._foreach_zero_(list(outs))
    _, damaged, marks = decode(bodies, numels, values, whole, use, outs, scale)
    for layer in marks.nonzero()[0].tolist():
        outs[layer].fill_(torch.nan)
    if damaged:
        _raise_damage(bodies, numels, values, whole)
    return marks


def _raise_damage(
    bodies: Sequence[Tensor], numels: Sequence[int], values: ValueFormat | None, whole: bool
) -> None:
    """The reference's WireError for bodies of which one was found damaged."""
    for body in bodies:
        outs = [torch.zeros(numel) for numel in numels]
        reference.decompress_add_(body.cpu(), outs, 1.0, values, whole)  # many small steps
    raise RuntimeError("a body that decodes was found damaged: please report this with the body")


def clear_(
    body: Tensor, outs: Sequence[Tensor], values: ValueFormat | None = None, whole: bool = False
) -> None:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.clear_`."""
    numels = check_outs(body, outs, whole)
    _, damaged, _ = decode([body], numels, values, whole, Use.clear, outs)
    if damaged:
        _raise_damage([body], numels, values, whole)


def recompress_(
    body: Tensor,
    x: Tensor,
    offsets: Int64s,
    counts: Int64s,
    values: ValueFormat,
    reserve: int = 0,
    rule: SelectionRule = SelectionRule.topk,
    thresholds: npt.NDArray[np.float32] | None = None,
    whole: bool = False,
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.recompress_`.

    The host waits three times: whether the body is whole, how many values it has (four times for
    layers that are one vector, and which of them are whose), and for the result.
    """
    offsets, counts = check_layers(x, offsets, counts, None, whole)
    floors = _floors(rule, thresholds, len(counts))
    check_body(body, x)
    numels = np.diff(offsets)
    if not len(counts):
        received, damaged, marks = None, bool(body.numel()), np.zeros(0, np.uint8)
    else:
        received, damaged, marks = decode([body], numels.tolist(), values, whole, Use.list)
    if damaged:
        reference.recompress_(body, x, offsets, counts, values, reserve, rule, thresholds, whole)
        raise RuntimeError("a body that decodes was found damaged: please report this with the body")
    if received is None:
        return torch.zeros(reserve, dtype=torch.uint8, device=x.device), np.zeros((0, 4))
    found, positions, old = received.listed()
    edges = np.cumsum([0, *found])
    if whole:
        edges = read_back(torch.searchsorted(positions.long(), upload(offsets - offsets[0], x.device)))
    if rule in _COUNTING:
        counts = _counted(old, edges, counts, None, rule, whole)
    cuts = edges[[0, -1]] if whole else edges
    segments = Segments(edges, cuts, counts, whole, x.device)  # not kept: sizes are those of this step
    given = segments.given(old, None, floors, np.asarray(marks, np.int64))
    selection = Selection(segments, upload(given, x.device), 0)
    spans = offsets[[0, -1]] if whole else offsets
    data, ends = _encode(
        *(segments, selection, values, reserve, np.diff(spans)),
        _positions_of(selection, segments, positions),
    )
    # what is left of the values is in their place; rounding up the largest of all would give Inf
    starts = torch.repeat_interleave(
        upload(spans[:-1], x.device), upload(found, x.device), output_size=len(old)
    )
    places = positions + starts
    x[places] = (x[places] + old).clamp(-LARGEST, LARGEST)
    told = read_back(_statistics(segments, selection, ends))
    data, stats, _ = _taken(selection.additions, data, told)
    return data, stats


reduce_ = functools.partial(sum_and_compress, decompress_sum_, compress_)
"""See :meth:`hvd_adaptive.kernels.base.SparseKernels.reduce_`: in two passes."""


def _positions_of(selection: Selection, segments: Segments, positions: Tensor) -> Tensor:
    """Of elements that were selected from a list of others: the positions of these; int32."""
    if not len(positions):
        return selection.indices
    starts = upload(np.repeat(segments.cuts[:-1], segments.most), positions.device)
    # where fewer are sent than could be, there is room that holds anything
    return positions[(selection.indices + starts).clamp(0, len(positions) - 1)]
