"""Quantizers, rules and tensors that tests of quantization share."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from hvd_adaptive.compressors.learned import ALQ, AMQ
from hvd_adaptive.compressors.quantized import Quantizer
from hvd_adaptive.compressors.quantizers import (
    NUQSGD,
    QSGD,
    Natural,
    OneBit,
    QSGDInf,
    SignSGD,
    TernGrad,
)
from hvd_adaptive.wire.quantized import Norm, QuantizationRule, Rounding, Tables

MEMBERS: list[Quantizer] = [
    QSGD(),
    QSGD(coding="huffman", block=100),
    QSGDInf(),
    NUQSGD(),
    Natural(),
    TernGrad(),
    TernGrad(clip=1.5, block=333, coding="huffman"),
    SignSGD(),
    OneBit(block=77),
    ALQ(),
    ALQ(coding="fixed", norm="max", start="uniform"),
    ALQ(coding="fixed", zero="true"),
    AMQ(),
    AMQ(norm="max", coding="fixed"),
]
RANDOM = [member for member in MEMBERS if not member.biased]
ALL = pytest.mark.parametrize("member", MEMBERS, ids=repr)
UNBIASED = pytest.mark.parametrize("member", RANDOM, ids=repr)
SIZES = (0, 1, 2, 511, 512, 513)
LARGE = (65535, 65536, 65537)
KEY = 0x123456789ABCDEF0
ONE_KEY = np.array([KEY], np.uint64)
RULES = [
    *(
        QuantizationRule(norm, rounding, block=block, clip=2.5)
        for norm in (Norm.l2, Norm.max, Norm.power, Norm.clipped)
        for rounding in (Rounding.uniform, Rounding.powers, Rounding.table)
        for block in ((512, 100) if norm is Norm.l2 else (512,))
    ),
    QuantizationRule(Norm.mean, Rounding.sign),
    QuantizationRule(Norm.sides, Rounding.sign, block=7),
]


def widths_of(rule: QuantizationRule) -> list[int]:
    return [1] if rule.rounding is Rounding.sign else list(range(1, 9))


def tables_of(rule: QuantizationRule, seed: int = 0) -> Tables:
    """The rule's levels, or random ones, with zero and without."""
    if not rule.carried:
        return rule.tables
    rng = np.random.default_rng(seed)
    magnitudes = {}
    for width in range(1, 9):
        count = 1 << (width - 1)
        magnitudes[width] = np.append(np.sort(rng.choice(2**20, count - 1, replace=False)) / 2**20, 1)
        if width > 1 and rng.random() < 0.5:
            magnitudes[width][0] = 0
    return Tables(magnitudes)


def compress(
    kernels: ModuleType, x: npt.NDArray[np.float32], width: int, rule: QuantizationRule, tables: Tables
) -> tuple[Tensor, Tensor, npt.NDArray[np.float64]]:
    """One layer: (body, remainder, stats)."""
    rest = torch.from_numpy(x.copy())
    body, stats = kernels.compress_(
        rest, np.array([0, x.size]), np.array([width]), rule, tables, keys=ONE_KEY
    )
    return body, rest, stats[0]


def sent(member: Quantizer, body: Tensor, numel: int) -> npt.NDArray[np.float64]:
    out = torch.zeros(numel)
    member.decompress_layers_add_(body, [out], 1.0)
    return out.double().numpy()


def gradient(numel: int, seed: int = 0) -> Tensor:
    """Heavier tails than normal, in blocks of different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).pow(2)
    return x * (1 + torch.arange(numel) // 512)


HUFFMAN = [
    QSGD(coding="huffman"),
    QSGDInf(coding="huffman"),
    NUQSGD(coding="huffman"),
    Natural(coding="huffman"),
    TernGrad(coding="huffman"),
    ALQ(zero="true"),  # else it would depend on the coding
    AMQ(),
    ALQ(zero="true", norm="l2"),
]
