"""Sparse bodies on a GPU: their positions are decoded once, then their values are added.

A stream of positions says only at the end of a block of 256 where the next one begins. So the blocks of
a layer are decoded one after the other, each of them at once by 128 threads; the layers and the bodies
side by side. A bucket of one very large layer is the worst case: some microseconds per 256 values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.triton.jit import decoding as jit
from hvd_adaptive.kernels.triton.launching import first_of, launch, pointers, read_back, upload
from hvd_adaptive.wire import ValueFormat

_SIZE = 1024
"""Values of a program at a time."""
_MOST_PROGRAMS = 64
"""Of one layer."""


class ReceivedSparse:
    """Bodies of the same layers.

    Args:
        bodies: on one device.
        numels: elements of each layer.
        values: the format that all layers must have; None takes each layer's own.
        whole: whether each body is one layer over all of them.
    """

    def __init__(
        self,
        bodies: Sequence[Tensor],
        numels: Sequence[int],
        values: ValueFormat | None,
        whole: bool,
    ) -> None:
        device = bodies[0].device
        self._device, self._whole, self._count, self._layers = device, whole, len(bodies), len(numels)
        self._kept = list(bodies)  # the table has their addresses only
        spans = [sum(numels)] if whole else list(numels)
        self._spans = len(spans)
        room = [min(sum(spans), 8 * body.numel()) for body in bodies]  # a position has a bit at least
        starts = np.cumsum([0, *room])
        table = [
            (body.data_ptr(), body.numel(), start)
            for body, start in zip(bodies, starts.tolist(), strict=False)
        ]
        self._bodies = upload(np.array(table, np.int64), device)
        self._edges = upload(np.cumsum([0, *numels]), device)
        sizes = upload(np.array(spans, np.int64), device)
        rows = self._count * (self._spans + 1)
        self._places = torch.zeros((rows, 8), dtype=torch.int64, device=device)
        self._indices = torch.empty(int(starts[-1]), dtype=torch.int32, device=device)
        self._programs = max(1, min(_MOST_PROGRAMS, -(-max(spans, default=0) // _SIZE)))
        expected = -1 if values is None else int(values)
        launch(
            *(jit.walk, (self._count,), device, self._bodies, sizes, self._places, self._spans),
            expected,
        )
        grid = (self._count, self._spans)
        launch(
            *(jit.decode_positions, grid, device, self._bodies, sizes, self._places, self._indices),
            self._spans,
        )
        launch(
            *(jit.check_values, (*grid, self._programs), device, self._bodies, self._places),
            self._spans,
            SIZE=_SIZE,
        )
        self._found = self._places[: self._count * self._spans].view(self._count, self._spans, 8)
        trailing = self._places[self._count * self._spans :, 0].sum()
        self._first_wrong = first_of(self._found[:, :, 5].amax(0))
        self._damaged = self._found[:, :, 5].sum() + trailing

    def add_to(self, outs: Sequence[Tensor], scale: float | None) -> None:
        """Add ``scale`` times the values, or clear where they would go; up to the first damage."""
        addresses = upload(pointers(outs, len(outs)), self._device)
        for number in range(self._count):
            launch(
                *(jit.add_values, (self._spans, self._programs), self._device, self._bodies),
                *(self._places, self._indices, addresses, self._edges, self._layers),
                *(self._first_wrong, number, self._spans, float(np.float32(scale or 0.0))),
                CLEARS=scale is None,
                WHOLE=self._whole,
                SIZE=_SIZE,
            )

    def listed(self) -> tuple[npt.NDArray[np.int64], Tensor, Tensor]:
        """How many elements each span of the only body has, their positions, and their values.

        Of a body that is not damaged. Waits for the device, because the sizes are those of the tensors.
        """
        counts = read_back(self._found[0, :, 2].contiguous())
        total = int(counts.sum())
        values = torch.empty(total, device=self._device)
        launch(
            *(jit.list_values, (self._spans, self._programs), self._device, self._bodies),
            *(self._places, values, self._spans),
            SIZE=_SIZE,
        )
        return counts, self._indices[:total], values

    def findings(self) -> tuple[bool, npt.NDArray[np.uint8]]:
        """Whether something is damaged, and the marks of layers before that; waits for the device."""
        numbers = torch.arange(self._spans, device=self._device)
        marked = self._found[:, :, 4].amax(0) * (numbers < self._first_wrong)
        found = read_back(torch.cat([marked, self._damaged.view(1)]))
        marks = found[:-1].astype(np.uint8)
        if self._whole:
            marks = np.repeat(marks, self._layers)
        return bool(found[-1]), marks
