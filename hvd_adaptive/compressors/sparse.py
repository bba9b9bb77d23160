"""Compressors that send a few elements: their positions and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hvd_adaptive import kernels, wire
from hvd_adaptive.compressors.base import (
    CodecState,
    Float64s,
    GatheredCompressor,
    LayerStats,
    Level,
    Shape,
)
from hvd_adaptive.layers import Layer


@dataclass(frozen=True)
class TopK(GatheredCompressor):
    """The ``density * numel`` elements of largest magnitude; ties go to the lowest index.

    Biased: use it with error feedback. Cost: two passes over the tensor and no sort (three copies of
    the tensor at density 1 %). Wire: Rice-coded gaps (8.1 bits an element at density 1 %) and values
    of ``values`` bits; the rounding error of the values stays in the remainder.
    Zeros are never sent. Source: Aji and Heafield, "Sparse Communication for Distributed Gradient
    Descent" (EMNLP 2017), with exact selection.

    Args:
        density: share of the elements to send, in (0, 1].
        values: ``fp32``, ``fp16``, ``bf16``, or ``int8`` (a scale for every 256 values).

    Raises:
        ValueError: density outside (0, 1], or an unknown value format.

    Example:
        >>> import torch
        >>> x = torch.tensor([0.5, -3.0, 0.25, 2.0])
        >>> topk = TopK(density=0.5, values="fp32")
        >>> payload, out = topk.compress_(x, topk.level), torch.zeros(4)
        >>> topk.decompress_add_(payload, out)
        >>> out.tolist(), x.tolist()
        ([0.0, -3.0, 0.0, 2.0], [0.5, 0.0, 0.25, 0.0])
    """

    density: float = 0.01
    values: str = "bf16"

    name = "topk"
    biased = True

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise ValueError(
                f"topk: density is the share of elements to send and must lie in (0, 1], got "
                f"{self.density}: write topk:density=0.01 for 1 %"
            )
        if self.values not in wire.ValueFormat.__members__:
            raise ValueError(
                f"topk: values={self.values!r} is not one of {', '.join(wire.ValueFormat.__members__)}"
            )

    @property
    def level(self) -> Level:
        """The density."""
        return self.density

    @property
    def format(self) -> wire.ValueFormat:
        """How values travel."""
        return wire.ValueFormat[self.values]

    def levels(self, layer: Layer) -> tuple[Level, ...]:
        """100 densities from ten times the default to a tenth of it (L-GreCo's search range)."""
        del layer
        steps = (self.density * step / 10 for step in range(100, 0, -1))
        return tuple(dict.fromkeys(min(1.0, density) for density in steps))

    def compress_layers_(
        self,
        x: Tensor,
        offsets: npt.NDArray[np.int64],
        levels: Sequence[Level],
        grads: Sequence[Tensor] | None = None,
        *,
        keys: npt.NDArray[np.uint64] | None = None,
        reserve: int = 0,
        spectra: npt.NDArray[np.int64] | None = None,
        state: CodecState | None = None,
    ) -> tuple[Tensor, LayerStats]:
        """All layers in one kernel call: add the gradient, find the threshold, extract, encode."""
        del keys, state
        sizes = np.diff(offsets)
        counts = np.array(
            [wire.count_of(int(numel), density) for numel, density in zip(sizes, levels, strict=True)],
            dtype=np.int64,
        )
        body, stats = kernels.for_device(x.device).topk_compress_(
            x, offsets, counts, self.format, grads, reserve, spectra
        )
        return body, LayerStats(stats[:, 0], stats[:, 1], stats[:, 3] != 0)

    def decompress_layers_add_(
        self, body: Tensor, outs: Sequence[Tensor], scale: float
    ) -> npt.NDArray[np.bool_]:
        """Scatter-add; every index and length is checked first."""
        marks = kernels.for_device(body.device).sparse_decompress_add_(body, outs, scale, self.format)
        return marks.astype(np.bool_)

    def errors(
        self,
        x: Tensor,
        levels: Sequence[Level],
        *,
        shape: Shape | None = None,
        state: CodecState | None = None,
    ) -> Float64s:
        """From one histogram of ``x`` for all levels; within 1 % of compressing at each.

        The rounding of the values is not counted: it stays in the remainder and is far below what
        selection leaves out.
        """
        del shape, state
        kernel = kernels.for_device(x.device)
        counts = [wire.count_of(x.numel(), density) for density in levels]
        energy = float(x.double().square().sum())
        errors: Float64s = kernel.errors_from_spectrum(
            kernel.spectrum(x), energy, x.numel(), np.array(counts, dtype=np.int64)
        )
        return errors

    def wire_bytes(self, numel: int, level: Level, *, shape: Shape | None = None) -> int:
        """Upper bound; within 3 % of the bytes sent for scattered indices."""
        del shape
        return wire.max_sparse_bytes(numel, wire.count_of(numel, level), self.format)
