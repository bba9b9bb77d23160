"""Sketches: the norm of a mean over the ranks, without anybody sending what the mean is of.

A sketch is some sums of a vector's elements under random signs that all ranks draw alike. It is
linear, so the mean of the ranks' sketches is the sketch of their mean; and signs are independent, so
the squared norm of a sketch is that of the vector in expectation. :class:`Gradient` has sixteen
numbers, for many steps; :func:`sketch` gives more of them, for one decision by one norm.

Source of the first: Alon, Matias and Szegedy, "The Space Complexity of Approximating the Frequency
Moments" (1996); signs in the shape of a product of rows and columns, so that a pass over the vector is
two small products of matrices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive import rng
from hvd_adaptive.arrays import Float64s
from hvd_adaptive.kernels import for_device
from hvd_adaptive.kernels.signs import DRAWS, GROUPS, SignedSums, Signs

__all__ = ["NUMBERS", "SKETCH", "Gradient", "sketch"]

NUMBERS = DRAWS * GROUPS
"""Of a gradient's sketch."""
SKETCH = 1021
"""Numbers by which the norm of a layer's mean gradient is known."""


class Gradient(NamedTuple):
    """A layer's gradient and what waits of it, as one pass sees them.

    The relative standard deviation of a sketch's squared norm is about 0.35, and up to 0.7 where the
    vector is made of equal rows; of several layers and steps together it is less.

    Args:
        energy: of the gradient: its squared norm; not finite where the gradient is not.
        nonzero: how many of its elements are not 0.
        numbers: ``float64[NUMBERS]``: the gradient's sketch, whose squared norm is that of the gradient
            in expectation; zeros where it is not finite.
        waits: ``float64[NUMBERS]``: the same of what is compressed without the gradient.
    """

    energy: float
    nonzero: int
    numbers: Float64s
    waits: Float64s

    @classmethod
    def seen(cls, grad: Tensor, x: Tensor, layer: int, step: int) -> Gradient:
        """Look at one. Cost: a pass over ``grad``, and one over both where something waits.

        Args:
            grad: the gradient, 1-D float32.
            x: what is compressed; the same memory where nothing waits.
            layer: index of the layer, the same on all ranks.
            step: number of the step, the same on all ranks.

        Example:
            >>> grad = torch.tensor([3.0, 0.0, -4.0])
            >>> seen = Gradient.seen(grad, grad, layer=0, step=0)
            >>> seen.energy, seen.nonzero, seen.waits.tolist() == [0.0] * NUMBERS
            (25.0, 2, True)
        """
        (key,) = rng.layer_keys(_SEED, rng.SHARED, step, [layer])
        signs, kernels = Signs.of(grad.numel(), int(key) >> 1), for_device(grad.device).measuring
        found, waits = kernels.signed_sums(grad, signs), np.zeros(NUMBERS)
        if x.data_ptr() != grad.data_ptr():
            waits = _numbers(kernels.signed_sums(x, signs, grad))
        return cls(found.energy, found.nonzero, _numbers(found), waits)


def _numbers(found: SignedSums) -> Float64s:
    numbers = found.numbers.ravel() / DRAWS**0.5
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
