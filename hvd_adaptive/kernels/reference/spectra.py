"""Histograms of magnitudes and sums over them, in plain torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.checks import check_bins, check_spectrum
from hvd_adaptive.kernels.floats import BINS, MAGNITUDE
from hvd_adaptive.kernels.selection import LARGE, SAMPLE, STRIDES


def magnitude_bits(x: Tensor) -> Tensor:
    """The bits of |x| as int32: they order as the magnitudes do, NaN and Inf above everything."""
    return x.view(torch.int32) & MAGNITUDE


def energy_of(x: Tensor) -> float:
    return float(x.double().square().sum())


def spectrum(x: Tensor) -> npt.NDArray[np.int64]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.spectrum`.

    Example:
        >>> import torch
        >>> hist = spectrum(torch.tensor([0.0, 1.0, -1.0, float("inf")]))
        >>> hist[0], hist[127 << 7], hist[0x7F80:].sum()
        (np.int64(1), np.int64(2), np.int64(1))
    """
    check_spectrum(x)
    bins = torch.bincount(magnitude_bits(x.view(-1)) >> 16, minlength=BINS)
    return bins.cpu().numpy()


def sample_spectrum(x: Tensor) -> npt.NDArray[np.int64]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.sample_spectrum`.

    Example:
        >>> import torch
        >>> int(sample_spectrum(torch.ones(1000)).sum())
        80
    """
    check_spectrum(x)
    stride = SAMPLE * STRIDES[x.numel() >= LARGE]
    starts = torch.arange(0, max(0, x.numel() - SAMPLE), stride, device=x.device)
    places = starts.unsqueeze(1) + torch.arange(SAMPLE, device=x.device)
    return spectrum(x.view(-1)[places])


def refined_spectrum(x: Tensor, bins: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.refined_spectrum`.

    Example:
        >>> import numpy as np, torch
        >>> fine = refined_spectrum(torch.tensor([1.0, -1.0, 1.0 + 2**-23, 2.0]), np.array([127 << 7]))
        >>> fine.shape, fine[0, :2].tolist()
        ((1, 65536), [2, 1])
    """
    check_spectrum(x)
    magnitudes = magnitude_bits(x.view(-1))
    fine = np.zeros((len(bins), 1 << 16), np.int32)
    for row, b in enumerate(check_bins(bins).tolist()):
        inside = magnitudes[magnitudes >> 16 == b] & 0xFFFF
        fine[row] = torch.bincount(inside, minlength=1 << 16).cpu().numpy()
    return fine


def summary(x: Tensor) -> tuple[npt.NDArray[np.int64], float, float, float]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.summary`.

    Example:
        >>> import torch
        >>> hist, *norms = summary(torch.tensor([3.0, -4.0]))
        >>> int(hist.sum()), norms
        (2, [7.0, 25.0, 4.0])
    """
    largest = float(x.abs().max()) if x.numel() else 0.0
    return spectrum(x), float(x.double().abs().sum()), energy_of(x), largest


def moments(x: Tensor) -> npt.NDArray[np.float64]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.moments`.

    Example:
        >>> import torch
        >>> moments(torch.tensor([1.0, -1.0, -1.0]))[:, 127 << 7].tolist()
        [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    """
    check_spectrum(x)
    flat = x.view(-1)
    rows = (magnitude_bits(flat) >> 16).long() + BINS * (flat.view(torch.int32) < 0)
    magnitudes = flat.double().abs()
    columns = [
        torch.bincount(rows, weights=weights, minlength=2 * BINS)
        for weights in (torch.ones_like(magnitudes), magnitudes, magnitudes.square())
    ]
    sums: npt.NDArray[np.float64] = torch.stack(columns, dim=1).view(2, BINS, 3).cpu().numpy()
    return sums
