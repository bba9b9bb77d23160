"""Chunks: how a bucket's elements are shared out among the ranks of a node, one chunk each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hvd_adaptive.buckets import Bucket
from hvd_adaptive.collectives.shards import Shards, cut


@dataclass(frozen=True)
class Chunks:
    """A bucket cut into one chunk for each rank of a node, and padded to chunks of one size.

    Chunks have about equally many elements, because nodes send them densely.

    Args:
        bucket: the bucket.
        ranks: of a node.
        local_rank: this rank's position on its node: the number of its chunk.
    """

    bucket: Bucket
    ranks: int
    local_rank: int

    @cached_property
    def _shards(self) -> Shards:
        return cut(self.bucket, [1.0] * len(self.bucket.layers), self.ranks)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where the chunks begin and end in the bucket's flat buffer."""
        return self._shards.bounds

    @property
    def start(self) -> int:
        """Where this rank's chunk begins."""
        return self.bounds[self.local_rank]

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.bounds[self.local_rank + 1]

    @cached_property
    def width(self) -> int:
        """Elements of a chunk, with its padding."""
        return max(end - start for start, end in itertools.pairwise(self.bounds))

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Of each piece of this rank's chunk, the position of its layer in the bucket."""
        return tuple(row.layer for row in self._rows if row.chunk == self.local_rank)

    @cached_property
    def own(self) -> Bucket:
        """This rank's chunk as a bucket of its own, whose layers are pieces of layers."""
        rows = [row for row in self._rows if row.chunk == self.local_rank]
        layers = [
            replace(self.bucket.layers[row.layer], shape=(row.stop - row.start,), dtype=torch.float32)
            for row in rows
        ]
        segments = []
        for segment in self.bucket.segments:
            inside = [i for i, row in enumerate(rows) if segment.start <= row.layer < segment.stop]
            if inside:
                levels = tuple(segment.levels[rows[i].layer - segment.start] for i in inside)
                sums = segment.sum_levels
                sums = tuple(sums[rows[i].layer - segment.start] for i in inside) if sums else ()
                part = replace(
                    segment, levels=levels, start=inside[0], stop=inside[-1] + 1, sum_levels=sums
                )
                segments.append(part)
        return replace(self.bucket, layers=tuple(layers), segments=tuple(segments))

    def pack(self, layers: Sequence[Tensor]) -> Tensor:
        """The layers as chunks of one size, 1-D float32; the memory is used again by the next call."""
        torch._foreach_copy_(self._views(self._packed), self._pieces(layers))
        return self._packed

    def unpack(self, chunks: Sequence[Tensor], layers: Sequence[Tensor]) -> None:
        """Write all chunks, 1-D float32, into the layers."""
        views = [
            chunks[row.chunk][row.at - row.chunk * self.width :][: row.stop - row.start]
            for row in self._rows
        ]
        torch._foreach_copy_(self._pieces(layers), views)

    def own_pieces(self, chunk: Tensor) -> list[Tensor]:
        """The pieces of this rank's chunk."""
        return list(chunk[: self.stop - self.start].split([each.numel for each in self.own.layers]))

    @cached_property
    def _packed(self) -> Tensor:
        return torch.zeros(self.ranks * self.width, device=self.bucket.device)

    def _views(self, packed: Tensor) -> list[Tensor]:
        return [packed[row.at : row.at + row.stop - row.start] for row in self._rows]

    def _pieces(self, layers: Sequence[Tensor]) -> list[Tensor]:
        flats = [layer.view(-1) for layer in layers]
        return [flats[row.layer][row.start : row.stop] for row in self._rows]

    @cached_property
    def _rows(self) -> tuple[_Row, ...]:
        """The pieces of all chunks."""
        offsets, bounds = self.bucket.offsets.tolist(), self.bounds
        rows = []
        for chunk, (first, last) in enumerate(itertools.pairwise(bounds)):
            for layer, (begin, end) in enumerate(itertools.pairwise(offsets)):
                start, stop = max(first, begin), min(last, end)
                if stop > start:
                    at = chunk * self.width + start - first
                    rows.append(_Row(chunk, layer, start - begin, stop - begin, at))
        return tuple(rows)


@dataclass(frozen=True, slots=True)
class _Row:
    """A piece: elements ``start:stop`` of a layer, in a chunk, and where it is among all of them."""

    chunk: int
    layer: int
    start: int
    stop: int
    at: int
