"""What is measured of gradients, in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_adaptive.kernels.signs import COLUMNS, DRAWS, GROUPS, SignedSums, Signs

_IN_CACHE = 1 << 15
"""Elements that are cast at once: temporaries of a layer's size would be fresh memory."""


def signed_sums(x: Tensor, signs: Signs, minus: Tensor | None = None) -> SignedSums:
    """See :meth:`hvd_adaptive.kernels.base.MeasuringKernels.signed_sums`.

    Example:
        >>> signed_sums(torch.tensor([3.0, 0.0, -4.0]), Signs.of(3, seed=0))[1:]
        (25.0, 2)
    """
    signs.check(x, minus)
    y = x if minus is None else x - minus
    full, rest = divmod(y.numel(), COLUMNS)
    rows, columns = signs.rows.to(y.device), signs.columns.to(y.device)
    sums = rows[:, :full] @ y[: full * COLUMNS].view(full, COLUMNS)
    if rest:
        sums[:, :rest] += rows[:, full:] * y[full * COLUMNS :]
    numbers = (sums * columns).view(DRAWS, GROUPS, -1).sum(-1).double().cpu().numpy()
    return SignedSums(numbers, float(y @ y), int(y.count_nonzero()))


def cast_error(x: Tensor, dtype: torch.dtype) -> float:
    """See :meth:`hvd_adaptive.kernels.base.MeasuringKernels.cast_error`.

    Example:
        >>> cast_error(torch.tensor([1.0, 1 + 2**-11, 65536.0]), torch.float16) == 2.0**-22 + 32.0**2
        True
    """
    limit, error = torch.finfo(dtype).max, 0.0
    for part in x.split(_IN_CACHE):
        lost = part.double() - part.clamp(-limit, limit).to(dtype).double()
        error += float(lost @ lost)
    return error
