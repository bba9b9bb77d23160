"""What a transport does: collectives on tensors. It never knows what it carries.

There are two among processes, which differ in the library below them
(:class:`~hvd_adaptive.comm.horovod_transport.HorovodTransport` and
:class:`~hvd_adaptive.comm.torch_transport.TorchTransport`), and one within a process
(:class:`~hvd_adaptive.comm.local_group.LocalTransport`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.comm.request import AVERAGE, Group, Request, nbytes_of, operation_bytes
from hvd_adaptive.comm.topology import Topology

Handle: TypeAlias = Any
"""What :meth:`Transport.submit` returns, for :meth:`Transport.wait`."""


class ProcessSet(Protocol):
    """Ranks that communicate: a process set of Horovod, or
    :class:`~hvd_adaptive.comm.torch_ranks.TorchRanks`."""

    @property
    def ranks(self) -> list[int] | None:
        """Their numbers among all ranks; None or empty where these are all of them."""

    def size(self) -> int:
        """Number of ranks."""

    def rank(self) -> int:
        """Position of this process among them."""

    def included(self) -> bool:
        """Whether this process is one of them."""


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


class Transport(ABC):
    """Asynchronous collectives among the ranks of a process set.

    Args:
        op: :data:`~hvd_adaptive.comm.request.AVERAGE` or :data:`~hvd_adaptive.comm.request.SUM`.
        process_set: this rank must be in it; None where a class has its own size and rank.
        gradient_predivide_factor: splits the averaging before and after the sum of an allreduce.
        topology: the nodes of the ranks; None where every rank is one of its own.
        groups: the process sets of this rank's node and of its peers, where ``topology`` is layered.
        obstacle: why there are no such groups, where that is not for the topology.
    """

    in_order: ClassVar[bool] = False
    """Whether all ranks must start the second operations of buckets in one order, as well."""
    takes_time: ClassVar[bool] = True
    """Whether the time of a step says something about operations."""

    def __init__(
        self,
        op: int,
        process_set: ProcessSet | None,
        gradient_predivide_factor: float = 1.0,
        topology: Topology | None = None,
        groups: Mapping[Group, ProcessSet] | None = None,
        obstacle: str = "",
    ) -> None:
        self._op = op
        self._topology = topology
        self._obstacle = obstacle
        self._groups: dict[Group, ProcessSet | None] = {"all": process_set, **(groups or {})}
        self._process_set: Any = process_set
        self._prescale = 1.0 / gradient_predivide_factor if op == AVERAGE else 1.0
        self._postscale = gradient_predivide_factor if op == AVERAGE else 1.0

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
        return self._op == AVERAGE

    @property
    def scale(self) -> float:
        """What a sum that is made here, not by an allreduce, is multiplied with."""
        return 1.0 / self.size if self.averages else 1.0

    @property
    def _after_sum(self) -> float:
        """What an allreduce multiplies a sum with."""
        return self._postscale / (self.size if self.averages else 1)

    def share(self, reduced: Tensor) -> Tensor:
        """What each rank must send so that the reduction over all of them gives ``reduced``."""
        return reduced / (self.size * self.scale)

    @abstractmethod
    def submit(self, request: Request, name: str, step: int) -> Handle:
        """Start a collective.

        Args:
            request: what to do.
            name: of the operation; every rank submits the same names. Names with the same ending, from
                the last point on, are submitted in the same order on all ranks.
            step: number of the step, the same on all ranks.

        Raises:
            RuntimeError: a rank has gone: see :func:`~hvd_adaptive.comm.failure.means_lost_rank`.
        """

    @abstractmethod
    def wait(self, handle: Handle) -> Tensor:
        """The result of a collective; raises as :meth:`submit` does when a rank has gone."""

    def has_ended(self, handle: Handle) -> bool:
        """Whether :meth:`wait` would return at once, as far as that can be told."""
        del handle
        return False

    @abstractmethod
    def link_costs(self, prefix: str) -> LinkCosts:
        """What operations among these ranks cost, as they are now; all ranks call it.

        Args:
            prefix: of the names of the operations that are timed.
        """

    @abstractmethod
    def link_look(self, prefix: str) -> tuple[float, float]:
        """Seconds of a small allgather and of a byte in a large one; all ranks call it.

        They tell whether costs still are what they were (:meth:`LinkCosts.still`), and take less time.

        Args:
            prefix: as of :meth:`link_costs`.
        """

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


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """As Horovod scales: in float32, or in float64 where that is the dtype."""
    if factor == 1.0:
        return tensor
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return (wide * torch.tensor(factor, dtype=wide.dtype)).to(tensor.dtype)


def assembled(indices: Tensor, values: Tensor, shape: torch.Size, divisor: int) -> Tensor:
    """A sparse tensor of all ranks' indices and values, as ``hvd.sparse_allreduce_async`` makes it."""
    return torch.sparse_coo_tensor(indices, values / divisor if divisor > 1 else values, shape)
