"""Compressors whose payloads can be summed: of several rounds, or of one, which is a cast."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.compressors.base import (
    NO_CONTEXT,
    CodecState,
    Compressor,
    LayerContext,
    Level,
    Payload,
    Shape,
)
from hvd_adaptive.compressors.checks import check_input, check_output, check_values
from hvd_adaptive.kernels import for_device
from hvd_adaptive.layers import Layer, PayloadKind


@dataclass(slots=True)
class LinearBatch:
    """The layers of one linear compressor in one bucket.

    Args:
        x: float32, 1-D, one per layer; left with the remainder.
        outs: float32, 1-D, one per layer; overwritten with the reduced layer.
        layers: shapes and names.
        levels: one per layer.
        keys: of shared random numbers, one per layer.
        state: of :meth:`Compressor.new_state`.
        dtype: in which payloads are summed.
        ranks: how many of them are summed, where what saturates is kept for the next step: a half
            precision value then takes that share of the range at most, so that no sum overflows. 1
            where it is dropped: a sum that overflows becomes Inf, as without compression.
    """

    x: Sequence[Tensor]
    outs: Sequence[Tensor]
    layers: Sequence[Layer]
    levels: Sequence[Level]
    keys: npt.NDArray[np.uint64]
    state: CodecState | None = None
    dtype: torch.dtype = torch.float32
    ranks: int = 1


Rounds: TypeAlias = Generator[list[Tensor], list[Tensor], None]
"""Yields 1-D tensors to be reduced and receives them reduced, once for each round."""


class LinearCompressor(Compressor):
    """Payloads can be summed, so they are sent by allreduce."""

    @property
    @abstractmethod
    def wire_dtype(self) -> torch.dtype | None:
        """dtype on the wire; None keeps the gradient's own."""

    @abstractmethod
    def rounds(self, batch: LinearBatch) -> Rounds:
        """Reduce a batch of layers in one round of allreduce or several.

        All ranks yield tensors of the same sizes, in the wire dtype, whatever their layers hold. A
        layer that is not finite on one rank must come out not finite on all of them.
        """

    @classmethod
    def compress(cls, tensor: Tensor) -> Any:
        """Horovod's own contract cannot hold where there are several rounds: its optimizer has one."""
        del tensor
        raise TypeError(
            f"{cls.name} is reduced in several rounds that depend on each other, and "
            "hvd.DistributedOptimizer sums once: use hvd_adaptive.DistributedOptimizer"
        )


class CastCompressor(LinearCompressor):
    """A cast to a smaller float type.

    Cost: one pass. Memory: the cast copy. Wire: ``wire_dtype``'s width. Also usable as a plain
    Horovod compressor: ``hvd.DistributedOptimizer(..., compression=hva.Compression.fp16)``.
    """

    wire_dtype: ClassVar[torch.dtype | None]
    biased = False

    @property
    def level(self) -> Level:
        """Bits per value; 32 where nothing is cast."""
        return 32 if self.wire_dtype is None else self.wire_dtype.itemsize * 8

    def levels(self, layer: Layer) -> tuple[Level, ...]:
        """The one level there is."""
        del layer
        return (self.level,)

    def encode(self, x: Tensor, out: Tensor, ranks: int = 1) -> None:
        """Cast ``x`` into ``out`` of the wire dtype; finite values stay finite (they saturate).

        So does the sum of ``ranks`` of them where the type's range is smaller than that of ``x``.
        """
        limit = torch.finfo(out.dtype).max
        if torch.finfo(x.dtype).max > limit:
            limit /= ranks
            # clamp keeps NaN; Inf must stay Inf, or an overflow would pass unseen by GradScaler
            out.copy_(torch.where(x.isinf(), x, x.clamp(-limit, limit)))
        else:
            out.copy_(x)

    @final
    def rounds(self, batch: LinearBatch) -> Rounds:
        """One round of the cast values; the remainder is the rounding error."""
        casts = [torch.empty_like(x, dtype=batch.dtype) for x in batch.x]
        for x, cast in zip(batch.x, casts, strict=True):
            self.encode(x, cast, batch.ranks)
            x.sub_(cast)
        reduced = yield casts
        torch._foreach_copy_(list(batch.outs), reduced)

    @final
    def compress_(
        self,
        x: Tensor,
        level: Level,
        context: LayerContext = NO_CONTEXT,
    ) -> Payload:
        """Cast; the remainder is the rounding error."""
        del context
        check_input(x)
        data = torch.empty_like(x, dtype=self.wire_dtype or x.dtype)
        self.encode(x, data)
        x.sub_(data.to(x.dtype))
        return Payload(data, x.numel(), level)

    @final
    def decompress_add_(self, payload: Payload, out: Tensor, scale: float = 1.0) -> None:
        """Add the cast values."""
        check_output(out, out.dtype)
        expected = self.wire_dtype or out.dtype
        check_values(self.name, payload.data, out.numel(), expected)
        out.add_(payload.data.to(out.dtype), alpha=scale)

    @final
    def errors(
        self,
        x: Tensor,
        levels: Sequence[Level],
        context: LayerContext = NO_CONTEXT,
    ) -> Float64s:
        """The rounding error, the same at every level. Cost: a pass, none where no bit is lost."""
        del context
        wire = self.wire_dtype or x.dtype
        if torch.promote_types(wire, x.dtype) == wire:
            return np.zeros(len(levels))
        flat = x.reshape(-1).float()
        return np.full(len(levels), for_device(x.device).measuring.cast_error(flat, wire))

    @final
    def wire_bytes(self, numel: int, level: Level, *, shape: Shape | None = None) -> int:
        """Exact."""
        del level, shape
        return numel * (self.wire_dtype or torch.float32).itemsize

    # --- Horovod's own contract -------------------------------------------------------------------

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Horovod's contract: cast ``tensor``; the context is its dtype."""
        if cls.wire_dtype is None or not tensor.dtype.is_floating_point:
            return tensor, None
        cast = tensor.to(cls.wire_dtype)
        if cls.payload_kind is PayloadKind.SUMMABLE:
            return cast, tensor.dtype
        _warn_no_saving(cls.name)
        return cast.to(tensor.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """Horovod's contract: cast back."""
        return tensor if ctx is None else tensor.to(ctx)


_warned: set[str] = set()


def _warn_no_saving(name: str) -> None:
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"Horovod cannot sum {name}: under hvd.DistributedOptimizer the values are rounded to "
            f"{name} but are sent at full width. hvd_adaptive.DistributedOptimizer sends half the "
            "bytes.",
            stacklevel=3,
        )
