"""The work on elements: one call a bucket. Every module here has the same functions.

``cpu`` (Numba) for tensors in host memory, ``reference`` (plain torch, any device) for everything
else and as the oracle in tests: the two give the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.reference import SelectionRule
from hvd_adaptive.wire import ValueFormat

__all__ = ["Kernels", "SelectionRule", "for_device", "rounding_for"]


class Kernels(Protocol):
    """What a kernel module offers; ``reference`` documents each function."""

    def sparse_compress_(
        self,
        x: Tensor,
        offsets: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        values: ValueFormat,
        grads: Sequence[Tensor] | None = None,
        reserve: int = 0,
        spectra: npt.NDArray[np.int64] | None = None,
        rule: SelectionRule = SelectionRule.topk,
        thresholds: npt.NDArray[np.float32] | None = None,
        whole: bool = False,
    ) -> tuple[Tensor, npt.NDArray[np.float64]]:
        """Extract and encode the largest elements of each layer."""

    def sparse_decompress_add_(
        self,
        body: Tensor,
        outs: Sequence[Tensor],
        scale: float,
        values: ValueFormat | None = None,
        whole: bool = False,
    ) -> npt.NDArray[np.uint8]:
        """Add what a body holds."""

    def sparse_decompress_sum_(
        self,
        bodies: Sequence[Tensor],
        outs: Sequence[Tensor],
        scale: float,
        values: ValueFormat | None = None,
        whole: bool = False,
    ) -> npt.NDArray[np.uint8]:
        """Set to the sum of what bodies hold."""

    def sparse_clear_(
        self,
        body: Tensor,
        outs: Sequence[Tensor],
        values: ValueFormat | None = None,
        whole: bool = False,
    ) -> None:
        """Set to 0 where a body holds something."""

    def sparse_recompress_(
        self,
        body: Tensor,
        x: Tensor,
        offsets: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        values: ValueFormat,
        reserve: int = 0,
        rule: SelectionRule = SelectionRule.topk,
        thresholds: npt.NDArray[np.float32] | None = None,
        whole: bool = False,
    ) -> tuple[Tensor, npt.NDArray[np.float64]]:
        """Compress a body further."""

    def spectrum(self, x: Tensor) -> npt.NDArray[np.int64]:
        """Histogram of magnitudes."""

    def sample_spectrum(self, x: Tensor) -> npt.NDArray[np.int64]:
        """Histogram of a sample."""

    def refined_spectrum(self, x: Tensor, bins: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Histograms inside some of its bins."""

    def summary(self, x: Tensor) -> tuple[npt.NDArray[np.int64], float, float, float]:
        """Histogram of magnitudes, their sum, that of their squares, and the largest."""

    def moments(self, x: Tensor) -> npt.NDArray[np.float64]:
        """Histogram of signs and magnitudes, with sums of magnitudes and squares."""

    def position_bits(self, x: Tensor, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Bits that the positions of the largest elements take, for many counts at once."""

    def errors_from_spectrum(
        self,
        hist: npt.NDArray[np.int64],
        energy: float,
        numel: int,
        counts: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.float64]:
        """Squared error of top-k for many k at once."""


def for_device(device: torch.device) -> Kernels:
    """The kernels for tensors on ``device``."""
    return _of_type(device.type)


@functools.cache
def _of_type(device: str) -> Kernels:
    if device == "cpu":
        from hvd_adaptive.kernels import cpu

        return cast(Kernels, cpu)
    from hvd_adaptive.kernels import reference

    return cast(Kernels, reference)


def rounding_for(device: torch.device) -> ModuleType:
    """The kernels that round, for tensors on ``device``; ``quantize_reference`` documents each."""
    if device.type == "cpu":
        from hvd_adaptive.kernels import quantize

        return quantize
    from hvd_adaptive.kernels import quantize_reference

    return quantize_reference
