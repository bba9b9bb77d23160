"""Gradients as an optimizer scales them: divided by the root of its second moment."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hvd_adaptive.layers import Layer


class SecondMoment(NamedTuple):
    """What Adam and its kin divide a layer's gradient by the root of.

    Args:
        average: float32, 1-D: decaying mean of the squares of the gradients so far.
        decay: share of it that is kept in a step (``beta2``).
        eps: added to the root.
    """

    average: Tensor
    decay: float
    eps: float

    def precondition(self, x: Tensor) -> Tensor:
        """``x`` over the root that it would be divided by if it were the next gradient.

        Its own square is part of that, as in the optimizer's step: elements that had no gradient so far
        are not divided by ``eps`` alone. Cost: some passes and two float32 per element for the time.

        Args:
            x: float32, 1-D.

        Example:
            >>> import torch
            >>> moment = SecondMoment(torch.tensor([4.0, 0.0]), decay=0.75, eps=0.0)
            >>> moment.precondition(torch.tensor([2.0, 2.0])).tolist()
            [1.0, 2.0]
        """
        root = self.average.mul(self.decay).addcmul_(x, x, value=1.0 - self.decay).sqrt_()
        # where eps is 0 nothing is known of what has no square
        return (x / root.add_(self.eps)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def no_second_moment(layer: Layer) -> SecondMoment | None:
    """None: until somebody says where an optimizer keeps them."""
    del layer
    return None
