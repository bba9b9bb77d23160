"""Decompression of a bucket's layers: adding one body, clearing where it is, summing several."""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba import carray, int64
from torch import Tensor

from hvd_adaptive.kernels.checks import check_bodies, check_body, check_outs
from hvd_adaptive.kernels.cpu.compiling import kernel
from hvd_adaptive.kernels.cpu.enums import TRAILING
from hvd_adaptive.kernels.cpu.intrinsics import (
    fence,
    float32_pointer,
    load_f32,
    load_u32,
    store_f32,
    stream,
)
from hvd_adaptive.kernels.cpu.layers import (
    add_layer,
    damage_error,
    decode_layer,
    most_values,
    scatter_values,
)
from hvd_adaptive.kernels.cpu.memory import KEPT, STREAMED, TILE, thread_buffers
from hvd_adaptive.wire import ValueFormat


@kernel
def _apply_layers(start, size, outs, numels, whole, clear, scale, expected, marks, decoded):
    """Decode all layers into the outputs; returns (damage, layer, byte position)."""
    indices, values = decoded
    position, end = start, start + size
    coded = 1 if whole else len(outs)
    for layer in range(coded):
        first, last = (0, len(outs)) if whole else (layer, layer + 1)
        n = int64(numels[first:last].sum())
        if whole or clear:
            damage, position, count = decode_layer(position, end, n, expected, indices, values)
        else:
            out = outs[layer]
            damage, position, count = add_layer(position, end, out, n, scale, expected, indices, values)
        if damage:
            return damage, layer, position - start
        before, i = int64(0), int64(0)
        for out in range(first, last):
            marks[out] = count < 0
            if count < 0 and not clear:
                carray(float32_pointer(outs[out]), numels[out])[:] = np.float32(np.nan)
            i = scatter_values(outs[out], numels[out], before, i, count, scale, clear, indices, values)
            before += numels[out]
    if position != end:
        return TRAILING, coded - 1, position - start
    return 0, 0, 0


def _apply(
    body: Tensor,
    outs: Sequence[Tensor],
    scale: float,
    values: ValueFormat | None,
    whole: bool,
    clear: bool,
) -> npt.NDArray[np.uint8]:
    """Decode a body into the outputs, or clear them where it holds a value; returns the marks."""
    numels = np.array(check_outs(body, outs, whole), np.int64)
    addresses = np.array([out.data_ptr() for out in outs], np.int64)
    marks = np.zeros(len(outs), np.uint8)
    start, size = body.data_ptr(), body.numel()
    spans = numels.sum(keepdims=True) if whole else numels
    expected = -1 if values is None else int(values)
    damage, layer, position = _apply_layers(
        start,
        size,
        addresses,
        numels,
        whole,
        clear,
        np.float32(scale),
        expected,
        marks,
        thread_buffers.decoded(most_values(start, start + size, spans, expected)),
    )
    if damage:
        raise damage_error(damage, layer, spans, position, size)
    return marks


