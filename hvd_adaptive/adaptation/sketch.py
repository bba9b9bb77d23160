"""Sketches: the norm of a mean over the ranks, without anybody sending what the mean is of.

A sketch is some sums of a vector's elements under random signs that all ranks draw alike. It is
linear, so the mean of the ranks' sketches is the sketch of their mean; and signs are independent, so
the squared norm of a sketch is that of the vector in expectation. Sixteen numbers per layer are sent
in the place of a gradient.

Source: Alon, Matias and Szegedy, "The Space Complexity of Approximating the Frequency Moments" (1996);
signs in the shape of a product of rows and columns, so that a pass over the vector is two small
products of matrices.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive import rng
from hvd_adaptive.arrays import Float64s

__all__ = ["NUMBERS", "signed_sums"]

_DRAWS, _GROUPS, _COLUMNS = 4, 4, 2048
NUMBERS = _DRAWS * _GROUPS
"""Of a sketch."""


def signed_sums(x: Tensor, layer: int, step: int) -> Float64s:
    """Sixteen numbers whose squared norm is that of ``x`` in expectation.

    The relative standard deviation of that is about 0.35, and up to 0.7 where the vector is made of
    equal rows; of several layers and steps together it is less. Cost: a pass over ``x``.

    Args:
        x: 1-D float32.
        layer: index of the layer, the same on all ranks.
        step: number of the step, the same on all ranks.

    Returns:
        ``float64[NUMBERS]``; zeros where ``x`` is not finite.

    Example:
        >>> signed_sums(torch.zeros(5), layer=0, step=0).tolist() == [0.0] * NUMBERS
        True
    """
    full, rest = divmod(x.numel(), _COLUMNS)
    (key,) = rng.layer_keys(_SEED, rng.SHARED, step, [layer])
    generator = torch.Generator().manual_seed(int(key) >> 1)
    rows = _signs((_DRAWS, full + 1), generator).to(x.device)
    columns = _signs((_DRAWS, _COLUMNS), generator).to(x.device)
    sums = rows[:, :full] @ x[: full * _COLUMNS].view(full, _COLUMNS)
    if rest:
        sums[:, :rest] += rows[:, full:] * x[full * _COLUMNS :]
    found = (sums * columns).view(_DRAWS, _GROUPS, -1).sum(-1) / _DRAWS**0.5
    numbers = found.double().flatten().cpu().numpy()
    return numbers if np.isfinite(numbers).all() else np.zeros(NUMBERS)


_SEED = 0x5CE7C4


def _signs(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).float().mul_(2).sub_(1)
