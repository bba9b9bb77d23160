"""Allgather: every rank's codes go to every rank, which decodes and adds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.comm.request import Request, operation_bytes
from hvd_adaptive.compressors.base import ClearsSent, LayerBatch
from hvd_adaptive.wire import frame as wire


@dataclass(frozen=True)
class AllGather(EncodedScheme):
    """One allgather of frames, one frame for each bucket and rank.

    Cost on a link: ``n - 1`` payloads, so it loses to a sum where there are many ranks.
    """

    name = "allgather"

    def run(self, bucket: Bucket, grads: list[Tensor], io: BucketIO) -> Steps:
        """Encode, gather, decode; layers that are not finite on some rank send a mark instead."""
        read = readable(grads)
        encoded = _encode(bucket, read, io)
        work = room_for_results(read)
        gathered = yield Request("allgather", _framed(encoded, bucket, io.ranks))
        bodies, nonfinite = wire.split_frames(gathered, bucket.index, len(bucket.layers), io.ranks)
        local = [each.to(torch.float32, copy=True) for each in read] if nonfinite else work
        marks = np.zeros(len(work), np.bool_)
        by_rank = [wire.split_parts(body, len(bucket.segments)) for body in bodies]
        for segment, of_all in zip(bucket.segments, zip(*by_rank, strict=True), strict=True):
            marks[segment.start : segment.stop] = encoder_of(segment).decompress_layers_sum_(
                of_all, work[segment.start : segment.stop], io.scale
            )
        finite = (~marks).tolist()
        _clear_sent(bucket, encoded, finite, io)
        if nonfinite:
            _restore(bucket, encoded, local, encoded.finite & marks, io)
        io.feedback.finish(bucket, work, finite)
        hand_over(bucket, work, grads, io)

    def seconds(self, work: Workload, ranks: int, link: LinkCosts) -> float:
        """An allgather, and every rank's payload to add."""
        carried = self.link_bytes(work.nbytes, ranks)
        return link.allgather + link.allgather_byte * carried + work.sums(ranks)

    def link_bytes(self, payload: float, ranks: int, ranks_per_node: int = 1) -> float:
        """As of one allgather."""
        return operation_bytes("allgather", payload, payload * ranks, ranks)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """This rank's codes, one for each segment, and which layers are finite here."""

    codes: list[Tensor]
    finite: npt.NDArray[np.bool_]


def _encode(bucket: Bucket, work: list[Tensor], io: BucketIO) -> _Encoded:
    """Compress each segment; a lone segment's codes leave room for the frame's header."""
    x, adds = io.feedback.begin(bucket, work, io.step)
    prepared = io.prepared(bucket)
    offsets = io.buffers.offsets
    codes: list[Tensor] = []
    marks: list[npt.NDArray[np.bool_]] = []
    energy, sent = np.zeros(len(bucket.layers)), np.zeros(len(bucket.layers))
    for segment in bucket.segments:
        if prepared is not None:
            code, stats = prepared.code, prepared.stats
            x.copy_(prepared.rest)
        else:
            code, stats = encoder_of(segment).compress_layers_(
                LayerBatch(
                    x,
                    offsets[segment.start : segment.stop + 1],
                    segment.levels,
                    adds[segment.start : segment.stop],
                    reserve=_room(bucket),
                    state=io.codec_states.get(segment.compressor.state_key),
                    **io.random_arguments(bucket, segment),
                )
            )
        if not segment.keeps:
            x[offsets[segment.start] : offsets[segment.stop]].zero_()
        codes.append(code)
        marks.append(stats.nonfinite)
        energy[segment.start : segment.stop] = stats.energy
        sent[segment.start : segment.stop] = stats.sent
    io.observe_energy(bucket, energy, sent)
    finite = ~(marks[0] if len(marks) == 1 else np.concatenate(marks))
    io.feedback.commit(bucket, x, work, finite.tolist(), io.step)
    return _Encoded(codes, finite)


def _clear_sent(bucket: Bucket, encoded: _Encoded, finite: list[bool], io: BucketIO) -> None:
    """Let the feedback clear where this rank has sent something."""

    def clear(views: Sequence[Tensor]) -> None:
        for segment, code in zip(bucket.segments, encoded.codes, strict=True):
            compressor = segment.compressor
            assert isinstance(compressor, ClearsSent), segment
            compressor.clear_layers_(code[_room(bucket) :], views[segment.start : segment.stop])

    io.feedback.clear_sent(bucket, clear, finite)


def _restore(
    bucket: Bucket,
    encoded: _Encoded,
    local: list[Tensor],
    undo: npt.NDArray[np.bool_],
    io: BucketIO,
) -> None:
    """Take back what was committed for layers that were finite here but not on another rank."""
    for segment, code in zip(bucket.segments, encoded.codes, strict=True):
        if not segment.keeps or not undo[segment.start : segment.stop].any():
            continue
        own = [torch.zeros_like(each) for each in local[segment.start : segment.stop]]
        marks = encoder_of(segment).decompress_layers_add_(code[_room(bucket) :], own, 1.0)
        for position in (p for p in range(segment.start, segment.stop) if undo[p]):
            sent = own[position - segment.start].view(-1)
            if marks[position - segment.start]:
                sent.zero_()  # a mark that stands for several layers: nothing of this one was sent
            io.feedback.restore(bucket, position, local[position].view(-1), sent)


def _room(bucket: Bucket) -> int:
    """Bytes in front of a segment's codes: of the frame's header, where the segment is alone."""
    return wire.HEADER_BYTES if len(bucket.segments) == 1 else 0


def _framed(encoded: _Encoded, bucket: Bucket, ranks: int) -> Tensor:
    """One frame with the codes of all segments of the bucket, or what says that it is too large."""
    codes = encoded.codes
    size = wire.frame_bytes([code.numel() - _room(bucket) for code in codes])
    if size > wire.MAX_GATHERED_BYTES // ranks:
        return wire.too_large(size, bucket.index, len(bucket.layers))
    frame = codes[0] if len(codes) == 1 else wire.join_parts(codes)
    wire.write_header(frame, bucket.index, len(bucket.layers), nonfinite=not encoded.finite.all())
    return frame
