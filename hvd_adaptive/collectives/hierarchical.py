"""Hierarchical: nodes add their gradients first, and then send each element once."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive import rng
from hvd_adaptive.buckets import Bucket
from hvd_adaptive.collectives.base import (
    BucketIO,
    EncodedScheme,
    Steps,
    hand_over,
    readable,
    room_for_results,
)
from hvd_adaptive.collectives.chunks import Chunks
from hvd_adaptive.collectives.costs import Workload
from hvd_adaptive.collectives.two_shot import Marks, Shots, TwoShot
from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.comm.request import Request, operation_bytes
from hvd_adaptive.comm.topology import Topology
from hvd_adaptive.wire import TooLargeError, WireError
from hvd_adaptive.wire import frame as wire


@dataclass(frozen=True)
class Hierarchical(EncodedScheme):
    """Dense sums inside a node, two-shot between nodes, of one chunk for each rank of a node.

    1. A bucket is cut into as many chunks as a node has ranks. By an alltoall inside the node, each
       rank gets its chunk of all its neighbors' gradients, and adds them in float32.
    2. The ranks that have the same chunk on all nodes reduce it by
       :class:`~hvd_adaptive.collectives.two_shot.TwoShot`: what is compressed is a node's sum. Feedback
       keeps what a *node* has not sent, each rank of its own chunk only, and the owner of a shard what
       it has not passed on.
    3. The node's ranks gather the reduced chunks, in float32.

    Cost on a link between nodes, for each rank of a node: ``2 (m - 1) / m`` payloads of its chunk, with
    ``m`` nodes: with L ranks on a node 1/L of what two-shot sends. Inside the node, 2 dense float32
    gradients. Four operations for each bucket in the place of two, and memory of one more float32
    gradient. What was kept before, of whole gradients, is summed in the node at the first step.

    Where a node has one rank, all ranks are on one node, or nodes have different numbers of ranks, this
    is two-shot among all ranks: a rank on a smaller node would need larger chunks, which no single rank
    of the others has.

    Source: the two levels of Wang et al., "ZeRO++" (2023), section 3.3, with error feedback at both
    ends of the second.

    Args:
        level: as of two-shot.

    Raises:
        ValueError: a level below 0.
    """

    level: float = 0.0

    name = "hierarchical"
    shots = 4
    recompresses = True
    returned = 0.5

    def __post_init__(self) -> None:
        self._between_nodes()

    def shots_on(self, topology: Topology) -> int:
        """Two where there is no hierarchy."""
        return self.shots if topology.is_layered else self._between_nodes().shots

    def _between_nodes(self) -> TwoShot:
        return TwoShot(self.level)

    def run(self, bucket: Bucket, grads: list[Tensor], io: BucketIO) -> Steps:
        """Add in the node, reduce a chunk between nodes, gather in the node."""
        topology = io.topology
        if not topology.is_layered:
            yield from self._between_nodes().run(bucket, grads, io)
            return
        chunks = io.buffers.chunks(topology.ranks_per_node, topology.local_rank(io.place))
        peers = _of_peers(bucket, chunks, io)
        # first of all: what is owned of other shards goes back to what feedback keeps
        residual = _owned(bucket, chunks, io, peers)
        if not io.buffers.is_gathered:
            yield from _gather_feedback(bucket, chunks, io)
        read = readable(grads)
        total = yield from _sum_in_node(chunks, read)
        work = room_for_results(read)
        shots = Shots(
            chunks.own, chunks.own_pieces(total), peers, self.level, "peers", lambda *_: residual
        )
        answer = yield from _reduce_chunk(shots, bucket, chunks)
        gathered = yield Request("allgather", answer, group="node")
        bodies, _ = wire.split_frames(gathered, bucket.index, len(bucket.layers), chunks.ranks)
        _check_sizes(bodies, bucket, chunks)
        finite = ~_marks_of(bodies, bucket)
        shots.settle(finite[list(chunks.positions)])
        size = 4 * chunks.width
        chunks.unpack([body[:size].view(torch.float32) for body in bodies], work)
        for position in np.flatnonzero(~finite).tolist():
            work[position].fill_(math.nan)
        io.feedback.finish(bucket, work, finite.tolist())
        hand_over(bucket, work, grads, io)

    def seconds(self, work: Workload, ranks: int, link: LinkCosts) -> float:
        """Two dense operations in the node, and a two-shot of a chunk, which is all that is compressed.

        Where costs are not of nodes and between them: those of two-shot.
        """
        if link.layers is None:
            return self._between_nodes().seconds(work, ranks, link)
        size, node, codec = link.layers.ranks_per_node, link.layers.node, work.codec
        dense = 4.0 * work.numel
        inside = (
            node.alltoall
            + node.alltoall_byte * operation_bytes("alltoall", dense, dense, size)
            + node.allgather
            + node.allgather_byte * operation_bytes("allgather", dense / size, dense, size)
        )
        chunk = Workload(work.numel // size, work.nbytes / size, codec)
        between = self._between_nodes().seconds(chunk, ranks // size, link.layers.peers)
        # every element is added once in the node, and written once at the end
        adding = 2 * codec.decompress * work.numel
        saved = work.compressing() - chunk.compressing()
        return inside + between + adding - saved

    def link_bytes(self, payload: float, ranks: int, ranks_per_node: int = 1) -> float:
        """A two-shot of a chunk between the nodes; what stays inside a node is not counted."""
        nodes = ranks // ranks_per_node
        return self._between_nodes().link_bytes(payload / ranks_per_node, nodes)


def _of_peers(bucket: Bucket, chunks: Chunks, io: BucketIO) -> BucketIO:
    """What two-shot among the peers works with: this rank's chunk in the place of the bucket."""
    rank = io.place
    peers = io.topology.peers(rank)
    return replace(
        io,
        feedback=io.feedback.part(bucket, chunks.own, chunks.start),
        buffers=io.buffers.of_chunk,
        ranks=len(peers),
        place=peers.index(rank),
        # peers share numbers, but other chunks have theirs: pieces of a layer are rounded apart
        seed=rng.mix(io.seed + chunks.local_rank),
    )


