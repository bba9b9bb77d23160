"""Ranks of torch.distributed, and groups of their own for what we send among them.

Groups are made of torch's backends themselves, on the store that the default group met at: only their
members take part, they are found by name, and nobody else's operations are ordered with theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hvd_adaptive.comm.watchdog import own_addresses

_DIST: Any = dist
"""With what is defined in C++, which torch's types leave out."""


class TorchRanks:
    """Some ranks, which are asked as Horovod's process sets are.

    Args:
        ranks: their numbers among all; this process need not be one.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)

    @classmethod
    def everyone(cls) -> TorchRanks:
        """All ranks of the default group."""
        return cls(range(dist.get_world_size()))

    @property
    def ranks(self) -> list[int]:
        """Their numbers among all."""
        return list(self._ranks)

    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    def rank(self) -> int:
        """Position of this process among them."""
        return self._ranks.index(dist.get_rank())

    def included(self) -> bool:
        """Whether this process is one of them."""
        return dist.get_rank() in self._ranks

    def group(self, name: str, backend: str = "gloo") -> Any:
        """Connect them, for operations of one name; all of them call it, once per name.

        Args:
            name: the same on all of them, and used by nobody else.
            backend: ``"gloo"`` or ``"nccl"``.
        """
        members = ",".join(map(str, self._ranks))
        store = _DIST.PrefixStore(f"hvd_adaptive/{name}/{members}", _store())
        if backend == "nccl":
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = _timeout()
            return dist.ProcessGroupNCCL(store, self.rank(), self.size(), options)
        return dist.ProcessGroupGloo(store, self.rank(), self.size(), _timeout())


def backend_of(device: torch.device) -> str:
    """The backend of the default group for tensors of a device; empty where it has none."""
    return str(dist.get_backend_config()).partition(f"{device.type}:")[2].partition(",")[0]


def meet() -> None:
    """Have a place where groups find each other, also where torch made none; all ranks call it.

    MPI starts ranks that need no such place, and torch then has none for groups of other backends.
    """
    if distributed_c10d._get_default_store() is not None or _own_store:
        return
    place: list[Any] = ["", 0]
    server: Any = None
    if dist.get_rank() == 0:
        server = _DIST.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        place = [own_addresses()[0], server.port]
    dist.broadcast_object_list(place)
    host, port = place
    _own_store.append(server or _DIST.TCPStore(host, port, is_master=False))


_own_store: list[Any] = []


def _store() -> Any:
    """Where ranks find each other."""
    store: Any = distributed_c10d._get_default_store()
    return _own_store[0] if store is None else store


def _timeout() -> timedelta:
    """The default group's."""
    for device in ("cpu", "cuda"):
        try:
            backend = distributed_c10d._get_default_group()._get_backend(torch.device(device))
            found: timedelta = backend.options._timeout
        except (RuntimeError, AttributeError):  # it has no backend for the device, or one without
            continue
        return found
    return distributed_c10d.default_pg_timeout
