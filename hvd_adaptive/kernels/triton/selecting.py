"""Which elements are sent, on a GPU: in two passes over the gradient and some over the candidates.

The first pass counts exponents; the second writes the sums and those elements whose exponent is the
threshold's or higher, of which the exact threshold is then found by three histograms of eight bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.selection import SelectionRule
from hvd_adaptive.kernels.triton.jit import selection as jit
from hvd_adaptive.kernels.triton.launching import TILE, Tiles, gradient_code, launch, pointers, upload
from hvd_adaptive.wire.sparse import CODE_BLOCK

Int64s = npt.NDArray[np.int64]

_DIGITS = ((15, 8), (7, 8), (0, 7))
"""Below the exponent: shift and bits of what is looked at next."""


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
        self.of_layer, self.starts = of_layer, starts
        self.tiles = Tiles(ends - starts, TILE, device)
        self.offsets, self.cuts = offsets, cuts
        self.columns = (
            *(starts, ends - starts),
            *(self.tiles.firsts, of_layer, of_span, starts - cuts[of_piece], of_piece),
        )
        tile_segments = np.repeat(np.arange(len(starts)), -(-(ends - starts) // TILE))
        self.tile_spans = upload(of_span[tile_segments], device)
        self.tile_pieces = upload(of_piece[tile_segments], device)
        self.layer_tiles = upload(_edges(of_layer[tile_segments], layers), device)
        self.span_tiles = upload(_edges(of_span[tile_segments], self.spans), device)
        self.piece_tiles = upload(_edges(of_piece[tile_segments], pieces), device)
        self.piece_spans_host = _spans_of_pieces(offsets, cuts, whole)
        self.piece_spans = upload(self.piece_spans_host, device)
        self.span_layers = upload(np.zeros(layers, np.int64) if whole else np.arange(layers), device)
        capacities = np.minimum(np.diff(cuts), most[self.piece_spans_host]) if pieces else most[:0]
        self.most = capacities
        """Elements that each piece sends at most."""
        self.capacity = int(capacities.sum())
        self.capacities = upload(np.cumsum([0, *capacities]), device)
        self.piece_offsets = upload(cuts[:-1], device)
        blocks = -(-capacities // CODE_BLOCK)
        self.blocks = int(blocks.sum())
        self.block_pieces = upload(np.repeat(np.arange(pieces), blocks), device)
        self.first_blocks = upload(np.cumsum([0, *blocks]), device)

    def table(self, grads: Sequence[Tensor] | None, device: torch.device) -> Tensor:
        """Rows of offset, elements, gradient, first tile, layer, span, place in the piece, piece."""
        start, numel, *others = self.columns
        width = grads[0].element_size() if grads else 0
        inside = width * (start - self.offsets[self.of_layer])
        addresses = pointers(grads, self.layers)[self.of_layer] + inside
        return upload(np.stack([start, numel, addresses, *others], axis=1), device)


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


@functools.lru_cache(maxsize=256)
def _kept_segments(
    offsets: bytes, cuts: bytes, most: bytes, whole: bool, device: torch.device
) -> Segments:
    first, second, third = (np.frombuffer(each, np.int64) for each in (offsets, cuts, most))
    return Segments(first, second, third, whole, device)


def segments_of(
    offsets: Int64s, cuts: Int64s, most: Int64s, whole: bool, device: torch.device
) -> Segments:
    """The segments of a bucket; kept, because it has the same ones at every step."""
    keys = (np.ascontiguousarray(each, np.int64).tobytes() for each in (offsets, cuts, most))
    first, second, third = keys
    return _kept_segments(first, second, third, whole, device)


class Selection:
    """What is sent of some layers, in device memory: after :meth:`run`.

    Args:
        x: what is kept of the layers; it receives the sums.
        segments: of the layers.
        grads: added first.
    """

    def __init__(self, x: Tensor, segments: Segments, grads: Sequence[Tensor] | None) -> None:
        device, tiles = x.device, segments.tiles.count
        self._x, self._segments, self._grads = x, segments, grads
        self._table = segments.table(grads, device)
        self.energies = torch.zeros(tiles, dtype=torch.float64, device=device)
        """Of each tile's sums."""
        self.nonfinite = torch.zeros(segments.layers, dtype=torch.int64, device=device)
        """``int64[L]``: 1 where the sum is not finite."""
        self.indices = torch.empty(segments.capacity, dtype=torch.int32, device=device)
        """From each piece's place in ``segments.capacities`` on; they count from the piece's start."""
        self.values = torch.empty(segments.capacity, dtype=torch.float32, device=device)
        """Their values."""

    def run(self, counts: Int64s, floors: Int64s, rule: SelectionRule) -> None:
        """Select, and write the sums into ``x``.

        Args:
            counts: of the spans: how many are sent at most.
            floors: bits of the least magnitude that is sent by ``SelectionRule.threshold``.
            rule: that one, or any other, which then sends ``counts``.
        """
        segments, device = self._segments, self._x.device
        tiles, spans = segments.tiles.count, segments.spans
        histograms = torch.zeros((spans, 256), dtype=torch.int32, device=device)
        limits = torch.zeros((2, spans), dtype=torch.int64, device=device)
        source = (self._x, self._table, segments.tiles.layers)
        meta = {"GRADS": gradient_code(self._grads), "TILE": TILE}
        launch(
            *(jit.measure, (tiles,), device, *source, upload(floors, device), histograms, *limits),
            *(self.nonfinite, self.energies),
            **meta,
        )
        wanted = torch.minimum(upload(counts, device), limits[0])
        if rule == SelectionRule.threshold:
            wanted = torch.minimum(wanted, limits[1])
        wrong = torch.zeros(spans, dtype=torch.int64, device=device)
        wrong.index_add_(0, segments.span_layers, self.nonfinite)
        self.wrong = (wrong > 0).long()
        """``int64[spans]``: 1 where nothing is sent because a sum is not finite."""
        wanted = torch.where(wrong > 0, 0, wanted)
        self._find(histograms, wanted, source, meta)

    def _find(
        self,
        histograms: Tensor,
        wanted: Tensor,
        source: tuple[Tensor, Tensor, Tensor],
        meta: dict[str, int],
    ) -> None:
        """The exact thresholds, and what reaches them."""
        segments, device = self._segments, self._x.device
        tiles, spans = (segments.tiles.count,), (segments.spans,)
        prefixes = torch.zeros(segments.spans, dtype=torch.int64, device=device)
        places = torch.empty(tiles[0] * TILE, dtype=torch.int32, device=device)
        sizes = torch.empty_like(places)
        found = torch.zeros(tiles[0], dtype=torch.int32, device=device)
        launch(jit.choose, spans, device, histograms, wanted, prefixes, BITS=8)
        launch(
            *(jit.split, tiles, device, *source, prefixes, self.nonfinite, places, sizes, found), **meta
        )
        table = (self._table, segments.tiles.layers, prefixes)
        for shift, bits in _DIGITS:
            launch(
                *(jit.refine, tiles, device, *table, sizes, found, histograms),
                SHIFT=shift,
                BITS=bits,
                TILE=TILE,
            )
            launch(jit.choose, spans, device, histograms, wanted, prefixes, BITS=bits)
        counts = torch.zeros((2, tiles[0]), dtype=torch.int64, device=device)
        launch(jit.count_selected, tiles, device, *table, sizes, found, *counts, TILE=TILE)
        before = self._place(counts, wanted)
        launch(
            *(jit.compact, tiles, device, self._x, *table, wanted, places, sizes, found, before),
            *(self.targets, self.indices, self.values),
            TILE=TILE,
        )

    def _place(self, counts: Tensor, quotas: Tensor) -> Tensor:
        """Where each tile's selected elements go; returns the ties in its span before it."""
        segments, (greater, ties) = self._segments, counts
        sums = torch.nn.functional.pad(torch.cumsum(ties, 0), (1, 0))
        before = sums[:-1] - sums[segments.span_tiles][segments.tile_spans]
        left = (quotas[segments.tile_spans] - before).clamp(min=0)
        self.selected = greater + torch.minimum(left, ties)
        """``int64[tiles]``: how many are sent."""
        sums = torch.nn.functional.pad(torch.cumsum(self.selected, 0), (1, 0))
        pieces = sums[segments.piece_tiles]
        self.counts = pieces[1:] - pieces[:-1]
        """``int64[pieces]``."""
        layers = sums[segments.layer_tiles]
        self.layer_counts = layers[1:] - layers[:-1]
        """``int64[L]``."""
        inside = sums[:-1] - pieces[segments.tile_pieces]
        self.targets = inside + segments.capacities[segments.tile_pieces]
        """``int64[tiles]``: where they begin."""
        return before

    def sent_energies(self) -> Tensor:
        """Of each tile, once ``values`` are what is decoded."""
        energies = torch.zeros_like(self.energies)
        launch(
            *(jit.energy_of_selected, (self._segments.tiles.count,), self._x.device, self.values),
            *(self.targets, self.selected, energies),
            TILE=TILE,
        )
        return energies
