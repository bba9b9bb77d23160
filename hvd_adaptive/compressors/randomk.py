"""Random-k: all ranks send the same random elements, so that values alone are sent, and summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.compressors import horovod
from hvd_adaptive.compressors.base import (
    NO_CONTEXT,
    LayerContext,
    Level,
    MultiLevel,
    Payload,
    Shape,
    check_density_bounds,
    densities,
)
from hvd_adaptive.compressors.checks import all_finite, check_input, check_values
from hvd_adaptive.compressors.linear import LinearBatch, LinearCompressor, Rounds
from hvd_adaptive.kernels import for_device
from hvd_adaptive.layers import Layer, PayloadKind
from hvd_adaptive.wire import WireError
from hvd_adaptive.wire import sparse as wire_sparse

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class RandomK(LinearCompressor, MultiLevel):
    """``density * numel`` elements at random, the same on all ranks; nothing but values is sent.

    Each step draws a new set, of which all ranks know the key (seed, step, layer). All elements are
    equally likely; in layers of 131,072 elements and more, neighbors are drawn together, up to 64
    (:func:`hvd_adaptive.kernels.orders.run_length`), because memory is slow where it is read at random.
    Biased, and used with error feedback; ``unbiased=true`` scales the values by ``1 / density``
    instead, and needs no feedback. Contraction: ``E |x - C(x)|^2 = (1 - density) |x|^2``. Cost: one
    read of the tensor, and some nanoseconds an element sent. Wire: one value an element, summed by
    allreduce, so that traffic does not grow with the number of ranks. Source: Stich, Cordonnier and
    Jaggi, "Sparsified SGD with Memory" (NeurIPS 2018), definition 2.1; neighbors: the random
    block of Vogels et al., "PowerSGD" (NeurIPS 2019); unbiased: Wangni et al. (NeurIPS 2018).
    Also usable as a plain Horovod compressor, without feedback: ``hvd.DistributedOptimizer(...,
    compression=hva.Compression.randomk(density=0.1, unbiased=True))``.

    Args:
        density: share of the elements to send, in (0, 1].
        values: ``fp32`` or ``fp16`` (what Horovod can sum); the rounding error of the values stays in
            the remainder.
        unbiased: scale by ``1 / density``.

    Raises:
        ValueError: density outside (0, 1], or another value format.

    Example:
        >>> x = torch.ones(100)
        >>> payload = RandomK(density=0.1).compress_(x, 0.1, LayerContext(key=7))
        >>> payload.nbytes, int(x.sum())
        (40, 90)
    """

    density: float = 0.01
    values: str = "fp32"
    unbiased: bool = False

    name = "randomk"
    payload_kind = PayloadKind.SUMMABLE
    # Horovod's own contract
    compress: ClassVar[Any] = horovod.ClassOrInstanceMethod(horovod.compress)
    decompress: ClassVar[Any] = horovod.ClassOrInstanceMethod(horovod.decompress)

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise ValueError(
                f"randomk: density is the share of elements to send and must lie in (0, 1], got "
                f"{self.density}: write randomk:density=0.01 for 1 %"
            )
        if self.values not in _DTYPES:
            raise ValueError(
                f"randomk: values={self.values!r} is not one of {', '.join(_DTYPES)}: Horovod sums them"
            )
        check_density_bounds(self.name, self.level_bounds)
        super().__post_init__()

    @property
    def biased(self) -> bool:
        """Unless scaled."""
        return not self.unbiased

    @property
    def level(self) -> Level:
        """The density."""
        return self.density

    @property
    def wire_dtype(self) -> torch.dtype:
        """That of the values."""
        return _DTYPES[self.values]

    def levels(self, layer: Layer) -> tuple[Level, ...]:
        """See :func:`~hvd_adaptive.compressors.base.densities`."""
        del layer
        return densities(self.density, self.level_bounds)

    def level_of_factor(self, factor: float) -> Level | None:
        """One over the factor."""
        return 1.0 / factor

    def nominal_factor(self, level: Level, layer: Layer) -> float:
        """One over the density."""
        del layer
        return 1.0 / float(level)

    def rounds(self, batch: LinearBatch) -> Rounds:
        """One round with the values of all layers."""
        reduced = yield [
            self._take_(x, level, int(key), batch.ranks) if all_finite(x) else self._nothing(x, level)
            for x, level, key in zip(batch.x, batch.levels, batch.keys, strict=True)
        ]
        for key, values, out in zip(batch.keys, reduced, batch.outs, strict=True):
            for_device(out.device).subset.add_(out.zero_(), values.to(out.dtype), int(key))
            if not all_finite(values):
                out.fill_(torch.nan)

    def compress_(
        self,
        x: Tensor,
        level: Level,
        context: LayerContext = NO_CONTEXT,
    ) -> Payload:
        """Take the values at the indices of ``key`` out of ``x``."""
        check_input(x)
        if not all_finite(x):
            raise ValueError("randomk: the tensor holds a NaN or an Inf; it was left as it was")
        sent = self._take_(x, level, context.key)
        return Payload(sent, x.numel(), level, context.key, context.shape)

    def decompress_add_(self, payload: Payload, out: Tensor, scale: float = 1.0) -> None:
        """Scatter-add."""
        self._check(payload, out.numel())
        for_device(out.device).subset.add_(out, payload.data.to(out.dtype), payload.key, scale)

    def recompress_(self, payload: Payload, x: Tensor, level: Level) -> Payload:
        """Keep the first of the values: a smaller set of the same key is the beginning of a larger."""
        check_input(x)
        self._check(payload, x.numel())
        fewer, values = wire_sparse.count_of(payload.numel, level), payload.data.to(x.dtype)
        kept = payload.data[:fewer].clone()
        if self.unbiased:
            kept = self._rounded(values[:fewer] * (values.numel() / max(1, fewer)))
            for_device(x.device).subset.add_(
                x, torch.cat([values[:fewer] - kept, values[fewer:]]), payload.key
            )
        else:
            for_device(x.device).subset.add_(x, values, payload.key, skip=fewer)
        return Payload(kept, payload.numel, level, payload.key, payload.shape)

    def errors(
        self,
        x: Tensor,
        levels: Sequence[Level],
        context: LayerContext = NO_CONTEXT,
    ) -> Float64s:
        """In expectation over the sets: ``1 - density`` of the energy, or ``1 / density - 1``."""
        del context
        check_input(x)
        # in float64: squares of what is finite fit
        energy = sum(float(part.double().square().sum()) for part in x.split(1 << 16))
        shares = np.array([wire_sparse.count_of(x.numel(), level) for level in levels]) / max(
            1, x.numel()
        )
        if x.numel() == 0:
            return np.zeros(len(levels))
        return energy * ((1 / shares - 1) if self.unbiased else (1 - shares))

    def wire_bytes(self, numel: int, level: Level, *, shape: Shape | None = None) -> int:
        """Exact."""
        del shape
        return wire_sparse.count_of(numel, level) * self.wire_dtype.itemsize

    def _check(self, payload: Payload, numel: int) -> None:
        """WireError unless the payload is that of a tensor of so many elements."""
        if payload.numel != numel:
            raise WireError(
                f"randomk: a payload of {payload.numel} elements is not that of a tensor of {numel}"
            )
        check_values(
            self.name, payload.data, wire_sparse.count_of(numel, payload.level), self.wire_dtype
        )

    def _take_(self, x: Tensor, level: Level, key: int, ranks: int = 1) -> Tensor:
        """Values as they are sent, which are taken out of ``x``, all of which is finite."""
        count = wire_sparse.count_of(x.numel(), level)
        values = for_device(x.device).subset.take_(x, count, key)
        if not self.unbiased and values.dtype == self.wire_dtype:
            return values
        scaled = values * (x.numel() / max(1, count)) if self.unbiased else values
        sent = self._rounded(scaled, ranks)
        for_device(x.device).subset.add_(x, values - sent, key)
        return sent

    def _rounded(self, values: Tensor, ranks: int = 1) -> Tensor:
        """In the dtype on the wire; what is too large for a sum over the ranks saturates."""
        limit = torch.finfo(self.wire_dtype).max / ranks
        return values.clamp(-limit, limit).to(self.wire_dtype)

    def _nothing(self, x: Tensor, level: Level) -> Tensor:
        """What stands for a tensor that is not finite: NaN wherever, so that all ranks see it."""
        return x.new_full((wire_sparse.count_of(x.numel(), level),), torch.nan, dtype=self.wire_dtype)
