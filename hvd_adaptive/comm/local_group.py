"""Many ranks in one process: what they send each other stays in memory, and is summed as MPI would.

Each rank is a thread that runs alone until it waits for the others, so that a run is repeatable and
takes one core whatever the number of ranks. Collectives give the same bits as Horovod over MPI where
MPI reduces by recursive doubling.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.control_channel import Channel, Pending
from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.comm.request import AVERAGE, Request, nbytes_of
from hvd_adaptive.comm.simulated_network import SimulatedNetwork
from hvd_adaptive.comm.topology import Topology
from hvd_adaptive.comm.transport import Transport, assembled, scaled

T = TypeVar("T")
Ranks: TypeAlias = tuple[int, ...]
Combine: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
"""Makes of what all ranks of a group contribute, in rank order, what each of them gets."""


class LocalGroupError(RuntimeError):
    """A rank has failed, or ranks wait for each other in different collectives."""


@dataclass
class _Collective:
    """One collective of some ranks."""

    name: str
    ranks: Ranks
    contributions: dict[int, Any] = field(default_factory=dict)
    results: Sequence[Any] | None = None
    carried: bool = False
    """Whether its time on the network has passed."""


@dataclass
class _Member:
    """Where one rank is."""

    started: Counter[Ranks] = field(default_factory=Counter)
    """How many collectives it has started, of each group of ranks."""
    waits_for: _Collective | None = None
    ended: bool = False
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    @property
    def can_run(self) -> bool:
        """Whether it has something to do that does not need the others."""
        return not self.ended and (self.waits_for is None or self.waits_for.results is not None)


class LocalGroup:
    """Ranks that share this process.

    Cost: nothing runs at the same time. A collective costs what summing or joining its tensors does,
    plus some 20 microseconds per rank to pass the turn on.

    Args:
        size: number of ranks.
        topology: which of them share a virtual node; None gives each a node of its own.
        link: what the network is assumed to cost; None is an Ethernet of 1 Gbit/s.
        network: whose clock goes on by what collectives on tensors take; None where no time passes.

    Raises:
        ValueError: ``size`` is not positive, or the topology is of another number of ranks, or of nodes
            with several where a network is simulated, whose links ranks do not share.

    Example:
        >>> def work(rank):
        ...     return rank.control("sizes").allgather(rank.rank)
        >>> LocalGroup(3).run(work)
        [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """

    def __init__(
        self,
        size: int,
        topology: Topology | None = None,
        link: LinkCosts | None = None,
        network: SimulatedNetwork | None = None,
    ) -> None:
        self.link = link or LinkCosts.of_gigabit()
        self.network = network
        if size < 1:
            raise ValueError(f"a group has at least one rank, got {size}")
        self.size = size
        self.topology = topology or Topology.flat(size)
        if self.topology.size != size:
            raise ValueError(f"a topology of {self.topology.size} ranks for a group of {size}")
        if network is not None and self.topology.ranks_per_node > 1:
            raise ValueError(
                "a simulated network has a link for each rank, not one for "
                f"{self.topology.ranks_per_node}: leave ranks_per_node out"
            )
        self._everyone: Ranks = tuple(range(size))
        self._open: dict[tuple[Ranks, int], _Collective] = {}
        self._members: list[_Member] = []
        self._failed: LocalGroupError | None = None

    def run(self, work: Callable[[LocalRank], T]) -> list[T]:
        """Let every rank do ``work``; what each of them returns, in rank order.

        Raises:
            LocalGroupError: ranks start different collectives, or wait for one that others never start.
            Exception: what the first rank that failed has raised.
        """
        self._open, self._failed = {}, None
        self._members = [_Member() for _ in range(self.size)]
        outcomes: list[_Outcome[T]] = [_Outcome() for _ in range(self.size)]
        threads = [
            threading.Thread(target=self._run_one, args=(rank, work, outcomes), daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        self._members[0].turn.release()
        for thread in threads:
            thread.join()
        first = min(
            (each for each in outcomes if each.error), key=lambda each: each.order, default=None
        )
        if first is not None and first.error is not None:
            raise first.error
        return [outcome.value for outcome in outcomes]  # type: ignore[misc]

    def _run_one(
        self, rank: int, work: Callable[[LocalRank], T], outcomes: Sequence[_Outcome[T]]
    ) -> None:
        member, outcome = self._members[rank], outcomes[rank]
        member.turn.acquire()
        try:
            outcome.value = work(LocalRank(self, rank))
        except BaseException as error:
            outcome.error = error
            outcome.order = sum(each.error is not None for each in outcomes)
            self._failed = self._failed or LocalGroupError(
                f"rank {rank} failed: {type(error).__name__}: {error}"
            )
        member.ended = True
        self._pass_on(rank)

    # --- collectives ------------------------------------------------------------------------------

    def start(
        self, rank: int, name: str, contribution: Any, combine: Combine, ranks: Ranks | None = None
    ) -> _Collective:
        """Take part in the next collective of some ranks, or of all; the last makes its results."""
        member, ranks = self._members[rank], ranks or self._everyone
        number = ranks, member.started[ranks]
        collective = self._open.setdefault(number, _Collective(name, ranks))
        member.started[ranks] += 1
        if collective.name != name:
            raise LocalGroupError(
                f"rank {rank} starts {name!r} where others have started {collective.name!r}: all ranks "
                "must start the same collectives in the same order"
            )
        collective.contributions[rank] = contribution
        if len(collective.contributions) == len(ranks):
            given = [collective.contributions[each] for each in ranks]
            collective.results = combine(given)
            collective.contributions.clear()
            del self._open[number]  # who waits for it holds it
        return collective

    def wait(self, rank: int, collective: _Collective) -> Any:
        """What this rank gets of it; others run meanwhile."""
        member = self._members[rank]
        while collective.results is None:
            if self._failed is not None:
                raise self._failed
            member.waits_for = collective
            self._pass_on(rank)
            member.turn.acquire()
        member.waits_for = None
        return collective.results[collective.ranks.index(rank)]

    def _pass_on(self, rank: int) -> None:
        """Let the next rank run that can; where none can, all fail."""
        order = [*range(rank + 1, self.size), *range(rank + 1)]
        for other in order:
            if self._members[other].can_run:
                self._members[other].turn.release()
                return
        for other in order:
            member = self._members[other]
            if not member.ended:
                self._failed = self._failed or LocalGroupError(self._describe_standstill())
                member.turn.release()
                return

    def _describe_standstill(self) -> str:
        waiting = [
            f"rank {rank} waits in {member.waits_for.name!r}"
            for rank, member in enumerate(self._members)
            if member.waits_for is not None and not member.ended
        ]
        ended = [f"rank {rank} has ended" for rank, member in enumerate(self._members) if member.ended]
        return f"no rank can continue: {', '.join([*waiting, *ended])}"


@dataclass
class _Outcome(Generic[T]):
    """How one rank's work ended."""

    value: T | None = None
    error: BaseException | None = None
    order: int = 0


class LocalRank:
    """One rank of a :class:`LocalGroup`, and what it sends with."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.group = group
        self.rank = rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    def transport(self, op: int = AVERAGE, gradient_predivide_factor: float = 1.0) -> LocalTransport:
        """Collectives on tensors."""
        return LocalTransport(self, op, gradient_predivide_factor)

    def control(self, name: str) -> LocalControl:
        """Agreement on small objects."""
        return LocalControl(self, name)

    def channel(self, name: str) -> LocalChannel:
        """What planners tell each other."""
        return LocalChannel(self, name)

    def start(
        self, name: str, contribution: Any, combine: Combine, ranks: Ranks | None = None
    ) -> Callable[[], Any]:
        """Take part in a collective of some ranks, or of all; the result waits for it."""
        collective = self.group.start(self.rank, name, contribution, combine, ranks)
        return lambda: self.group.wait(self.rank, collective)


class LocalTransport(Transport):
    """See :class:`~hvd_adaptive.comm.transport.Transport`; nothing leaves the process."""

    takes_time = False

    def __init__(self, rank: LocalRank, op: int, gradient_predivide_factor: float = 1.0) -> None:
        topology = rank.group.topology
        super().__init__(op, None, gradient_predivide_factor, topology)
        self._rank = rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._rank.size

    @property
    def rank(self) -> int:
        """Of these ranks."""
        return self._rank.rank

    def has_ended(self, handle: object) -> bool:
        """Never before all ranks have been waited for: each then starts all in the same order."""
        del handle
        return False

    def wait(self, handle: Callable[[], Tensor]) -> Tensor:
        """The result, once all ranks have started it."""
        return handle()

    def link_costs(self, prefix: str) -> LinkCosts:
        """Those that are assumed: memory is no network."""
        del prefix
        return self._rank.group.link

    def link_look(self, prefix: str) -> tuple[float, float]:
        """Of those that are assumed."""
        del prefix
        return self._rank.group.link.allgather, self._rank.group.link.allgather_byte

    def submit(self, request: Request, name: str, step: int) -> Callable[[], Tensor]:
        """Start a collective."""
        del step
        combine = {
            "allreduce": self._allreduce,
            "allgather": _allgather,
            "alltoall": _alltoall,
            "sparse": self._sparse,
        }[request.operation]
        contribution = request.tensor if request.splits is None else request
        group, members = self._rank.group, self.members(request.group)
        collective = group.start(self.rank, name, contribution, combine, members)
        return lambda: self._finish(collective, request)

    def _finish(self, collective: _Collective, request: Request) -> Tensor:
        """The result; for the first rank that has it, the network's time passes."""
        group = self._rank.group
        result: Tensor = group.wait(self.rank, collective)
        if group.network is not None and not collective.carried:
            collective.carried = True
            group.network.carry(self.traffic(request, nbytes_of(result)))
        return result

    def _allreduce(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Into all tensors, in their own dtype."""
        given = [scaled(tensor, self._prescale) for tensor in tensors]
        total = scaled(recursive_doubling(given), self._after_sum)
        for tensor in tensors:
            tensor.copy_(total)
        return tensors

    def _sparse(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Indices and values of all ranks, one after the other."""
        indices = torch.cat([tensor._indices() for tensor in tensors], dim=1)
        values = torch.cat([tensor._values() for tensor in tensors])
        divisor = self.size if self.averages else 1
        gathered = assembled(indices, values, tensors[0].shape, divisor)
        return [gathered] * len(tensors)


def recursive_doubling(tensors: Sequence[Tensor]) -> Tensor:
    """The sum, added in the order of MPI's recursive doubling.

    Where ranks are no power of two, the first are added in pairs, so that a power of two is left; then
    neighbors are added, neighboring pairs, and so on. Each sum is rounded to the dtype.

    Example:
        >>> recursive_doubling([torch.tensor([float(x)]) for x in range(5)])
        tensor([10.])
    """
    extra = len(tensors) - (1 << (len(tensors).bit_length() - 1))
    pairs = [tensors[2 * i] + tensors[2 * i + 1] for i in range(extra)]
    partial = [*pairs, *tensors[2 * extra :]]
    while len(partial) > 1:
        partial = [one + other for one, other in zip(partial[::2], partial[1::2], strict=True)]
    return partial[0]


def _allgather(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """All tensors one after the other; everyone gets a copy, as they write into what they get."""
    gathered = torch.cat(list(tensors))
    return [gathered.clone() for _ in tensors]


def _alltoall(given: Sequence[Tensor | Request]) -> Sequence[Tensor]:
    """To each rank its slice of every rank's tensor."""
    slices = [
        each.chunk(len(given))
        if isinstance(each, Tensor)
        else each.tensor.split(list(each.splits or ()))
        for each in given
    ]
    return [torch.cat([each[rank] for each in slices]) for rank in range(len(given))]


class LocalControl(Control):
    """See :class:`~hvd_adaptive.comm.agreement.Control`."""

    def __init__(self, rank: LocalRank, name: str) -> None:
        super().__init__(name)
        self._rank = rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._rank.size

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank.rank

    def allgather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, as they come back from JSON."""
        texts = self._rank.start(
            self.name, json.dumps(value), lambda given: [list(given)] * len(given)
        )()
        return [json.loads(text) for text in texts]


class LocalChannel(Channel):
    """See :class:`~hvd_adaptive.comm.control_channel.Channel`."""

    name = "local"

    def __init__(self, rank: LocalRank, name: str) -> None:
        self._rank = rank
        self._operation = name
        self._count = itertools.count()

    def mean(self, values: Float64s) -> Pending:
        """An average."""
        return self._start(values, lambda given: np.sum(given, axis=0) / len(given))

    def least(self, values: Float64s) -> Pending:
        """A minimum."""
        return self._start(values, lambda given: np.min(given, axis=0))

    def gather(self, values: Float64s) -> Pending:
        """An allgather."""
        return self._start(values, np.stack)

    def broadcast(self, message: str) -> str:
        """Rank 0's message."""
        sent: str = self._rank.start(self._next(), message, lambda given: [given[0]] * len(given))()
        return sent

    def exchange(self, message: str) -> list[str]:
        """All messages."""
        texts = self._rank.start(self._next(), message, lambda given: [list(given)] * len(given))()
        return list(texts)

    def _start(self, values: Float64s, combine: Callable[[Sequence[Float64s]], Float64s]) -> Pending:
        def for_all(given: Sequence[Float64s]) -> Sequence[Float64s]:
            result = combine(given)
            return [result.copy() for _ in given]

        return self._rank.start(self._next(), np.array(values, np.float64), for_all)

    def _next(self) -> str:
        return f"{self._operation}.{next(self._count)}"
