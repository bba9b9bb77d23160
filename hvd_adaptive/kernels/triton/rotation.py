"""Rotation of layers on a GPU: a launch for each size of chunks.

:class:`hvd_adaptive.kernels.base.RotationKernels` says what each function does. Memory traffic, in
words of 4 bytes per element: 2 to find the largest, 3 to rotate; 2 or 3 to rotate back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.checks import check_rotated
from hvd_adaptive.kernels.rotation import CHUNK, chunks
from hvd_adaptive.kernels.triton.jit import rotation as jit
from hvd_adaptive.kernels.triton.launching import (
    TILE,
    gradient_code,
    key_words,
    launch,
    pointers,
    read_back,
    tiles_of,
    upload,
)
from hvd_adaptive.rng import mix

_ROWS = 4
"""Chunks of a program."""


def rotate_(
    layers: Sequence[Tensor], key: int, grads: Sequence[Tensor] | None = None
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.RotationKernels.rotate_`."""
    check_rotated(layers, grads, halves=True)
    if not layers:
        return np.zeros(0, np.uint8)
    device = layers[0].device
    numels = np.array([layer.numel() for layer in layers], np.int64)
    tiles = tiles_of(numels, TILE, device)
    tops = torch.zeros(len(layers), dtype=torch.int32, device=device)
    own, added = (upload(pointers(each, len(layers)), device) for each in (layers, grads))
    launch(
        *(jit.find_largest, (tiles.count,), device, own, added, upload(numels, device)),
        *(tiles.layers, tiles.first, tops),
        GRADS=gradient_code(grads),
        SIZE=TILE,
    )
    _launch(numels, own, added, tops, key, back=False, others_are=gradient_code(grads))
    largest = read_back(tops).view(np.float32)
    found = np.where(largest <= jit.LARGEST_ROTATED.value, 0, np.where(largest < np.inf, 2, 1))
    return found.astype(np.uint8)


def rotate_back_(layers: Sequence[Tensor], key: int, outs: Sequence[Tensor] | None = None) -> None:
    """See :meth:`hvd_adaptive.kernels.base.RotationKernels.rotate_back_`."""
    check_rotated(layers, outs)
    if not layers:
        return
    device = layers[0].device
    numels = np.array([layer.numel() for layer in layers], np.int64)
    own, added = (upload(pointers(each, len(layers)), device) for each in (layers, outs))
    _launch(numels, own, added, own, key, back=True, others_are=gradient_code(outs))


def _launch(
    numels: npt.NDArray[np.int64],
    own: Tensor,
    others: Tensor,
    tops: Tensor,
    key: int,
    *,
    back: bool,
    others_are: int,
) -> None:
    """All chunks of all layers, size by size."""
    device, size = own.device, CHUNK
    words = key_words(mix(key), device)
    places = [{size: (first, count) for first, size, count in chunks(n)} for n in numels.tolist()]
    while size:
        of_size = np.array([each.get(size, (0, 0)) for each in places], np.int64)
        tiles = tiles_of(of_size[:, 1], _ROWS, device)
        if tiles.count:
            launch(
                *(jit.rotate, (tiles.count,), device, own, others, tiles.layers, tiles.first),
                *(upload(of_size[:, 0], device), upload(of_size[:, 1], device), tops, words),
                BACK=back,
                OTHERS=others_are,
                ROWS=_ROWS,
                LOG=size.bit_length() - 1,
            )
        size //= 4
