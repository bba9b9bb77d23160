"""Controllers of one rank or of several in one process."""

from __future__ import annotations

import torch

from hvd_adaptive.adaptation.controller import AdaptationController
from hvd_adaptive.comm.local_group import LocalGroup, LocalRank
from hvd_adaptive.compressors import parse
from hvd_adaptive.layers import Layer
from hvd_adaptive.planning import parse as parse_recipe
from hvd_adaptive.telemetry import Meter

LAYERS = (Layer(0, "wide", (64, 32)), Layer(1, "tall", (400, 4)))


def controllers(recipe: str, ranks: int = 1) -> list[AdaptationController]:
    """One per rank, which plan for :data:`LAYERS`."""
    own = parse("topk:density=0.05")

    def make(rank: LocalRank) -> AdaptationController:
        channel = rank.channel("test.plan")
        made = AdaptationController(
            parse_recipe(recipe), channel, Meter(), rank.rank, rank.size, (parse("qsgd:bits=4"),)
        )
        made.attach(
            [(layer, own, "allgather") for layer in LAYERS], {"wide": 0, "tall": 1}, 100.0, False
        )
        return made

    return LocalGroup(ranks).run(make)


def gradient(layer: Layer, step: int, rank: int = 0) -> torch.Tensor:
    """Layers of different spectra; noise of each step and rank."""
    noise = torch.randn(layer.numel, generator=torch.Generator().manual_seed(100 * step + rank))
    return noise.sign() * noise.abs() ** (1 + layer.index)
