"""EF21: ranks send what their estimates of the gradient, or of its momentum, lack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hvd_adaptive.buckets import Bucket
from hvd_adaptive.compressors import NoCompression
from hvd_adaptive.compressors.checks import all_finite
from hvd_adaptive.feedback.base import Feedback, FeedbackContext, FeedbackState, ReduceBuffer
from hvd_adaptive.feedback.velocity import VELOCITY, advance, check_momentum, foreseen, go_back


@dataclass(frozen=True)
class EF21(Feedback):
    """Every rank keeps an estimate of its gradient and sends what the estimate lacks.

    Rank m sends ``c = C(g - h)`` and adds it to its estimate ``h``; all step with the mean of the
    estimates, ``H``. Estimates start from the last gradient of the dense warm-up (from 0 without one).
    Memory: two float32 per gradient element. For biased compressors; converges without bounded
    gradients. Source: Richtarik, Sokolov and Fatkhullin, "EF21" (NeurIPS 2021), algorithm 1, layer by
    layer as in Kimad (Xin et al., 2023).
    """

    name = "ef21"
    in_warmup = True
    estimates = True

    def new_state(self, context: FeedbackContext) -> FeedbackState:
        """Estimates and their mean."""
        return _Estimates(context)


@dataclass(frozen=True)
class EF21SGDM(Feedback):
    """EF21 of velocities: estimates follow each rank's momentum, which has less noise than gradients.

    Rank m adds its gradient to a velocity, ``u = momentum * u + g``, sends ``c = C(u - h)``, and adds
    ``c`` to its estimate ``h``; all step with the mean of the estimates. Where gradients are of small
    batches, EF21 spends what it sends on their noise, and does not converge to less than that; this
    does. The wrapped optimizer must have no momentum of its own (Adam: ``betas[0] = 0``), and keeps
    the learning rate that it had with momentum. Layers that are not compressed send ``u`` whole.
    Memory: three float32 per gradient element. Source: Fatkhullin, Tyurin and Richtarik, "Momentum
    Provably Improves Error Feedback!" (NeurIPS 2023), algorithm 1, whose velocity is
    ``(1 - momentum) * u``.

    Args:
        momentum: factor of the velocity, in [0, 1).

    Raises:
        ValueError: a momentum outside [0, 1).

    Example:
        >>> EF21SGDM().momentum
        0.9
    """

    momentum: float = 0.9

    name = "ef21-sgdm"
    for_dense = True
    in_warmup = True
    estimates = True

    def __post_init__(self) -> None:
        check_momentum(self.name, self.momentum)

    def new_state(self, context: FeedbackContext) -> FeedbackState:
        """Estimates, their mean, and velocities."""
        return _EstimatesOfVelocities(self, context)


class _Estimates(FeedbackState):
    """``-h`` in the place of a residual: with the gradient added it is what is to be compressed."""

    slots: ClassVar[tuple[str, ...]] = ("estimate", "mean")
    shared = ("mean",)
    needs_gradient_after_commit = True

    def begin(
        self, bucket: Bucket, grads: Sequence[Tensor], step: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """``-h``, and the gradients. A bucket that is sent whole starts from 0: that is exact."""
        del step
        estimate = self._flats["estimate", bucket.index]
        if all(isinstance(segment.compressor, NoCompression) for segment in bucket.segments):
            estimate.zero_()
            self._flats["mean", bucket.index].zero_()
        return estimate, grads

    def commit(
        self, bucket: Bucket, x: Tensor, grads: Sequence[Tensor], good: Sequence[bool], step: int
    ) -> None:
        """The remainder is ``g - h - c``: less ``g`` it is ``-(h + c)``."""
        del x, step
        for view, grad, fine in zip(self.views("estimate", bucket), grads, good, strict=True):
            if fine:
                view.sub_(grad.reshape(-1))

    def finish(self, bucket: Bucket, outs: Sequence[Tensor], good: Sequence[bool]) -> None:
        """``H`` grows by what was sent, and is what all step with."""
        for view, out, fine in zip(self.views("mean", bucket), outs, good, strict=True):
            if fine:
                out.copy_(view.add_(out.view(-1)).view_as(out))

    def merge_ranks(self, bucket: Bucket, reduce: ReduceBuffer, fresh: bool) -> dict[str, Tensor]:
        """``H`` becomes the mean of the estimates of the ranks that there are now."""
        found = super().merge_ranks(bucket, reduce, fresh)
        self._flats["mean", bucket.index].copy_(found["estimate"]).neg_()
        return found

    def restore(self, bucket: Bucket, position: int, grad: Tensor, own: Tensor | None) -> None:
        """Take from ``h`` what was sent."""
        del grad
        if own is not None:
            self.views("estimate", bucket)[position].add_(own)


class _EstimatesOfVelocities(_Estimates):
    """``u`` in the place of the gradient."""

    slots = (*_Estimates.slots, VELOCITY)

    def __init__(self, rule: EF21SGDM, context: FeedbackContext) -> None:
        super().__init__(context)
        self._momentum = rule.momentum

    def begin(
        self, bucket: Bucket, grads: Sequence[Tensor], step: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """``-h``, and the velocities; a gradient that is not finite stands for itself."""
        return super().begin(bucket, advance(self.views(VELOCITY, bucket), grads, self._momentum), step)

    def preview(self, bucket: Bucket, grads: Sequence[Tensor]) -> list[Tensor]:
        """What estimates lack of the velocities to come."""
        held = zip(self.views("estimate", bucket), self.views(VELOCITY, bucket), grads, strict=True)
        return [estimate + foreseen(u, grad, self._momentum) for estimate, u, grad in held]

    def commit(
        self, bucket: Bucket, x: Tensor, grads: Sequence[Tensor], good: Sequence[bool], step: int
    ) -> None:
        """As EF21 with the velocities."""
        super().commit(bucket, x, self.views(VELOCITY, bucket), good, step)

    def restore(self, bucket: Bucket, position: int, grad: Tensor, own: Tensor | None) -> None:
        """Take from ``h`` what was sent, and the gradient from ``u``."""
        super().restore(bucket, position, grad, own)
        if all_finite(grad):
            go_back(self.views(VELOCITY, bucket)[position], grad, self._momentum)
