"""Which elements are sent, on a GPU: in one pass over the gradient and some over the candidates.

A sample of one element in 64 says how large those are that may be sent. The pass writes the sums, and
lists these candidates. A histogram of them says to within 2^12 magnitudes what the exact threshold is,
and another one, of those that close to it, which it is. Where it is far above what the sample promised,
a third one is needed. Where the sample promised too much, and there are fewer candidates than elements
to send, all elements of that span but zeros become candidates by another pass. Whether either happens
only the device knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.triton.jit import selection as jit
from hvd_adaptive.kernels.triton.launching import Ranges, Table, Tiles, kept, launch, upload
from hvd_adaptive.wire.sparse import CODE_BLOCK

Int64s = npt.NDArray[np.int64]

_TILE = 1024
"""Elements of a program that reads all of them."""
_WARPS = 1
"""Of such a program, which then need not wait for one another."""
_SHARE_WARPS = 4
"""Of a program that looks at the candidates of some tiles."""
_SAMPLED = 64
"""Of as many elements one is in the sample."""
_AT_ONCE = int(jit.TILES.value // jit.SHARE.value)
"""Programs of a part, where its tiles are shared out."""
_PLACED = 1024
"""Tiles of a program that says where elements go."""


class _SelectionTable(Table):
    """What a :class:`Selection` is told; addresses count from 0 until they are known.

    Args:
        segments: elements, their number, gradient, first tile, layer, span, place in the piece, and
            piece of each segment. The elements and the gradient are addresses.
        asked: of each span, see :func:`_asked`.
        layers: their number; which of them are marked is not known yet.
        pieces: the address of each.
    """

    def __init__(self, segments: Int64s, asked: Int64s, layers: int, pieces: Int64s) -> None:
        super().__init__(segments, asked, np.zeros(layers, np.int64), pieces)
        self.from_x = np.r_[self.column(0, 0), self.column(3)]
        """Addresses that count from that of ``x``."""
        self.gradients, self.floors = self.column(0, 2), self.column(1, 1)
        self.marks = self.column(2)


class Segments:
    """How layers, what is selected from together, and what is encoded together overlap.

    A *span* is selected from as one vector: a layer, or all of them. A *piece* is encoded as if it were
    a layer. A *segment* lies in one layer, one span and one piece.

    Args:
        offsets: of the layers.
        cuts: of the pieces; all offsets are among them, or the layers are one span.
        most: elements that each span sends at most.
        whole: whether the layers are one span.
        device: where the tables are.
    """

    def __init__(
        self, offsets: Int64s, cuts: Int64s, most: Int64s, whole: bool, device: torch.device
    ) -> None:
        layers, pieces = len(offsets) - 1, len(cuts) - 1
        starts, ends, of_layer, of_piece = _overlaps(offsets, cuts)
        of_span = np.zeros_like(of_layer) if whole else of_layer
        self.layers, self.pieces, self.spans = layers, pieces, len(most)
        sizes = ends - starts
        self.tiles = Tiles(sizes, _TILE, device)
        self.cuts = cuts
        rows = (
            *(4 * starts, sizes, np.zeros_like(starts)),
            *(self.tiles.firsts, of_layer, of_span, starts - cuts[of_piece], of_piece),
        )
        self._begins = np.stack([of_layer, starts - offsets[of_layer]], 1).tolist()
        """The layer of each segment, and its place there."""
        tile_segments = np.repeat(np.arange(len(starts)), -(-sizes // _TILE))
        tile_spans = of_span[tile_segments]
        self.whole, self.numel = whole, int(offsets[-1] - offsets[0])
        span_sizes = np.diff(offsets[[0, -1]] if whole else offsets)
        large = span_sizes > int(jit.SMALL.value)  # these have histograms
        self.large_spans = int(large.sum())
        self.histogram_rows = upload(np.where(large, np.cumsum(large) - 1, -1), device)
        asked = _asked(most, _sampled(sizes, of_span, span_sizes), span_sizes)
        self._table = _SelectionTable(np.stack(rows, 1), asked, layers, 4 * cuts[:-1])
        tiles_of_span = np.bincount(tile_spans, minlength=self.spans)
        parts = -(-tiles_of_span // int(jit.TILES.value))
        self.parts = int(parts.sum())
        numbers = np.arange(self.parts) - np.repeat(np.cumsum(parts) - parts, parts)
        part_spans = upload(np.repeat(np.arange(self.spans), parts), device)
        self.part = part_spans, upload(numbers, device)
        """The span of each part, and its number there."""
        self.span_parts = upload(np.append(self.spans, parts).astype(np.int32), device)
        layer_tiles = _edges(of_layer[tile_segments], layers)
        self.layer_ranges = Ranges(layer_tiles, device)
        """The tiles of each layer, as rows."""
        self.span_tiles = upload(_edges(tile_spans, self.spans), device)
        piece_spans = _spans_of_pieces(offsets, cuts, whole)
        self.piece_spans = upload(piece_spans, device)
        capacities = np.minimum(np.diff(cuts), most[piece_spans]) if pieces else most[:0]
        self.most = capacities
        """Elements that each piece sends at most."""
        self.capacity = int(capacities.sum())
        self.capacities = upload(np.cumsum([0, *capacities]), device)
        tile_pieces = of_piece[tile_segments]
        layer_spans = np.zeros(layers, np.int64) if whole else np.arange(layers)
        self.owners = (
            *(self.span_tiles, upload(tile_spans, device), upload(tile_pieces, device)),
            *(upload(_edges(tile_pieces, pieces), device), self.piece_spans),
            *(upload(layer_tiles, device), upload(layer_spans, device), self.capacities),
        )
        """Who has which tiles, as :func:`hvd_adaptive.kernels.triton.jit.selection.place` takes it."""
        self.sizes = upload(np.array([self.tiles.count, pieces, layers]), device)
        blocks = -(-capacities // CODE_BLOCK)
        self.blocks = int(blocks.sum())
        self.block_pieces = upload(np.repeat(np.arange(pieces), blocks), device)
        self.first_blocks = upload(np.cumsum([0, *blocks]), device)

    def given(
        self,
        x: Tensor,
        grads: Sequence[Tensor] | None,
        floors: Int64s | None = None,
        marks: Int64s | None = None,
    ) -> Int64s:
        """What a :class:`Selection` is told, besides these segments.

        Args:
            x: what is kept of the layers; it receives the sums, and what is left.
            grads: added first.
            floors: of the spans: bits of the least magnitude that is sent; None where no threshold is
                given, and so many are sent as may be.
            marks: ``int64[L]``: 1 for layers of which nothing is to be sent; None if there are none.
        """
        table, numbers = self._table, self._table.copy()
        numbers[table.from_x] += x.data_ptr()
        if grads:
            size = grads[0].element_size()
            numbers[table.gradients] = [
                grads[layer].data_ptr() + size * inside for layer, inside in self._begins
            ]
        if floors is not None:
            numbers[table.floors] = floors
        if marks is not None:
            numbers[table.marks] = marks
        return numbers

    def split(self, sent: Tensor) -> Sequence[Tensor]:
        """The parts of :meth:`given` on the device."""
        return self._table.split(sent)


def _asked(counts: Int64s, sampled: Int64s, numels: Int64s) -> Int64s:
    """What is asked of each span, if there is no threshold.

    Args:
        counts: how many elements of each span are sent at most.
        sampled: how many are in its sample.
        numels: how many it has.

    Returns:
        Rows of the count; the floor; how many of the sample should be candidates, so that hardly ever
        too few are; and where the candidates are listed.
    """
    share = np.minimum(counts, numels) * (sampled / np.maximum(numels, 1))
    needed = np.where(sampled == numels, counts, np.ceil(1.1 * share + 3 * np.sqrt(share)) + 2)
    needed = np.where(counts > 0, needed, 0).astype(np.int64)
    return np.stack([counts, np.full_like(counts, -1), needed, np.cumsum(numels) - numels], 1)


def _sampled(sizes: Int64s, of_span: Int64s, span_sizes: Int64s) -> Int64s:
    """How many elements of each span are in its sample."""
    sample = _TILE // _SAMPLED
    whole_tiles, rest = sizes // _TILE, sizes % _TILE
    seen = np.zeros_like(span_sizes)
    np.add.at(seen, of_span, whole_tiles * sample + np.minimum(rest, sample))
    return seen


def _overlaps(offsets: Int64s, cuts: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """(start, end, layer, piece) of each segment that has elements."""
    edges = np.unique(np.concatenate([offsets, cuts]))
    starts, ends = edges[:-1], edges[1:]
    of_layer = np.searchsorted(offsets, starts, side="right") - 1  # the last of those that begin here
    of_piece = np.searchsorted(cuts, starts, side="right") - 1
    return starts, ends, of_layer, of_piece


def _spans_of_pieces(offsets: Int64s, cuts: Int64s, whole: bool) -> Int64s:
    """The span of each piece; pieces are the spans themselves, or none is empty."""
    if whole:
        return np.zeros(len(cuts) - 1, np.int64)
    if len(cuts) == len(offsets):
        return np.arange(len(cuts) - 1)
    return np.searchsorted(offsets, cuts[:-1], side="right") - 1


def _edges(owners: Int64s, count: int) -> Int64s:
    """Where the part of each owner begins in a rising list, and its end."""
    edges: Int64s = np.searchsorted(owners, np.arange(count + 1))
    return edges


segments_of = kept(Segments)
"""The segments of a bucket."""


class Selection:
    """What is sent of some layers, in device memory.

    Args:
        segments: of the layers.
        sent: what :meth:`Segments.given` says, on the device.
        gradients: the dtype of the gradients, as :func:`gradient_code` says it.
    """

    def __init__(self, segments: Segments, sent: Tensor, gradients: int) -> None:
        device, tiles = sent.device, segments.tiles.count
        self._device, self._segments, self._gradients = device, segments, gradients
        self._table, known, self.nonfinite, self.addresses = segments.split(sent)
        """``nonfinite``, ``int64[L]``: 1 where the sum is not finite; where pieces are."""
        self._energies = torch.empty((tiles, 2), dtype=torch.float64, device=device)
        self.indices = torch.empty(segments.capacity, dtype=torch.int32, device=device)
        """From each piece's place in ``segments.capacities`` on; they count from the piece's start."""
        self.values = torch.empty(segments.capacity, dtype=torch.float32, device=device)
        """Their values."""
        self._select(known)

    def _select(self, known: Tensor) -> None:
        """Write the sums into their place, and select from them."""
        segments, device = self._segments, self._device
        spans, tiles = segments.spans, (segments.tiles.count,)
        bins = int(jit.SAMPLE_BINS.value)
        rows = segments.large_spans, int(jit.BINS.value)
        samples, tickets, *listed, first = _zeros(
            (spans, bins), spans, spans, spans, rows, device=device
        )
        later = torch.empty((2, *rows), dtype=torch.int32, device=device)  # cleared where they are used
        histograms = first, *later
        wrong = self.nonfinite.any(0, keepdim=True).long() if segments.whole else self.nonfinite
        self.wrong = wrong
        """``int64[spans]``: 1 where nothing is sent because a sum is not finite."""
        floor_bits = torch.empty(spans, dtype=torch.int32, device=device)
        self._lists = _Lists.of(segments.numel, tiles[0], device)
        meta = {"GRADS": self._gradients, "TILE": _TILE}
        source, parts = (self._table, segments.tiles.layers, known), (segments.parts,)
        launch(
            *(jit.sample, parts, device, *source, *segments.part, segments.span_parts),
            *(segments.span_tiles, samples, tickets, floor_bits),
            **meta,
            SAMPLE=_TILE // _SAMPLED,
        )
        launch(
            *(jit.sift, tiles, device, *source, floor_bits, self.nonfinite, wrong, self._energies),
            *(listed[0], *self._lists),
            **meta,
            num_warps=_WARPS,
        )
        launch(
            *(jit.count_candidates, (*parts, _AT_ONCE), device, *source, *segments.part),
            *(segments.span_parts, segments.span_tiles, floor_bits, *listed, *self._lists),
            *(segments.histogram_rows, histograms[0], histograms[1]),
            TILE=_TILE,
            num_warps=_WARPS,
        )
        spread = (known, floor_bits, wrong, *listed, self._lists.values, segments.histogram_rows)
        self._compact(*self._refine(spread, histograms))

    def _refine(
        self, spread: tuple[Tensor, ...], histograms: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """The exact threshold of each span as bits, and how many that have it are sent; int32."""
        segments, device, steps = self._segments, self._device, int(jit.STEPS.value)
        found = torch.empty((steps, 3, segments.spans), dtype=torch.int32, device=device)
        for step in range(steps):
            launch(
                *(jit.refine, (segments.parts,), device, *segments.part, segments.span_parts),
                *(*spread, *histograms, found[step - 1], found[step]),
                FIRST=step == 0,
            )
            histograms = *histograms[1:], histograms[0]
        return found[-1, 0], found[-1, 2]

    def _compact(self, thresholds: Tensor, quotas: Tensor) -> None:
        """What reaches the thresholds, in order."""
        segments, device, lists = self._segments, self._device, self._lists
        tiles, shares = segments.tiles.count, (segments.parts, _AT_ONCE)
        source = (*segments.part, segments.span_tiles, thresholds)
        counts = torch.empty(2 * tiles, dtype=torch.int32, device=device)
        launch(
            *(jit.count_selected, shares, device, *source, lists.values, lists.firsts, lists.found),
            *(counts, tiles),
            num_warps=_SHARE_WARPS,
        )
        sums = torch.cumsum(counts, 0, dtype=torch.int64)
        ties_before, self.selected, self.targets = torch.empty(
            (3, tiles), dtype=torch.int64, device=device
        )
        """``int64[tiles]``: how many are sent, and where they begin."""
        sent = torch.empty(segments.pieces + segments.layers, dtype=torch.int64, device=device)
        self.counts, self.layer_counts = sent.split([segments.pieces, segments.layers])
        """``int64[pieces]`` and ``int64[L]``."""
        most = max(tiles, segments.pieces, segments.layers)
        launch(
            *(jit.place, (-(-most // _PLACED),), device, sums, quotas, *segments.owners, ties_before),
            *(self.selected, self.targets, self.counts, self.layer_counts, segments.sizes),
            SIZE=_PLACED,
        )
        launch(
            *(jit.compact, shares, device, self._table, segments.tiles.layers, *source, quotas),
            *(*lists, ties_before, self.targets, self.indices, self.values),
            num_warps=_SHARE_WARPS,
        )

    def energies(self) -> Tensor:
        """Of each tile's sums, and of what it sends, once ``values`` are what is decoded.

        ``float64[tiles, 2]``; what it holds of a layer that is not finite means nothing.
        """
        segments = self._segments
        launch(
            *(jit.energy_of_selected, (segments.parts, _AT_ONCE), self._device, *segments.part),
            *(segments.span_tiles, self.values, self.targets, self.selected, self._energies),
            num_warps=_SHARE_WARPS,
        )
        return self._energies

    @property
    def additions(self) -> Additions:
        """What is kept of a selection whose bytes have been written."""
        found = self._lists.found
        return Additions(self._segments, self._table, self.nonfinite, found, self._gradients)


class Additions(NamedTuple):
    """Where gradients have been added; lists of candidates, as large as the layers, are not held."""

    segments: Segments
    table: Tensor
    nonfinite: Tensor
    found: Tensor
    gradients: int

    def take_back(self) -> None:
        """Subtract the gradients of layers that are not finite, where they have been added."""
        tiles = self.segments.tiles
        if self.gradients:
            launch(
                *(jit.take_back, (tiles.count,), self.table.device, self.table, tiles.layers),
                *(self.nonfinite, self.found),
                GRADS=self.gradients,
                TILE=_TILE,
            )


class _Lists(NamedTuple):
    """Candidates, and where those of each tile are."""

    places: Tensor
    values: Tensor
    firsts: Tensor
    found: Tensor

    @classmethod
    def of(cls, numel: int, tiles: int, device: torch.device) -> _Lists:
        """Room for all elements, of which most is never touched."""
        return cls(
            torch.empty(numel, dtype=torch.int32, device=device),
            torch.empty(numel, dtype=torch.float32, device=device),
            torch.empty(tiles, dtype=torch.int64, device=device),
            torch.empty(tiles, dtype=torch.int32, device=device),
        )


def _zeros(*shapes: int | tuple[int, int], device: torch.device) -> list[Tensor]:
    """Tensors of int32 zeros, by one fill."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    parts = torch.zeros(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
