"""Two-shot: each rank sums one shard of all ranks' codes, and sends the sum compressed again."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive import rng
from hvd_adaptive.buckets import Bucket
from hvd_adaptive.collectives.base import (
    BucketIO,
    EncodedScheme,
    Steps,
    encoder_of,
    hand_over,
    readable,
    room_for_results,
)
from hvd_adaptive.collectives.costs import Workload
from hvd_adaptive.collectives.shards import Part, Shards
from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.comm.request import Group, Request, operation_bytes
from hvd_adaptive.compressors.base import ClearsSent, LayerBatch, Reduced
from hvd_adaptive.wire import TooLargeError, WireError
from hvd_adaptive.wire import frame as wire

_LOAD = struct.Struct("<I")
"""Bytes that the owner of a shard has received, beside its codes: all ranks then cut alike."""

Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TwoShot(EncodedScheme):
    """Reduce-scatter and allgather of compressed payloads, with a residual at either end.

    A bucket's elements are shared out among the ranks (:mod:`~hvd_adaptive.collectives.shards`). Each
    rank sends every owner the codes of its shard; the owner adds them in float32, compresses the sum,
    and all gather what the owners send, which every rank decodes alike, owners too. Where the bucket's
    feedback keeps what a rank has not sent, the owner keeps what it has not passed on: under error
    feedback a second residual, under EF21 the server's estimate.

    Cost on a link: ``2 (n - 1) / n`` payloads, whatever ``n`` is. The noise of an unbiased quantizer is
    added twice. Source: the aggregation of Markov et al., "CGX" (Middleware 2022), section 4, and of
    Tang et al., "1-bit Adam" (ICML 2021), section 5; EF21 in both directions is algorithm 3 of Xin et
    al., "Kimad" (2023).

    Args:
        level: of the second compression, in the compressor's unit (bits, or a density); 0 takes that
            of the first.

    Raises:
        ValueError: a level below 0.
    """

    level: float = 0.0

    name = "two_shot"
    shots = 2
    recompresses = True
    returned = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.level < math.inf:
            raise ValueError(
                f"two_shot: level is the one of the second compression, or 0, got {self.level}"
            )

    def run(self, bucket: Bucket, grads: list[Tensor], io: BucketIO) -> Steps:
        """Encode, exchange shards, sum, encode, gather, decode."""
        read = readable(grads)
        shots, work = Shots(bucket, read, io, self.level), room_for_results(read)
        finite = ~(yield from shots.exchange(work))
        shots.settle(finite)
        for position in np.flatnonzero(~finite).tolist():
            work[position].fill_(math.nan)
        io.feedback.finish(bucket, work, finite.tolist())
        hand_over(bucket, work, grads, io)

    def seconds(self, work: Workload, ranks: int, link: LinkCosts) -> float:
        """Two operations; a shard is added and compressed again, and all sums are written."""
        half = self.link_bytes(work.nbytes, ranks) / 2
        network = (
            link.alltoall + link.alltoall_byte * half + link.allgather + link.allgather_byte * half
        )
        owner = work.sums(ranks, 1 / ranks) + work.compressing(1 / ranks)
        return network + owner + work.sums(1)

    def link_bytes(self, payload: float, ranks: int, ranks_per_node: int = 1) -> float:
        """An alltoall and an allgather of shards, both of one payload."""
        first = operation_bytes("alltoall", payload, payload, ranks)
        return first + operation_bytes("allgather", payload / ranks, payload, ranks)


class Shots:
    """One bucket's two shots among the ranks of a group, and what they leave on this rank.

    Args:
        bucket: the bucket.
        work: what this rank contributes of its layers, :func:`readable`.
        io: of the ranks of the group.
        level: of the second compression; 0 takes that of the first.
        group: who takes part.
        owned: the owner's residual of elements of the bucket; None takes that of the feedback.
    """

    def __init__(
        self,
        bucket: Bucket,
        work: list[Tensor],
        io: BucketIO,
        level: float,
        group: Group = "all",
        owned: Callable[[int, int], Tensor | None] | None = None,
    ) -> None:
        self._bucket, self._local, self._io, self._group = bucket, work, io, group
        self._shards = io.buffers.shards(io.ranks)
        self._sent = _compress(bucket, work, self._shards, io)
        start, stop = self._shards.bounds[io.place : io.place + 2]
        residual = owned(start, stop) if owned else io.feedback.owned(bucket, start, stop)
        self._owned = _Owned(bucket, self._shards, io, level, residual)

    def exchange(self, outs: list[Tensor]) -> Generator[Request, Tensor, Marks]:
        """Write the reduced layers into ``outs``, which may be what was contributed.

        Returns:
            The layers that are not finite on some rank, the same on all ranks.

        Raises:
            WireError: a payload is damaged or too large; on all ranks.
        """
        bucket, io = self._bucket, self._io
        nonfinite = bool(self._sent.nonfinite.any())
        frames = [_frame_of(bodies, bucket, io.ranks, nonfinite) for bodies in self._sent.bodies]
        sizes = tuple(sum(piece.numel() for piece in frame) for frame in frames)
        everything = torch.cat([piece for frame in frames for piece in frame])
        received = yield Request("alltoall", everything, sizes, self._group)
        gathered = yield Request("allgather", self._owned.reduce(received), group=self._group)
        bodies, nonfinite = wire.split_frames(gathered, bucket.index, len(bucket.layers), io.ranks)
        if nonfinite and outs is self._local:
            self._local = [each.clone() for each in outs]
        codes, loads = _split(bodies, self._shards)
        marks = _decode(codes, self._shards, outs, io)
        if self._group == "all":  # other groups have other shards, and a checkpoint those of all ranks
            io.buffers.note_loads(loads)
        return marks

    def settle(self, finite: Marks) -> None:
        """Keep what was left of layers that are ``finite`` on all ranks; forget the step for others."""
        bucket, sent, shards, io = self._bucket, self._sent, self._shards, self._io
        if not finite.all():
            self._owned.restore(finite)
        _clear_sent(bucket, sent, shards, finite, io)
        if not finite.all():
            _restore(bucket, sent, shards, self._local, ~sent.nonfinite & ~finite, io)


@dataclass(frozen=True, slots=True)
class _Sent:
    """This rank's codes by shard and part, and which layers are not finite here."""

    bodies: list[list[Tensor]]
    nonfinite: Marks


