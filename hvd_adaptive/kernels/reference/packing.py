"""Codes packed at their true width, and back, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_adaptive.wire.quantized import TRIT_BYTES, TRITS


def in_rows(x: Tensor, size: int) -> Tensor:
    """``x`` in rows of ``size``, the last one filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % size)).view(-1, size)


def pack(codes: Tensor, bits: int, alphabet: int) -> Tensor:
    """The bytes of a layer's codes, int64 (see :mod:`hvd_adaptive.wire.quantized`).

    Example:
        >>> pack(torch.tensor([1, 2, 3]), bits=4, alphabet=16).tolist()
        [33, 3]
        >>> pack(torch.tensor([2, 1, 0, 0, 1, 2]), bits=2, alphabet=3).tolist()
        [86, 2]
    """
    if alphabet == 3:
        digits, weights = in_rows(codes, TRITS), [3**digit for digit in range(TRITS)]
    else:
        fields = (codes.unsqueeze(1) >> torch.arange(bits, device=codes.device)) & 1
        digits, weights = in_rows(fields.view(-1), 8), [1 << bit for bit in range(8)]
    return (digits * torch.tensor(weights, device=codes.device)).sum(1).to(torch.uint8)


def unpack(data: Tensor, bits: int, alphabet: int) -> Tensor:
    """All codes that fit into the bytes, int64; ``alphabet`` or more where there is none."""
    wide = data.long().unsqueeze(1)
    if alphabet == 3:
        digits = wide // torch.tensor([3**digit for digit in range(TRITS)], device=data.device) % 3
        return torch.where(wide < TRIT_BYTES, digits, 255).view(-1)
    stream = ((wide >> torch.arange(8, device=data.device)) & 1).view(-1)
    rows = stream[: stream.numel() // bits * bits].view(-1, bits)
    return (rows << torch.arange(bits, device=data.device)).sum(1)
