"""float32 as bits: the numbers that all kernels agree on.

The bits of non-negative floats order as the floats do, and NaN and Inf are the largest. A *bin* is the
upper 16 of a magnitude's bits: exponent and 7 mantissa bits.
"""

from __future__ import annotations

import torch

BINS = 1 << 15
"""Bins of the spectrum: one for each exponent and upper 7 bits of the mantissa."""
MAGNITUDE = 0x7FFFFFFF
INF = 0x7F800000
LARGEST = float(torch.finfo(torch.float32).max)
CANCELLED = 2.0**-22
"""Up to this share of a gradient that was added and taken away again, what is left is rounding."""
