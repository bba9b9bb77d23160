"""One bucket's way: feedback, compression, collective, decompression.

The way of a bucket is a generator that yields the collectives it needs and receives their results;
the exchange drives the generators of all buckets, in the same order on all ranks.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive import rng
from hvd_adaptive.buckets import Bucket, Segment
from hvd_adaptive.comm.transport import Handle, JoinedRankError, Request, Transport, nbytes_of
from hvd_adaptive.compressors.base import (
    CastCompressor,
    ClearsSent,
    CodecState,
    Compressor,
    GatheredCompressor,
    LayerBatch,
    LinearBatch,
    LinearCompressor,
    Rounds,
    all_finite,
)
from hvd_adaptive.feedback import FeedbackState, split
from hvd_adaptive.layers import Collective
from hvd_adaptive.telemetry import Meter
from hvd_adaptive.wire import frame as wire_frame

Steps: TypeAlias = Generator[Request, Tensor, None]

_PRESENT = "present"
"""What every rank votes for that takes part in a step."""


class _Staging:
    """What a bucket needs at every step and is made once: offsets and, on demand, a flat buffer."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        sizes = [layer.numel for layer in bucket.layers]
        self.offsets = np.cumsum([0, *sizes], dtype=np.int64)
        self.dense_bytes = bucket.dense_bytes

    @functools.cached_property
    def flat(self) -> Tensor:
        """The payload of a bucket of casts, in its wire dtype."""
        return torch.zeros(self._bucket.numel, dtype=self._bucket.dtype, device=self._bucket.device)

    @functools.cached_property
    def views(self) -> list[Tensor]:
        """The layers in ``flat``, in their shapes."""
        return shaped(self.flat, self._bucket)


@dataclass(frozen=True, slots=True)
class CollectiveTiming:
    """One collective of a step.

    Args:
        bucket: index of the bucket.
        traffic: bytes that this rank's link carried in one direction.
        launched: when, in seconds.
        done: when its result was there at the latest.
        exposed: seconds for which training waited for it.
    """

    bucket: int
    traffic: int
    launched: float
    done: float
    exposed: float


