"""Agreement by the library's own operations: Horovod's, or torch.distributed's."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import torch

from hvd_adaptive.comm import world
from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.transport import ProcessSet
from hvd_adaptive.comm.world import World
from hvd_adaptive.wire.frame import MAX_GATHERED_BYTES

_LENGTH_BYTES = 8
_TOO_LARGE = "hvd_adaptive: too large"
"""Key of what is sent in the place of a message that is too large."""


class ProcessSetControl(Control):
    """Collectives on small objects among the ranks of a process set.

    Args:
        name: of the operation, the same on all ranks and used by nobody else.
        process_set: this rank must be in it; None is all ranks of the library that was initialized.
    """

    def __init__(self, name: str, process_set: ProcessSet | None = None) -> None:
        super().__init__(name)
        self._given = process_set

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

    def number_of(self, rank: int) -> int:
        """The number among all ranks of one that takes part."""
        ranks = self.process_set.ranks
        return rank if ranks is None else int(ranks[rank])

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
        data = self.world.gather(tensor, self.name, self.process_set).numpy().tobytes()
        values = []
        while data:
            end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
            values.append(json.loads(data[_LENGTH_BYTES:end]))
            data = data[end:]
        for rank, told in enumerate(values):
            if isinstance(told, dict) and _TOO_LARGE in told:
                raise RuntimeError(
                    f"{self.name}: rank {rank} has {told[_TOO_LARGE]} bytes to tell all others, of "
                    f"which {self.size} ranks have {MAX_GATHERED_BYTES // self.size} each"
                )
        return values

    def hand_out(self, state: Any) -> Any:
        """What rank 0 passes, on all ranks: dictionaries, lists, numbers, text and tensors."""
        file = io.BytesIO()
        if self.rank == 0:
            torch.save(state, file)
        mine = torch.from_numpy(np.frombuffer(file.getvalue(), np.uint8).copy())
        first = self.world.gather(mine, f"{self.name}.state", self.process_set)
        return torch.load(io.BytesIO(first.numpy().tobytes()), map_location="cpu", weights_only=True)
