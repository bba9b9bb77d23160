"""Sparse bodies on a GPU: their positions are decoded once, then their values are added.

A stream of positions says only at the end of a block of 256 where the next one begins, but the table in
front of it says how many bits each group of 16 blocks takes. So the groups of all layers and bodies are
decoded side by side; the blocks of a group one after the other, each of them at once by all threads of
a program. Positions in a group first count from the group before, which is added when all are known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.triton.jit import decoding as jit
from hvd_adaptive.kernels.triton.launching import launch, pointers, read_back, upload
from hvd_adaptive.wire import ValueFormat
from hvd_adaptive.wire.sparse import GROUP

_SIZE = 1024
"""Values of a program, once their positions are known."""
_PARTS = GROUP // _SIZE
"""Such programs of a group."""
_FIELDS = 8
"""Columns of the table of places."""
_WARPS = 2
"""Of a program that decodes positions: it has 512 bits in hand."""


class ReceivedSparse:
    """Bodies of the same layers.

    Args:
        bodies: on one device.
        numels: elements of each layer.
        values: the format that all layers must have; None takes each layer's own.
        whole: whether each body is one layer over all of them.
        outs: what :meth:`add_to_outs` changes, one for each layer.
    """

    def __init__(
        self,
        bodies: Sequence[Tensor],
        numels: Sequence[int],
        values: ValueFormat | None,
        whole: bool,
        outs: Sequence[Tensor] = (),
    ) -> None:
        device = bodies[0].device
        self._device, self._whole, self._count, self._layers = device, whole, len(bodies), len(numels)
        self._kept = list(bodies)  # the table has their addresses only
        self._tables(numels, values, outs)
        rows = self._count * (self._spans + 1) * _FIELDS
        slots = self._count * self._room
        zeros = torch.zeros(rows + slots, dtype=torch.int64, device=device)
        self._places, self._slots = zeros.split([rows, slots])
        totals = torch.empty(slots, dtype=torch.int64, device=device)
        self._found = torch.empty(self._spans + 2, dtype=torch.int64, device=device)
        expected = -1 if values is None else int(values)
        shape = (self._spans, self._room)
        launch(
            *(jit.walk, (self._count,), device, self._bodies, self._sizes, self._places),
            *(self._slots, *shape, expected),
        )
        source = (self._bodies, self._sizes, self._places, self._slots, self._indices, totals, *shape)
        grid = (self._room, self._count)
        launch(jit.decode_positions, grid, device, *source, num_warps=_WARPS)
        launch(jit.place_and_check, grid, device, *source, SIZE=_SIZE)
        launch(
            *(jit.summarize, (1,), device, self._places, self._found, self._count, self._spans),
            SIZE=256,
        )

    def _tables(
        self, numels: Sequence[int], values: ValueFormat | None, outs: Sequence[Tensor]
    ) -> None:
        """What the host knows, in one upload, and room for the positions."""
        spans = [sum(numels)] if self._whole else list(numels)
        self._spans = len(spans)
        # a position has a bit at least, and so has a value
        bits = 1 + (ValueFormat.sign if values is None else values).bits
        most = [min(sum(spans), 8 * body.numel() // bits) for body in self._kept]
        starts = np.cumsum([0, *most])
        self._indices = torch.empty(int(starts[-1]), dtype=torch.int32, device=self._device)
        self._room = max(most) // GROUP + self._spans
        addresses = pointers(self._kept, self._count)
        sizes = [body.numel() for body in self._kept]
        bodies = np.stack([addresses, np.array(sizes, np.int64), starts[:-1]], axis=1)
        edges, outputs = np.cumsum([0, *numels]), pointers(outs, len(outs))
        tables = bodies.reshape(-1), np.array(spans, np.int64), edges, outputs
        # each begins at a multiple of 16 bytes, or Triton would compile kernels for others, too
        padded = [np.pad(table, (0, len(table) % 2)) for table in tables]
        parts = upload(np.concatenate(padded), self._device).split([len(part) for part in padded])
        self._bodies, self._sizes, self._edges, self._outs = parts

    def add_to_outs(self, scale: float | None) -> None:
        """Add ``scale`` times the values, or clear where they would go; up to the first damage."""
        for number in range(self._count):
            launch(
                *(jit.add_values, (self._room, _PARTS), self._device, self._bodies, self._places),
                *(self._slots, self._indices, self._outs, self._edges, self._found, self._layers),
                *(number, self._spans, self._room, float(np.float32(scale or 0.0))),
                CLEARS=scale is None,
                WHOLE=self._whole,
                SIZE=_SIZE,
            )

    def listed(self) -> tuple[npt.NDArray[np.int64], Tensor, Tensor]:
        """How many elements each span of the only body has, their positions, and their values.

        Of a body that is not damaged. Waits for the device, because the sizes are those of the tensors.
        """
        rows = self._places[: self._spans * _FIELDS].view(self._spans, _FIELDS)
        counts = read_back(rows[:, 2].contiguous())
        total = int(counts.sum())
        values = torch.empty(total, device=self._device)
        launch(
            *(jit.list_values, (self._room, _PARTS), self._device, self._bodies, self._places),
            *(self._slots, values, self._spans, self._room),
            SIZE=_SIZE,
        )
        return counts, self._indices[:total], values

    def findings(self) -> tuple[bool, npt.NDArray[np.uint8]]:
        """Whether something is damaged, and the marks of layers before that; waits for the device."""
        found = read_back(self._found)
        marks = found[: self._spans].astype(np.uint8)
        if self._whole:
            marks = np.repeat(marks, self._layers)
        return bool(found[self._spans]), marks