def _compress(bucket: Bucket, work: list[Tensor], shards: Shards, io: BucketIO) -> _Sent:
    """Compress each segment for all owners, and commit what that leaves."""
    x, adds = io.feedback.begin(bucket, work, io.step)
    offsets = io.buffers.offsets
    bodies: list[list[Tensor]] = [[] for _ in range(io.ranks)]
    nonfinite = np.zeros(len(bucket.layers), np.bool_)
    energy, sent = np.zeros(len(bucket.layers)), np.zeros(len(bucket.layers))
    for segment in bucket.segments:
        compressor, layers = encoder_of(segment), slice(segment.start, segment.stop)
        batch = LayerBatch(
            x,
            offsets[segment.start : segment.stop + 1],
            segment.levels,
            adds[layers],
            state=io.codec_states.get(compressor.state_key),
            **io.random_arguments(bucket, segment),
        )
        edges = shards.edges_of(segment)
        codes, stats = compressor.compress_shards_(batch, edges)
        for of_owner, code, own in zip(bodies, codes, edges, strict=True):
            if len(own) > 1:
                of_owner.append(code)
        if not segment.keeps:
            x[offsets[segment.start] : offsets[segment.stop]].zero_()
        nonfinite[layers] = stats.nonfinite
        energy[layers], sent[layers] = stats.energy, stats.sent
    io.observe_energy(bucket, energy, sent)
    io.feedback.commit(bucket, x, work, (~nonfinite).tolist(), io.step)
    return _Sent(bodies, nonfinite)


def _frame_of(bodies: Sequence[Tensor], bucket: Bucket, ranks: int, nonfinite: bool) -> list[Tensor]:
    """A frame for one owner, or for all from one, or what says that it is too large; in pieces."""
    size = wire.frame_bytes([body.numel() for body in bodies])
    if size > wire.MAX_GATHERED_BYTES // ranks:
        return [wire.too_large(size, bucket.index, len(bucket.layers))]
    return wire.frame_pieces(bodies, bucket.index, len(bucket.layers), bucket.device, nonfinite)


