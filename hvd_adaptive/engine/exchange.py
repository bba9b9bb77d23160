"""The exchange: drives the schemes of all buckets, and counts what each operation cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.adaptation.timing import CollectiveTiming
from hvd_adaptive.arrays import Float64s
from hvd_adaptive.buckets import Bucket
from hvd_adaptive.collectives import reduces_in_nodes, scheme_named
from hvd_adaptive.collectives.base import BucketIO, Buffers, Steps
from hvd_adaptive.comm.request import Request, nbytes_of
from hvd_adaptive.comm.transport import Handle, JoinedRankError, Transport
from hvd_adaptive.engine.codec_states import CodecStates
from hvd_adaptive.engine.labels import labeled
from hvd_adaptive.engine.multi_level import MultiLevelPayloads
from hvd_adaptive.feedback import FeedbackState
from hvd_adaptive.layers import PayloadKind
from hvd_adaptive.telemetry import Meter, Trace


@dataclass(slots=True, eq=False)
class _InFlight:
    """A bucket whose operation is under way."""

    bucket: Bucket
    steps: Steps
    request: Request
    handle: Handle
    round: int
    launched: float


class Exchange:
    """Sends buckets and writes the reduced gradients where the local ones were.

    Args:
        transport: the operations.
        meter: receives what every bucket cost.
        prefix: of the operations' names; the same on all ranks, and of this optimizer alone.
        seed: of random rounding and selection; the same on all ranks.
        rank: of this process.
        clock: seconds, by which operations are timed.
    """

    def __init__(
        self,
        transport: Transport,
        meter: Meter,
        prefix: str,
        seed: int = 0,
        rank: int = 0,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.transport = transport
        self.meter = meter
        self.prefix = prefix
        self.seed = seed
        self.rank = rank
        self._clock = clock
        self.step = 0
        """Number of the running step, the same on all ranks."""
        self.codec_states = CodecStates()
        """What compressors learn."""
        self.payloads = MultiLevelPayloads()
        """What of this step was compressed before its turn."""
        self.timings: list[CollectiveTiming] = []
        """This step's operations, once all have ended, in an order that is the same on all ranks."""
        self._passengers: Tensor | None = None
        self._takes_passengers = -1
        self._inflight: deque[_InFlight] = deque()
        self._feedback: Mapping[int, FeedbackState] = {}
        self._buffers: dict[int, Buffers] = {}
        self._in_nodes = False
        self._loaded_shards: dict[str, Any] = {}

    def attach(
        self,
        buckets: Sequence[Bucket],
        feedback: Mapping[int, FeedbackState],
        per_rank_levels: bool = False,
    ) -> None:
        """Use these buckets from now on.

        Args:
            buckets: in launch order.
            feedback: what is kept of each bucket, by its index.
            per_rank_levels: whether other ranks have buckets of other levels.
        """
        if self._inflight:
            raise RuntimeError("buckets cannot be changed while their collectives are under way")
        self._feedback = feedback
        last = buckets[-1:]
        self._takes_passengers = next((each.index for each in last if self._can_take(each)), -1)
        self._buffers = {bucket.index: Buffers(bucket, per_rank_levels) for bucket in buckets}
        self._in_nodes = any(reduces_in_nodes(bucket.scheme) for bucket in buckets)
        for each in self._buffers.values():
            if each.name in self._loaded_shards:
                each.load_shards(self._loaded_shards[each.name])
        self._loaded_shards = {}
        self.codec_states.add_for(part.compressor for each in buckets for part in each.segments)

    def _can_take(self, last: Bucket) -> bool:
        """Whether counts of all ranks can be summed along with a bucket."""
        if not scheme_named(last.scheme).takes_passengers(last, self._feedback[last.index]):
            return False
        # every sum may be rounded, and one rank more or less must still be seen
        return self.transport.size**2 * torch.finfo(last.dtype).eps < 1

    @property
    def takes_passengers(self) -> bool:
        """Whether the last bucket can take some numbers along; the same on all ranks.

        Not where operations of a node's ranks could be under way without one that has joined: absent
        ranks must then be known before anything is waited for.
        """
        return self._takes_passengers >= 0 and not self.reduces_in_nodes

    def take_along(self, passengers: Tensor) -> bool:
        """Have the last bucket take some numbers along, if it can: its result overwrites them."""
        if self.takes_passengers:
            self._passengers = passengers
        return self.takes_passengers

    @property
    def reduces_in_nodes(self) -> bool:
        """Whether some operations are among a node's ranks alone."""
        return self._in_nodes and self.transport.topology.is_layered

    def shards_dict(self) -> dict[str, Any]:
        """How buckets are shared out among owners, by their first layer; the same on all ranks."""
        found = {each.name: each.shards_dict() for each in self._buffers.values()}
        return self._loaded_shards | {name: each for name, each in found.items() if each is not None}

    def load_shards(self, found: Mapping[str, Any]) -> None:
        """Share buckets out as :meth:`shards_dict` says, where they are of the same elements."""
        self._loaded_shards = dict(found)

    def begin_step(self, step: int) -> None:
        """Draw the random numbers of this step from now on."""
        self.step = step
        self.timings.clear()
        self.payloads.forget()
        self._passengers = None

    def start(self, bucket: Bucket, grads: list[Tensor]) -> None:
        """Compress a bucket and launch its first operation.

        Args:
            bucket: the bucket.
            grads: its layers' gradients; :meth:`finish` writes the result into them. Dense, except
                for a bucket of a sparse layer.
        """
        self._advance()
        started = self._clock()
        io = self._io(bucket)
        steps = scheme_named(bucket.scheme).run(bucket, grads, io)
        with labeled("compress"):
            request = next(steps)
        done = self._clock()
        self.meter.bucket(bucket.index, compress=done - started, dense=io.buffers.dense_bytes)
        if self.meter.trace is not None:
            self.meter.trace.span("compress", started, done, bucket=bucket.index)
        self._submit(bucket, steps, request, round_=0)

    def _io(self, bucket: Bucket) -> BucketIO:
        # what takes a pass over the gradients is measured in one step of each window
        weight = self.meter.every if self.step % self.meter.every == 0 else 0
        passes = bucket.kind is not PayloadKind.ENCODED
        passengers = None
        if bucket.index == self._takes_passengers:
            passengers, self._passengers = self._passengers, None

        def observe_energy(of: Bucket, energy: Float64s, sent: Float64s) -> None:
            times = weight if passes else 1
            self.meter.bucket(
                bucket.index, energy=times * float(energy.sum()), sent=times * float(sent.sum())
            )
            self.meter.layers(of.index, of.layers, energy, sent)

        return BucketIO(
            self._feedback[bucket.index],
            self._buffers[bucket.index],
            self.codec_states.by_key,
            self.step,
            self.transport.size,
            self.transport.rank,
            self.rank,
            self.transport.scale,
            self.transport.share,
            self.seed,
            observe_energy,
            self.transport.topology,
            self.payloads.take,
            weight,
            passengers,
        )

    def finish(self) -> None:
        """Wait for every operation, in launch order, and write the results."""
        while self._inflight:
            self._go_on(self._inflight.popleft())
        self.payloads.forget()
        self.timings.sort(key=lambda timing: (timing.round, timing.bucket))

    def _advance(self) -> None:
        """Go on with buckets whose first shots have ended, while others are still being computed.

        Ranks may so launch in different orders, which Horovod allows. Where the transport does not, a
        bucket goes on only after those before it.
        """
        topology = self.transport.topology
        waiting = [
            each
            for each in self._inflight
            if each.round + 1 < scheme_named(each.bucket.scheme).shots_on(topology)
        ]
        for each in waiting:
            if self.transport.has_ended(each.handle):
                self._inflight.remove(each)
                self._go_on(each)
            elif self.transport.in_order:
                return

    def _go_on(self, ended: _InFlight) -> None:
        """Wait for an operation, and do what follows it."""
        waiting = self._clock()
        with labeled("wait"):
            reply = self.transport.wait(ended.handle)
        done = self._clock()
        more: Request | None
        try:
            with labeled("decompress"):
                more = ended.steps.send(reply)
        except StopIteration:
            more = None
        decompressed = self._clock()
        carried = self.transport.traffic(ended.request, nbytes_of(reply))
        traffic, node = (0, carried) if ended.request.group == "node" else (carried, 0)
        index, exposed = ended.bucket.index, done - waiting
        direction = scheme_named(ended.bucket.scheme).direction(ended.request)
        self.timings.append(
            CollectiveTiming(index, traffic, ended.launched, done, exposed, ended.round, direction)
        )
        self.meter.bucket(
            index,
            exposed=exposed,
            communicate=done - ended.launched,
            decompress=decompressed - done,
            traffic=traffic,
            node=node,
        )
        if self.meter.trace is not None:
            _record(self.meter.trace, ended, (waiting, done, decompressed), carried)
        if more is not None:
            self._submit(ended.bucket, ended.steps, more, ended.round + 1)

    def drain(self) -> None:
        """Complete what is under way, refused or not, where a rank has joined; drop the results."""
        # among the ranks of a node without the one that has joined, an operation never ends
        handles = [each.handle for each in self._inflight if each.request.group == "all"]
        self._inflight.clear()
        for handle in handles:
            with suppress(JoinedRankError):
                self.transport.wait(handle)

    def abandon(self) -> None:
        """Forget what is under way, after Horovod reported that a rank has gone."""
        self._inflight.clear()

    def reduce(self, tensor: Tensor) -> Tensor:
        """A tensor reduced over the ranks as gradients are; waits for it."""
        request = Request("allreduce", tensor.clone())
        return self.transport.wait(self.transport.submit(request, f"{self.prefix}.reduce", self.step))

    def _submit(self, bucket: Bucket, steps: Steps, request: Request, round_: int) -> None:
        launched = self._clock()  # before: it may go ahead at once
        name = f"{self.prefix}.{bucket.index}.{round_}"
        handle = self.transport.submit(request, name, self.step)
        if request.group != "node":  # what stays there is dense, and not what compression is for
            self.meter.bucket(bucket.index, payload=nbytes_of(request.tensor))
        self._inflight.append(_InFlight(bucket, steps, request, handle, round_, launched))


def _record(trace: Trace, ended: _InFlight, times: tuple[float, float, float], carried: int) -> None:
    """Trace an operation, the wait for it, and what followed."""
    waiting, done, decompressed = times
    index, request = ended.bucket.index, ended.request
    trace.flight(
        f"bucket {index}: {request.operation}",
        ended.launched,
        done,
        scheme=ended.bucket.scheme,
        round=ended.round,
        group=request.group,
        traffic_bytes=carried,
    )
    trace.span("wait", waiting, done, bucket=index)
    trace.span("decompress", done, decompressed, bucket=index)
