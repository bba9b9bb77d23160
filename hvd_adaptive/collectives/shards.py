"""Shards: how a bucket's elements are shared out among the ranks, each of which owns one part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.buckets import Bucket, Segment

GRAIN = 512
"""Elements, counted from a layer's start, at whose multiples layers are cut: the usual block of the
quantizers, so that a cut changes no norm."""


@dataclass(frozen=True)
class Part:
    """What one shard holds of one segment.

    Args:
        segment: of the bucket.
        edges: ``int64[P + 1]``: where its pieces begin and end in the bucket's flat buffer.
        layers: of each piece, the position of its layer in the bucket.
    """

    segment: Segment
    edges: Int64s
    layers: tuple[int, ...]

    @property
    def levels(self) -> list[float]:
        """Of the pieces."""
        return [self.segment.levels[layer - self.segment.start] for layer in self.layers]

    def views(self, flats: Sequence[Tensor], offsets: Int64s) -> list[Tensor]:
        """The pieces, of all layers of the bucket as 1-D tensors."""
        return [
            flats[layer][start - offsets[layer] : end - offsets[layer]]
            for layer, start, end in zip(
                self.layers, self.edges[:-1].tolist(), self.edges[1:].tolist(), strict=True
            )
        ]

    def views_of(self, shard: Tensor, start: int) -> list[Tensor]:
        """The pieces, of a shard that begins at ``start`` of the flat buffer."""
        edges = (self.edges - start).tolist()
        return [shard[a:b] for a, b in itertools.pairwise(edges)]


@dataclass(frozen=True)
class Shards:
    """A bucket cut into one shard a rank.

    Args:
        bucket: the bucket.
        bounds: ``n + 1`` positions in its flat buffer; shard ``s`` lies between two of them, and may
            be empty.
    """

    bucket: Bucket
    bounds: tuple[int, ...]

    @cached_property
    def offsets(self) -> Int64s:
        """Where the layers begin."""
        sizes = [layer.numel for layer in self.bucket.layers]
        return np.cumsum([0, *sizes], dtype=np.int64)

    @cached_property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """Of each shard, its parts; segments of which it holds nothing are left out."""
        edges = np.unique(np.concatenate([self.offsets, np.array(self.bounds, np.int64)]))
        return tuple(
            tuple(
                Part(
                    segment, own, tuple((np.searchsorted(self.offsets, own[:-1], "right") - 1).tolist())
                )
                for segment in self.bucket.segments
                if len(own := self._within(edges, rank, segment)) > 1
            )
            for rank in range(len(self.bounds) - 1)
        )

    def edges_of(self, segment: Segment) -> list[Int64s]:
        """Of each shard, the edges of the segment's pieces; none where it holds nothing of it."""
        nothing = np.zeros(0, np.int64)
        return [
            next((part.edges for part in parts if part.segment is segment), nothing)
            for parts in self.parts
        ]

    def _within(self, edges: Int64s, rank: int, segment: Segment) -> Int64s:
        first = max(self.bounds[rank], int(self.offsets[segment.start]))
        last = min(self.bounds[rank + 1], int(self.offsets[segment.stop]))
        return edges[(edges >= first) & (edges <= last)] if last > first else edges[:0]


def expected_bytes(bucket: Bucket) -> list[float]:
    """Bytes that an element of each layer takes, as the compressors foresee it."""
    return [
        segment.compressor.wire_bytes(layer.numel, level, shape=layer.shape) / max(1, layer.numel)
        for segment in bucket.segments
        for layer, level in zip(
            bucket.layers[segment.start : segment.stop], segment.levels, strict=True
        )
    ]


def cut(bucket: Bucket, weights: npt.ArrayLike, ranks: int) -> Shards:
    """Cut a bucket so that all shards weigh about the same.

    Args:
        bucket: the bucket.
        weights: bytes that an element of each layer is expected to take.
        ranks: how many shards.

    Example:
        >>> from hvd_adaptive.buckets import Bucket
        >>> from hvd_adaptive.layers import Layer, PayloadKind
        >>> import torch
        >>> layers = (Layer(0, "a", (4096,)), Layer(1, "b", (4096,)))
        >>> bucket = Bucket(
        ...     0,
        ...     PayloadKind.ENCODED,
        ...     layers,
        ...     (),
        ...     torch.float32,
        ...     torch.device("cpu"),
        ...     feedback="ef",
        ...     scheme="two_shot",
        ... )
        >>> cut(bucket, [1.0, 3.0], 4).bounds
        (0, 4096, 5632, 6656, 8192)
    """
    sizes = np.array([layer.numel for layer in bucket.layers], np.int64)
    offsets = np.cumsum([0, *sizes])
    loads: Float64s = np.cumsum([0.0, *(sizes * np.maximum(np.asarray(weights, np.float64), 1e-9))])
    targets = loads[-1] * np.arange(1, ranks) / ranks
    places = np.interp(targets, loads, offsets)
    layers = np.clip(np.searchsorted(offsets, places, "right") - 1, 0, max(0, len(sizes) - 1))
    starts, ends = offsets[layers], offsets[layers + 1] if len(sizes) else offsets[layers]
    snapped = np.minimum(starts + GRAIN * np.rint((places - starts) / GRAIN).astype(np.int64), ends)
    bounds = np.maximum.accumulate(np.concatenate([[0], snapped, [offsets[-1]]]))
    return Shards(bucket, tuple(int(bound) for bound in bounds))
