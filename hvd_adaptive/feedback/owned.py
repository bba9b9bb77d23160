"""What the owner of a shard has not passed on of the sums that it compressed again.

It is kept in the units of a sum over the ranks: what waits here counts as much as what waits on any
rank for its own gradient. So where a shard goes to another owner, or is no longer compressed twice, it
is *handed back*: added to what this rank keeps of its own gradients, and nothing need be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hvd_adaptive.buckets import Bucket

OwnedPieces: TypeAlias = dict[str, list[tuple[int, Tensor]]]
"""By layer, pieces of it: where each begins, and what is owned of it, 1-D float32."""

HandBack: TypeAlias = Callable[[str, int, Tensor], None]
"""Takes a layer's name, where a piece of it begins, and the piece."""


@dataclass
class _Shard:
    """What is owned of one bucket: elements ``start:stop`` of its flat buffer."""

    bucket: Bucket
    start: int
    stop: int
    flat: Tensor

    def pieces(self) -> Iterator[tuple[str, int, Tensor]]:
        """Layer, where the piece begins in it, and the piece."""
        position = 0
        for layer in self.bucket.layers:
            first, last = max(self.start, position), min(self.stop, position + layer.numel)
            if last > first:
                yield layer.name, first - position, self.flat[first - self.start : last - self.start]
            position += layer.numel


class OwnedResiduals:
    """The owner's residuals of one rank, for the buckets of one feedback rule."""

    def __init__(self) -> None:
        self._shards: dict[tuple[str, ...], _Shard] = {}
        self._loaded: OwnedPieces = {}

    def of(self, bucket: Bucket, start: int, stop: int, hand_back: HandBack) -> Tensor:
        """The residual of a shard, 1-D float32; zeros where it is new.

        Args:
            bucket: the bucket.
            start: where the shard begins in its flat buffer.
            stop: where it ends.
            hand_back: takes what was owned of these layers if it was another shard.
        """
        names = tuple(layer.name for layer in bucket.layers)
        shard = self._shards.get(names)
        if shard is not None and (shard.start, shard.stop) == (start, stop):
            return shard.flat
        if shard is not None:
            self._give(names, hand_back)
        shard = _Shard(bucket, start, stop, torch.zeros(stop - start, device=bucket.device))
        loaded = {name: self._loaded.pop(name) for name in names if name in self._loaded}
        places = {(name, first): piece for name, first, piece in shard.pieces()}
        rows = [(name, first, piece) for name, rows in loaded.items() for first, piece in rows]
        fits = len(rows) == len(places) and all(
            (name, first) in places and places[name, first].numel() == piece.numel()
            for name, first, piece in rows
        )
        for name, first, piece in rows:
            if fits:
                places[name, first].copy_(piece)
            else:
                hand_back(name, first, piece)
        self._shards[names] = shard
        return shard.flat

    def keep_only(self, buckets: Collection[Bucket], hand_back: HandBack) -> None:
        """Hand back what belongs to none of these buckets, which are compressed twice."""
        wanted = {tuple(layer.name for layer in bucket.layers) for bucket in buckets}
        for names in [names for names in self._shards if names not in wanted]:
            self._give(names, hand_back)
        covered = {name for names in wanted for name in names}
        for name in [name for name in self._loaded if name not in covered]:
            for first, piece in self._loaded.pop(name):
                hand_back(name, first, piece)

    def pieces(self) -> OwnedPieces:
        """All that is owned: views."""
        found: OwnedPieces = {name: list(rows) for name, rows in self._loaded.items()}
        for shard in self._shards.values():
            for name, first, piece in shard.pieces():
                found.setdefault(name, []).append((first, piece))
        return found

    def load(self, pieces: OwnedPieces) -> None:
        """Own these pieces, too; of layers of which nothing is owned yet."""
        self._loaded.update({name: list(rows) for name, rows in pieces.items() if rows})

    @property
    def nbytes(self) -> int:
        """Memory."""
        return sum(shard.flat.nbytes for shard in self._shards.values())

    def _give(self, names: tuple[str, ...], hand_back: HandBack) -> None:
        for name, first, piece in self._shards.pop(names).pieces():
            hand_back(name, first, piece)
