"""Checks of arguments that all backends share; each raises ValueError where something does not fit."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.floats import BINS
from hvd_adaptive.kernels.quantization import ReceivedBody
from hvd_adaptive.kernels.selection import SelectionRule
from hvd_adaptive.wire.quantized import Tables
from hvd_adaptive.wire.sparse import MAX_NUMEL

HALVES = (torch.float16, torch.bfloat16)
"""What gradients may be where a backend adds them as they are."""


def check_layers(
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    grads: Sequence[Tensor] | None,
    whole: bool = False,
    halves: bool = False,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """``offsets`` and ``counts`` as contiguous int64; ValueError where the input does not fit.

    ``halves``: whether gradients may be float16 or bfloat16, all of them.
    """
    offsets = np.ascontiguousarray(offsets, dtype=np.int64)
    counts = np.ascontiguousarray(counts, dtype=np.int64)
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"x is 1-D contiguous float32, got {_describe(x)}")
    if offsets.ndim != 1 or len(offsets) == 0 or len(counts) != (1 if whole else len(offsets) - 1):
        raise ValueError(
            f"L layers have L + 1 offsets and L counts (one if they are one vector), got "
            f"{offsets.shape} and {counts.shape}"
        )
    sizes = _checked_sizes(offsets.tobytes(), counts.tobytes(), whole, x.numel())
    if grads is not None:
        _check_grads(x, sizes, grads, halves)
    return offsets, counts


def check_cuts(
    offsets: npt.NDArray[np.int64], cuts: npt.NDArray[np.int64], whole: bool
) -> npt.NDArray[np.int64]:
    """``cuts`` as contiguous int64; ValueError unless they cut the layers, or their one vector."""
    cuts = np.ascontiguousarray(cuts, dtype=np.int64)
    ends = offsets[[0, -1]] if whole else offsets
    if cuts.ndim != 1 or (np.diff(cuts) <= 0).any() or not np.isin(ends, cuts).all():
        raise ValueError("cuts must rise, and hold all ends of what is selected from together")
    if len(cuts) and (cuts[0] != ends[0] or cuts[-1] != ends[-1]):
        raise ValueError(f"cuts go from {ends[0]} to {ends[-1]}, got {cuts[0]} to {cuts[-1]}")
    return cuts


@functools.lru_cache(maxsize=256)
def _checked_sizes(offsets: bytes, counts: bytes, whole: bool, numel: int) -> tuple[int, ...]:
    """The sizes of the layers of a tensor; ValueError if they do not fit it.

    Kept, because a bucket has the same ones at every step.
    """
    edges, wanted = (np.frombuffer(each, np.int64) for each in (offsets, counts))
    sizes = np.diff(edges)
    if edges[0] < 0 or edges[-1] > numel or sizes.min(initial=0) < 0:
        raise ValueError(f"offsets must rise from 0 to at most the {numel} elements of x")
    check_numel(int(edges[-1] - edges[0]) if whole else int(sizes.max(initial=0)))
    if wanted.min(initial=0) < 0:
        raise ValueError(f"counts must be 0 or more, got {wanted.min()}")
    return tuple(sizes.tolist())


def check_numel(numel: int) -> None:
    """ValueError if so many elements are too many to be one vector."""
    if numel > MAX_NUMEL:
        raise ValueError(
            f"a layer, or a model that is compressed as one vector, has at most {MAX_NUMEL} elements, "
            f"got {numel}: indices are 32-bit"
        )


def _check_grads(x: Tensor, sizes: Sequence[int], grads: Sequence[Tensor], halves: bool) -> None:
    if len(grads) != len(sizes):
        raise ValueError(f"got {len(grads)} gradients for {len(sizes)} layers")
    expected = _gradient_dtype(grads, halves)
    for layer, (grad, numel) in enumerate(zip(grads, sizes, strict=True)):
        if (
            grad.numel() != numel
            or grad.dtype != expected
            or not grad.is_contiguous()
            or grad.is_cpu != x.is_cpu
        ):
            raise ValueError(
                f"the gradient of layer {layer} must be {numel} contiguous "
                f"{str(expected).removeprefix('torch.')} on {x.device}, got {_describe(grad)}"
            )


def _gradient_dtype(grads: Sequence[Tensor], halves: bool) -> torch.dtype:
    """The dtype that all gradients must have: that of the first, if kernels can read it."""
    if halves and grads and grads[0].dtype in HALVES:
        return grads[0].dtype
    return torch.float32


def check_thresholds(
    rule: SelectionRule, thresholds: npt.NDArray[np.float32] | None, layers: int
) -> npt.NDArray[np.int64]:
    """The thresholds as bits, at least 1 so that no zero reaches them."""
    if (thresholds is not None) != (rule == SelectionRule.threshold):
        raise ValueError(f"thresholds belong to SelectionRule.threshold and to no other, got {rule!r}")
    if thresholds is None:
        return np.ones(layers, np.int64)
    thresholds = np.ascontiguousarray(thresholds, dtype=np.float32)
    if thresholds.shape != (layers,) or not (thresholds >= 0).all():
        raise ValueError(f"expected {layers} thresholds of 0 or more, got {thresholds}")
    bits: npt.NDArray[np.int64] = np.maximum(np.abs(thresholds).view(np.int32), 1).astype(np.int64)
    return bits


def check_outs(body: Tensor, outs: Sequence[Tensor], whole: bool = False) -> list[int]:
    """The numbers of elements of the tensors that a body is added to; ValueError where one is unfit."""
    check_bytes(body)
    for out in outs:
        if out.dtype != torch.float32 or not out.is_contiguous() or out.is_cpu != body.is_cpu:
            raise ValueError(
                f"values are added to contiguous float32 tensors on {body.device}, got {_describe(out)}"
            )
    numels = [out.numel() for out in outs]
    check_numel(sum(numels) if whole else max(numels, default=0))
    return numels


def check_bodies(bodies: Sequence[Tensor]) -> Sequence[Tensor]:
    """ValueError where there is nothing to sum."""
    if not bodies:
        raise ValueError("there is no body to sum: each rank sends one")
    return bodies


def check_received(
    bodies: Sequence[ReceivedBody],
    offsets: npt.NDArray[np.int64],
    x: Tensor | None,
    before: Tensor | None,
) -> None:
    """ValueError where there is nothing to sum, or what is added cannot be kept."""
    if not bodies:
        raise ValueError("there is no body to sum: each rank sends one")
    for body in bodies:
        check_bytes(body.data)
    if x is None:
        return
    if before is None or before.dtype != torch.float32 or before.shape != x.shape:
        raise ValueError("before is float32 with as many elements as x: it receives what x held")
    if not before.is_contiguous() or x.is_cpu != bodies[0].data.is_cpu:
        raise ValueError(f"bodies, x and before lie on one device, contiguous; x is {_describe(x)}")


def check_body(body: Tensor, x: Tensor) -> None:
    """ValueError unless ``body`` is bytes on the device of ``x``."""
    check_bytes(body)
    if body.is_cpu != x.is_cpu:
        raise ValueError(f"a body must be on the device of x, {x.device}, got {_describe(body)}")


def check_bytes(body: Tensor) -> None:
    if body.dtype != torch.uint8 or body.dim() != 1 or not body.is_contiguous():
        raise ValueError(f"a body is 1-D contiguous uint8, got {_describe(body)}")


def check_bins(bins: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """``bins`` as int64; ValueError unless they are different bins of a spectrum."""
    bins = np.ascontiguousarray(bins, dtype=np.int64)
    if bins.ndim != 1 or len(np.unique(bins)) != len(bins) or ((bins < 0) | (bins >= BINS)).any():
        raise ValueError(f"expected different bins from 0 to {BINS - 1}, got {bins}")
    return bins


def check_spectrum(x: Tensor) -> None:
    """ValueError unless ``x`` is contiguous float32."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"the spectrum is that of a contiguous float32 tensor, got {_describe(x)}")


