"""Sparse kernels in plain torch: a sort instead of a threshold, one layer at a time.

:class:`hvd_adaptive.kernels.base.SparseKernels` says what each function does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.checks import (
    check_bodies,
    check_body,
    check_counts,
    check_cuts,
    check_layers,
    check_outs,
    check_thresholds,
)
from hvd_adaptive.kernels.floats import LARGEST
from hvd_adaptive.kernels.reference.decoding import decode_layers
from hvd_adaptive.kernels.reference.encoding import block_heads, bytes_tensor, encode_layer, gap_blocks
from hvd_adaptive.kernels.reference.spectra import (
    energy_of,
    magnitude_bits,
    moments,
    refined_spectrum,
    sample_spectrum,
    spectrum,
    summary,
)
from hvd_adaptive.kernels.selection import SelectionRule, counts_from_above, dgc_count, redsync_count
from hvd_adaptive.kernels.two_passes import sum_and_compress
from hvd_adaptive.wire import ValueFormat
from hvd_adaptive.wire.varint import write_varint

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


def count_to_send(x: Tensor, k: int, rule: SelectionRule, floor: int) -> int:
    """How many elements a rule sends of a finite vector; ``floor``: the threshold's bits."""
    magnitudes = magnitude_bits(x)
    nonzeros = int((magnitudes > 0).sum())
    k = min(k, x.numel())

    def reaching(bits: int) -> int:
        return int((magnitudes >= bits).sum())

    count = k
    if rule == SelectionRule.threshold:
        count = min(k, reaching(floor))
    elif rule == SelectionRule.dgc:
        count = dgc_count(counts_from_above(sample_spectrum(x)), x.numel(), k, reaching)
    elif rule == SelectionRule.redsync and 0 < k < nonzeros:
        mean = float(np.float32(float(x.double().abs().sum()) / x.numel()))
        count = redsync_count(k, mean, float(x.abs().max()), lambda b: reaching(b << 16))
    return min(count, nonzeros)


