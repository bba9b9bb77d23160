"""Histograms of magnitudes and sums over them, by atomic additions in device memory.

:class:`hvd_adaptive.kernels.base.SparseKernels` says what each function does. The host waits for each.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.checks import check_bins, check_spectrum
from hvd_adaptive.kernels.floats import BINS
from hvd_adaptive.kernels.selection import LARGE, SAMPLE, STRIDES
from hvd_adaptive.kernels.triton.jit import spectra as jit
from hvd_adaptive.kernels.triton.launching import COPIES, launch, read_back, upload

_SIZE = 4096
"""Elements of a program."""


def spectrum(x: Tensor) -> npt.NDArray[np.int64]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.spectrum`."""
    check_spectrum(x)
    return _counted(x, x.numel(), 0, 0)


def sample_spectrum(x: Tensor) -> npt.NDArray[np.int64]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.sample_spectrum`."""
    check_spectrum(x)
    stride = SAMPLE * STRIDES[x.numel() >= LARGE]
    groups = -(-max(0, x.numel() - SAMPLE) // stride)
    return _counted(x, groups * SAMPLE, SAMPLE, stride)


def _counted(x: Tensor, numel: int, group: int, stride: int) -> npt.NDArray[np.int64]:
    """The spectrum of all elements, or of groups that begin ``stride`` apart."""
    counts = torch.zeros((COPIES, BINS), dtype=torch.int32, device=x.device)
    launch(
        *(jit.count_bins, (-(-numel // _SIZE),), x.device, x, numel, counts),
        GROUP=group,
        STRIDE=stride,
        COPIES=COPIES,
        SIZE=_SIZE,
    )
    return read_back(counts.sum(0, dtype=torch.int64))


def refined_spectrum(x: Tensor, bins: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.refined_spectrum`."""
    check_spectrum(x)
    bins = check_bins(bins)
    rows = np.full(BINS, -1, np.int32)
    rows[bins] = np.arange(len(bins))
    counts = torch.zeros((len(bins), 1 << 16), dtype=torch.int32, device=x.device)
    launch(
        *(jit.refine_bins, (-(-x.numel() // _SIZE),), x.device, x, x.numel()),
        *(upload(rows, x.device), counts),
        SIZE=_SIZE,
    )
    return read_back(counts)


def summary(x: Tensor) -> tuple[npt.NDArray[np.int64], float, float, float]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.summary`."""
    check_spectrum(x)
    programs = -(-x.numel() // _SIZE)
    counts = torch.zeros((COPIES, BINS), dtype=torch.int32, device=x.device)
    sums = torch.zeros((programs, 3), dtype=torch.float64, device=x.device)
    launch(
        *(jit.summarize, (programs,), x.device, x, x.numel(), counts, sums),
        COPIES=COPIES,
        SIZE=_SIZE,
    )
    largest = sums[:, 2].amax() if programs else sums.sum()
    found = read_back(torch.cat([counts.sum(0).double(), sums[:, :2].sum(0), largest.view(1)]))
    total, energy, top = found[BINS:].tolist()
    return found[:BINS].astype(np.int64), total, energy, top


def moments(x: Tensor) -> npt.NDArray[np.float64]:
    """See :meth:`hvd_adaptive.kernels.base.SparseKernels.moments`."""
    check_spectrum(x)
    sums = torch.zeros((COPIES, 2, BINS, 3), dtype=torch.float64, device=x.device)
    launch(
        *(jit.sum_bins, (-(-x.numel() // _SIZE),), x.device, x, x.numel(), sums),
        COPIES=COPIES,
        SIZE=_SIZE,
    )
    return read_back(sums.sum(0))