class _Owned:
    """The shard that this rank owns, from the codes of all ranks to the code of their sum."""

    def __init__(
        self, bucket: Bucket, shards: Shards, io: BucketIO, level: float, residual: Tensor | None
    ) -> None:
        self._bucket, self._io, self._level = bucket, io, level
        self._parts = shards.parts[io.place]
        self._start, self._stop = shards.bounds[io.place : io.place + 2]
        self._residual = residual
        self._reduced: list[Reduced] = []

    def reduce(self, received: Tensor) -> Tensor:
        """The frame that all ranks get; what is wrong with what this one got is told to all of them."""
        bucket, ranks = self._bucket, self._io.ranks
        try:
            frames, nonfinite = wire.split_frames(received, bucket.index, len(bucket.layers), ranks)
            codes = [wire.split_parts(frame, len(self._parts)) for frame in frames]
            for part, of_all in zip(self._parts, zip(*codes, strict=True), strict=True):
                self._reduced.append(self._reduce(part, of_all))
        except (WireError, TooLargeError) as error:
            for each in self._reduced:  # parts before the damaged one
                each.undo(np.flatnonzero(~each.nonfinite).tolist())
            return wire.refused(str(error), bucket.index, len(bucket.layers))
        marked = nonfinite or any(each.nonfinite.any() for each in self._reduced)
        load = torch.frombuffer(bytearray(_LOAD.pack(received.numel())), dtype=torch.uint8)
        parts = [*(each.body for each in self._reduced), load.to(bucket.device)]
        return torch.cat(_frame_of(parts, bucket, ranks, marked))

    def _reduce(self, part: Part, bodies: Sequence[Tensor]) -> Reduced:
        """Sum one part and compress the sum; what is left stays in the residual, where there is one."""
        compressor = encoder_of(part.segment)
        keeps = self._residual is not None and part.segment.keeps
        x, start = self._residual, self._start
        if x is None or not keeps:
            x, start = torch.empty(part.numel, device=self._bucket.device), int(part.edges[0])
        batch = LayerBatch(
            x,
            part.edges - start,
            [self._level or level for level in part.sum_levels],
            keys=_keys(self._bucket, part, self._io) if compressor.draws else None,
            state=self._io.codec_states.get(compressor.state_key),
            learns=False,
            rotation=rng.rotation_key(self._io.seed, self._io.step),
        )
        return compressor.reduce_layers_(bodies, batch, keeps)

    def restore(self, finite: Marks) -> None:
        """Take back what was kept of layers that are not finite."""
        if self._residual is None:
            return
        for part, reduced in zip(self._parts, self._reduced, strict=True):
            undo = ~finite[list(part.layers)] & ~reduced.nonfinite
            if part.segment.keeps and undo.any():
                reduced.undo(np.flatnonzero(undo).tolist())


def _keys(bucket: Bucket, part: Part, io: BucketIO) -> npt.NDArray[np.uint64]:
    """Keys of the random numbers of the second shot: other ones than any rank draws in the first."""
    layers = [bucket.layers[position].index for position in part.layers]
    keys = rng.layer_keys(io.seed, rng.OWNER + io.rank, io.step, layers)
    pieces = zip(keys.tolist(), part.edges[:-1].tolist(), strict=True)
    return np.array([rng.mix(key ^ start) for key, start in pieces], np.uint64)


def _split(bodies: Sequence[Tensor], shards: Shards) -> tuple[list[list[Tensor]], list[int]]:
    """What the owners sent: codes by shard and part, and how many bytes each has received."""
    codes, loads = [], []
    for body, parts in zip(bodies, shards.parts, strict=True):
        *own, load = wire.split_parts(body, len(parts) + 1)
        if load.numel() != _LOAD.size:
            raise WireError(f"damaged frame: an owner's load has {load.numel()} bytes")
        codes.append(own)
        loads.append(_LOAD.unpack(bytes(load.tolist()))[0])
    return codes, loads


def _decode(
    codes: Sequence[Sequence[Tensor]], shards: Shards, work: Sequence[Tensor], io: BucketIO
) -> Marks:
    """Write all owners' sums where the gradients are; returns the layers with a mark."""
    flats = [each.view(-1) for each in work]
    marks = np.zeros(len(work), np.bool_)
    for own, parts in zip(codes, shards.parts, strict=True):
        for part, code in zip(parts, own, strict=True):
            views = part.views(flats, io.buffers.offsets)
            found = encoder_of(part.segment).decompress_layers_sum_([code], views, io.scale)
            marks[np.array(part.layers)[found]] = True
    return marks


def _clear_sent(bucket: Bucket, sent: _Sent, shards: Shards, finite: Marks, io: BucketIO) -> None:
    """Let the feedback clear where this rank has sent something."""

    def clear(views: Sequence[Tensor]) -> None:
        for parts, bodies in zip(shards.parts, sent.bodies, strict=True):
            for part, body in zip(parts, bodies, strict=True):
                compressor = part.segment.compressor
                assert isinstance(compressor, ClearsSent), part.segment
                compressor.clear_layers_(body, part.views(views, io.buffers.offsets))

    io.feedback.clear_sent(bucket, clear, finite.tolist())


def _restore(
    bucket: Bucket, sent: _Sent, shards: Shards, local: list[Tensor], undo: Marks, io: BucketIO
) -> None:
    """Take back what was committed for layers that were finite here but not on another rank."""
    kept = np.zeros(len(undo), np.bool_)
    for segment in (segment for segment in bucket.segments if segment.keeps):
        kept[segment.start : segment.stop] = undo[segment.start : segment.stop]
    if not kept.any():
        return
    own = [torch.zeros(each.numel(), device=each.device) for each in local]
    for parts, bodies in zip(shards.parts, sent.bodies, strict=True):
        for part, body in zip(parts, bodies, strict=True):
            views = part.views(own, io.buffers.offsets)
            marks = encoder_of(part.segment).decompress_layers_add_(body, views, 1.0)
            for piece in np.flatnonzero(marks).tolist():
                views[piece].zero_()  # a mark that stands for several layers: nothing was sent
    for position in np.flatnonzero(kept).tolist():
        io.feedback.restore(bucket, position, local[position].float().view(-1), own[position])
