"""No feedback: what was left out is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvd_adaptive.buckets import Bucket
from hvd_adaptive.feedback.base import Feedback, FeedbackContext, FeedbackState


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """What was left out is dropped. Memory: one float32 buffer for each bucket that is coded."""

    name = "none"
    keeps = False

    def new_state(self, context: FeedbackContext) -> FeedbackState:
        """Scratch space only."""
        return _Scratch(context)


class _Scratch(FeedbackState):
    """Buffers that are cleared at each use, made on demand: buckets that are only summed need none."""

    slots = ()
    previews_exactly = True

    def begin(
        self, bucket: Bucket, grads: Sequence[Tensor], step: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Zeros, and the gradients."""
        del step
        flat = self._flats.get(("", bucket.index))
        if flat is None:
            flat = torch.zeros(bucket.numel, dtype=torch.float32, device=bucket.device)
            self._flats["", bucket.index] = flat
        return flat.zero_(), grads
