"""Allreduce: payloads are summed on the way, by Horovod."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from hvd_adaptive.buckets import Bucket
from hvd_adaptive.collectives.base import BucketIO, Scheme, Steps
from hvd_adaptive.collectives.summed import observe_casts, reduce_summable, sends_plain_casts
from hvd_adaptive.comm.request import Request, operation_bytes
from hvd_adaptive.feedback import FeedbackState
from hvd_adaptive.layers import PayloadKind


@dataclass(frozen=True)
class AllReduce(Scheme):
    """One allreduce for each round of the compressors.

    Cost on a link: ``2 (n - 1) / n`` payloads, whatever ``n`` is.
    """

    name = "allreduce"
    carries = PayloadKind.SUMMABLE

    def run(self, bucket: Bucket, grads: list[Tensor], io: BucketIO) -> Steps:
        """Sum where the gradient is if nothing needs a copy, else round by round."""
        if _is_own_buffer(bucket, grads, io):
            observe_casts(bucket, grads, grads, io)
            yield Request("allreduce", grads[0].view(-1))
        else:
            yield from reduce_summable(bucket, grads, io, _allreduce)

    def takes_passengers(self, bucket: Bucket, feedback: FeedbackState) -> bool:
        """Where a bucket of casts has a buffer of its own, whatever its gradients' dtypes are."""
        # to read them from another device would be to wait for it
        here = bucket.device.type == "cpu"
        return here and len(bucket.layers) > 1 and sends_plain_casts(bucket, feedback)

    def link_bytes(self, payload: float, ranks: int, ranks_per_node: int = 1) -> float:
        """As of one allreduce of the payload."""
        return operation_bytes("allreduce", payload, payload, ranks)


def _allreduce(flat: Tensor, io: BucketIO) -> Generator[Request, Tensor, Tensor]:
    if io.passengers is None:
        yield Request("allreduce", flat)
        return flat
    whole = io.buffers.with_passengers(io.passengers)
    yield Request("allreduce", whole)
    io.passengers.copy_(whole[flat.numel() :])
    return flat


def _is_own_buffer(bucket: Bucket, grads: list[Tensor], io: BucketIO) -> bool:
    """Whether the one gradient of the bucket is summed where it is, without a copy."""
    plain = len(grads) == 1 and sends_plain_casts(bucket, io.feedback)
    return plain and grads[0].dtype == bucket.dtype and grads[0].is_contiguous()
