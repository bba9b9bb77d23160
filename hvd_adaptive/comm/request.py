"""What is asked of a transport, and the bytes that it puts on a link. Needs neither Horovod nor MPI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

AVERAGE: Final = 0
SUM: Final = 1
ADASUM: Final = 2
"""What becomes of gradients: the numbers of ``hvd.Average``, ``hvd.Sum`` and ``hvd.Adasum``."""

Operation: TypeAlias = Literal["allreduce", "allgather", "alltoall", "sparse"]
Group: TypeAlias = Literal["all", "node", "peers"]
"""Who takes part: all ranks, those of this rank's node, or one of each node
(:class:`~hvd_adaptive.comm.topology.Topology`)."""

Direction: TypeAlias = Literal["up", "down"]
"""Whether an operation carries what ranks send, or sums that were compressed again."""


@dataclass(frozen=True, slots=True)
class Request:
    """One collective operation.

    Args:
        operation: ``allreduce`` (in place), ``allgather`` (along the first dimension, which may
            differ between ranks), ``alltoall`` or ``sparse`` (a sparse tensor).
        tensor: this rank's contribution, contiguous.
        splits: of an alltoall, how many elements go to each rank; None sends equal slices.
        group: who takes part; no allreduce and nothing sparse in other groups than all ranks.
    """

    operation: Operation
    tensor: Tensor
    splits: tuple[int, ...] | None = None
    group: Group = "all"


def operation_bytes(operation: Operation, sent: float, received: float, ranks: int) -> float:
    """Bytes that one rank puts on its link, in one direction, for one operation (ring algorithms).

    Args:
        operation: which.
        sent: bytes that the rank contributes.
        received: bytes of the result.
        ranks: number of ranks.

    Example:
        >>> operation_bytes("allreduce", 100, 100, 4), operation_bytes("allgather", 100, 400, 4)
        (150.0, 300.0)
    """
    match operation:
        case "allreduce":
            return 2 * (ranks - 1) * sent / ranks
        case "alltoall":
            return (ranks - 1) * sent / ranks
        case "allgather" | "sparse":
            return (ranks - 1) * received / ranks


def nbytes_of(tensor: Tensor) -> int:
    """Bytes that a tensor takes on the wire."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes
