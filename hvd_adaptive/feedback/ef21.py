"""EF21: ranks send what their estimates of the gradient lack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hvd_adaptive.buckets import Bucket
from hvd_adaptive.compressors import NoCompression
from hvd_adaptive.feedback.base import Feedback, FeedbackContext, FeedbackState, ReduceBuffer


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


class _Estimates(FeedbackState):
    """``-h`` in the place of a residual: with the gradient added it is what is to be compressed."""

    slots = ("estimate", "mean")
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

    def merge_ranks(self, bucket: Bucket, reduce: ReduceBuffer, fresh: bool) -> None:
        """``H`` becomes the mean of the estimates of the ranks that there are now."""
        estimate = self._flats["estimate", bucket.index]
        start, reduced = reduce(estimate)
        if fresh:
            estimate.copy_(start)
        self._flats["mean", bucket.index].copy_(reduced).neg_()

    def restore(self, bucket: Bucket, position: int, grad: Tensor, own: Tensor | None) -> None:
        """Take from ``h`` what was sent."""
        del grad
        if own is not None:
            self.views("estimate", bucket)[position].add_(own)
