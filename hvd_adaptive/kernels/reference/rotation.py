"""Rotation of layers in plain torch: all chunks of a size at a time.

:class:`hvd_adaptive.kernels.base.RotationKernels` says what each function does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.checks import check_rotated
from hvd_adaptive.kernels.reference.quantized import words
from hvd_adaptive.kernels.rotation import CHUNK, LARGEST_BACK, LARGEST_ROTATED, chunks
from hvd_adaptive.rng import mix


def signs(key: int, device: torch.device | None = None) -> Tensor:
    """The random signs of a chunk, float32.

    Example:
        >>> signs(key=1)[:6].tolist()
        [1.0, 1.0, 1.0, -1.0, 1.0, 1.0]
    """
    # mixed once more than the keys of rounding are: one key may serve both
    return 1.0 - 2.0 * (words(CHUNK, mix(key), device) >> 31).float()


def _butterflies(rows: Tensor) -> Tensor:
    """Each row times the Hadamard matrix, over the square root of its length."""
    length = rows.shape[1]
    distance = 1
    while distance < length:
        pairs = rows.reshape(-1, length // (2 * distance), 2, distance)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack([low + high, low - high], 2).reshape(-1, length)
        distance *= 2
    return rows.mul(length**-0.5)


def rotate_(
    layers: Sequence[Tensor], key: int, grads: Sequence[Tensor] | None = None
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.RotationKernels.rotate_`.

    Example:
        >>> x = torch.tensor([8.0, 2.0, 1.0, 1.0, 3.0])
        >>> rotate_([x], key=1).tolist(), x.tolist()
        ([0], [5.0, 4.0, 5.0, 2.0, 3.0])
        >>> rotate_back_([x], key=1)
        >>> x.tolist()
        [8.0, 2.0, 1.0, 1.0, 3.0]
    """
    check_rotated(layers, grads, halves=True)
    found = np.zeros(len(layers), np.uint8)
    for index, layer in enumerate(layers):
        x = layer.view(-1)
        total = x if grads is None else x + grads[index].view(-1)
        top = float(total.abs().max()) if x.numel() else 0.0
        found[index] = 0 if top <= LARGEST_ROTATED else 2 if top < torch.inf else 1
        if found[index]:
            continue
        random = signs(key, x.device)
        for start, size, count in chunks(x.numel()):
            rows = total[start : start + size * count].view(count, size)
            x[start : start + size * count] = _butterflies(rows * random[:size]).view(-1)
    return found


def rotate_back_(layers: Sequence[Tensor], key: int, outs: Sequence[Tensor] | None = None) -> None:
    """See :meth:`hvd_adaptive.kernels.base.RotationKernels.rotate_back_`."""
    check_rotated(layers, outs)
    for index, layer in enumerate(layers):
        x = layer.view(-1)
        random = signs(key, x.device)
        for start, size, count in chunks(x.numel()):
            part = slice(start, start + size * count)
            rows = x[part].view(count, size).clamp(-LARGEST_BACK, LARGEST_BACK)
            back = (_butterflies(rows) * random[:size]).view(-1)
            if outs is None:
                x[part] = back
            else:
                outs[index].view(-1)[part] += back
