"""Sparse bodies on a GPU: their positions are decoded once, then their values are added.

A stream of positions says only at the end of a block of 256 where the next one begins, but the table in
front of it says how many bits each group of 16 blocks takes. So the groups of all layers and bodies are
decoded side by side; the blocks of a group one after the other, each of them at once by all threads of
a program. Positions in a group first count from the group before, which is added when all are known.

A sum is written tile by tile: zeros, to which the values of each body in this tile are added while it
is still in the cache. Where the bodies are one layer over all outputs, these are cleared beforehand.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.triton import recording
from hvd_adaptive.kernels.triton.jit import decoding as jit
from hvd_adaptive.kernels.triton.launching import (
    Table,
    kept,
    launch,
    read_back,
    scale_bits,
    tiles_of,
)
from hvd_adaptive.wire import ValueFormat
from hvd_adaptive.wire.sparse import GROUP

_SIZE = 1024
"""Values of a program, once their positions are known."""
_PARTS = GROUP // _SIZE
"""Such programs of a group."""
_FIELDS = 8
"""Columns of the table of places."""
_WARPS = 2
"""Of a program that decodes positions: it has 1024 bits, or 256 codes, in hand."""
_PLACED, _PLACE_WARPS = 512, 4
"""Values that are placed at once, and warps for them."""
_SUMMED = 8192
"""Outputs of a program that writes a sum."""
_SUM_WARPS = 4
"""Of such a program."""
_ADDED = 128
"""Values that it adds at once."""
_SOUGHT = 128
"""Tiles of a program that looks for where their values begin."""


class Use(enum.Enum):
    """What positions are decoded for."""

    list = enum.auto()
    add = enum.auto()
    """Values to what the outputs hold."""
    sum = enum.auto()
    """Of the values, which the outputs become; those of one vector must be zeros."""
    clear = enum.auto()
    """The outputs, where a body has values."""


class SparseLayout:
    """Bodies of the same layers, but for what they hold.

    Args:
        numels: elements of each layer.
        most: values that each body may have.
        values: the format that all layers must have; None takes each layer's own.
        whole: whether each body is one layer over all of them.
        device: of all tensors.
    """

    def __init__(
        self,
        numels: tuple[int, ...],
        most: tuple[int, ...],
        values: ValueFormat | None,
        whole: bool,
        device: torch.device,
    ) -> None:
        self.device, self.whole, self.count, self.layers = device, whole, len(most), len(numels)
        spans = [sum(numels)] if whole else list(numels)
        self.spans = len(spans)
        starts = np.cumsum([0, *most])
        rows = np.zeros((self.count, int(jit.BODY_FIELDS.value)), np.int64)
        rows[:, 2] = starts[:-1]
        self.indices = int(starts[-1])
        self.room = max(most) // GROUP + self.spans
        self.expected = -1 if values is None else int(values)
        self.tiles = tiles_of(np.array([] if whole else numels, np.int64), _SUMMED, device)
        outs, scale = np.zeros(self.layers, np.int64), np.zeros(1, np.int64)
        self._table = Table(rows, np.array(spans, np.int64), np.cumsum([0, *numels]), outs, scale)
        """Rows of bodies; sizes of spans, edges of layers, their outputs; the bits of the scale."""
        self._addresses, self._sizes = self._table.column(0, 0), self._table.column(0, 1)
        self._outs = self._table.column(3)

    def given(
        self, bodies: Sequence[Tensor], outs: Sequence[Tensor], scale: float
    ) -> npt.NDArray[np.int64]:
        """What :class:`ReceivedSparse` is told, besides this layout."""
        numbers = self._table.copy()
        numbers[self._addresses] = [body.data_ptr() for body in bodies]
        numbers[self._sizes] = [body.numel() for body in bodies]
        if outs:
            numbers[self._outs] = [out.data_ptr() for out in outs]
        numbers[-1] = scale_bits(scale)
        return numbers

    def split(self, sent: Tensor) -> Sequence[Tensor]:
        """The parts of :meth:`given` on the device."""
        return self._table.split(sent)


_layout_of = kept(SparseLayout)


def layout_of(
    bodies: Sequence[Tensor], numels: Sequence[int], values: ValueFormat | None, whole: bool
) -> SparseLayout:
    """Kept, because a bucket has the same one at most steps: that of bodies of about this size."""
    # a position has a bit at least, and so has a value
    bits = 1 + (ValueFormat.sign if values is None else values).bits
    most = tuple([_rounded_up(8 * body.numel() // bits) for body in bodies])
    return _layout_of(tuple(numels), most, values, whole, bodies[0].device)


def _rounded_up(number: int) -> int:
    """To a number of which only the first four bits are not 0."""
    low = (number >> 4).bit_length()
    return -(-number >> low) << low


class ReceivedSparse:
    """Bodies whose positions are known.

    Args:
        layout: of the bodies.
        sent: what :meth:`SparseLayout.given` says, on the device.
    """

    def __init__(self, layout: SparseLayout, sent: Tensor) -> None:
        self._layout, device = layout, layout.device
        self._bodies, self._sizes, self._edges, self._outs, self._scale = layout.split(sent)
        rows, slots = layout.count * (layout.spans + 1) * _FIELDS, layout.count * layout.room
        zeros = torch.zeros(rows + slots, dtype=torch.int64, device=device)
        self._places, self._slots = zeros.split([rows, slots])
        self._indices = torch.empty(layout.indices, dtype=torch.int32, device=device)
        totals = torch.empty(slots, dtype=torch.int64, device=device)
        self.found = torch.empty(layout.spans + 2, dtype=torch.int64, device=device)
        """Marks of spans before the first damage; whether there is some; and the span that it is in."""
        shape = (layout.spans, layout.room)
        launch(
            *(jit.walk, (layout.count,), device, self._bodies, self._sizes, self._places),
            *(self._slots, *shape, layout.expected),
        )
        source = (self._bodies, self._sizes, self._places, self._slots, self._indices, totals, *shape)
        grid = (layout.room, layout.count)
        launch(jit.decode_positions, grid, device, *source, num_warps=_WARPS)
        launch(jit.place_and_check, grid, device, *source, SIZE=_PLACED, num_warps=_PLACE_WARPS)
        launch(
            *(jit.summarize, (1,), device, self._places, self.found, layout.count, layout.spans),
            SIZE=256,
        )

    def change_outs(self, use: Use) -> None:
        """Add or clear, up to the first damage."""
        if use is Use.sum and not self._layout.whole:
            self._write_sums()
            return
        layout = self._layout
        for number in range(layout.count):
            launch(
                *(jit.add_values, (layout.room, _PARTS), layout.device, self._bodies, self._places),
                *(self._slots, self._indices, self._outs, self._edges, self.found, layout.layers),
                *(number, layout.spans, layout.room, self._scale),
                CLEARS=use is Use.clear,
                WHOLE=layout.whole,
                SIZE=_SIZE,
            )

    def _write_sums(self) -> None:
        layout, tiles = self._layout, self._layout.tiles
        starts = torch.empty((layout.count, tiles.count), dtype=torch.int32, device=layout.device)
        source = (self._places, self._indices, tiles.layers, tiles.first, starts)
        launch(
            *(jit.find_starts, (-(-tiles.count // _SOUGHT), layout.count), layout.device, *source),
            *(layout.spans, tiles.count),
            TILE=_SUMMED,
            SIZE=_SOUGHT,
        )
        launch(
            *(jit.write_sums, (tiles.count,), layout.device, *source, self._bodies, self._sizes),
            *(self._outs, self.found, layout.count, layout.spans, self._scale),
            TILE=_SUMMED,
            SIZE=_ADDED,
            num_warps=_SUM_WARPS,
        )

    def listed(self) -> tuple[npt.NDArray[np.int64], Tensor, Tensor]:
        """How many elements each span of the only body has, their positions, and their values.

        Of a body that is not damaged. Waits for the device, because the sizes are those of the tensors.
        """
        layout = self._layout
        rows = self._places[: layout.spans * _FIELDS].view(layout.spans, _FIELDS)
        counts = read_back(rows[:, 2].contiguous())
        total = int(counts.sum())
        values = torch.empty(total, device=layout.device)
        launch(
            *(jit.list_values, (layout.room, _PARTS), layout.device, self._bodies, self._places),
            *(self._slots, values, layout.spans, layout.room),
            SIZE=_SIZE,
        )
        return counts, self._indices[:total], values


def decode(
    bodies: Sequence[Tensor],
    numels: Sequence[int],
    values: ValueFormat | None,
    whole: bool,
    use: Use,
    outs: Sequence[Tensor] = (),
    scale: float = 0.0,
) -> tuple[ReceivedSparse | None, bool, npt.NDArray[np.uint8]]:
    """Bodies to be listed, whether one is damaged, and the marks of layers before that; waits.

    Args:
        bodies: on one device.
        numels: elements of each layer.
        values: the format that all layers must have; None takes each layer's own.
        whole: whether each body is one layer over all of them.
        use: what for.
        outs: one for each layer.
        scale: of what is added.
    """
    layout = layout_of(bodies, numels, values, whole)

    def work(sent: Tensor) -> tuple[ReceivedSparse | None, Tensor]:
        received = ReceivedSparse(layout, sent)
        if use is Use.list:
            return received, received.found
        received.change_outs(use)
        return None, received.found

    given = layout.given(bodies, outs, scale)
    received, found = recording.run((layout, use), given, layout.device, work)
    marks = found[: layout.spans].astype(np.uint8)
    if whole:
        marks = np.repeat(marks, layout.layers)
    return received, bool(found[layout.spans]), marks
