"""What is carried of layers whose rule no longer keeps anything."""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_adaptive.engine.feedback_states import FeedbackStates
from hvd_adaptive.feedback import RESIDUAL, FeedbackContext
from hvd_adaptive.layers import Layer

LAYER = Layer(0, "w", (2, 3))


def carrying(residual: Tensor, steps: int | None = None) -> FeedbackStates:
    context = FeedbackContext(lambda index: 0.1, lambda: 2)
    states = FeedbackStates(context, None if steps is None else lambda: steps)
    states.replace({LAYER.name: {RESIDUAL: residual.clone()}}, {})
    return states


def sent(states: FeedbackStates, finite: bool = True) -> Tensor:
    """What a step adds to a gradient of zeros."""
    grad = torch.zeros(LAYER.shape)
    states.add_carried([LAYER], [grad])
    result = grad if finite else torch.full(LAYER.shape, float("nan"))
    states.return_carried(lambda index: result)
    states.forget_step()
    return grad.view(-1)


def test_all_of_it_goes_with_the_next_gradient() -> None:
    residual = torch.arange(6.0)
    states = carrying(residual)
    assert torch.equal(sent(states), residual)
    assert not states.kept().get(LAYER.name)


def test_under_auto_it_goes_in_equal_parts_with_several() -> None:
    residual = 12 * torch.arange(6.0)
    states = carrying(residual, steps=4)
    parts = [sent(states) for _ in range(5)]
    assert all(torch.allclose(part, residual / 4) for part in parts[:4])
    assert not parts[4].any()
    assert not states.kept().get(LAYER.name)


def test_a_part_that_was_not_applied_is_sent_again() -> None:
    residual = 12 * torch.arange(6.0)
    states = carrying(residual, steps=4)
    sent(states, finite=False)
    assert torch.allclose(states.kept()[LAYER.name][RESIDUAL], residual)
    total = sum(sent(states) for _ in range(5))
    assert torch.allclose(torch.as_tensor(total), residual)
