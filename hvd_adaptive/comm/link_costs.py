"""What the network's operations cost among the ranks, measured where there is a network."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hvd_adaptive.comm.request import Group, Operation, Request

if TYPE_CHECKING:
    from hvd_adaptive.comm.transport import Transport

SMALL, LARGE = 256, 1 << 17
"""Bytes of a rank in the operations that are timed."""
REPEATS = 6
LEAST_BYTE = 1e-11
"""Seconds of a byte that no memory is faster than: what noise may not hide."""


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Seconds of operations among all ranks: of one that is small, and what each byte adds.

    Args:
        allgather: seconds of a small allgather.
        alltoall: seconds of a small alltoall.
        allgather_byte: seconds of a byte on a rank's link in one direction, in a large allgather.
        alltoall_byte: the same of an alltoall.
        layers: the same inside nodes and between them, where that was measured apart.

    Example:
        >>> print(LinkCosts.of_gigabit())
        allgather 0.2 ms + 1e+03 Mbit/s, alltoall 0.2 ms + 1e+03 Mbit/s
    """

    allgather: float
    alltoall: float
    allgather_byte: float
    alltoall_byte: float
    layers: LayerCosts | None = None

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> LinkCosts:
        """Undo :meth:`to_dict`.

        Example:
            >>> LinkCosts.from_dict(LinkCosts.of_gigabit().to_dict()) == LinkCosts.of_gigabit()
            True
        """
        layers = found.get("layers")
        made = None if layers is None else LayerCosts.from_dict(layers)
        return cls(**{**found, "layers": made})

    def to_dict(self) -> dict[str, Any]:
        """Numbers, for JSON."""
        return asdict(self)

    @classmethod
    def of_gigabit(cls) -> LinkCosts:
        """Of a 1 Gbit/s Ethernet: what is assumed where there is no network to measure."""
        return cls(2e-4, 2e-4, 8e-9, 8e-9)

    def __str__(self) -> str:
        rates = [8e-6 / each for each in (self.allgather_byte, self.alltoall_byte)]
        return (
            f"allgather {1e3 * self.allgather:.2g} ms + {rates[0]:.3g} Mbit/s, "
            f"alltoall {1e3 * self.alltoall:.2g} ms + {rates[1]:.3g} Mbit/s"
        )


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Seconds of operations inside nodes, and of those between ranks of different nodes.

    All nodes, and all positions on a node, are measured at the same time, as they work at the same
    time: what ranks of a node take from each other on their link is counted.

    Args:
        ranks_per_node: ranks of each node.
        node: among the ranks of a node.
        peers: among the ranks of one position on all nodes.
    """

    ranks_per_node: int
    node: LinkCosts
    peers: LinkCosts

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> LayerCosts:
        """Of what :meth:`LinkCosts.to_dict` made of it."""
        node, peers = (LinkCosts.from_dict(found[key]) for key in ("node", "peers"))
        return cls(found["ranks_per_node"], node, peers)


def measure_link(transport: Transport, prefix: str) -> LinkCosts:
    """Time small and large operations; all ranks call it at the same time.

    Where nodes have several ranks, it does so also inside the nodes and between them.

    Cost: some operations of 128 KiB: 0.3 s with 16 ranks at 200 Mbit/s.

    Args:
        transport: between the ranks.
        prefix: of the operations' names.
    """
    if transport.size == 1:
        return LinkCosts.of_gigabit()
    costs = _measured(transport, prefix, "all")
    if not transport.has_node_groups:
        return costs
    node, peers = (_measured(transport, f"{prefix}.{group}", group) for group in _LAYERS)
    return replace(costs, layers=LayerCosts(transport.topology.ranks_per_node, node, peers))


_LAYERS: tuple[Group, ...] = ("node", "peers")


def _measured(transport: Transport, prefix: str, group: Group) -> LinkCosts:
    """What operations cost among the ranks of a group."""
    costs = []
    operations: tuple[Operation, ...] = ("allgather", "alltoall")
    for operation in operations:
        small, large = (
            _seconds(transport, f"{prefix}.{operation}", operation, size, group)
            for size in (SMALL, LARGE)
        )
        received = LARGE * len(transport.members(group)) if operation == "allgather" else LARGE
        payload = torch.zeros(LARGE, dtype=torch.uint8)
        carried = transport.traffic(Request(operation, payload, group=group), received)
        costs.append((small, max(LEAST_BYTE, (large - small) / carried)))
    (allgather, allgather_byte), (alltoall, alltoall_byte) = costs
    return LinkCosts(allgather, alltoall, allgather_byte, alltoall_byte)


def _seconds(transport: Transport, name: str, operation: Operation, size: int, group: Group) -> float:
    """The fastest of some operations; the first is not counted, in which connections are made."""
    size -= size % len(transport.members(group))
    seconds = []
    for repeat in range(1 + REPEATS):
        payload = torch.zeros(size, dtype=torch.uint8)
        started = time.perf_counter()
        request = Request(operation, payload, group=group)
        transport.wait(transport.submit(request, f"{name}.{size}", repeat))
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
