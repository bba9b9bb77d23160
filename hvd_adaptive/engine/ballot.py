"""The ballot: questions that all ranks answer once in each step, in one small sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hvd_adaptive.comm.request import Request
from hvd_adaptive.comm.transport import Handle, Transport

_PRESENT = "present"
"""What every rank that takes part in a step votes for."""


class Ballot:
    """One vote of all ranks in each step.

    It is an operation of its own, or goes along with gradients: of a small dense step that operation
    takes 4 %.

    Args:
        transport: carries the sum.
        name: of the operation.
    """

    def __init__(self, transport: Transport, name: str) -> None:
        self._transport = transport
        self._name = name
        self._votes: Tensor | None = None
        self._handle: Handle | None = None
        self._questions: tuple[str, ...] = ()

    def cast(self, step: int, take_along: Callable[[Tensor], bool] | None, **answers: bool) -> None:
        """Ask all ranks some questions, by name; :meth:`outcome` waits for their answers.

        Args:
            step: number of the step.
            take_along: has the votes summed with the gradients, before :meth:`outcome` is asked for,
                and says whether it does; None sends them at once in an operation of their own, for
                whoever must hear of absent ranks before anything else is sent.
            answers: this rank's.
        """
        self._handle = None
        self._questions = (*answers, _PRESENT)
        # float64, which no gradient is: Horovod would copy a large one to send both in one buffer
        self._votes = torch.tensor([*map(float, answers.values()), 1.0], dtype=torch.float64)
        if take_along is None or not take_along(self._votes):
            self._handle = self._transport.submit(Request("allreduce", self._votes), self._name, step)

    def outcome(self) -> dict[str, bool]:
        """Which questions any rank has answered with yes, the same on all ranks."""
        return {question: count > 0.0 for question, count in self._count().items()}

    @property
    def rank_is_missing(self) -> bool:
        """Whether a rank has not voted: it has called ``hvd.join()``."""
        size, one = self._transport.size, self._transport.scale
        return self._count()[_PRESENT] < (size - 0.5) * one

    def complete(self) -> None:
        """Complete a vote whose outcome nobody will ask for."""
        if self._handle is not None:
            self._count()

    def abandon(self) -> None:
        """Forget a vote that never ends, after Horovod reported that a rank has gone."""
        self._handle = None

    def _count(self) -> dict[str, float]:
        """How many ranks said yes, in the units of the transport's sums; waits for them."""
        assert self._votes is not None, "nobody has voted"
        if self._handle is not None:
            self._votes, self._handle = self._transport.wait(self._handle), None
        return dict(zip(self._questions, self._votes.tolist(), strict=True))
