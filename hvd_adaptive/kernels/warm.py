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
    offsets, counts = np.array([0, 64]), np.array([4])
    body, _ = cpu.topk_compress_(x, offsets, counts, ValueFormat.fp32, [torch.ones(64)])
    cpu.sparse_decompress_add_(body, [out], 1.0)
    cpu.spectrum(x)
    return time.perf_counter() - start


if __name__ == "__main__":
    print(f"hvd_adaptive kernels ready after {warm():.1f} s")
