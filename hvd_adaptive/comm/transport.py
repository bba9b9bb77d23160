"""Collectives over Horovod's public operations. The transport never knows what it carries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor

from hvd_adaptive.comm.link_costs import LinkCosts, measure_link
from hvd_adaptive.comm.request import Group, Request, nbytes_of, operation_bytes
from hvd_adaptive.comm.topology import Topology

Handle: TypeAlias = int | Callable[[], Tensor]


class JoinedRankError(RuntimeError):
    """A rank has called ``hvd.join()``, after which Horovod only sums.

    Args:
        what: does not work then.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"a rank has called hvd.join() (it has run out of data), which does not work with {what}: "
            "give all ranks the same number of steps, by a DistributedSampler or by "
            "DataLoader(drop_last=True) over equal shares, or use compressors that are summed "
            "(none, fp16, powersgd, randomk) without a planner"
        )


@contextmanager
def joins_named() -> Iterator[None]:
    """Raise :class:`JoinedRankError` where Horovod refuses an operation because of ``hvd.join()``."""
    try:
        yield
    except HorovodInternalError as error:
        if "not supported with Join" not in str(error):
            raise
        raise JoinedRankError("payloads that are gathered, nor when layers change") from error


_NAME_TAKEN = "same name as another tensor that is currently being processed"


@contextmanager
def leftovers_dropped() -> Iterator[None]:
    """Begin an elastic run again where an operation is left over from before Horovod's restart.

    Horovod's thread ends when a rank has gone, and refuses what is under way. What is handed over at
    that very moment it neither refuses nor runs: after ``hvd.init()`` the operation is still there, so
    that its name is taken. ``hvd.shutdown()`` drops it, which an elastic run calls on this error.

    Raises:
        HorovodInternalError: in the place of Horovod's ValueError, in elastic runs only.
    """
    try:
        yield
    except ValueError as error:
        if _NAME_TAKEN not in str(error) or os.environ.get("HOROVOD_ELASTIC") != "1":
            raise
        raise HorovodInternalError(f"left over from before Horovod's restart: {error}") from error


