"""What tests of schemes that compress twice share: layers, gradients, and where their mass is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from hvd_adaptive import VirtualRanks
from hvd_adaptive.comm.local_group import LocalRank, LocalTransport
from hvd_adaptive.comm.request import Request

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


class Recorder(LocalTransport):
    """Notes every operation, and the bytes that it puts on this rank's link and inside its node.

    Attributes:
        gathered: the frames that were gathered among all ranks or peers, by operation.
    """

    def __init__(self, rank: LocalRank) -> None:
        super().__init__(rank, hvd.Average)
        self.operations: list[str] = []
        self.payloads: list[int] = []
        self.sent = self.inside = 0.0
        self.gathered: list[Tensor] = []

    def submit(self, request: Request, name: str, step: int) -> Callable[[], Tensor]:
        self.operations.append(f"{request.operation} {name}")
        if request.group != "node":
            self.payloads.append(_nbytes(request.tensor))
        finish = super().submit(request, name, step)

        def wait() -> Tensor:
            result = finish()
            nbytes = self.traffic(request, _nbytes(result))
            if request.group == "node":
                self.inside += nbytes
            else:
                self.sent += nbytes
                if request.operation == "allgather":
                    self.gathered.append(result.clone())
            return result

        return wait


def _nbytes(tensor: Tensor) -> int:
    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes
