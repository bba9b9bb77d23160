"""What the owner of a shard does on a GPU: decode and sum all bodies in one pass, then encode the sum.

:class:`hvd_adaptive.kernels.base.ReductionKernels` says what it does. Memory traffic, in words of 4
bytes per element: a write for the sum, however many bodies there are, and that of a compression.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.checks import check_received
from hvd_adaptive.kernels.quantization import ReceivedBody
from hvd_adaptive.kernels.reference.reduction import with_kept
from hvd_adaptive.kernels.triton.quantized import Use, compress_, decode, raise_damage, unpacked_codes
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
    """See :meth:`hvd_adaptive.kernels.base.ReductionKernels.reduce_`."""
    check_received(bodies, offsets, x, before)
    offsets = np.ascontiguousarray(offsets, np.int64)
    edges = offsets.tolist()
    numels = [end - start for start, end in itertools.pairwise(edges)]
    whole = [unpacked_codes(body, numels, rule) for body in bodies]
    total = torch.empty(edges[-1], device=bodies[0].data.device)
    outs = [*total[edges[0] :].split_with_sizes(numels)]
    damaged, _ = decode(whole, numels, rule, Use.sum, outs)  # before x is changed
    if damaged:
        raise_damage(bodies, numels, rule)
    rest, grads = with_kept(total, outs, offsets, x, before)
    data, stats = compress_(rest, offsets, bits, rule, tables, grads, keys, reserve)
    marks = stats[:, 2].astype(np.uint8)
    for layer in marks.nonzero()[0].tolist():
        if x is not None and before is not None:  # given back up to a rounding
            x[edges[layer] : edges[layer + 1]] = before[edges[layer] : edges[layer + 1]]
    return data, marks
