"""Sums of quantized layers that are quantized again, in plain torch: in two passes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.checks import check_received
from hvd_adaptive.kernels.quantization import ReceivedBody
from hvd_adaptive.kernels.reference.quantized import compress_, decompress_add_
from hvd_adaptive.wire.quantized import QuantizationRule, Tables


def reduce_(
    bodies: Sequence[ReceivedBody],
    offsets: npt.NDArray[np.int64],
    bits: npt.NDArray[np.int64],
    rule: QuantizationRule,
    tables: Tables,
    x: Tensor | None = None,
    before: Tensor | None = None,
    keys: npt.NDArray[np.uint64] | None = None,
    reserve: int = 0,
) -> tuple[Tensor, npt.NDArray[np.uint8]]:
    """See :meth:`hvd_adaptive.kernels.base.ReductionKernels.reduce_`: in two passes.

    Example:
        >>> from hvd_adaptive.wire.quantized import Norm, Rounding
        >>> rule = QuantizationRule(Norm.max, Rounding.uniform, block=4)
        >>> one_layer, bits = np.array([0, 4]), np.array([2])
        >>> body, _ = compress_(torch.tensor([1.0, -4.0, 4.0, 0.0]), one_layer, bits, rule, rule.tables)
        >>> bodies = [ReceivedBody(body, 0, rule.tables)] * 2
        >>> both, _ = reduce_(bodies, one_layer, bits, rule, rule.tables)
        >>> out = torch.zeros(4)
        >>> marks = decompress_add_(both, 0, [out], 1.0, rule, rule.tables)
        >>> out[1:].tolist()
        [-8.0, 8.0, 0.0]
    """
    check_received(bodies, offsets, x, before)
    total = torch.zeros(int(offsets[-1]), device=bodies[0].data.device)
    edges = list(itertools.pairwise(np.asarray(offsets).tolist()))
    outs = [total[start:end] for start, end in edges]
    for body in bodies:
        decompress_add_(body.data, body.start, outs, 1.0, rule, body.tables, body.codes)
    rest, grads = with_kept(total, outs, offsets, x, before)
    data, stats = compress_(rest, offsets, bits, rule, tables, grads, keys, reserve)
    return data, stats[:, 2].astype(np.uint8)


def with_kept(
    total: Tensor,
    outs: list[Tensor],
    offsets: npt.NDArray[np.int64],
    x: Tensor | None,
    before: Tensor | None,
) -> tuple[Tensor, list[Tensor] | None]:
    """What is left to compress of a sum, and what is added to it: the sum, where something was kept.

    Args:
        total: the sum.
        outs: its layers.
        offsets: of the layers.
        x: what was kept; None where nothing is.
        before: gets a copy of that; None keeps none.
    """
    if x is None or before is None:
        return (total if x is None else x), None
    before[offsets[0] : offsets[-1]] = x[offsets[0] : offsets[-1]]
    return x, outs
