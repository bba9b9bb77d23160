"""Velocities: momentum that a rank applies to its own gradients, before they are compressed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hvd_adaptive.compressors.checks import all_finite
from hvd_adaptive.feedback.base import LARGEST_MAGNITUDE

VELOCITY = "velocity"
"""The slot of a velocity ``u = momentum * u + gradient``."""


def check_momentum(rule: str, momentum: float) -> None:
    """ValueError if a rule cannot have this momentum."""
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"{rule}: momentum must lie in [0, 1), got {momentum}")


def advance(
    velocities: Sequence[Tensor], grads: Sequence[Tensor], momentum: float, factor: float = 1.0
) -> list[Tensor]:
    """Add gradients to velocities, in place.

    Args:
        velocities: 1-D float32, one per layer.
        grads: of the same layers.
        momentum: what velocities are multiplied with first.
        factor: what gradients are multiplied with.

    Returns:
        What is sent in the place of each gradient, 1-D float32: its velocity. A gradient that is not
        finite stands for itself, and its velocity stays.
    """
    sent: list[Tensor] = []
    for grad, velocity in zip(grads, velocities, strict=True):
        flat = grad.reshape(-1)
        if all_finite(flat):
            velocity.mul_(momentum).add_(flat, alpha=factor)
            if not all_finite(velocity):
                velocity.clamp_(-LARGEST_MAGNITUDE, LARGEST_MAGNITUDE)  # Inf would stay forever
            sent.append(velocity)
        else:
            sent.append(flat.float())
    return sent


def go_back(velocity: Tensor, grad: Tensor, momentum: float, factor: float = 1.0) -> None:
    """Undo what :func:`advance` did with a finite gradient, but for rounding."""
    if momentum:
        velocity.sub_(grad.reshape(-1), alpha=factor).div_(momentum)
    else:
        velocity.zero_()


def foreseen(velocity: Tensor, grad: Tensor, momentum: float, factor: float = 1.0) -> Tensor:
    """What :func:`advance` will make of a velocity; changes nothing."""
    return (momentum * velocity).add_(grad.reshape(-1), alpha=factor)