def decompress_add_(
    body: Tensor,
    outs: Sequence[Tensor],
    scale: float,
    values: ValueFormat | None = None,
    whole: bool = False,
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.decompress_add_`. Releases the GIL."""
    return _apply(body, outs, scale, values, whole, clear=False)


def clear_(
    body: Tensor, outs: Sequence[Tensor], values: ValueFormat | None = None, whole: bool = False
) -> None:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.clear_`. Releases the GIL."""
    _apply(body, outs, 0.0, values, whole, clear=True)


@kernel
def write_zeros(out, n):
    """Write n zeros."""
    target = carray(float32_pointer(out), n)
    for i in range(n):
        target[i] = np.float32(0)


@kernel
def _add_until(end, out, indices, values, i, count, scale):
    """Add the values from number i on whose indices are below ``end``; returns the next number.

    Addresses all: what Numba does to slice an array costs as much as adding ten values.
    """
    while i < count:
        index = int64(load_u32(indices + 4 * i))
        if index >= end:
            break
        store_f32(out + 4 * index, load_f32(out + 4 * index) + scale * load_f32(values + 4 * i))
        i += 1
    return i


@kernel
def add_all_until(end, out, decoded, counts, places, scale):
    """The same for all bodies; ``places``: the next value of each, moved on."""
    indices, values = decoded
    where, what, row = int64(indices.ctypes.data), int64(values.ctypes.data), 4 * indices.shape[1]
    for body in range(len(counts)):
        skip = body * row
        places[body] = _add_until(
            end, out, where + skip, what + skip, places[body], counts[body], scale
        )


@kernel
def _sum_output(out, n, first, fresh, scale, decoded, counts, places, block):
    """Sum what the bodies hold in [first, first + n).

    A small output is summed in its place; a large one that held nothing before in a block in the
    cache, from which it is written past the cache.
    """
    end = first + n
    if not fresh or 4 * n < STREAMED or out % 32 != 0:
        if fresh:
            write_zeros(out, n)
        add_all_until(end, out - 4 * first, decoded, counts, places, scale)
        return
    here = int64(block.ctypes.data)
    for start in range(0, n, TILE):
        size = min(TILE, n - start)
        write_zeros(here, size)
        begin = first + start
        add_all_until(begin + size, here - 4 * begin, decoded, counts, places, scale)
        whole = size & ~7
        for i in range(0, whole, 8):
            stream(here + 4 * i, out + 4 * (start + i))
        for i in range(whole, size):
            store_f32(out + 4 * (start + i), load_f32(here + 4 * i))


@kernel
def decode_bodies(starts, ends, n, expected, decoded, firsts, counts):
    """Decode a layer of all bodies into their rows, from ``firsts`` on, and move their starts on.

    Returns (damage, body, its address, whether some body marks the layer as nonfinite).
    """
    indices, values = decoded
    nonfinite = False
    for body in range(len(starts)):
        first = firsts[body]
        damage, starts[body], count = decode_layer(
            starts[body], ends[body], n, expected, indices[body, first:], values[body, first:]
        )
        if damage:
            return damage, body, starts[body], nonfinite
        nonfinite |= count < 0
        counts[body] = max(count, 0)
    return 0, 0, 0, nonfinite


@kernel
def find_trailing(starts, ends):
    """The first body of which something is left; -1 if there is none."""
    for body in range(len(starts)):
        if starts[body] != ends[body]:
            return body
    return -1


@kernel
def _sum_layers(
    starts, ends, outs, numels, whole, fresh, scale, expected, marks, decoded, counts, places, block
):
    """Sum all bodies, layer by layer; returns (damage, body, layer, its address)."""
    coded = 1 if whole else len(outs)
    none = np.zeros(len(starts), np.int64)
    for layer in range(coded):
        first, last = (0, len(outs)) if whole else (layer, layer + 1)
        n = int64(numels[first:last].sum())
        damage, body, position, nonfinite = decode_bodies(
            starts, ends, n, expected, decoded, none, counts
        )
        if damage:
            return damage, body, layer, position
        places[:] = 0
        before = int64(0)
        for out in range(first, last):
            if nonfinite:
                marks[out] = 1
                carray(float32_pointer(outs[out]), numels[out])[:] = np.float32(np.nan)
            else:
                _sum_output(
                    outs[out], numels[out], before, fresh, scale, decoded, counts, places, block
                )
            before += numels[out]
    fence()
    body = find_trailing(starts, ends)
    return (TRAILING, body, coded - 1, starts[body]) if body >= 0 else (0, 0, 0, 0)


def decompress_sum_(
    bodies: Sequence[Tensor],
    outs: Sequence[Tensor],
    scale: float,
    values: ValueFormat | None = None,
    whole: bool = False,
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.decompress_sum_`. Releases the GIL.

    Cost: some ns per value, and writing the outputs once for as many bodies as hold 2^22 values in
        their
    largest layer, or for two. Memory: 8 bytes for each of these values, of which a thread keeps up to
    32 MiB.
    """
    numels = np.array(check_outs(check_bodies(bodies)[0], outs, whole), np.int64)
    addresses = np.array([out.data_ptr() for out in outs], np.int64)
    marks = np.zeros(len(outs), np.uint8)
    for body in bodies[1:]:
        check_body(body, bodies[0])
    spans = numels.sum(keepdims=True) if whole else numels
    expected = -1 if values is None else int(values)
    edges = np.array([(body.data_ptr(), body.data_ptr() + body.numel()) for body in bodies], np.int64)
    most = max(1, *(most_values(start, end, spans, expected) for start, end in edges))
    together = min(len(bodies), max(2, KEPT // most))
    indices, decoded = (
        each[: together * most].reshape(together, most)
        for each in thread_buffers.decoded(together * most)
    )
    for first in range(0, len(bodies), together):
        starts, ends = edges[first : first + together].T.copy()
        counts, places = np.empty((2, len(starts)), np.int64)
        damage, which, layer, position = _sum_layers(
            starts.copy(),
            ends,
            addresses,
            numels,
            whole,
            first == 0,
            np.float32(scale),
            expected,
            marks,
            (indices, decoded),
            counts,
            places,
            thread_buffers.block,
        )
        if damage:
            begin, size = int(starts[which]), int(ends[which] - starts[which])
            raise damage_error(damage, layer, spans, position - begin, size)
    return marks
