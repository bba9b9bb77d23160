"""The ballot: questions that all ranks answer once in each step, in one small sum."""

from __future__ import annotations

import torch

from hvd_adaptive.comm.request import Request
from hvd_adaptive.comm.transport import Handle, Transport

_PRESENT = "present"
"""What every rank that takes part in a step votes for."""


class Ballot:
    """One vote of all ranks in each step.

    Args:
        transport: carries the sum.
        name: of the operation.
    """

    def __init__(self, transport: Transport, name: str) -> None:
        self._transport = transport
        self._name = name
        self._handle: Handle | None = None
        self._questions: tuple[str, ...] = ()
        self._counts: dict[str, float] | None = None

    def cast(self, step: int, **answers: bool) -> None:
        """Ask all ranks some questions, by name; :meth:`outcome` waits for their answers."""
        self._counts = None
        self._questions = (*answers, _PRESENT)
        # float64, which no gradient is: Horovod would copy a large one to send both in one buffer
        votes = torch.tensor([*map(float, answers.values()), 1.0], dtype=torch.float64)
        self._handle = self._transport.submit(Request("allreduce", votes), self._name, step)

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
        if self._handle is not None:
            counts = self._transport.wait(self._handle).tolist()
            self._handle, self._counts = None, dict(zip(self._questions, counts, strict=True))
        assert self._counts is not None, "nobody has voted"
        return self._counts
