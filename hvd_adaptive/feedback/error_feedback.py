"""Error feedback: what was left out is added to the next gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvd_adaptive import rng
from hvd_adaptive.buckets import Bucket
from hvd_adaptive.feedback.base import (
    LARGEST_MAGNITUDE,
    RESIDUAL,
    Feedback,
    FeedbackContext,
    FeedbackState,
    LayerStates,
    ResidualState,
    split,
)
from hvd_adaptive.kernels import for_device
from hvd_adaptive.kernels.floats import CANCELLED


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """What was left out is added to the next gradient.

    Memory: one residual per gradient element, of 4 or 2 bytes; with 2, also a float32 copy of the
    largest bucket. Source: Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014);
    Karimireddy et al., "Error Feedback Fixes SignSGD" (ICML 2019).

    Args:
        decay: what the residual is multiplied with before the gradient is added: 1 keeps all of it,
            less forgets old gradients.
        dtype: ``fp32``, or ``bf16`` for half the memory. A bf16 residual is rounded at random, so that
            small gradients are added up in expectation instead of being rounded away.
        lr_correction: multiply the residual by the ratio of the last learning rate to this one, so
            that an old gradient counts with the rate of its own step. A rate below a 10,000th of the
            last counts as 0, at which nothing is corrected.

    Raises:
        ValueError: a decay outside (0, 1], or another dtype.
    """

    decay: float = 1.0
    dtype: str = "fp32"
    lr_correction: bool = False

    name = "ef"
    hosts_others = True

    def __post_init__(self) -> None:
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(
                f"ef: decay must lie in (0, 1], got {self.decay}: 1 keeps the residual whole"
            )
        if self.dtype not in _DTYPES:
            raise ValueError(f"ef: dtype={self.dtype!r} is not one of {', '.join(_DTYPES)}")

    def new_state(self, context: FeedbackContext) -> FeedbackState:
        """Residuals."""
        return _Residuals(self, context)


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_LARGEST_RATIO = 1e4
"""A learning rate that falls further within one step counts as 0: nearly nothing is applied at it."""


def _scale_(x: Tensor, factor: float) -> None:
    """Multiply; what would come near the end of float32 saturates, and is not Inf forever after."""
    x.mul_(factor)
    if factor > 1.0:
        x.clamp_(-LARGEST_MAGNITUDE, LARGEST_MAGNITUDE)


class _Residuals(ResidualState):
    """The residuals of error feedback."""

    def __init__(self, rule: ErrorFeedback, context: FeedbackContext) -> None:
        super().__init__(context, _DTYPES[rule.dtype])
        self._rule = rule
        self._spare: Tensor | None = None
        self._lent: dict[int, Tensor] = {}

    @property
    def previews_exactly(self) -> bool:
        """Where the residual is added as it is."""
        return self._rule.decay == 1.0 and not self._rule.lr_correction

    def attach(self, buckets: Sequence[Bucket], kept: LayerStates) -> None:
        """As of the others; the float32 copy is made again, for the largest of these buckets."""
        super().attach(buckets, kept)
        self._spare = None
        self._lent.clear()

    def begin(
        self, bucket: Bucket, grads: Sequence[Tensor], step: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The residual itself (a float32 copy of it where it is kept in bf16), and the gradients."""
        del step
        kept = self._flats[RESIDUAL, bucket.index]
        x = kept if kept.dtype == torch.float32 else self._widened(kept, bucket)
        if self._rule.decay != 1.0:
            x.mul_(self._rule.decay)
        if self._rule.lr_correction:
            for layer, view in zip(bucket.layers, split(x, bucket.layers), strict=True):
                now = self._context.rate(layer.index)
                before = self._context.rates.get(layer.name, now)
                # at a rate of 0, or next to it, nothing is applied, and nothing is to be corrected
                if now > before / _LARGEST_RATIO:
                    _scale_(view, before / now)
                    self._context.rates[layer.name] = now
        return x, grads

    def commit(
        self, bucket: Bucket, x: Tensor, grads: Sequence[Tensor], good: Sequence[bool], step: int
    ) -> None:
        """Round what is kept in bf16; float32 was changed in place."""
        del grads, good
        kept = self._flats[RESIDUAL, bucket.index]
        if kept.dtype == torch.bfloat16:
            context = self._context
            (key,) = rng.layer_keys(context.seed, context.rank, step, [-1 - bucket.index])
            for_device(x.device).quantized.round_at_random_(kept, x, int(key))
            self._spare = self._lent.pop(bucket.index, self._spare)

    def _widened(self, kept: Tensor, bucket: Bucket) -> Tensor:
        """A float32 copy, in memory that one bucket leaves to the next.

        Fresh memory costs a page fault for every 4 KiB. Where several buckets are under way at once,
        the others get some: kept, it would be more than bf16 saves.
        """
        spare, self._spare = self._spare, None
        if spare is None or spare.device != kept.device:
            largest = max(each.numel for each in self._buckets if each.device == bucket.device)
            spare = torch.empty(largest, device=kept.device)
        self._lent[bucket.index] = spare
        return spare[: bucket.numel].copy_(kept)

    def restore(self, bucket: Bucket, position: int, grad: Tensor, own: Tensor | None) -> None:
        """Remainder + what was sent - gradient; what that leaves of rounding alone becomes 0."""
        if own is None:
            return
        kept = self.views(RESIDUAL, bucket)[position]
        total = kept.float() + own
        back = total - grad
        back[back.abs() <= CANCELLED * grad.abs()] = 0.0
        kept.copy_(back)
