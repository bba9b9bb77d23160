"""The vote of each step: where it travels, and that it is heard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_adaptive import VirtualRanks
from hvd_adaptive.comm.local_group import LocalTransport

VOTES = 7
"""Questions in each step."""


def model_of(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))


def gradients(model: nn.Module, seed: int) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Tensor]]:
    """Names of rank 0's operations, and what it sends, from now on."""
    sent: list[tuple[str, Tensor]] = []
    submit = LocalTransport.submit

    def watched(self: LocalTransport, request: Any, name: str, step: int) -> Any:
        if self.rank == 0:
            sent.append((name, request.tensor.clone()))
        return submit(self, request, name, step)

    monkeypatch.setattr(LocalTransport, "submit", watched)
    return sent


@pytest.mark.parametrize(
    ("compression", "layers", "ranks", "along"),
    [
        ("none", 2, 2, True),
        ("fp16", 2, 31, True),
        ("fp16", 2, 32, False),  # sums of halves may then be off by one rank
        ("none", 2, 32, True),
        ("none", 1, 2, False),  # a gradient is sent where it is: there is no room behind it
        ("bf16", 2, 2, False),  # which is no allreduce
        ("topk:density=0.1", 2, 2, False),
        ("powersgd:rank=2", 2, 2, False),
    ],
)
def test_a_vote_goes_along_with_what_is_summed_as_it_is(
    monkeypatch: pytest.MonkeyPatch, compression: str, layers: int, ranks: int, along: bool
) -> None:
    model = model_of(layers)
    virtual = VirtualRanks(ranks, model.named_parameters(), compression)
    sent = watch(monkeypatch)
    for step in range(3):
        sent.clear()
        virtual.reduce([gradients(model, ranks * step + rank) for rank in range(ranks)])
        votes = [name for name, _ in sent if name.endswith(".vote")]
        assert len(votes) == (0 if along else 1), sent
        if along:
            ((_, tensor),) = sent
            assert tensor.numel() == layers * 64 * 64 + VOTES
        expected = [gradients(model, ranks * step + rank) for rank in range(ranks)]
        if compression == "none":
            for name, parameter in model.named_parameters():
                mean = torch.stack([row[name] for row in expected]).mean(dim=0)  # type: ignore[misc]
                torch.testing.assert_close(parameter.grad, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("spoiled", [float("nan"), float("inf"), 1e30])
def test_what_gradients_hold_does_not_touch_a_vote(compression: str, spoiled: float) -> None:
    """An overflow in one rank's gradients is everyone's, and no answer to any question."""
    model = model_of(2)
    virtual = VirtualRanks(2, model.named_parameters(), compression)
    versions = []
    for step in range(4):
        grads = [gradients(model, 2 * step + rank) for rank in range(2)]
        if step == 1:
            last = grads[1]["0.weight"]
            assert last is not None
            last.fill_(spoiled)
        virtual.reduce(grads)
        versions.append(virtual.plan.version)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()
    assert len(set(versions)) == 1  # ranks had nothing to agree on after the first step