def _select(x: Tensor, k: int, rule: SelectionRule, floor: int) -> Tensor:
    """The rising indices of what a rule sends of a finite vector; ``floor``: the threshold's bits."""
    order = torch.sort(magnitude_bits(x), descending=True, stable=True).indices
    return order[: count_to_send(x, k, rule, floor)].sort().values


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
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.compress_`.

    Example:
        >>> import numpy as np, torch
        >>> from hvd_adaptive.wire import ValueFormat
        >>> x = torch.tensor([1.0, -5.0, 2.0, 0.0, 3.0])
        >>> offsets, counts = np.array([0, 3, 5]), np.array([1, 2])
        >>> grads = [torch.ones(3), torch.ones(2)]
        >>> body, stats = compress_(x, offsets, counts, ValueFormat.fp32, grads)
        >>> x.tolist(), stats[:, 2].tolist()
        ([2.0, 0.0, 3.0, 0.0, 0.0], [1.0, 2.0])
    """
    offsets, counts = check_layers(x, offsets, counts, grads, whole, halves=True)
    floors = check_thresholds(rule, thresholds, len(counts)).tolist()
    layers = len(offsets) - 1
    stats = np.zeros((layers, 4))
    for layer in range(layers):
        part = x[offsets[layer] : offsets[layer + 1]]
        total = part if grads is None else part + grads[layer].view(-1)
        stats[layer, 3] = not bool(total.isfinite().all())
        if not stats[layer, 3]:
            part.copy_(total)
            stats[layer, 0] = energy_of(total)
    parts = [torch.zeros(reserve, dtype=torch.uint8, device=x.device)]
    for span, (first, last) in enumerate(_spans(layers, whole)):
        if stats[first:last, 3].any():
            parts.append(bytes_tensor(write_varint(1), x.device))
            continue
        part = x[offsets[first] : offsets[last]]
        indices = _select(part, int(counts[span]), rule, floors[span])
        taken = part[indices]
        encoded, decoded = encode_layer(indices, taken, values)
        part[indices] = taken - decoded
        parts += encoded
        _note_sent(stats[first:last], offsets[first : last + 1], indices, decoded)
    return torch.cat(parts), stats


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
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.compress_cut_`: select all, cut, encode.

    Example:
        >>> import numpy as np, torch
        >>> from hvd_adaptive.wire import ValueFormat
        >>> x, one = torch.tensor([1.0, -5.0, 2.0, 3.0]), np.array([2])
        >>> data, stats, ends = compress_cut_(x, np.array([0, 4]), one, ValueFormat.fp32, [0, 2, 4])
        >>> x.tolist(), data.numel() == int(ends[-1]), int(stats[0, 2])
        ([1.0, 0.0, 2.0, 0.0], True, 2)
    """
    offsets, counts = check_layers(x, offsets, counts, grads, whole, halves=True)
    cuts = check_cuts(offsets, cuts, whole)
    selected = x.clone()
    _, stats = compress_(
        selected, offsets, counts, ValueFormat.fp32, grads, 0, rule, thresholds, whole
    )  # sends all bits of what it selects
    layers, sent = len(offsets) - 1, torch.zeros_like(x)
    for layer in np.flatnonzero(stats[:, 3] == 0).tolist() if grads is not None else ():
        assert grads is not None
        x[offsets[layer] : offsets[layer + 1]] += grads[layer].view(-1)
    pieces: list[Tensor] = []
    for first, last in _spans(layers, whole):
        finite = not stats[first:last, 3].any()
        inside = cuts[(cuts >= offsets[first]) & (cuts <= offsets[last])].tolist()
        for start, end in itertools.pairwise(inside):
            part, indices = x[start:end], (x[start:end] != selected[start:end]).nonzero().view(-1)
            codes = [bytes_tensor(write_varint(1), x.device)]
            if finite:
                codes, decoded = encode_layer(indices, part[indices], values)
                part[indices] -= decoded
                sent[start + indices] = decoded
            pieces.append(torch.cat(codes))
    for layer in range(layers):
        stats[layer, 1] = energy_of(sent[offsets[layer] : offsets[layer + 1]])
    ends = np.cumsum([piece.numel() for piece in pieces], dtype=np.int64)
    return torch.cat([torch.zeros(0, dtype=torch.uint8, device=x.device), *pieces]), stats, ends


def _spans(layers: int, whole: bool) -> list[tuple[int, int]]:
    """First and last layer + 1 of everything that is selected from together."""
    return [(0, layers)] if whole else [(layer, layer + 1) for layer in range(layers)]


def _by_layer(offsets: npt.NDArray[np.int64], indices: Tensor, values: Tensor) -> list[Tensor]:
    """The values of each layer, of indices that count from the first layer on."""
    edges = torch.from_numpy(offsets - offsets[0]).to(indices.device)
    cuts = torch.searchsorted(indices, edges).tolist()
    return [values[start:end] for start, end in itertools.pairwise(cuts)]


def _note_sent(
    stats: npt.NDArray[np.float64], offsets: npt.NDArray[np.int64], indices: Tensor, decoded: Tensor
) -> None:
    """Energy and number of what the layers send, into their rows."""
    for row, values in zip(stats, _by_layer(offsets, indices, decoded), strict=True):
        row[1:3] = energy_of(values), len(values)


def _pieces(
    body: Tensor, outs: Sequence[Tensor], values: ValueFormat | None, whole: bool
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, bool]]:
    """(number, the output as 1-D, indices into it, values, nonfinite) of one layer after the other."""
    numels = check_outs(body, outs, whole)
    edges = np.cumsum([0, *numels])
    spans = _spans(len(outs), whole)
    totals = [int(edges[last] - edges[first]) for first, last in spans]
    decoded = decode_layers(body, body.cpu().numpy().tobytes(), totals, values)
    for (first, last), (found, taken, nonfinite) in zip(spans, decoded, strict=True):
        indices = torch.tensor(found, dtype=torch.int64, device=body.device)
        offsets = edges[first : last + 1] - edges[first]
        parts = zip(
            _by_layer(offsets, indices, indices), _by_layer(offsets, indices, taken), strict=True
        )
        for layer, (where, part) in enumerate(parts, first):
            yield layer, outs[layer].view(-1), where - int(offsets[layer - first]), part, nonfinite


def decompress_add_(
    body: Tensor,
    outs: Sequence[Tensor],
    scale: float,
    values: ValueFormat | None = None,
    whole: bool = False,
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.decompress_add_`.

    Example:
        >>> import numpy as np, torch
        >>> from hvd_adaptive.wire import ValueFormat
        >>> x, out = torch.tensor([1.0, -5.0, 2.0]), torch.zeros(3)
        >>> body, _ = compress_(x, np.array([0, 3]), np.array([1]), ValueFormat.fp16)
        >>> decompress_add_(body, [out], scale=0.5).tolist(), out.tolist()
        ([0], [0.0, -2.5, 0.0])
    """
    marks = np.zeros(len(outs), np.uint8)
    for layer, out, where, taken, nonfinite in _pieces(body, outs, values, whole):
        marks[layer] = nonfinite
        if nonfinite:
            out.fill_(float("nan"))
        out[where] += taken * torch.tensor(scale, dtype=torch.float32, device=out.device)
    return marks


