"""One bucket's way: feedback, compression, collective, decompression.

The way of a bucket is a generator that yields the collectives it needs and receives their results;
the exchange drives the generators of all buckets, in the same order on all ranks.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive import wire
from hvd_adaptive.buckets import Bucket, Part
from hvd_adaptive.compressors.base import CastCompressor, GatheredCompressor
from hvd_adaptive.feedback import Feedback, split
from hvd_adaptive.layers import Collective
from hvd_adaptive.telemetry import Meter
from hvd_adaptive.transport import Handle, Request, Transport, nbytes_of

Steps: TypeAlias = Generator[Request, Tensor, None]


class _Staging:
    """What a bucket needs at every step and is made once: offsets and, on demand, a flat buffer."""

    def __init__(self, bucket: Bucket, ranks: int) -> None:
        self._bucket = bucket
        # padded, so that every rank's slice of an alltoall has the same size
        self._padded = -(-bucket.numel // ranks) * ranks
        sizes = [layer.numel for layer in bucket.layers]
        self.offsets = np.cumsum([0, *sizes], dtype=np.int64)

    @functools.cached_property
    def flat(self) -> Tensor:
        """The payload of a linear bucket, in its wire dtype."""
        return torch.zeros(self._padded, dtype=self._bucket.dtype, device=self._bucket.device)

    @functools.cached_property
    def views(self) -> list[Tensor]:
        """The layers in ``flat``, in their shapes."""
        return shaped(self.flat[: self._bucket.numel], self._bucket)


@dataclass(slots=True)
class _Flight:
    """A bucket whose collective is under way."""

    bucket: Bucket
    steps: Steps
    request: Request
    handle: Handle
    round: int
    launched: float


class Exchange:
    """Sends buckets and writes the reduced gradients where the local ones were.

    Args:
        transport: the collectives.
        meter: told what every bucket cost.
        prefix: of the operations' names; the same on all ranks, and of this optimizer alone.
    """

    def __init__(self, transport: Transport, meter: Meter, prefix: str) -> None:
        self._transport = transport
        self._meter = meter
        self._prefix = prefix
        self._inflight: deque[_Flight] = deque()
        self._feedback: dict[int, Feedback] = {}
        self._staged: dict[int, _Staging] = {}
        self._vote: Handle | None = None

    def attach(self, buckets: Sequence[Bucket], feedback: dict[int, Feedback]) -> None:
        """Use these buckets from now on; ``feedback`` by bucket index."""
        if self._inflight:
            raise RuntimeError("buckets cannot be changed while their collectives are under way")
        self._feedback = feedback
        self._staged = {bucket.index: _Staging(bucket, self._transport.size) for bucket in buckets}

    @property
    def busy(self) -> bool:
        """Whether collectives are under way."""
        return bool(self._inflight)

    def start(self, bucket: Bucket, grads: list[Tensor]) -> None:
        """Compress a bucket and launch its first collective.

        Args:
            bucket: the bucket.
            grads: its layers' gradients; :meth:`finish` writes the result into them. Dense, except
                for a bucket of a sparse layer.
        """
        started = perf_counter()
        steps = _WAYS[bucket.collective](self, bucket, grads)
        request = next(steps)
        self._meter.bucket(bucket.index, compress=perf_counter() - started, dense=bucket.dense_bytes)
        self._submit(bucket, steps, request, round_=0)

    def finish(self) -> None:
        """Wait for every collective, in launch order, and write the results."""
        while self._inflight:
            flight = self._inflight.popleft()
            waiting = perf_counter()
            reply = self._transport.wait(flight.handle)
            done = perf_counter()
            more: Request | None
            try:
                more = flight.steps.send(reply)
            except StopIteration:
                more = None
            self._meter.bucket(
                flight.bucket.index,
                exposed=done - waiting,
                communicate=done - flight.launched,
                decompress=perf_counter() - done,
                traffic=self._transport.traffic(flight.request, nbytes_of(reply)),
            )
            if more is not None:
                self._submit(flight.bucket, flight.steps, more, flight.round + 1)

    def abandon(self) -> None:
        """Forget what is under way, after Horovod reported that a rank has gone."""
        self._inflight.clear()
        self._vote = None

    def share(self, reduced: Tensor) -> Tensor:
        """What each rank must send so that the reduction over all of them gives ``reduced``."""
        return reduced / (self._transport.size * self._transport.scale)

    def vote(self, yes: bool) -> None:
        """Ask all ranks a question; :meth:`voted` tells later whether any of them said yes."""
        ballot = torch.tensor([float(yes)])
        self._vote = self._transport.submit(Request("allreduce", ballot), f"{self._prefix}.vote")

    def voted(self) -> bool:
        """The outcome of the last :meth:`vote`, the same on all ranks; False where there was none."""
        if self._vote is None:
            return False
        outcome = self._transport.wait(self._vote)
        self._vote = None
        return bool(outcome > 0)

    def _submit(self, bucket: Bucket, steps: Steps, request: Request, round_: int) -> None:
        handle = self._transport.submit(request, f"{self._prefix}.{bucket.index}.{round_}")
        self._meter.bucket(bucket.index, payload=nbytes_of(request.tensor))
        self._inflight.append(_Flight(bucket, steps, request, handle, round_, perf_counter()))

    # --- the ways of a bucket ---------------------------------------------------------------------

    def _reduce(self, bucket: Bucket, grads: list[Tensor]) -> Steps:
        """Sum the payloads by one allreduce."""
        if self._is_own_buffer(bucket, grads):
            yield Request("allreduce", grads[0].view(-1))
            return
        staging = self._staged[bucket.index]
        self._load_linear(bucket, staging, grads)
        yield Request("allreduce", staging.flat)
        torch._foreach_copy_(grads, staging.views)

    def _two_shot(self, bucket: Bucket, grads: list[Tensor]) -> Steps:
        """Sum one slice on each rank, in float32, then gather the slices."""
        staging = self._staged[bucket.index]
        self._load_linear(bucket, staging, grads)
        slices = yield Request("alltoall", staging.flat.view(torch.uint8))
        rows = slices.view(bucket.dtype).view(self._transport.size, -1)
        total = rows.sum(0, dtype=torch.float32).mul_(self._transport.scale)
        gathered = yield Request("allgather", total.to(bucket.dtype).view(torch.uint8))
        reduced = gathered.view(bucket.dtype)[: bucket.numel]
        torch._foreach_copy_(grads, shaped(reduced, bucket))

    def _gather(self, bucket: Bucket, grads: list[Tensor]) -> Steps:
        """Send every rank's codes to every rank, which decodes and adds them."""
        work = [_as_float32(grad) for grad in grads]
        gathered = yield Request("allgather", self._encode(bucket, work))
        torch._foreach_zero_(work)
        for body in wire.split_frames(gathered, bucket.index, len(bucket.layers), self._transport.size):
            for part, code in zip(bucket.parts, wire.split_parts(body, len(bucket.parts)), strict=True):
                _gathered(part).decompress_layers_add_(
                    code, work[part.start : part.stop], self._transport.scale
                )
        for grad, result in zip(grads, work, strict=True):
            if result is not grad:
                grad.copy_(result)

    def _sparse(self, bucket: Bucket, grads: list[Tensor]) -> Steps:
        """A sparse gradient: indices and values by allgather, as Horovod does."""
        del bucket
        result = yield Request("sparse", grads[0])
        grads[0].zero_().add_(result)

    # --- what they share --------------------------------------------------------------------------

    def _is_own_buffer(self, bucket: Bucket, grads: list[Tensor]) -> bool:
        """Whether the one gradient of the bucket can be summed where it is, without a copy."""
        return (
            len(grads) == 1
            and grads[0].dtype == bucket.dtype
            and grads[0].is_contiguous()
            and not self._feedback[bucket.index].keeps
        )

    def _load_linear(self, bucket: Bucket, staging: _Staging, grads: list[Tensor]) -> None:
        """Cast the gradients into the payload; with feedback, keep the rounding error."""
        feedback = self._feedback[bucket.index]
        if not feedback.keeps:
            # an overflow becomes Inf, as with Horovod: nobody would keep what saturation cuts off
            torch._foreach_copy_(staging.views, grads)
            return
        kept = feedback.begin(bucket)
        x = kept.clone()
        torch._foreach_add_(shaped(x, bucket), [grad.to(torch.float32) for grad in grads])
        payload = staging.flat[: bucket.numel]
        _linear(bucket.parts[0]).encode(x, payload)
        x.sub_(payload)
        # Layer by layer: one that holds a NaN keeps its last good residual, and the NaN is sent
        for new, old in zip(split(x, bucket.layers), split(kept, bucket.layers), strict=True):
            if new.isfinite().all():
                old.copy_(new)

    def _encode(self, bucket: Bucket, work: list[Tensor]) -> Tensor:
        """One frame with the codes of all layers of the bucket."""
        x = self._feedback[bucket.index].begin(bucket)
        offsets = self._staged[bucket.index].offsets
        codes: list[Tensor] = []
        energy = sent = 0.0
        for part in bucket.parts:
            code, stats = _gathered(part).compress_layers_(
                x,
                offsets[part.start : part.stop + 1],
                part.levels,
                work[part.start : part.stop],
                # a lone part leaves room for the header, which saves copying the codes
                reserve=wire.HEADER_BYTES if len(bucket.parts) == 1 else 0,
            )
            codes.append(code)
            energy += float(stats.energy.sum())
            sent += float(stats.sent.sum())
        self._meter.bucket(bucket.index, energy=energy, sent=sent)
        frame = codes[0] if len(codes) == 1 else wire.join_parts(codes)
        wire.write_header(frame, bucket.index, len(bucket.layers))
        return frame


_WAYS = {
    Collective.REDUCE: Exchange._reduce,
    Collective.TWO_SHOT: Exchange._two_shot,
    Collective.GATHER: Exchange._gather,
    Collective.SPARSE: Exchange._sparse,
}


def shaped(flat: Tensor, bucket: Bucket) -> list[Tensor]:
    """Views of the bucket's layers in ``flat``, in their shapes."""
    views = split(flat, bucket.layers)
    return [view.view(layer.shape) for view, layer in zip(views, bucket.layers, strict=True)]


def _linear(part: Part) -> CastCompressor:
    assert isinstance(part.compressor, CastCompressor), part
    return part.compressor


def _gathered(part: Part) -> GatheredCompressor:
    assert isinstance(part.compressor, GatheredCompressor), part
    return part.compressor


def _as_float32(grad: Tensor) -> Tensor:
    """``grad`` itself if kernels can work on it, else a contiguous float32 copy."""
    if grad.dtype == torch.float32 and grad.is_contiguous():
        return grad
    return grad.to(torch.float32, memory_format=torch.contiguous_format)
