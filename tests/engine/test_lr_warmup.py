"""Dense gradients until the learning rate stops rising."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_adaptive import VirtualRanks
from hvd_adaptive.comm.local_group import LocalTransport
from hvd_adaptive.config import read_lr_warmup

SHAPE = (64, 64)


def linear(steps: int) -> Callable[[int], float]:
    """Rises in every step up to one, stays for two steps, and falls."""
    return lambda step: 0.1 * min(step + 1, steps) / steps * (1.0 if step < steps + 2 else 0.5)


def by_epoch(steps: int) -> Callable[[int], float]:
    """Rises once in four steps."""
    return lambda step: 0.1 * min(step // 4 + 1, steps) / steps


class Run:
    """Some ranks, a model, and its learning rate."""

    def __init__(self, dense_steps: int | str, schedule: Callable[[int], float], **more: Any) -> None:
        self.model = nn.Linear(64, 64, bias=False)
        self.group: dict[str, Any] = {"params": list(self.model.parameters()), "lr": 0.0}
        self.schedule, self.step = schedule, 0
        self.ranks = VirtualRanks(
            2,
            self.model.named_parameters(),
            **{"compression": "topk:density=0.1", **more},
            dense_steps=dense_steps,
            param_groups=lambda: [self.group],
        )

    def advance(self) -> bool:
        """One step; whether it sent dense gradients."""
        self.group["lr"] = self.schedule(self.step)
        generator = torch.Generator().manual_seed(self.step)
        grads: list[dict[str, Tensor]] = [
            {"weight": torch.randn(SHAPE, generator=generator)} for _ in range(2)
        ]
        self.ranks.reduce(grads)  # type: ignore[arg-type]
        self.step += 1
        grad = self.model.weight.grad
        assert grad is not None
        return int(grad.count_nonzero()) == grad.numel()


@pytest.mark.parametrize(
    ("dense_steps", "schedule", "expected"),
    [
        # the fifth step's rate is the highest; the sixth is the first that does not rise
        ("lr_warmup", linear(5), 6),
        ("lr_warmup", lambda step: 0.1, 2),
        ("lr_warmup", lambda step: 0.1 / (step + 1), 2),
        # 3 epochs of 4 steps: the last rise is in step 8, and 4 steps without one end with step 12
        ("lr_warmup:4", by_epoch(3), 13),
        ("lr_warmup:3", by_epoch(3), 4),  # too little: an epoch has four
        (3, linear(5), 3),
    ],
)
def test_dense_steps_end_with_the_warm_up_of_the_rate(
    dense_steps: int | str, schedule: Callable[[int], float], expected: int
) -> None:
    run = Run(dense_steps, schedule)
    dense = [run.advance() for _ in range(expected + 4)]
    assert dense == [True] * expected + [False] * 4


def test_a_rate_that_rises_later_does_not_begin_it_again() -> None:
    run = Run("lr_warmup", lambda step: 0.1 if step < 4 else 0.2)
    assert [run.advance() for _ in range(8)] == [True] * 2 + [False] * 6


def test_a_rank_whose_rate_rises_alone_keeps_all_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks vote: none begins to compress before the others."""
    votes: list[list[float]] = []
    submit = LocalTransport.submit

    def watched(self: LocalTransport, request: Any, name: str, step: int) -> Any:
        if request.tensor.dtype == torch.float64:
            if self.rank == 1 and step < 5:
                request.tensor[1] = 1.0  # the second question
            votes.append(request.tensor.tolist())
        return submit(self, request, name, step)

    monkeypatch.setattr(LocalTransport, "submit", watched)
    run = Run("lr_warmup", lambda step: 0.1)
    assert [run.advance() for _ in range(9)] == [True] * 6 + [False] * 3
    assert votes[4][1] != votes[5][1]


@pytest.mark.parametrize("at", [1, 3, 6, 9])
def test_a_resumed_run_begins_to_compress_at_the_same_step(at: int) -> None:
    whole = Run("lr_warmup", linear(5), feedback="ef21")
    expected = [whole.advance() for _ in range(12)]
    first = Run("lr_warmup", linear(5), feedback="ef21")
    found = [first.advance() for _ in range(at)]
    second = Run("lr_warmup", linear(5), feedback="ef21")
    second.ranks.load_compression_state_dicts(copy.deepcopy(first.ranks.compression_state_dicts()))
    second.step = at
    found += [second.advance() for _ in range(12 - at)]
    assert found == expected
    mine, other = second.model.weight.grad, whole.model.weight.grad
    assert mine is not None
    assert other is not None
    assert torch.equal(mine, other)


@pytest.mark.parametrize("text", ["lr_warmup:", "lr_warmup:0", "lr_warmup:x", "lr_warmups", "warmup"])
def test_another_word_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write a whole number, 'lr_warmup', or 'lr_warmup:STEPS'"):
        read_lr_warmup(text)
