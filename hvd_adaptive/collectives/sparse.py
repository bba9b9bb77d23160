"""Sparse gradients, such as those of embeddings: indices and values by allgather, as Horovod does."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hvd_adaptive.buckets import Bucket
from hvd_adaptive.collectives.base import BucketIO, Scheme, Steps
from hvd_adaptive.comm.request import Request, operation_bytes
from hvd_adaptive.layers import PayloadKind


@dataclass(frozen=True)
class SparseAllGather(Scheme):
    """Every rank's indices and values go to every rank.

    Cost on a link: ``n - 1`` payloads.
    """

    name = "sparse"
    carries = PayloadKind.SPARSE

    def run(self, bucket: Bucket, grads: list[Tensor], io: BucketIO) -> Steps:
        """One operation; nothing is compressed and nothing is kept."""
        del bucket, io
        result = yield Request("sparse", grads[0])
        grads[0].zero_().add_(result)

    def link_bytes(self, payload: float, ranks: int, ranks_per_node: int = 1) -> float:
        """As of one allgather."""
        return operation_bytes("sparse", payload, payload * ranks, ranks)
