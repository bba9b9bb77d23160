"""What compressors ask of the tensors that they are given."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hvd_adaptive.wire import WireError


def check_input(x: Tensor) -> None:
    """Raise ValueError unless ``x`` is a 1-D contiguous float32 tensor."""
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(
            f"expected a 1-D contiguous float32 tensor, got {x.dtype} of shape {tuple(x.shape)}: "
            "use x.float().contiguous().view(-1)"
        )


def check_output(out: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Raise ValueError unless ``out`` is a 1-D contiguous tensor of ``dtype``."""
    if out.dtype != dtype or out.dim() != 1 or not out.is_contiguous():
        raise ValueError(
            f"values are added to a 1-D contiguous {dtype} tensor, got {out.dtype} of shape "
            f"{tuple(out.shape)}, stride {out.stride()}"
        )


def all_finite(x: Tensor) -> bool:
    """Whether ``x`` holds neither a NaN nor an Inf. Cost: one read of it.

    Example:
        >>> all_finite(torch.ones(3)), all_finite(torch.tensor([1.0, float("nan")]))
        (True, False)
    """
    # a sum that is finite has met neither; one that is not may be of large numbers
    return math.isfinite(float(x.sum())) or bool(x.isfinite().all())


def check_values(name: str, data: Tensor, numel: int, dtype: torch.dtype) -> None:
    """Raise WireError unless ``data`` is ``numel`` values of ``dtype``, one after the other."""
    if data.dtype != dtype or data.shape != (numel,) or not data.is_contiguous():
        raise WireError(
            f"{name}: got {data.dtype} of shape {tuple(data.shape)}, stride {data.stride()}, expected "
            f"{numel} contiguous values of {dtype}"
        )
