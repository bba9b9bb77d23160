"""Numbers and plans between ranks, beside the gradients: what the decision path sends.

Who sends them: :mod:`~hvd_adaptive.comm.horovod_channel` and :mod:`~hvd_adaptive.comm.torch_channel`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.comm.agreement import Control

Pending: TypeAlias = Callable[[], Float64s]
"""Waits for a result; raises if a rank has gone."""


class Channel(ABC):
    """Every rank makes the same calls in the same order."""

    name: str
    """How it is sent."""

    @abstractmethod
    def mean(self, values: Float64s) -> Pending:
        """Start to average over the ranks; ``float64[n]``, the same n on all."""

    @abstractmethod
    def least(self, values: Float64s) -> Pending:
        """Start to take the minimum over the ranks; ``float64[n]``, the same n on all."""

    @abstractmethod
    def gather(self, values: Float64s) -> Pending:
        """Start to gather ``float64[n]`` of every rank, the same n on all, as ``float64[ranks, n]``."""

    @abstractmethod
    def broadcast(self, message: str) -> str:
        """Rank 0's message, on all ranks; what the others pass is not looked at."""

    @abstractmethod
    def exchange(self, message: str) -> list[str]:
        """The messages of all ranks, of any length, in rank order."""


class ChannelControl(Control):
    """Agreement on small objects as of a :class:`Control`, whose messages a channel carries.

    Args:
        control: of the same ranks.
        channel: opened by all ranks when they first have something to tell.
    """

    def __init__(self, control: Control, channel: Callable[[], Channel]) -> None:
        super().__init__(control.name)
        self._control = control
        self._channel = channel

    @property
    def size(self) -> int:
        """Number of ranks that take part."""
        return self._control.size

    @property
    def rank(self) -> int:
        """Position of this rank among those that take part."""
        return self._control.rank

    def number_of(self, rank: int) -> int:
        """The number among all ranks of one that takes part."""
        return self._control.number_of(rank)

    def allgather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, as they come back from JSON."""
        return [json.loads(text) for text in self._channel().exchange(json.dumps(value))]
