"""The control plane: small objects that ranks tell each other and must agree on.

Messages are JSON: nothing that a rank sends is executed by another. They are carried by
:class:`~hvd_adaptive.comm.process_set_control.ProcessSetControl` (the library's own operations),
:class:`~hvd_adaptive.comm.control_channel.ChannelControl`, and
:class:`~hvd_adaptive.comm.local_group.LocalControl` (within a process).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from hvd_adaptive.comm.failure import told_by, told_here

T = TypeVar("T")


class Control(ABC):
    """Collectives on small objects among some ranks, which all make the same calls in the same order.

    Args:
        name: of the operation, the same on all ranks and used by nobody else.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks that take part."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Position of this rank among those that take part."""

    @abstractmethod
    def allgather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order. ``value`` must be JSON-serializable."""

    def number_of(self, rank: int) -> int:
        """The number among all ranks of one that takes part."""
        return rank

    def decide(self, build: Callable[[], Any]) -> Any:
        """What rank 0 builds, on all ranks; ``build`` is called nowhere else.

        Args:
            build: makes something JSON-serializable.

        Raises:
            RuntimeError: it failed on rank 0; on the others.
        """
        error: Exception | None = None
        mine: dict[str, Any] = {}
        if self.rank == 0:
            try:
                # as text, so that what JSON cannot hold is an error here and not while others wait
                mine = {"built": json.dumps(build())}
            except Exception as failure:
                error = failure
                mine = {"error": f"{type(failure).__name__}: {failure}"}
        first = self.allgather(mine)[0]
        if error is not None:
            raise told_here(error)
        if "error" in first:
            message = f"rank 0 could not decide: {first['error']}"
            raise self._told_by(0, RuntimeError(message))
        return json.loads(first["built"])

    def agree(
        self,
        what: str,
        build: Callable[[], T],
        digest: Callable[[T], dict[str, str]],
        alone: bool = False,
        remedy: str = "all ranks must build the same model and pass the same options",
    ) -> T:
        """Build something on every rank, and raise on every rank unless all built the same.

        Args:
            what: names the thing in messages.
            build: makes it; what it raises is raised on all ranks.
            digest: describes it, item by item; the items must be equal on all ranks.
            alone: True on a rank that has nobody to agree with.
            remedy: what to do where an item differs.

        Raises:
            ValueError: ranks built different things, or ``build`` refused its arguments (ValueError,
                TypeError or KeyError) on another rank: names the rank, and the item or the error.
            RuntimeError: ``build`` or ``digest`` failed in any other way on another rank, as above.
            Exception: what they raised on this one.
        """
        built: T | None = None
        error: Exception | None = None
        mine: dict[str, Any]
        try:
            built = build()
            mine = {"digest": digest(built)}
        except Exception as failure:
            error = failure
            refused = isinstance(failure, ValueError | TypeError | KeyError)
            mine = {"error": f"{type(failure).__name__}: {failure}", "refused": refused}
        everyone = [] if alone else self.allgather(mine)
        if error is not None:
            raise error if alone else self._told_by(everyone.index(mine), error)
        for rank, other in enumerate(everyone):
            if "error" in other:
                kind = ValueError if other["refused"] else RuntimeError
                raise self._told_by(rank, kind(f"{what}: rank {rank} failed: {other['error']}"))
        for rank, other in enumerate(everyone):
            # dicts are equal in any order, but buckets are built in this one
            if list(other["digest"].items()) != list(mine["digest"].items()):
                me = self.number_of(self.rank)
                message = f"{what}: {_difference(me, rank, mine, other, remedy)}"
                raise self._told_by(0, ValueError(message))
        assert built is not None
        return built

    def _told_by(self, rank: int, error: Exception) -> Exception:
        """An error that others raise as well; only this rank of the process set prints it in full."""
        if rank == self.rank:
            return told_here(error)
        return told_by(f"rank {self.number_of(rank)}", error)


def _difference(me: int, rank: int, mine: dict[str, Any], other: dict[str, Any], remedy: str) -> str:
    """Name the first item in which another rank differs from this one."""
    here, there = mine["digest"], other["digest"]
    for key in [*here, *(key for key in there if key not in here)]:
        if here.get(key) != there.get(key):
            return (
                f"{key} is {here.get(key, 'missing')} on rank {me} but "
                f"{there.get(key, 'missing')} on rank {rank} of the process set: {remedy}"
            )
    return (
        f"rank {rank} of the process set has the same items as rank {me} in another order: "
        "all ranks must name their parameters in the same order"
    )