def check_measured(x: Tensor) -> None:
    """ValueError unless ``x`` is 1-D contiguous float32."""
    if x.dtype != torch.float32 or x.ndim != 1 or not x.is_contiguous():
        raise ValueError(f"what is measured must be 1-D contiguous float32, got {_describe(x)}")


def check_counts(x: Tensor, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """``counts`` as int64; ValueError unless each is 0 or more and ``x`` is contiguous float32."""
    check_spectrum(x)
    counts = np.ascontiguousarray(counts, dtype=np.int64)
    if counts.ndim != 1 or counts.min(initial=0) < 0:
        raise ValueError(f"expected a row of counts, each 0 or more, got {counts}")
    return counts


def check_rotated(
    layers: Sequence[Tensor], others: Sequence[Tensor] | None, halves: bool = False
) -> None:
    """ValueError unless all are contiguous float32, and ``others`` are of the layers' sizes.

    ``halves``: whether ``others`` may be float16 or bfloat16, all of them.
    """
    of_others = _gradient_dtype(others or (), halves)
    expected = [torch.float32] * len(layers) + [of_others] * len(others or ())
    for each, dtype in zip((*layers, *(others or ())), expected, strict=True):
        if each.dtype != dtype or not each.is_contiguous():
            raise ValueError(f"layers that are rotated are contiguous float32, got {_describe(each)}")
    sizes = [layer.numel() for layer in layers]
    if others is not None and [other.numel() for other in others] != sizes:
        raise ValueError(f"layers of {sizes} elements do not fit {[o.numel() for o in others]}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}, stride {tensor.stride()} on {tensor.device}"


def check_bits(bits: npt.NDArray[np.int64], tables: Tables) -> None:
    """ValueError unless there is a table for every layer's bits."""
    without = {*bits.tolist()} - tables.magnitudes.keys()
    if without:
        known = ", ".join(str(bits) for bits in tables.magnitudes)
        raise ValueError(f"there are no levels for {min(without)} bits per value, but for {known}")


def check_keys(keys: npt.NDArray[np.uint64] | None, layers: int) -> npt.NDArray[np.uint64]:
    """Keys or dithers as contiguous uint64, 0 if there are none; ValueError unless one per layer."""
    if keys is None:
        return np.zeros(layers, np.uint64)
    if keys.shape != (layers,) or keys.dtype != np.uint64:
        raise ValueError(f"{layers} layers have as many uint64 keys, got {keys.dtype}{keys.shape}")
    return np.ascontiguousarray(keys)
