"""Rotation of layers in host memory, in Numba: chunk by chunk, in vectors of 16, without the GIL.

The distances below 16 are within a vector, which is loaded once for all of them; of the others two at a
time are done with four vectors. The additions are those of the butterflies one after the other, so the
bytes are those of the reference.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba import carray, int32, int64, uint32
from torch import Tensor

from hvd_adaptive.kernels.checks import check_rotated
from hvd_adaptive.kernels.cpu.compiling import kernel
from hvd_adaptive.kernels.cpu.intrinsics import (
    ROTATED,
    butterflies_across,
    butterflies_within,
    float32_pointer,
    float_bits,
)
from hvd_adaptive.kernels.cpu.rounding import key_halves, random_word
from hvd_adaptive.kernels.floats import INF, MAGNITUDE
from hvd_adaptive.kernels.rotation import CHUNK, LARGEST_BACK, LARGEST_ROTATED
from hvd_adaptive.rng import mix

LARGEST_BITS = int(np.float32(LARGEST_ROTATED).view(np.uint32))


@kernel
def _signs(key, signs):
    """The random signs of a chunk."""
    low, high = key_halves(key)
    for i in range(len(signs)):
        word = random_word(uint32(i), low, high)
        signs[i] = np.float32(1) - np.float32(int32(word >> uint32(31)) * 2)


@kernel
def _butterflies(buffer, n):
    """The n values in the buffer times the Hadamard matrix."""
    address = int64(buffer.ctypes.data)
    distance = 1
    if n >= ROTATED:
        for i in range(0, n, ROTATED):
            butterflies_within(address + 4 * i)
        distance = ROTATED
    while distance < n:
        if distance < ROTATED:
            for base in range(0, n, 2 * distance):
                for i in range(base, base + distance):
                    low, high = buffer[i], buffer[i + distance]
                    buffer[i], buffer[i + distance] = low + high, low - high
            distance *= 2
            continue
        for base in range(0, n, 4 * distance):
            for i in range(base, base + distance, ROTATED):
                butterflies_across(address + 4 * i, 4 * distance)
        distance *= 4


@kernel
def _factor(n):
    """1 / sqrt(n), exact for a power of four."""
    return np.float32(1) / np.sqrt(np.float32(n))


@kernel
def _largest(x, g, n):
    """The largest magnitude of x + g, as bits."""
    a = carray(float32_pointer(x), n)
    top = int32(0)
    if g == 0:
        for i in range(n):
            top = max(top, int32(float_bits(a[i]) & uint32(MAGNITUDE)))
        return int64(top)
    b = carray(float32_pointer(g), n)
    for i in range(n):
        top = max(top, int32(float_bits(a[i] + b[i]) & uint32(MAGNITUDE)))
    return int64(top)


@kernel
def _rotate_chunk(x, g, n, signs, buffer):
    """x = H signs (x + g) / sqrt(n)."""
    a = carray(float32_pointer(x), n)
    if g == 0:
        for i in range(n):
            buffer[i] = a[i] * signs[i]
    else:
        b = carray(float32_pointer(g), n)
        for i in range(n):
            buffer[i] = (a[i] + b[i]) * signs[i]
    _butterflies(buffer, n)
    factor = _factor(n)
    for i in range(n):
        a[i] = buffer[i] * factor


@kernel
def _rotate_chunk_back(x, out, n, signs, buffer):
    """x = signs H x / sqrt(n); or added to ``out``."""
    a = carray(float32_pointer(x), n)
    limit = np.float32(LARGEST_BACK)
    for i in range(n):
        value = limit if a[i] > limit else a[i]  # a NaN stays one
        buffer[i] = -limit if value < -limit else value
    _butterflies(buffer, n)
    factor = _factor(n)
    if out == 0:
        for i in range(n):
            a[i] = buffer[i] * factor * signs[i]
        return
    b = carray(float32_pointer(out), n)
    for i in range(n):
        b[i] += buffer[i] * factor * signs[i]


@kernel
def _rotate_layers(layers, grads, numels, signs, found, buffer):
    """See :func:`rotate_`."""
    for layer in range(len(layers)):
        x, g, n = layers[layer], grads[layer], numels[layer]
        top = _largest(x, g, n)
        found[layer] = 0 if top <= LARGEST_BITS else 2 if top < INF else 1
        start, size = int64(0), int64(CHUNK)
        while start < n and found[layer] == 0:
            if size > n - start:
                size >>= 2
                continue
            _rotate_chunk(x + 4 * start, g + 4 * start if g else 0, size, signs, buffer)
            start += size


@kernel
def _rotate_layers_back(layers, outs, numels, signs, buffer):
    """See :func:`rotate_back_`."""
    for layer in range(len(layers)):
        x, out, n = layers[layer], outs[layer], numels[layer]
        start, size = int64(0), int64(CHUNK)
        while start < n:
            if size > n - start:
                size >>= 2
                continue
            _rotate_chunk_back(x + 4 * start, out + 4 * start if out else 0, size, signs, buffer)
            start += size


class _Work(threading.local):
    """Buffers of one thread: signs and a chunk."""

    def __init__(self) -> None:
        self.signs, self.buffer = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)

    def with_signs(self, key: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        _signs(np.uint64(mix(key)), self.signs)
        return self.signs, self.buffer


_work = _Work()


def _addresses(layers: Sequence[Tensor], other: Sequence[Tensor] | None) -> npt.NDArray[np.int64]:
    """Of the layers, of what belongs to them (0 if there is none), and their numbers of elements."""
    rows = np.zeros((3, len(layers)), np.int64)
    rows[0] = [layer.data_ptr() for layer in layers]
    if other is not None:
        rows[1] = [each.data_ptr() for each in other]
    rows[2] = [layer.numel() for layer in layers]
    return rows


def rotate_(
    layers: Sequence[Tensor], key: int, grads: Sequence[Tensor] | None = None
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.RotationKernels.rotate_`. Releases the GIL."""
    check_rotated(layers, grads)
    found = np.zeros(len(layers), np.uint8)
    addresses, others, numels = _addresses(layers, grads)
    signs, buffer = _work.with_signs(key)
    _rotate_layers(addresses, others, numels, signs, found, buffer)
    return found


def rotate_back_(layers: Sequence[Tensor], key: int, outs: Sequence[Tensor] | None = None) -> None:
    """See :meth:`hvd_adaptive.kernels.base.RotationKernels.rotate_back_`. Releases the GIL."""
    check_rotated(layers, outs)
    addresses, others, numels = _addresses(layers, outs)
    signs, buffer = _work.with_signs(key)
    _rotate_layers_back(addresses, others, numels, signs, buffer)
