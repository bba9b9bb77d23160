"""Shards: how a bucket's elements are shared out among the ranks, each of which owns one part."""

from __future__ import annotations

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
    def numel(self) -> int:
        """Elements of all pieces."""
        return int(self.edges[-1] - self.edges[0])

    @property
    def levels(self) -> list[float]:
        """Of the pieces."""
        return [self.segment.levels[layer - self.segment.start] for layer in self.layers]

    @property
    def sum_levels(self) -> list[float]:
        """Of the sums of the pieces."""
        sums = self.segment.sum_levels
        if not sums:
            return self.levels
        found = [sums[layer - self.segment.start] for layer in self.layers]
        return [own or level for own, level in zip(found, self.levels, strict=True)]

    def views(self, flats: Sequence[Tensor], offsets: Int64s) -> list[Tensor]:
        """The pieces, of all layers of the bucket as 1-D tensors."""
        return [
            flats[layer][start - offsets[layer] : end - offsets[layer]]
            for layer, start, end in zip(
                self.layers, self.edges[:-1].tolist(), self.edges[1:].tolist(), strict=True
            )
        ]


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
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """Of each shard, its parts; segments of which it holds nothing are left out."""
        offsets = self.bucket.offsets
        edges = np.unique(np.concatenate([offsets, np.array(self.bounds, np.int64)]))
        return tuple(
            tuple(
                Part(segment, own, tuple((np.searchsorted(offsets, own[:-1], "right") - 1).tolist()))
                for segment in self.bucket.segments
                if len(own := self._within(edges, offsets, rank, segment)) > 1
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

    def _within(self, edges: Int64s, offsets: Int64s, rank: int, segment: Segment) -> Int64s:
        first = max(self.bounds[rank], int(offsets[segment.start]))
        last = min(self.bounds[rank + 1], int(offsets[segment.stop]))
        return edges[(edges >= first) & (edges <= last)] if last > first else edges[:0]


def expected_bytes(bucket: Bucket) -> list[float]:
    """Bytes that an element of each layer takes, as the compressors foresee it."""
    nbytes = [each for segment in bucket.segments for each in bucket.wire_bytes(segment)]
    return [each / max(1, layer.numel) for each, layer in zip(nbytes, bucket.layers, strict=True)]


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
    sizes = np.diff(bucket.offsets)
    loads = np.cumsum([0.0, *(sizes * np.maximum(np.asarray(weights, np.float64), 1e-9))])
    return _cut_at_equal_loads(bucket, bucket.offsets, loads, ranks)


def _cut_at_equal_loads(bucket: Bucket, places: Int64s, loads: Float64s, ranks: int) -> Shards:
    """Cut where equal shares of what is loaded up to some places end, at whole grains of a layer."""
    offsets = bucket.offsets
    sizes = np.diff(offsets)
    wanted = np.interp(loads[-1] * np.arange(1, ranks) / ranks, loads, places)
    layers = np.clip(np.searchsorted(offsets, wanted, "right") - 1, 0, max(0, len(sizes) - 1))
    starts, ends = offsets[layers], offsets[layers + 1] if len(sizes) else offsets[layers]
    snapped = np.minimum(starts + GRAIN * np.rint((wanted - starts) / GRAIN).astype(np.int64), ends)
    bounds = np.maximum.accumulate(np.concatenate([[0], snapped, [offsets[-1]]]))
    return Shards(bucket, tuple(int(bound) for bound in bounds))


FIRST_WINDOW, LAST_WINDOW = 2, 64
"""Steps after which shards are looked at again: twice as many each time that they stay."""
UNEVEN = 1.15
"""Largest load of a shard, in means, at which shards stay as they are."""


@dataclass
class Balance:
    """What the owners of a bucket's shards have received lately; the same on all ranks.

    Selection sends most from where gradients are large, which may be a small part of a layer: shards of
    equal size then are not of equal work.

    Args:
        loads: bytes that each owner has received since shards were looked at.
        steps: how many steps these are.
        window: after how many of them shards are looked at again.
    """

    loads: list[int]
    steps: int = 0
    window: int = FIRST_WINDOW

    def note(self, shards: Shards, received: Sequence[int]) -> Shards:
        """Count one step; the shards to use from the next one on.

        Example:
            >>> from hvd_adaptive.layers import Layer, PayloadKind
            >>> import torch
            >>> layers, cpu = (Layer(0, "a", (8192,)),), torch.device("cpu")
            >>> bucket = Bucket(
            ...     0, PayloadKind.ENCODED, layers, (), torch.float32, cpu, "ef", "two_shot"
            ... )
            >>> shards, balance = cut(bucket, [1.0], 2), Balance([0, 0])
            >>> for _ in range(2):
            ...     shards = balance.note(shards, [300, 100])
            >>> shards.bounds
            (0, 2560, 8192)
        """
        self.loads = [load + more for load, more in zip(self.loads, received, strict=True)]
        self.steps += 1
        if self.steps < self.window:
            return shards
        loads, self.loads = self.loads, [0] * len(received)
        self.steps = 0
        if max(loads) * len(loads) > UNEVEN * sum(loads):
            places, upto = np.array(shards.bounds), np.cumsum([0.0, *loads])
            moved = _cut_at_equal_loads(shards.bucket, places, upto, len(loads))
            if moved.bounds != shards.bounds:
                return moved
        self.window = min(LAST_WINDOW, 2 * self.window)
        return shards