def decompress_sum_(
    bodies: Sequence[Tensor],
    outs: Sequence[Tensor],
    scale: float,
    values: ValueFormat | None = None,
    whole: bool = False,
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.decompress_sum_`.

    Example:
        >>> import numpy as np, torch
        >>> from hvd_adaptive.wire import ValueFormat
        >>> x, out = torch.tensor([1.0, -5.0, 2.0]), torch.ones(3)
        >>> body, _ = compress_(x, np.array([0, 3]), np.array([1]), ValueFormat.fp16)
        >>> decompress_sum_([body, body], [out], scale=0.5).tolist(), out.tolist()
        ([0], [0.0, -5.0, 0.0])
    """
    for out in outs:
        out.zero_()
    marks = np.zeros(len(outs), np.uint8)
    for body in check_bodies(bodies):
        marks |= decompress_add_(body, outs, scale, values, whole)
    return marks


def clear_(
    body: Tensor, outs: Sequence[Tensor], values: ValueFormat | None = None, whole: bool = False
) -> None:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.clear_`.

    Example:
        >>> import numpy as np, torch
        >>> from hvd_adaptive.wire import ValueFormat
        >>> x, momentum = torch.tensor([1.0, -5.0, 2.0]), torch.ones(3)
        >>> body, _ = compress_(x, np.array([0, 3]), np.array([1]), ValueFormat.fp16)
        >>> clear_(body, [momentum])
        >>> momentum.tolist()
        [1.0, 0.0, 1.0]
    """
    for _, out, where, _, _ in _pieces(body, outs, values, whole):
        out[where] = 0


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
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.recompress_`.

    Example:
        >>> import numpy as np, torch
        >>> from hvd_adaptive.wire import ValueFormat
        >>> x, offsets = torch.tensor([1.0, -5.0, 2.0]), np.array([0, 3])
        >>> body, _ = compress_(x, offsets, np.array([2]), ValueFormat.fp32)
        >>> less, _ = recompress_(body, x, offsets, np.array([1]), ValueFormat.fp32)
        >>> body.numel(), less.numel(), x.tolist()
        (12, 7, [1.0, 0.0, 2.0])
    """
    offsets, counts = check_layers(x, offsets, counts, None, whole)
    floors = check_thresholds(rule, thresholds, len(counts)).tolist()
    check_body(body, x)
    layers = len(offsets) - 1
    spans = _spans(layers, whole)
    numels = [int(offsets[last] - offsets[first]) for first, last in spans]
    parts = [torch.zeros(reserve, dtype=torch.uint8, device=x.device)]
    stats = np.zeros((layers, 4))
    decoded = decode_layers(body, body.cpu().numpy().tobytes(), numels, values)
    for span, (found, old, nonfinite) in enumerate(decoded):
        first, last = spans[span]
        if nonfinite:
            stats[first:last, 3] = 1
            parts.append(bytes_tensor(write_varint(1), x.device))
            continue
        part, edges = x[offsets[first] : offsets[last]], offsets[first : last + 1]
        indices = torch.tensor(found, dtype=torch.int64, device=x.device)
        stats[first:last, 0] = [energy_of(values) for values in _by_layer(edges, indices, old)]
        kept = _select(old, int(counts[span]), rule, floors[span])
        encoded, new = encode_layer(indices[kept], old[kept], values)
        left = old.clone()
        left[kept] -= new
        # rounding up the largest of all magnitudes would give Inf
        part[indices] = (part[indices] + left).clamp(-LARGEST, LARGEST)
        parts += encoded
        _note_sent(stats[first:last], edges, indices[kept], new)
    return torch.cat(parts), stats


reduce_ = partial(sum_and_compress, decompress_sum_, compress_)
"""See :meth:`hvd_adaptive.kernels.base.SparseKernels.reduce_`: in two passes."""


def position_bits(x: Tensor, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.position_bits`.

    Example:
        >>> import numpy as np, torch
        >>> position_bits(torch.tensor([0.0, 3.0, 2.0, 1.0]), np.array([0, 1, 4])).tolist()
        [[0, 0], [1, 8], [3, 10]]
    """
    counts = check_counts(x, counts)
    table = np.zeros((len(counts), 2), np.int64)
    if not bool(x.isfinite().all()):
        return table
    for row, count in zip(table, counts.tolist(), strict=True):
        indices = _select(x.view(-1), count, SelectionRule.topk, 1)
        _, blocks, sizes = gap_blocks(indices)
        row[:] = len(indices), int(block_heads(blocks, sizes)[1].sum())
    return table
