"""What the network's operations cost, timed among the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hvd_adaptive.comm.link_costs import LayerCosts, LinkCosts
from hvd_adaptive.comm.request import Group, Operation, Request
from hvd_adaptive.comm.transport import Transport

SMALL = 256
"""Bytes of a rank in the small operations that are timed."""
CARRIED = 1 << 19
"""Bytes on a rank's link in one direction in the large ones: more than networks let pass at once."""
SMALL_REPEATS, LARGE_REPEATS = 5, 3
"""How often they are done: the fastest of few large ones is within a tenth of that of many, and what
they take is time of training, each time that the network is measured again."""
LARGE_SECONDS = 0.03
"""And for how long the large ones are done at least: on a fast link three of them take less time than
a rank may wait for a core that it shares, so all three could be late."""
LOOKS = 2
"""How often they are done to see whether the network is another one by now."""
SETTLING, SETTLING_SECONDS, LOOK_SECONDS = 30, 1.5, 0.2
"""How many operations go before those that are timed at least, and how much time at most: where the
network is measured, and where it is only looked at."""
CALM, UNEVEN, NOISE = 10, 2.0, 2e-3
"""The last so many of them must have taken no more than so many times the fastest, on average, and so
many seconds."""
LEAST_BYTE = 1e-11
"""Seconds of a byte that no memory is faster than: what noise may not hide."""


class NetworkTransport(Transport):
    """A transport among processes."""

    def link_costs(self, prefix: str) -> LinkCosts:
        """By :func:`measure_link`."""
        return measure_link(self, prefix)

    def link_look(self, prefix: str) -> tuple[float, float]:
        """By :func:`look_at_link`."""
        return look_at_link(self, prefix)


def measure_link(transport: Transport, prefix: str) -> LinkCosts:
    """Time small and large operations; all ranks call it at the same time.

    Where nodes have several ranks, it does so also inside the nodes and between them.

    Cost: six operations with 512 KiB on each link (0.15 s at 200 Mbit/s), or 0.06 s of more of them on
    a faster one, and :func:`settle`.

    Args:
        transport: between the ranks.
        prefix: of the operations' names.
    """
    if transport.size == 1:
        return LinkCosts.of_gigabit()
    settle(transport, prefix)
    costs = _measured(transport, prefix, "all")
    if not transport.has_node_groups:
        return costs
    node, peers = (_measured(transport, f"{prefix}.{group}", group) for group in _LAYERS)
    return replace(costs, layers=LayerCosts(transport.topology.ranks_per_node, node, peers))


def look_at_link(transport: Transport, prefix: str) -> tuple[float, float]:
    """Seconds of a small allgather, and of a byte in a large one; all ranks call it at the same time.

    Cost: a third of the operations of :func:`measure_link`, and :func:`settle`.

    Args:
        transport: between the ranks.
        prefix: of the operations' names.
    """
    if transport.size == 1:
        known = LinkCosts.of_gigabit()
        return known.allgather, known.allgather_byte
    settle(transport, prefix, LOOK_SECONDS)
    return _operation_costs(transport, prefix, "allgather", "all", (LOOKS, LOOKS))


def settle(transport: Transport, prefix: str, seconds: float = SETTLING_SECONDS) -> None:
    """Small operations that nobody times; all ranks call it at the same time.

    The network's threads give way to computing, and have to catch up afterwards: where 8 ranks shared 2
    cores, operations took up to 20 times as long, for half a second or a second. A measurement would
    have been of nothing else. The first rank tells the others when they are even.

    Cost: :data:`SETTLING` small operations, and more while they are uneven.

    Args:
        transport: between the ranks.
        prefix: of the operations' names.
        seconds: that they may take.
    """
    request = Request("allgather", torch.zeros(1, dtype=torch.uint8))
    _repeated(
        transport,
        f"{prefix}.settle",
        request,
        lambda taken: sum(taken) < seconds and not _are_even(taken),
    )


def _are_even(taken: Sequence[float]) -> bool:
    """Whether operations have taken about the same time lately.

    Example:
        >>> _are_even([0.002] * 29), _are_even([0.002] * 28), _are_even([0.002] * 28 + [0.06])
        (True, False, False)
    """
    return len(taken) >= SETTLING - 1 and sum(taken[-CALM:]) <= CALM * (UNEVEN * min(taken) + NOISE)


_LAYERS: tuple[Group, ...] = ("node", "peers")


def _measured(transport: Transport, prefix: str, group: Group) -> LinkCosts:
    """What operations cost among the ranks of a group."""
    repeats = SMALL_REPEATS, LARGE_REPEATS
    allgather, allgather_byte = _operation_costs(
        transport, prefix, "allgather", group, repeats, LARGE_SECONDS
    )
    alltoall, alltoall_byte = _operation_costs(
        transport, prefix, "alltoall", group, repeats, LARGE_SECONDS
    )
    return LinkCosts(allgather, alltoall, allgather_byte, alltoall_byte)


def _operation_costs(
    transport: Transport,
    prefix: str,
    operation: Operation,
    group: Group,
    repeats: tuple[int, int],
    least: float = 0.0,
) -> tuple[float, float]:
    """Seconds of a small operation, and of a byte in a large one, each repeated so often at least."""
    members = len(transport.members(group))
    others = _slices(CARRIED // max(1, members - 1), members)
    size = others if operation == "allgather" else others * members

    def seconds(count: int, times: int, least: float = 0.0) -> float:
        request = Request(operation, torch.zeros(count, dtype=torch.uint8), group=group)
        return operation_seconds(transport, f"{prefix}.{operation}.{count}", request, times, least)

    small = seconds(_slices(SMALL, members), repeats[0])
    large = seconds(size, repeats[1], least)
    received = size * members if operation == "allgather" else size
    payload = torch.zeros(size, dtype=torch.uint8)
    carried = transport.traffic(Request(operation, payload, group=group), received)
    return small, max(LEAST_BYTE, (large - small) / carried)


def _slices(size: int, members: int) -> int:
    """About so many bytes, of which an alltoall sends as many to each."""
    return max(1, size // members) * members


def operation_seconds(
    transport: Transport, name: str, request: Request, repeats: int, least: float = 0.0
) -> float:
    """What an operation takes: the fastest of some; all ranks call it at the same time.

    Args:
        transport: between the ranks.
        name: of the operation, the same on all ranks.
        request: whose tensor is overwritten.
        repeats: how often it is done at least: more than once, as the first may have to make
            connections.
        least: seconds for which it is repeated at least.
    """
    return min(
        _repeated(
            transport,
            name,
            request,
            lambda taken: len(taken) + 1 < repeats or sum(taken) < least,
        )
    )


def _repeated(
    transport: Transport, name: str, request: Request, more: Callable[[list[float]], bool]
) -> list[float]:
    """What each took of operations that are repeated for as long as one rank says.

    The first rank of the group decides by its clock whether another one follows, and the others learn
    it from what it sends: ones if so, and zeros otherwise.

    Args:
        transport: between the ranks.
        name: of the operation, the same on all ranks.
        request: whose tensor is overwritten.
        more: whether another one is to follow the next, by what those so far have taken.
    """
    first = transport.rank == transport.members(request.group)[0]
    taken: list[float] = []
    while True:
        request.tensor.fill_(float(first and more(taken)))
        started = time.perf_counter()
        result = transport.wait(transport.submit(request, name, len(taken)))
        taken.append(time.perf_counter() - started)
        if not result.flatten()[0]:
            return taken
