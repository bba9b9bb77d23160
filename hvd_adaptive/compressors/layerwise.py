"""A base for compressors of your own: encode one layer, decode one layer, nothing else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.compressors.base import (
    NO_CONTEXT,
    GatheredCompressor,
    LayerBatch,
    LayerContext,
    LayerStats,
    Level,
)
from hvd_adaptive.compressors.checks import all_finite
from hvd_adaptive.wire import WireError
from hvd_adaptive.wire.varint import varint_bytes, write_varint


class LayerwiseCompressor(GatheredCompressor):
    """Codes one layer at a time, by :meth:`encode` and :meth:`decode`, in plain torch.

    Gradients, remainders, buckets, marks for layers that are not finite and checks of lengths are
    taken care of. Costs a few dozen microseconds per layer in addition to the encoding itself. Wire: a
    varint ``bytes << 1 | nonfinite`` per layer, and its code.
    """

    @abstractmethod
    def encode(self, x: Tensor, level: Level, key: int) -> Tensor:
        """The code of a finite layer.

        Args:
            x: float32, 1-D; not to be changed.
            level: how hard to compress.
            key: of random numbers.

        Returns:
            uint8, 1-D, of any length.
        """

    @abstractmethod
    def decode(self, code: Tensor, numel: int) -> Tensor:
        """The layer that ``code`` holds: float32, 1-D, ``numel`` elements.

        Raises:
            WireError: :meth:`encode` cannot have made this code.
        """

    @final
    def compress_layers_(self, batch: LayerBatch) -> tuple[Tensor, LayerStats]:
        """Layer after layer: add the gradient, encode, subtract what the code decodes to."""
        x, grads = batch.x, batch.grads
        count = len(batch.levels)
        parts = [torch.zeros(batch.reserve, dtype=torch.uint8, device=x.device)]
        stats = LayerStats(np.zeros(count), np.zeros(count), np.zeros(count, np.bool_))
        for layer, level in enumerate(batch.levels):
            kept = x[batch.offsets[layer] : batch.offsets[layer + 1]]
            total = kept if grads is None else kept + grads[layer].reshape(-1)
            if not all_finite(total):
                stats.nonfinite[layer] = True
                parts.append(_bytes(write_varint(1), x.device))
                continue
            code = self.encode(total, level, 0 if batch.keys is None else int(batch.keys[layer]))
            decoded = self._decoded(code, total.numel())
            stats.energy[layer] = float(total.double().square().sum())
            stats.sent[layer] = float(decoded.double().square().sum())
            kept.copy_(total - decoded)
            parts += [_bytes(write_varint(code.numel() << 1), x.device), code]
        return torch.cat(parts), stats

    @final
    def decompress_layers_add_(
        self, body: Tensor, outs: Sequence[Tensor], scale: float
    ) -> npt.NDArray[np.bool_]:
        """Layer after layer."""
        marks = np.zeros(len(outs), np.bool_)
        position = 0
        for layer, out in enumerate(outs):
            header, position = _read_varint(body, position, self.name, layer)
            size = header >> 1
            if header & 1:
                marks[layer] = True
                out.fill_(torch.nan)
            if size > body.numel() - position or (header & 1 and size):
                raise WireError(
                    f"{self.name}: layer {layer} ends past the payload's {body.numel()} bytes"
                )
            if not header & 1:
                decoded = self._decoded(body[position : position + size], out.numel())
                out.view(-1).add_(decoded, alpha=scale)
            position += size
        if position != body.numel():
            raise WireError(f"{self.name}: {body.numel() - position} bytes follow the last layer")
        return marks

    def errors(
        self,
        x: Tensor,
        levels: Sequence[Level],
        context: LayerContext = NO_CONTEXT,
    ) -> Float64s:
        """By really compressing at every level."""
        del context
        decoded = (self._decoded(self.encode(x, level, 0), x.numel()) for level in levels)
        return np.array([float((x - each).double().square().sum()) for each in decoded])

    def sent_energies(
        self,
        x: Tensor,
        levels: Sequence[Level],
        context: LayerContext = NO_CONTEXT,
    ) -> Float64s:
        """By really compressing at every level, as :meth:`errors`."""
        del context
        decoded = (self._decoded(self.encode(x, level, 0), x.numel()) for level in levels)
        return np.array([float(each.double().square().sum()) for each in decoded])

    def _decoded(self, code: Tensor, numel: int) -> Tensor:
        decoded = self.decode(code, numel)
        if decoded.shape != (numel,) or decoded.dtype != torch.float32 or not all_finite(decoded):
            raise WireError(
                f"{self.name}: decode() gave {decoded.dtype} of shape {tuple(decoded.shape)}, expected "
                f"{numel} finite float32"
            )
        return decoded


def _bytes(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _read_varint(body: Tensor, position: int, name: str, layer: int) -> tuple[int, int]:
    """The number at ``position``, and the position after it."""
    data = bytes(body[position : position + 9].tolist())
    value = 0
    for length, byte in enumerate(data, start=1):
        value |= (byte & 0x7F) << (7 * (length - 1))
        if byte < 0x80:
            if length != varint_bytes(value):
                break
            return value, position + length
    raise WireError(f"{name}: layer {layer} begins with a damaged length, at byte {position}")
