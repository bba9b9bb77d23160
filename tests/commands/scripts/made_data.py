"""Images that are made on the spot: each class is a pattern with noise."""

from __future__ import annotations

import torch
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset


def images(count: int, channels: int, size: int, classes: int, seed: int) -> TensorDataset:
    """``count`` images with their classes; the patterns are the same for every seed."""
    generator = torch.Generator().manual_seed(1)
    patterns = interpolate(torch.randn(classes, channels, 4, 4, generator=generator), size=(size, size))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    noise = torch.randn(count, channels, size, size, generator=generator)
    return TensorDataset(2 * patterns[labels] + noise, labels)
