"""Two-shot sum of casts that no operation of Horovod can add, such as bfloat16."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from hvd_adaptive.buckets import Bucket
from hvd_adaptive.collectives.base import BucketIO, Scheme, Steps
from hvd_adaptive.collectives.summed import reduce_summable
from hvd_adaptive.comm.request import Request, operation_bytes
from hvd_adaptive.layers import PayloadKind


@dataclass(frozen=True)
class CastTwoShot(Scheme):
    """Each rank sums one slice in float32, then all gather the slices.

    Cost on a link: ``2 (n - 1) / n`` payloads, whatever ``n`` is.
    """

    name = "cast_two_shot"
    carries = PayloadKind.CAST
    shots = 2

    def run(self, bucket: Bucket, grads: list[Tensor], io: BucketIO) -> Steps:
        """Two operations for each round of the compressors."""
        return reduce_summable(bucket, grads, io, _two_shot)

    def link_bytes(self, payload: float, ranks: int, ranks_per_node: int = 1) -> float:
        """An alltoall and an allgather of slices."""
        first = operation_bytes("alltoall", payload, payload, ranks)
        return first + operation_bytes("allgather", payload / ranks, payload, ranks)


def _two_shot(flat: Tensor, io: BucketIO) -> Generator[Request, Tensor, Tensor]:
    """Sum slices by alltoall, then gather them; slices are padded to one size."""
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % io.ranks))
    slices = yield Request("alltoall", padded.view(torch.uint8))
    rows = slices.view(flat.dtype).view(io.ranks, -1)
    total = rows.sum(0, dtype=torch.float32).mul_(io.scale)
    gathered = yield Request("allgather", total.to(flat.dtype).view(torch.uint8))
    return gathered.view(flat.dtype)[: flat.numel()]