@dataclass(slots=True)
class _InFlight:
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
        seed: of random rounding and selection; the same on all ranks.
        rank: of this process.
    """

    def __init__(
        self, transport: Transport, meter: Meter, prefix: str, seed: int = 0, rank: int = 0
    ) -> None:
        self._transport = transport
        self.meter = meter
        self._prefix = prefix
        self.seed = seed
        self.rank = rank
        self._step = 0
        self._inflight: deque[_InFlight] = deque()
        self._memory: dict[int, FeedbackState] = {}
        self._staged: dict[int, _Staging] = {}
        self._vote: Handle | None = None
        self._questions: tuple[str, ...] = ()
        self._outcome: dict[str, float] | None = None
        self.timings: list[CollectiveTiming] = []
        """This step's collectives, in the order in which they ended."""
        self.states: dict[Compressor, CodecState] = {}
        """What compressors have learnt, by :meth:`Compressor.state_key`."""

    def attach(self, buckets: Sequence[Bucket], memory: dict[int, FeedbackState]) -> None:
        """Use these buckets from now on; ``memory`` of their feedback by bucket index."""
        if self._inflight:
            raise RuntimeError("buckets cannot be changed while their collectives are under way")
        self._memory = memory
        self._staged = {bucket.index: _Staging(bucket) for bucket in buckets}
        for compressor in {part.compressor for bucket in buckets for part in bucket.parts}:
            state = None if compressor.state_key in self.states else compressor.new_state()
            if state is not None:
                self.states[compressor.state_key] = state

    def load_state(self, compressor: Compressor, learnt: Mapping[str, Any]) -> None:
        """Let a compressor go on from what it had learnt; ValueError if that does not fit."""
        state = compressor.new_state()
        if state is None:
            raise ValueError(
                f"compression state holds what {compressor.name!r} learnt, which learns nothing"
            )
        state.load_state_dict(learnt)
        self.states[compressor.state_key] = state

    def begin_step(self, step: int) -> None:
        """Draw the random numbers of this step from now on."""
        self._step = step
        self.timings.clear()

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
        dense = self._staged[bucket.index].dense_bytes
        self.meter.bucket(bucket.index, compress=perf_counter() - started, dense=dense)
        self._submit(bucket, steps, request, round_=0)

    def finish(self) -> None:
        """Wait for every collective, in launch order, and write the results."""
        while self._inflight:
            in_flight = self._inflight.popleft()
            waiting = perf_counter()
            reply = self._transport.wait(in_flight.handle)
            done = perf_counter()
            more: Request | None
            try:
                more = in_flight.steps.send(reply)
            except StopIteration:
                more = None
            traffic = self._transport.traffic(in_flight.request, nbytes_of(reply))
            index, exposed = in_flight.bucket.index, done - waiting
            self.timings.append(CollectiveTiming(index, traffic, in_flight.launched, done, exposed))
            self.meter.bucket(
                index,
                exposed=exposed,
                communicate=done - in_flight.launched,
                decompress=perf_counter() - done,
                traffic=traffic,
            )
            if more is not None:
                self._submit(in_flight.bucket, in_flight.steps, more, in_flight.round + 1)

    def drain(self) -> None:
        """Complete what is under way, refused or not, where a rank has joined; drop the results."""
        handles = [in_flight.handle for in_flight in self._inflight]
        self._inflight.clear()
        for handle in handles:
            with suppress(JoinedRankError):
                self._transport.wait(handle)

    def abandon(self) -> None:
        """Forget what is under way, after Horovod reported that a rank has gone."""
        self._inflight.clear()
        self._vote = None

    def reduce(self, tensor: Tensor) -> Tensor:
        """A tensor reduced over the ranks as gradients are; waits for it."""
        request = Request("allreduce", tensor.clone())
        return self._transport.wait(
            self._transport.submit(request, f"{self._prefix}.reduce", self._step)
        )

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over the ranks, not summed."""
        return self._transport.averages

    def share(self, reduced: Tensor) -> Tensor:
        """What each rank must send so that the reduction over all of them gives ``reduced``."""
        return reduced / (self._transport.size * self._transport.scale)

    def vote(self, **questions: bool) -> None:
        """Ask all ranks some questions; :meth:`voted` tells later to which any of them said yes."""
        self._outcome = None
        self._questions = (*questions, _PRESENT)
        # float64, which no gradient is: Horovod would copy a large one to send both in one buffer
        ballot = torch.tensor([*map(float, questions.values()), 1.0], dtype=torch.float64)
        self._vote = self._transport.submit(
            Request("allreduce", ballot), f"{self._prefix}.vote", self._step
        )

    def voted(self) -> dict[str, bool]:
        """The outcomes of the last :meth:`vote`, the same on all ranks."""
        outcome = self._count_votes()
        return {question: count > 0.0 for question, count in outcome.items()}

    def forget_vote(self) -> None:
        """Complete a vote whose outcome nobody will ask for."""
        if self._vote is not None:
            self._count_votes()

    @property
    def missing(self) -> bool:
        """Whether a rank took no part in the last :meth:`vote`: it has called ``hvd.join()``."""
        every, one = self._transport.size * self._transport.scale, self._transport.scale
        return self._count_votes()[_PRESENT] < every - 0.5 * one

    def _count_votes(self) -> dict[str, float]:
        """How many ranks said yes, in the units of the transport's sums; waits for them."""
        if self._vote is not None:
            counts = self._transport.wait(self._vote).tolist()
            self._vote, self._outcome = None, dict(zip(self._questions, counts, strict=True))
        assert self._outcome is not None, "nobody has voted"
        return self._outcome

    def _submit(self, bucket: Bucket, steps: Steps, request: Request, round_: int) -> None:
        launched = perf_counter()  # before: it may go ahead at once
        name = f"{self._prefix}.{bucket.index}.{round_}"
        handle = self._transport.submit(request, name, self._step)
        self.meter.bucket(bucket.index, payload=nbytes_of(request.tensor))
        self._inflight.append(_InFlight(bucket, steps, request, handle, round_, launched))

    # --- the ways of a bucket ---------------------------------------------------------------------

    def _linear(self, bucket: Bucket, grads: list[Tensor]) -> Steps:
        """Sum the payloads by allreduce, in as many rounds as the compressors need."""
        casts = all(isinstance(part.compressor, CastCompressor) for part in bucket.parts)
        if not casts or self._memory[bucket.index].slots:
            yield from self._rounds(bucket, grads)
        elif bucket.collective is Collective.REDUCE and _is_own_buffer(bucket, grads):
            yield Request("allreduce", grads[0].view(-1))
        else:
            staging = self._staged[bucket.index]
            # an overflow becomes Inf, as with Horovod: nobody would keep what saturation cuts off
            torch._foreach_copy_(staging.views, grads)
            reduced = yield from self._sum(bucket, staging.flat)
            torch._foreach_copy_(
                grads, [_within(*pair) for pair in zip(shaped(reduced, bucket), grads, strict=True)]
            )

    def _sum(self, bucket: Bucket, flat: Tensor) -> Generator[Request, Tensor, Tensor]:
        """One reduction over the ranks of a flat buffer, by the bucket's collective."""
        if bucket.collective is Collective.REDUCE:
            yield Request("allreduce", flat)
            return flat
        # No operation of Horovod adds this dtype: each rank sums one slice in float32, and all
        # gather the slices, which are padded to one size.
        ranks = self._transport.size
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % ranks))
        slices = yield Request("alltoall", padded.view(torch.uint8))
        rows = slices.view(flat.dtype).view(ranks, -1)
        total = rows.sum(0, dtype=torch.float32).mul_(self._transport.scale)
        gathered = yield Request("allgather", total.to(flat.dtype).view(torch.uint8))
        return gathered.view(flat.dtype)[: flat.numel()]

    def _rounds(self, bucket: Bucket, grads: list[Tensor]) -> Steps:
        """Compressors with rounds of their own; the memory changes only where all ranks are finite."""
        memory = self._memory[bucket.index]
        work = [_as_float32(grad) for grad in grads]
        x, adds = memory.begin(bucket, work, self._step)
        # a rule that looks at the gradients again keeps them; else the results take their place
        results = (
            [torch.empty_like(each) for each in work] if memory.needs_gradient_after_commit else work
        )
        total = torch.empty_like(x)
        kept, rests = split(x, bucket.layers), split(total, bucket.layers)
        for rest, held, add in zip(rests, kept, adds, strict=True):
            torch.add(held, add.view(-1), out=rest)
        outs = [each.view(-1) for each in results]
        running = [
            _linear(part).rounds(self._batch(bucket, part, rests, outs)) for part in bucket.parts
        ]
        pending = [next(each) for each in running]
        rounds: list[Rounds | None] = [*running]
        while any(rounds):
            tensors = [tensor for some in pending for tensor in some]
            flat = torch.cat([tensor.reshape(-1).to(bucket.dtype) for tensor in tensors])
            reduced = yield from self._sum(bucket, flat)
            pending = _advance(rounds, pending, reduced)
        good = [all_finite(each) for each in outs]
        for part in (part for part in bucket.parts if part.keeps):
            for position in (each for each in range(part.start, part.stop) if good[each]):
                kept[position].copy_(rests[position])
        memory.commit(bucket, x, work, good, self._step)
        for position in (position for position, fine in enumerate(good) if not fine):
            memory.restore(bucket, position, work[position], None)
        memory.finish(bucket, results, good)
        self._hand_over(bucket, results, grads)

    def _gather(self, bucket: Bucket, grads: list[Tensor]) -> Steps:
        """Send every rank's codes to every rank, which decodes and adds them."""
        memory = self._memory[bucket.index]
        work = [_as_float32(grad) for grad in grads]
        codes, fine_here = self._encode(bucket, work)
        ranks = self._transport.size
        gathered = yield Request("allgather", _framed(codes, bucket, fine_here, ranks))
        bodies, nonfinite = wire_frame.split_frames(gathered, bucket.index, len(bucket.layers), ranks)
        local = [each.clone() for each in work] if nonfinite else work
        marks = np.zeros(len(work), np.bool_)
        by_rank = [wire_frame.split_parts(body, len(bucket.parts)) for body in bodies]
        for part, of_all in zip(bucket.parts, zip(*by_rank, strict=True), strict=True):
            marks[part.start : part.stop] = _gathered(part).decompress_layers_sum_(
                of_all, work[part.start : part.stop], self._transport.scale
            )
        good = (~marks).tolist()
        self._clear_sent(bucket, codes, good)
        if nonfinite:
            self._restore(bucket, codes, local, fine_here & marks)
        memory.finish(bucket, work, good)
        self._hand_over(bucket, work, grads)

    def _sparse(self, bucket: Bucket, grads: list[Tensor]) -> Steps:
        """A sparse gradient: indices and values by allgather, as Horovod does."""
        del bucket
        result = yield Request("sparse", grads[0])
        grads[0].zero_().add_(result)

    # --- what they share --------------------------------------------------------------------------

    def _batch(
        self, bucket: Bucket, part: Segment, x: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> LinearBatch:
        """One linear compressor's share of a bucket."""
        return LinearBatch(
            x[part.start : part.stop],
            outs[part.start : part.stop],
            bucket.layers[part.start : part.stop],
            part.levels,
            self._keys(bucket, part, rng.SHARED),
            self.states.get(part.compressor.state_key),
            bucket.dtype,
            self._transport.size if part.keeps and self._memory[bucket.index].slots else 1,
        )

    def _keys(self, bucket: Bucket, part: Segment, rank: int) -> npt.NDArray[np.uint64]:
        """Of the random numbers of one compressor's layers in this step."""
        layers = [layer.index for layer in bucket.layers[part.start : part.stop]]
        return rng.layer_keys(self.seed, rank, self._step, layers)

    def _hand_over(self, bucket: Bucket, results: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Copy the results that were not formed in the gradients' own memory.

        What float16 cannot hold waits, because residuals can be larger than any gradient.
        """
        for position, (grad, result) in enumerate(zip(grads, results, strict=True)):
            if result is grad:
                continue
            held = _within(result, grad)
            if held is not result:
                excess = (result - held).nan_to_num_(0.0, 0.0, 0.0)  # where both are Inf
                self._memory[bucket.index].postpone(bucket, position, self.share(excess.view(-1)))
            grad.copy_(held)

    def _encode(self, bucket: Bucket, work: list[Tensor]) -> tuple[list[Tensor], npt.NDArray[np.bool_]]:
        """The codes of each part of the bucket, and which layers are finite here.

        A lone part's codes leave room for the frame's header, which saves copying them.
        """
        memory = self._memory[bucket.index]
        x, adds = memory.begin(bucket, work, self._step)
        offsets = self._staged[bucket.index].offsets
        codes: list[Tensor] = []
        marks: list[npt.NDArray[np.bool_]] = []
        energy = sent = 0.0
        for part in bucket.parts:
            compressor = _gathered(part)
            code, stats = compressor.compress_layers_(
                LayerBatch(
                    x,
                    offsets[part.start : part.stop + 1],
                    part.levels,
                    adds[part.start : part.stop],
                    keys=self._keys(bucket, part, self.rank) if compressor.draws else None,
                    reserve=_room(bucket),
                    state=self.states.get(part.compressor.state_key),
                ),
            )
            if not part.keeps:
                x[offsets[part.start] : offsets[part.stop]].zero_()
            codes.append(code)
            marks.append(stats.nonfinite)
            energy += float(stats.energy.sum())
            sent += float(stats.sent.sum())
        self.meter.bucket(bucket.index, energy=energy, sent=sent)
        fine = ~(marks[0] if len(marks) == 1 else np.concatenate(marks))
        memory.commit(bucket, x, work, fine.tolist(), self._step)
        return codes, fine

    def _clear_sent(self, bucket: Bucket, codes: list[Tensor], good: list[bool]) -> None:
        """Let the memory clear where this rank has sent something."""

        def clear(views: Sequence[Tensor]) -> None:
            for part, code in zip(bucket.parts, codes, strict=True):
                compressor = part.compressor
                assert isinstance(compressor, ClearsSent), part
                compressor.clear_layers_(code[_room(bucket) :], views[part.start : part.stop])

        self._memory[bucket.index].clear_sent(bucket, clear, good)

    def _restore(
        self,
        bucket: Bucket,
        codes: list[Tensor],
        local: list[Tensor],
        undo: npt.NDArray[np.bool_],
    ) -> None:
        """Take back what was committed for layers that were finite here but not on another rank."""
        for part, code in zip(bucket.parts, codes, strict=True):
            if not part.keeps or not undo[part.start : part.stop].any():
                continue
            own = [torch.zeros_like(each) for each in local[part.start : part.stop]]
            marks = _gathered(part).decompress_layers_add_(code[_room(bucket) :], own, 1.0)
            for position in (p for p in range(part.start, part.stop) if undo[p]):
                sent = own[position - part.start].view(-1)
                if marks[position - part.start]:
                    sent.zero_()  # a mark that stands for several layers: nothing of this one was sent
                self._memory[bucket.index].restore(bucket, position, local[position].view(-1), sent)


_WAYS = {
    Collective.REDUCE: Exchange._linear,
    Collective.TWO_SHOT: Exchange._linear,
    Collective.GATHER: Exchange._gather,
    Collective.SPARSE: Exchange._sparse,
}


def _advance(
    rounds: list[Rounds | None], pending: list[list[Tensor]], reduced: Tensor
) -> list[list[Tensor]]:
    """Hand each compressor its reduced tensors; returns what they send next.

    One that needs fewer rounds than the others becomes None and sends nothing in the later ones.
    """
    pieces = iter(torch.split(reduced, [tensor.numel() for some in pending for tensor in some]))
    following: list[list[Tensor]] = []
    for position, each in enumerate(rounds):
        sends: list[Tensor] = []
        if each is not None:
            try:
                sends = each.send([next(pieces) for _ in pending[position]])
            except StopIteration:
                rounds[position] = None
        following.append(sends)
    return following


def _is_own_buffer(bucket: Bucket, grads: list[Tensor]) -> bool:
    """Whether the one gradient of the bucket can be summed where it is, without a copy."""
    return len(grads) == 1 and grads[0].dtype == bucket.dtype and grads[0].is_contiguous()


def _room(bucket: Bucket) -> int:
    """Bytes in front of a part's codes: of the frame's header, where the part is alone."""
    return wire_frame.HEADER_BYTES if len(bucket.parts) == 1 else 0


def _framed(codes: list[Tensor], bucket: Bucket, fine: npt.NDArray[np.bool_], ranks: int) -> Tensor:
    """One frame with the codes of all parts of the bucket, or what says that it is too large."""
    size = wire_frame.frame_bytes([code.numel() - _room(bucket) for code in codes])
    if size > wire_frame.MAX_GATHERED_BYTES // ranks:
        return wire_frame.too_large(size, bucket.index, len(bucket.layers))
    frame = codes[0] if len(codes) == 1 else wire_frame.join_parts(codes)
    wire_frame.write_header(frame, bucket.index, len(bucket.layers), nonfinite=not fine.all())
    return frame


def shaped(flat: Tensor, bucket: Bucket) -> list[Tensor]:
    """Views of the bucket's layers in ``flat``, in their shapes."""
    views = split(flat, bucket.layers)
    return [view.view(layer.shape) for view, layer in zip(views, bucket.layers, strict=True)]


def _linear(part: Segment) -> LinearCompressor:
    assert isinstance(part.compressor, LinearCompressor), part
    return part.compressor


def _gathered(part: Segment) -> GatheredCompressor:
    assert isinstance(part.compressor, GatheredCompressor), part
    return part.compressor


def _within(result: Tensor, grad: Tensor) -> Tensor:
    """``result``, saturated where rounding to a narrower dtype would make Inf of a finite value."""
    if grad.dtype != torch.float16 or result.dtype == torch.float16:
        return result
    wide, limit = result.float(), torch.finfo(grad.dtype).max
    if not bool((wide.abs() > limit).any()):
        return result
    return torch.where(wide.isfinite(), wide.clamp(-limit, limit), wide)


def _as_float32(grad: Tensor) -> Tensor:
    """``grad`` itself if kernels can work on it, else a contiguous float32 copy."""
    if grad.dtype == torch.float32 and grad.is_contiguous():
        return grad
    return grad.to(torch.float32).contiguous()
