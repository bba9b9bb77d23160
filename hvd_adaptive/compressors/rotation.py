"""Layers that are rotated before a compressor sees them, and rotated back after it decoded them.

Rounding has the least variance where a block's values are alike, so that its largest magnitude is near
the others: a random rotation spreads each large value evenly over its chunk. It is orthonormal, so the
error of a layer is that of the rotated one, and what is unbiased stays so. What is sent is described in
:mod:`hvd_adaptive.wire.quantized`; all of it is about bodies of one bucket.

Cost: about five memcpys of the tensor to add the gradient and rotate, two to rotate back the remainder,
three to add a decoded sum, however many bodies it is of. Memory: a copy of the layers while they are
decoded. Source: Suresh, Yu, Kumar and McMahan, "Distributed Mean Estimation with Limited Communication"
(ICML 2017), section 3; compare Vargaftik et al., "EDEN" (ICML 2022).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.compressors.base import LayerBatch, LayerStats
from hvd_adaptive.kernels import for_device
from hvd_adaptive.kernels.checks import check_bytes
from hvd_adaptive.kernels.rotation import LARGEST_ROTATED
from hvd_adaptive.wire import quantized as wire

Compress: TypeAlias = Callable[[LayerBatch], tuple[Tensor, LayerStats]]
Total: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor], float], npt.NDArray[np.bool_]]

_NOT_FINITE, _TOO_LARGE = 1, 2
_MOST = torch.finfo(torch.float32).max


def compress_layers_(batch: LayerBatch, compress: Compress) -> tuple[Tensor, LayerStats]:
    """What ``compress`` makes of the rotated layers; leaves the remainder, which is rotated back.

    Layers that are not finite keep their ``x`` bit for bit. Magnitudes above
    :data:`~hvd_adaptive.kernels.rotation.LARGEST_ROTATED` saturate; the remainder has the rest.
    """
    x, key, reserve = batch.x, batch.rotation, batch.reserve
    kernels = for_device(x.device).rotation
    views = [x[start:end] for start, end in _edges(batch)]
    found = kernels.rotate_(views, key, batch.grads)
    kept = {i: views[i].clone() for i in np.flatnonzero(found == _NOT_FINITE).tolist()}
    excess = {
        i: _saturate_(views[i], None if batch.grads is None else batch.grads[i])
        for i in np.flatnonzero(found == _TOO_LARGE).tolist()
    }
    energies = {i: float((views[i].double() + rest).square().sum()) for i, rest in excess.items()}
    for i in kept:
        views[i].fill_(torch.nan)  # whatever it was that is not finite, the layer is marked
    kernels.rotate_([views[i] for i in excess], key)

    body, stats = compress(replace(batch, grads=None, reserve=reserve + wire.ROTATION_BYTES))
    front = torch.frombuffer(bytearray(wire.write_rotation(key)), dtype=torch.uint8)
    body[reserve : reserve + wire.ROTATION_BYTES] = front
    kernels.rotate_back_(views, key)

    for i, held in kept.items():
        views[i].copy_(held)
    for i, rest in excess.items():
        views[i].add_(rest).clamp_(-_MOST, _MOST)
        stats.energy[i] = energies[i]
    return body, stats


def rotated(x: Tensor, key: int) -> tuple[Tensor, float]:
    """A rotated copy of a layer, and the squared norm of what saturates in it; NaN if not finite."""
    copy = x.clone()
    kernels = for_device(x.device).rotation
    (found,) = kernels.rotate_([copy], key).tolist()
    if found == _NOT_FINITE:
        return copy, float("nan")
    if found != _TOO_LARGE:
        return copy, 0.0
    beyond = _saturate_(copy, None)
    kernels.rotate_([copy], key)
    return copy, float(beyond.double().square().sum())


def decompress_layers_sum_(
    bodies: Sequence[Tensor], outs: Sequence[Tensor], scale: float, total: Total
) -> npt.NDArray[np.bool_]:
    """Add the layers of all bodies to ``outs``: ``total`` sums those of a key, which are then rotated.

    Raises:
        WireError: a body has no key, or ``total`` finds damage.
    """
    by_key: dict[int, list[Tensor]] = {}
    for body in bodies:
        check_bytes(body)
        size = min(body.numel(), wire.ROTATION_BYTES)
        key = wire.read_rotation(bytes(body[:size].tolist()), body.numel())
        by_key.setdefault(key, []).append(body[size:])
    marks = np.zeros(len(outs), np.bool_)
    for key, rest in by_key.items():
        sums = [torch.empty_like(out) for out in outs]
        marks |= total(rest, sums, scale)
        kernels = for_device(bodies[0].device).rotation
        kernels.rotate_back_(sums, key, outs)
    return marks


def _edges(batch: LayerBatch) -> list[tuple[int, int]]:
    return list(itertools.pairwise(np.asarray(batch.offsets).tolist()))


def _saturate_(x: Tensor, grad: Tensor | None) -> Tensor:
    """Add the gradient to ``x``, clamp the sum to what can be rotated, and return what that took."""
    total = x if grad is None else x + grad.view(-1)
    inside = total.clamp(-LARGEST_ROTATED, LARGEST_ROTATED)
    beyond = total - inside
    x.copy_(inside)
    return beyond
