"""Compile every kernel into Numba's cache: ``python -m hvd_adaptive.kernels.warm``.

Worth one line in a job script: without it each rank's first step compiles for some seconds.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from hvd_adaptive.kernels import cpu
from hvd_adaptive.wire import ValueFormat


def warm() -> float:
    """Call every kernel once on a few elements; returns the seconds that took."""
    start = time.perf_counter()
    x, out = torch.ones(64), torch.zeros(64)
    offsets, counts, how = np.array([0, 64]), np.array([4]), ValueFormat.fp32
    for whole in (False, True):
        body, _ = cpu.sparse_compress_(x, offsets, counts, how, [torch.ones(64)], whole=whole)
        cpu.sparse_decompress_add_(body, [out], 1.0, whole=whole)
        cpu.sparse_shrink_(body, x, offsets, counts, how, whole=whole)
    cpu.refined_spectrum(x, np.array([0]))
    for summary in (cpu.spectrum, cpu.sample_spectrum, cpu.summary, cpu.moments):
        summary(x)
    return time.perf_counter() - start


if __name__ == "__main__":
    print(f"hvd_adaptive kernels ready after {warm():.1f} s")
