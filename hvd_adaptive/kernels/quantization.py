"""Quantization: what all backends agree on, and the error that random rounding is expected to leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.huffman import Code
from hvd_adaptive.wire.quantized import QuantizationRule, Tables

LARGEST_NORM = 2.0**127
"""What is above it saturates: a value and a level of the other sign may be twice the norm apart."""
WEIGHT_SHIFT = 13
"""Shares are weighed by their float's exponent and 10 bits of the mantissa."""
WEIGHT_BINS = (0x3F800000 >> WEIGHT_SHIFT) + 1
"""Bins of the shares in [0, 1]; the last one holds those that are 1."""
LARGEST_BF16 = 0x7F7F0000
"""Bits of the largest float32 that is a finite bfloat16."""
NAN_BF16 = 0x7FC0


@dataclass(frozen=True, slots=True)
class ReceivedBody:
    """A body of quantized layers whose codebooks have been read.

    Args:
        data: uint8, 1-D, contiguous.
        start: byte of it at which the layers begin.
        tables: levels for all numbers of bits that a layer may have.
        codes: the Huffman codes of coded layers, by bits.
    """

    data: Tensor
    start: int
    tables: Tables
    codes: Mapping[int, Code] = field(default_factory=dict)


def sum_one_by_one(
    add: Callable[..., npt.NDArray[np.uint8]],
    bodies: Sequence[ReceivedBody],
    outs: Sequence[Tensor],
    scale: float,
    rule: QuantizationRule,
) -> npt.NDArray[np.uint8]:
    """Clear the outputs, and ``add`` each body: a backend's ``decompress_add_``."""
    if outs:
        torch._foreach_zero_(list(outs))
    marks = np.zeros(len(outs), np.uint8)
    for body in bodies:
        marks |= add(body.data, body.start, outs, scale, rule, body.tables, body.codes)
    return marks


def _weight_edges() -> npt.NDArray[np.float64]:
    """The shares at which bins begin, and the end of the last, which holds 1 only."""
    words = np.arange(WEIGHT_BINS, dtype=np.uint32) << np.uint32(WEIGHT_SHIFT)
    return np.append(words.view(np.float32).astype(np.float64), 1.0)


EDGES = _weight_edges()


def expected_from_weights(
    weights: npt.NDArray[np.float64], signed: npt.NDArray[np.float32]
) -> tuple[float, npt.NDArray[np.float64]]:
    """What rounding at random to ``signed`` levels does, in expectation, from :func:`norm_histogram`.

    A share ``r`` between levels ``a`` and ``b`` becomes ``b`` with probability ``(r - a) / (b - a)``,
    which has the variance ``(b - r)(r - a)`` (Faghri et al. 2020, equation 2). Weight is taken to be
    spread evenly over a bin, which is within 1 % of the truth for scattered values. Cost: the bins in
    use.

    Args:
        weights: ``float64[WEIGHT_BINS]``.
        signed: the levels, rising, symmetric, from -1 to 1.

    Returns:
        The squared error, and the weight that each level gets of magnitudes: ``float64[levels]``.

    Example:
        >>> import torch
        >>> from hvd_adaptive.kernels import for_device
        >>> from hvd_adaptive.wire.quantized import Norm, QuantizationRule, Rounding
        >>> signed, rule = np.array([-1, 0, 1], np.float32), QuantizationRule(Norm.l2, Rounding.uniform)
        >>> x = torch.ones(100) / 2
        >>> norm_histogram = for_device(x.device).quantized.norm_histogram
        >>> weights, _ = norm_histogram(x, rule, squared=True)
        >>> round(expected_from_weights(weights, signed)[0], 1)
        225.0
        >>> weights, _ = norm_histogram(x, rule, squared=False)
        >>> expected_from_weights(weights, signed)[1].round(1).tolist()
        [0.0, 90.0, 10.0]
    """
    used = np.flatnonzero(weights)
    low, high, weight = EDGES[used], EDGES[used + 1], weights[used]
    levels = signed.astype(np.float64)
    # Pieces: the bins, cut at the levels. A piece lies between two neighboring levels.
    cuts = np.searchsorted(high, levels[(levels > 0) & (levels < 1)])
    inside = levels[(levels > 0) & (levels < 1)]
    valid = cuts < used.size
    cuts, inside = cuts[valid], inside[valid]
    hit = (low[cuts] < inside) & (inside < high[cuts])
    cuts, inside = cuts[hit], inside[hit]
    density = weight / np.where(high > low, high - low, 1.0)
    starts = np.insert(low, cuts + 1, inside)
    ends = np.insert(high, cuts, inside)
    owner = np.insert(np.arange(used.size), cuts, cuts)
    length = ends - starts
    mass = np.where(length > 0, density[owner] * length, weight[owner])
    middle = (starts + ends) / 2
    below = np.clip(np.searchsorted(levels, middle, side="right") - 1, 0, levels.size - 2)
    inside, gap = middle - levels[below], np.diff(levels)[below]
    variance = (gap - inside) * inside - length * length / 12
    up = mass * (inside / gap)
    counts = np.zeros(levels.size)
    np.add.at(counts, below, mass - up)
    np.add.at(counts, below + 1, up)
    return float(np.maximum(mass * variance, 0.0).sum()), counts
