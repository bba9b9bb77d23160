"""What tests of schemes that compress twice share: layers, gradients, and where their mass is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hvd_adaptive import VirtualRanks

SHAPES = {"wide": (96, 128), "tall": (3000, 4), "table": (40, 50), "bias": (64,)}
OVERRIDES = {"*": "topk:density=0.05,values=fp32"}

Sums: TypeAlias = dict[str, Tensor]


class Layers(nn.Module):
    def __init__(self, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def gradients(
    rank: int, step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randn(shape, generator=generator).pow(3) for name, shape in shapes.items()}


def everyone(size: int, step: int) -> list[dict[str, Tensor]]:
    return [gradients(rank, step) for rank in range(size)]


def waiting(states: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    """All ranks' gradient mass of one layer that has not reached the weights, float64."""
    numel = torch.Size(SHAPES[name]).numel()
    total = torch.zeros(numel, dtype=torch.float64)
    for state in states:
        total += state["kept"][name]["residual"].double() if "residual" in state["kept"][name] else 0.0
        for start, piece in state["owned"].get(name, ()):
            total[start : start + piece.numel()] += piece
    return total


def train(ranks: VirtualRanks, model: nn.Module, size: int) -> tuple[Sums, Sums]:
    """Some steps: by layer, the sum of all gradients, and that of what steps, times the ranks."""
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    summed, applied = zeros, {name: each.clone() for name, each in zeros.items()}
    for step in range(5):
        everything = everyone(size, step)
        for name in SHAPES:
            summed[name] += torch.stack([each[name].double() for each in everything]).sum(0)
        ranks.reduce(everything)
        for name in SHAPES:
            applied[name] += size * getattr(model, name).grad.double()
    return summed, applied
