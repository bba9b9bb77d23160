"""Multi-level compression: a step's payloads at several levels, made before it is known which is sent.

Source: Tyagi and Swany, "GraVAC" (2023), section III: what is compressed to the smallest factor is
compressed further to the others, and one of the payloads is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.buckets import Bucket
from hvd_adaptive.collectives.base import PreparedPayload
from hvd_adaptive.compressors.base import CodecState, Compressor, LayerBatch, LayerStats, Level
from hvd_adaptive.compressors.sparse import SparseCompressor
from hvd_adaptive.layers import Layer
from hvd_adaptive.wire.frame import HEADER_BYTES

_Key: TypeAlias = tuple[tuple[str, ...], Compressor, tuple[Level, ...]]


class MultiLevelPayloads:
    """The payloads of the running step, by the layers' names, compressor and levels.

    Memory: a float32 per element and level until the step has been sent.
    """

    def __init__(self) -> None:
        self._made: dict[_Key, PreparedPayload] = {}

    def compress(
        self,
        layers: Sequence[Layer],
        x: Sequence[Tensor],
        compressor: Compressor,
        chain: Sequence[tuple[Level, ...]],
        states: Mapping[Compressor, CodecState],
    ) -> Float64s | None:
        """Compress to the first levels, and each payload further to the next.

        Args:
            layers: of one bucket.
            x: what is to be compressed of each: float32, 1-D; not changed.
            compressor: of all of them.
            chain: a level for each layer, from the mildest compression to the strongest.
            states: what compressors have learned, by their ``state_key``.

        Returns:
            ``float64[len(chain), layers]``: squared L2 norm of what each payload decodes to. None where
            payloads cannot be compressed further, or a layer is not finite: nothing is kept then.
        """
        if not isinstance(compressor, SparseCompressor) or not chain:
            return None
        flat = torch.cat([each.view(-1) for each in x])
        offsets = np.cumsum([0, *(layer.numel for layer in layers)], dtype=np.int64)
        state = states.get(compressor.state_key)
        code, stats = compressor.compress_layers_(
            LayerBatch(flat, offsets, chain[0], reserve=HEADER_BYTES, state=state)
        )
        if stats.nonfinite.any():
            return None
        names, energy, sent = tuple(layer.name for layer in layers), stats.energy, [stats.sent]
        for levels, stronger in zip(chain, [*chain[1:], None], strict=True):
            rest = flat if stronger is None else flat.clone()
            made = LayerStats(energy, sent[-1], stats.nonfinite)
            self._made[names, compressor, levels] = PreparedPayload(code, rest, made)
            if stronger is not None:
                code, further = compressor.recompress_layers_(
                    code[HEADER_BYTES:], flat, offsets, stronger, HEADER_BYTES
                )
                sent.append(further.sent)
        return np.array(sent)

    def take(self, bucket: Bucket) -> PreparedPayload | None:
        """The payload of a bucket at its levels, if it was made."""
        if len(bucket.segments) != 1:
            return None
        segment = bucket.segments[0]
        names = tuple(layer.name for layer in bucket.layers)
        return self._made.pop((names, segment.compressor, segment.levels), None)

    def forget(self) -> None:
        """The step has been sent."""
        self._made.clear()