def _owned(bucket: Bucket, chunks: Chunks, io: BucketIO, peers: BucketIO) -> Tensor | None:
    """What this rank has not passed on of the shard of its chunk that it owns."""
    bounds = peers.buffers.shards(peers.ranks).bounds
    start, stop = (chunks.start + bound for bound in bounds[peers.place : peers.place + 2])
    return io.feedback.owned(bucket, start, stop)


def _sum_in_node(chunks: Chunks, layers: list[Tensor]) -> Generator[Request, Tensor, Tensor]:
    """This rank's chunk of the layers' sum over the node, 1-D float32.

    By alltoall, because Horovod's reduce-scatter adds in an order that depends on MPI and on the size.
    """
    received = yield Request("alltoall", chunks.pack(layers), group="node")
    return received.view(chunks.ranks, chunks.width).sum(0)


def _gather_feedback(bucket: Bucket, chunks: Chunks, io: BucketIO) -> Steps:
    """Sum what the node's ranks keep of whole gradients, each rank of its own chunk.

    All ranks do it at the first step of a layout. Where nothing is kept elsewhere, nothing changes.
    """
    for flat in io.feedback.gathered_slots(bucket):
        layers = [each.float() for each in flat.split([layer.numel for layer in bucket.layers])]
        received = yield Request("alltoall", chunks.pack(layers), group="node")
        own = flat[chunks.start : chunks.stop]
        for local_rank, row in enumerate(received.view(chunks.ranks, chunks.width)):
            if local_rank != chunks.local_rank and bool(row.any()):
                own.copy_(own.float() + row[: own.numel()])
        flat[: chunks.start].zero_()
        flat[chunks.stop :].zero_()
    io.buffers.is_gathered = True


def _reduce_chunk(shots: Shots, bucket: Bucket, chunks: Chunks) -> Generator[Request, Tensor, Tensor]:
    """What the node is told of this rank's chunk: its sum over all ranks, and layers not finite."""
    sums = torch.zeros(chunks.width, device=bucket.device)
    marks = torch.zeros(_mark_bytes(bucket), dtype=torch.uint8)
    try:
        found = yield from shots.exchange(chunks.own_pieces(sums))
    except (WireError, TooLargeError) as error:
        return wire.refused(str(error), bucket.index, len(bucket.layers))
    marks[[chunks.positions[piece] for piece in np.flatnonzero(found).tolist()]] = 1
    body = torch.cat([sums.view(torch.uint8), marks.to(bucket.device)])
    if wire.frame_bytes([body.numel()]) > wire.MAX_GATHERED_BYTES // chunks.ranks:
        return wire.too_large(body.numel(), bucket.index, len(bucket.layers))
    return wire.frame(body, bucket.index, len(bucket.layers))


def _mark_bytes(bucket: Bucket) -> int:
    """Bytes of the layers' marks: one each, filled up so that float32 after them are aligned."""
    count = len(bucket.layers)
    return -count % 4 + count


def _check_sizes(bodies: list[Tensor], bucket: Bucket, chunks: Chunks) -> None:
    """WireError unless all hold a chunk and the layers' marks."""
    wanted = 4 * chunks.width + _mark_bytes(bucket)
    for rank, body in enumerate(bodies):
        if body.numel() != wanted:
            raise WireError(
                f"damaged frame: the chunk of local rank {rank} of bucket {bucket.index} has "
                f"{body.numel()} bytes instead of {wanted}"
            )


def _marks_of(bodies: list[Tensor], bucket: Bucket) -> Marks:
    """The layers that are not finite in some chunk; all of a segment that is compressed together."""
    rows = [body[-_mark_bytes(bucket) :].cpu().numpy()[: len(bucket.layers)] for body in bodies]
    marks: Marks = np.any(rows, axis=0)
    for segment in bucket.segments:
        if segment.compressor.whole_model and marks[segment.start : segment.stop].any():
            marks[segment.start : segment.stop] = True
    return marks
