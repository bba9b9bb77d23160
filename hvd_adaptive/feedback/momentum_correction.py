"""Momentum correction: Deep Gradient Compression's momentum before compression."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hvd_adaptive.buckets import Bucket
from hvd_adaptive.compressors.checks import all_finite
from hvd_adaptive.feedback.base import (
    RESIDUAL,
    Feedback,
    FeedbackContext,
    FeedbackState,
    ResidualState,
)
from hvd_adaptive.feedback.velocity import VELOCITY, advance, check_momentum, foreseen, go_back


@dataclass(frozen=True)
class MomentumCorrection(Feedback):
    """Momentum is applied before compression, to the local gradient: Deep Gradient Compression.

    ``u = momentum * u + g; v = v + u``; the top of ``v`` is sent; where an element was sent, ``u`` and
    ``v`` become 0. The wrapped optimizer must then have no momentum of its own. Layers that are not
    compressed send ``u`` whole. Memory: two float32 per gradient element. Source: Lin et al., "Deep
    Gradient Compression" (ICLR 2018), sections 3.1 to 3.3.

    Args:
        momentum: factor of the velocity ``u``, in [0, 1).
        masking: clear ``u`` where an element was sent (momentum factor masking), so that stale
            momentum does not carry weights in the wrong direction.
        clip: clip the norm of each rank's whole gradient at ``clip / sqrt(ranks)`` before it is
            added; 0 does not. Clipping waits for all gradients, so nothing is sent during the
            backward pass.

    Raises:
        ValueError: a momentum outside [0, 1), or a negative clip.
    """

    momentum: float = 0.9
    masking: bool = True
    clip: float = 0.0

    name = "dgc"
    for_dense = True
    in_warmup = True
    needs_selection = True

    def __post_init__(self) -> None:
        check_momentum(self.name, self.momentum)
        if not 0.0 <= self.clip < math.inf:
            raise ValueError(f"dgc: clip is the largest norm of a gradient, or 0, got {self.clip}")

    @property
    def needs_all(self) -> bool:
        """The norm of the whole gradient does."""
        return self.clip > 0.0

    def new_state(self, context: FeedbackContext) -> FeedbackState:
        """Residuals and velocities."""
        return _Velocities(self, context)


class _Velocities(ResidualState):
    """``v`` in the place of the residual, ``u`` in that of the gradient."""

    slots = (RESIDUAL, VELOCITY)
    needs_gradient_after_commit = True

    def __init__(self, rule: MomentumCorrection, context: FeedbackContext) -> None:
        super().__init__(context)
        self._rule = rule
        self._factor = 1.0

    def observe_all(self, grads: Mapping[int, Tensor]) -> None:
        """Find the factor that clips the whole gradient; one that is not finite is not clipped."""
        if not self._rule.clip:
            return
        squares = sum(float(grad.double().square().sum()) for grad in grads.values())
        limit = self._rule.clip / math.sqrt(self._context.ranks())
        norm = math.sqrt(squares) if math.isfinite(squares) else 0.0
        self._factor = min(1.0, limit / norm) if norm > 0.0 else 1.0

    def begin(
        self, bucket: Bucket, grads: Sequence[Tensor], step: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """``v``, and the velocities; a gradient that is not finite stands for itself."""
        del step
        velocities = self.views(VELOCITY, bucket)
        adds = advance(velocities, grads, self._rule.momentum, self._factor)
        return self._flats[RESIDUAL, bucket.index], adds

    def preview(self, bucket: Bucket, grads: Sequence[Tensor]) -> list[Tensor]:
        """``v`` and the velocities to come."""
        held = zip(self.views(RESIDUAL, bucket), self.views(VELOCITY, bucket), grads, strict=True)
        return [v + foreseen(u, grad, self._rule.momentum, self._factor) for v, u, grad in held]

    def clear_sent(
        self, bucket: Bucket, clear: Callable[[Sequence[Tensor]], None], good: Sequence[bool]
    ) -> None:
        """Factor masking; layers that are to be restored are left alone."""
        if self._rule.masking:
            views = self.views(VELOCITY, bucket)
            clear([v if fine else v.clone() for v, fine in zip(views, good, strict=True)])

    def restore(self, bucket: Bucket, position: int, grad: Tensor, own: Tensor | None) -> None:
        """``v = remainder + sent - u``, then ``u = (u - g) / momentum``."""
        if not all_finite(grad):
            return  # nothing was done on this rank
        velocity = self.views(VELOCITY, bucket)[position]
        if own is not None:
            self.views(RESIDUAL, bucket)[position].add_(own).sub_(velocity)
        go_back(velocity, grad, self._rule.momentum, self._factor)