class Transport:
    """Asynchronous collectives among the ranks of a process set.

    Args:
        op: ``hvd.Average`` or ``hvd.Sum``.
        process_set: Horovod process set; this rank must be in it.
        gradient_predivide_factor: splits the averaging before and after the sum of an allreduce.
        topology: the nodes of the ranks; None where every rank is one of its own.
        groups: the process sets of this rank's node and of its peers, where ``topology`` is layered.
        obstacle: why there are no such groups, where that is not for the topology.
    """

    def __init__(
        self,
        op: int,
        process_set: hvd.ProcessSet,
        gradient_predivide_factor: float = 1.0,
        topology: Topology | None = None,
        groups: Mapping[Group, hvd.ProcessSet] | None = None,
        obstacle: str = "",
    ) -> None:
        self._op = op
        self._topology = topology
        self._obstacle = obstacle
        self._groups: dict[Group, hvd.ProcessSet] = {"all": process_set, **(groups or {})}
        self._process_set = process_set
        self._prescale = 1.0 / gradient_predivide_factor if op == hvd.Average else 1.0
        self._postscale = gradient_predivide_factor if op == hvd.Average else 1.0

    @property
    def size(self) -> int:
        """Number of ranks; an elastic run may change it."""
        return int(self._process_set.size())

    @property
    def rank(self) -> int:
        """Of this process, among those of the process set."""
        return int(self._process_set.rank())

    @property
    def topology(self) -> Topology:
        """The nodes of the ranks."""
        return self._topology or Topology.flat(self.size)

    @property
    def obstacle(self) -> str:
        """Why nothing can be reduced in nodes first; empty where it can."""
        return self._obstacle or self.topology.obstacle

    @property
    def has_node_groups(self) -> bool:
        """Whether there are operations inside nodes, and between them."""
        return not self.obstacle

    def members(self, group: Group) -> tuple[int, ...]:
        """The ranks of a group, in the order in which it counts them."""
        match group:
            case "all":
                return tuple(range(self.size))
            case "node":
                return self.topology.neighbors(self.rank)
            case "peers":
                return self.topology.peers(self.rank)

    @property
    def averages(self) -> bool:
        """Whether an allreduce averages; else it sums."""
        return bool(self._op == hvd.Average)

    @property
    def scale(self) -> float:
        """What a sum that is made here, not by an allreduce, is multiplied with."""
        return 1.0 / self.size if self.averages else 1.0

    def share(self, reduced: Tensor) -> Tensor:
        """What each rank must send so that the reduction over all of them gives ``reduced``."""
        return reduced / (self.size * self.scale)

    def submit(self, request: Request, name: str, step: int) -> Handle:
        """Start a collective.

        Args:
            request: what to do.
            name: of the operation; every rank submits the same names in the same order.
            step: number of the step, the same on all ranks.

        Raises:
            HorovodInternalError: a rank has gone.
        """
        with leftovers_dropped():
            return self._start(request, name, step)

    def _start(self, request: Request, name: str, step: int) -> Handle:
        tensor, common = request.tensor, {"name": name, "process_set": self._groups[request.group]}
        handle: Handle
        match request.operation:
            case "allreduce":
                handle = hvd.allreduce_async_(
                    tensor,
                    op=self._op,
                    prescale_factor=self._prescale,
                    postscale_factor=self._postscale,
                    **common,
                )
            case "allgather":
                handle = partial(_flat, hvd.allgather_async(_uncached(tensor, step), **common))
            case "alltoall":
                splits = None if request.splits is None else torch.IntTensor(request.splits)
                handle = partial(
                    _flat, hvd.alltoall_async(_uncached(tensor, step), splits=splits, **common)
                )
            case "sparse":
                handle = hvd.sparse_allreduce_async(tensor, op=self._op, **common)
        return handle

    def wait(self, handle: Handle) -> Tensor:
        """The result of a collective; raises what Horovod raises when a rank has gone."""
        with joins_named():
            result: Tensor = handle() if callable(handle) else hvd.synchronize(handle)
        return result

    def has_ended(self, handle: Handle) -> bool:
        """Whether :meth:`wait` would return at once, as far as that can be told."""
        number = handle.args[0] if isinstance(handle, partial) else handle
        return isinstance(number, int) and bool(hvd.poll(number))

    def link_costs(self, prefix: str) -> LinkCosts:
        """What operations among these ranks cost, as they are now; all ranks call it."""
        return measure_link(self, prefix)

    def traffic(self, request: Request, received: int) -> int:
        """Bytes that this rank puts on its link for an operation, in one direction.

        What stays in the node counts as well: the caller knows of which group the request is.

        Args:
            request: the operation.
            received: bytes of its result.
        """
        sent, members = nbytes_of(request.tensor), self.members(request.group)
        if request.splits is not None:
            own = request.splits[members.index(self.rank)]
            return sent - own * request.tensor.element_size()
        return int(operation_bytes(request.operation, sent, received, len(members)))


def _uncached(tensor: Tensor, step: int) -> Tensor:
    """The bytes in a shape that Horovod did not see in the step before.

    An operation of the same name and shape is answered from Horovod's cache. A rank that has called
    ``hvd.join()`` says that it is ready for all that is in its cache: what is no allreduce then hangs.
    Without the cache Horovod refuses it. Cost: none that was seen, as most payloads differ in size.
    """
    return tensor.view(-1, 1) if step % 2 else tensor


def _flat(handle: int) -> Tensor:
    """Wait for one of those."""
    result = hvd.synchronize(handle)
    # alltoall also tells how many rows came from whom
    gathered: Tensor = result[0] if isinstance(result, tuple) else result
    return gathered.view(-1)
