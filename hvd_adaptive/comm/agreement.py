"""The control plane: small objects that ranks tell each other and must agree on.

Messages are JSON: nothing that a rank sends is executed by another.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from hvd_adaptive.comm import world
from hvd_adaptive.comm.excepthook import told_by, told_here
from hvd_adaptive.comm.transport import ProcessSet
from hvd_adaptive.comm.world import World
from hvd_adaptive.wire.frame import MAX_GATHERED_BYTES

T = TypeVar("T")

_LENGTH_BYTES = 8
_TOO_LARGE = "hvd_adaptive: too large"
"""Key of what is sent in the place of a message that is too large."""


class Control:
    """Collectives on small objects among the ranks of a process set.

    Every rank of the process set must make the same calls in the same order.

    Args:
        name: of the operation, the same on all ranks and used by nobody else.
        process_set: this rank must be in it; None is all ranks of the library that was initialized.
    """

    def __init__(self, name: str, process_set: ProcessSet | None = None) -> None:
        self._name = name
        self._given = process_set

    @property
    def name(self) -> str:
        """Of the operation."""
        return self._name

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return world.current().everyone if self._given is None else self._given

    @property
    def world(self) -> World:
        """The library that connects them."""
        return world.of(self.process_set)

    @property
    def size(self) -> int:
        """Number of ranks that take part."""
        return int(self.process_set.size())

    @property
    def rank(self) -> int:
        """Position of this rank among those that take part."""
        return int(self.process_set.rank())

    def allgather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order. ``value`` must be JSON-serializable.

        Raises:
            RuntimeError: on all ranks, where one has more to tell than MPI's 32-bit counts allow it.
        """
        message = json.dumps(value).encode()
        if len(message) + _LENGTH_BYTES > MAX_GATHERED_BYTES // self.size:
            message = json.dumps({_TOO_LARGE: len(message)}).encode()
        framed = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        tensor = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        data = self.world.gather(tensor, self._name, self.process_set).numpy().tobytes()
        values = []
        while data:
            end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
            values.append(json.loads(data[_LENGTH_BYTES:end]))
            data = data[end:]
        for rank, told in enumerate(values):
            if isinstance(told, dict) and _TOO_LARGE in told:
                raise RuntimeError(
                    f"{self._name}: rank {rank} has {told[_TOO_LARGE]} bytes to tell all others, of "
                    f"which {self.size} ranks have {MAX_GATHERED_BYTES // self.size} each"
                )
        return values

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

    def hand_out(self, state: Any) -> Any:
        """What rank 0 passes, on all ranks: dictionaries, lists, numbers, text and tensors."""
        file = io.BytesIO()
        if self.rank == 0:
            torch.save(state, file)
        mine = torch.from_numpy(np.frombuffer(file.getvalue(), np.uint8).copy())
        first = self.world.gather(mine, f"{self._name}.state", self.process_set)
        return torch.load(io.BytesIO(first.numpy().tobytes()), map_location="cpu", weights_only=True)

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
                me = self._number_of(self.rank)
                message = f"{what}: {_difference(me, rank, mine, other, remedy)}"
                raise self._told_by(0, ValueError(message))
        assert built is not None
        return built

    def _told_by(self, rank: int, error: Exception) -> Exception:
        """An error that others raise as well; only this rank of the process set prints it in full."""
        if rank == self.rank:
            return told_here(error)
        return told_by(f"rank {self._number_of(rank)}", error)

    def _number_of(self, rank: int) -> int:
        """The number among all ranks of a rank of the process set."""
        ranks = self.process_set.ranks
        return rank if ranks is None else int(ranks[rank])


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
