"""Sums of sparse layers that are compressed again, by a backend's kernels for either."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.selection import SelectionRule
from hvd_adaptive.wire.sparse import ValueFormat


def sum_and_compress(
    sum_: Callable[..., Any],
    compress_: Callable[..., tuple[Tensor, npt.NDArray[np.float64]]],
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
    """:meth:`~hvd_adaptive.kernels.base.SparseKernels.reduce_` in two passes.

    Args:
        sum_: a backend's ``decompress_sum_``.
        compress_: its ``compress_``.
        bodies: as of ``reduce_``, like all others.
        x: as there.
        offsets: as there.
        counts: as there.
        values: as there.
        keeps: as there.
        reserve: as there.
        rule: as there.
        thresholds: as there.
        whole: as there.

    Example:
        >>> from hvd_adaptive.kernels.reference.sparse import compress_, decompress_add_, reduce_
        >>> x, one_layer, count = torch.tensor([1.0, -4.0, 4.0, 0.5]), np.array([0, 4]), np.array([1])
        >>> body, _ = compress_(x.clone(), one_layer, count, ValueFormat.fp32)
        >>> both, marks = reduce_([body, body], x, one_layer, count, ValueFormat.fp32)
        >>> out = torch.zeros(4)
        >>> decompress_add_(both, [out], 1.0).tolist(), out.tolist(), x.tolist()
        ([0], [0.0, -12.0, 0.0, 0.0], [1.0, 0.0, 4.0, 0.5])
    """
    sums = torch.empty_like(x) if keeps else x
    totals = [sums[start:end] for start, end in itertools.pairwise(np.asarray(offsets).tolist())]
    sum_(bodies, totals, 1.0, values, whole)
    grads = totals if keeps else None
    data, stats = compress_(x, offsets, counts, values, grads, reserve, rule, thresholds, whole)
    return data, stats[:, 3].astype(np.uint8)
