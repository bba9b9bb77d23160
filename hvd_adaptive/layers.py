"""A layer: one parameter tensor, and the ways in which its payloads can meet those of other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

_CPU = torch.device("cpu")


class Collective(Enum):
    """How the payloads of one bucket meet."""

    REDUCE = "allreduce"
    """Payloads can be summed on the way: one allreduce."""
    TWO_SHOT = "alltoall+allgather"
    """Payloads can be summed, but not by Horovod: each rank sums one slice, then all gather them."""
    GATHER = "allgather"
    """Every rank's payload goes to every rank, which sums after decoding."""
    SPARSE = "sparse allgather"
    """A sparse gradient's indices and values, as Horovod sends them."""


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
