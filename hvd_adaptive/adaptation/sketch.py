"""Sketches: the norm of a mean over the ranks, without anybody sending what the mean is of.

A sketch is some sums of a vector's elements under random signs that all ranks draw alike. It is
linear, so the mean of the ranks' sketches is the sketch of their mean; and signs are independent, so
the squared norm of a sketch is that of the vector in expectation. :func:`signed_sums` are sixteen
numbers, for many steps; :func:`sketch` more of them, for one decision by one norm.

Source of the first: Alon, Matias and Szegedy, "The Space Complexity of Approximating the Frequency
Moments" (1996); signs in the shape of a product of rows and columns, so that a pass over the vector is
two small products of matrices.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive import rng
from hvd_adaptive.arrays import Float64s

__all__ = ["NUMBERS", "SKETCH", "signed_sums", "sketch"]

_DRAWS, _GROUPS, _COLUMNS = 4, 4, 2048
NUMBERS = _DRAWS * _GROUPS
"""Of :func:`signed_sums`."""
SKETCH = 1021
"""Numbers by which the norm of a layer's mean gradient is known."""


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


def sketch(x: Tensor, key: int) -> Float64s:
    """Fewer numbers with the norm of ``x``: its elements with random signs, added up in 1021 places.

    Linear in ``x``, exact up to 1021 elements; beyond, the norm has a relative deviation of 2 %, and is
    unbiased when squared. The number is a prime, lest columns of a matrix keep to a few places. Cost:
    some ns per element. Source: Charikar, Chen and Farach-Colton, "Finding frequent items in data
    streams" (ICALP 2002), section 3.

    Args:
        x: float32, 1-D.
        key: of the signs.

    Returns:
        ``float64[min(numel, 1021)]``.

    Example:
        >>> import torch
        >>> sketch(torch.tensor([3.0, -4.0]), 0).tolist()
        [3.0, -4.0]
        >>> bool(abs(np.linalg.norm(sketch(torch.ones(10_000), 0)) / 100 - 1) < 0.1)
        True
    """
    wide = x.double().cpu()
    if len(wide) > SKETCH:
        generator = torch.Generator().manual_seed(rng.mix(key) & (2**63 - 1))
        signs = torch.randint(0, 2, (len(wide),), generator=generator, dtype=torch.int8)
        wide = torch.nn.functional.pad(wide * (2 * signs - 1), (0, -len(wide) % SKETCH))
        wide = wide.view(-1, SKETCH).sum(0)
    found: Float64s = wide.numpy()
    return found


_SEED = 0x5CE7C4


def _signs(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).float().mul_(2).sub_(1)
