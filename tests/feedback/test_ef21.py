"""What momentum before compression does for EF21, where gradients are noisy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hvd_adaptive import VirtualRanks

SIDE, RANKS = 64, 4


class Point(nn.Module):
    """What is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(SIDE, SIDE))


def distance_kept(feedback: str, momentum: float, seed: int) -> float:
    """How far from the minimum of ``|x|^2 / 2`` descent stays, of what it began with.

    Each rank's gradient has noise of variance 1. Of the mean of 4 ranks, dense descent with a
    momentum of 0.9 keeps the root of ``0.05 / 2 / 4``: 0.08.
    """
    generator = torch.Generator().manual_seed(seed)
    point = Point()
    ranks = VirtualRanks(
        RANKS, point.named_parameters(), "topk:density=0.02,values=fp32", feedback=feedback
    )
    x = torch.randn(SIDE, SIDE, generator=generator)
    start, velocity, later = float(x.norm()), torch.zeros_like(x), []
    for step in range(500):
        ranks.reduce([{"x": x + torch.randn(x.shape, generator=generator)} for _ in range(RANKS)])
        assert point.x.grad is not None
        velocity = momentum * velocity + point.x.grad
        x = x - 0.005 * velocity
        if step >= 400:
            later.append(float(x.norm()) / start)
    return sum(later) / len(later)


@pytest.mark.parametrize("seed", [1, 2])
def test_momentum_before_compression_keeps_noise_out_of_ef21(seed: int) -> None:
    plain = distance_kept("ef21", 0.9, seed)
    before = distance_kept("ef21-sgdm:momentum=0.9", 0.0, seed)
    assert before < 0.4 * plain
    assert before < 0.16
