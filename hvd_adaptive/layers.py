"""A layer: one parameter tensor, and the kinds of payloads that its gradient can become."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

_CPU = torch.device("cpu")

SMALL_NUMEL = 1024
"""Tensors under this size, and biases and norms, are sent dense: they are under 1 % of a model's bytes
and lose most by compression."""


class PayloadKind(Enum):
    """What can be done to payloads on their way; compressors declare it, schemes carry one kind."""

    SUMMABLE = "summable"
    """Values that one allreduce adds up."""
    CAST = "cast"
    """Values that can be added, but in no operation of Horovod: bfloat16."""
    ENCODED = "encoded"
    """Bytes that must be decoded before they can be added."""
    SPARSE = "sparse"
    """Indices and values of a sparse gradient, as torch has them."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One parameter tensor, without its data.

    Args:
        index: position in the optimizer, the same on all ranks.
        name: the parameter's name.
        shape: the parameter's shape.
        dtype: dtype of the gradient.
        device: device of the gradient.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = _CPU

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the dense gradient."""
        return self.numel * self.dtype.itemsize
