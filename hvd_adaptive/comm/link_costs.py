"""What the network's operations cost among the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

SMALL_APART, LARGE_APART = 1.5, 1.15
"""In another network, operations take so many times as long, or as short."""
SMALL_NOISE = 1e-3
"""Seconds by which small ones then differ, too: they wait for cores more than for the network."""
LARGE_DISORDER = 2.0
"""Up to how many times as long or as short large ones take where small ones wait for cores."""

CYCLE = 1e-3
"""Seconds that Horovod's thread sleeps between two looks at what is to be done (its default)."""
TCP_SHARE = 0.95
"""Of a link's rate; the rest are headers."""


def seconds_of_byte(rate: float) -> float:
    """Seconds that TCP needs for a byte on a link of ``rate`` bit per second.

    Example:
        >>> f"{seconds_of_byte(1e9):.3g}"
        '8.42e-09'
    """
    return 8 / (TCP_SHARE * rate)


def small_seconds(seconds: float, ranks: int, others: int, cycle: float = CYCLE) -> float:
    """Seconds of a small operation among other ranks: see :meth:`LinkCosts.at`, which goes by it.

    Example:
        >>> small_seconds(0.001, 2, 64), small_seconds(0.003, 2, 4)
        (0.001, 0.005)
    """
    fixed = min(seconds, cycle)
    rounds = [max(1.0, math.log2(max(1, each))) for each in (ranks, others)]
    return fixed + (seconds - fixed) * rounds[1] / rounds[0]


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
        allgather 0.2 ms + 1,000 Mbit/s, alltoall 0.2 ms + 1,000 Mbit/s
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

    def at(self, ranks: int, others: int, cycle: float = CYCLE) -> LinkCosts:
        """The same network among another number of ranks, as many of them on each node.

        What a byte on a link costs stays. A small operation takes Horovod's cycle, whoever takes part,
        and messages that follow each other, as many as ``log2(ranks)``: MPI sends small ones along a
        tree, or by recursive doubling.

        Args:
            ranks: among which this was measured.
            others: among which it is wanted.
            cycle: seconds of a small operation that do not grow with the ranks.

        Example:
            >>> LinkCosts(1.5e-3, 1.5e-3, 8e-9, 8e-9).at(4, 16).allgather
            0.002
        """
        small = [small_seconds(each, ranks, others, cycle) for each in (self.allgather, self.alltoall)]
        layers = self.layers
        if layers is not None:
            nodes, other_nodes = (each // layers.ranks_per_node for each in (ranks, others))
            layers = replace(layers, peers=layers.peers.at(nodes, other_nodes, cycle))
        return replace(self, allgather=small[0], alltoall=small[1], layers=layers)

    def with_rate(self, rate: float, ranks_per_node: int = 1, before: float | None = None) -> LinkCosts:
        """The same among hosts whose links have another rate; what stays in a node costs as before.

        Args:
            rate: bits per second of a host's link in one direction.
            ranks_per_node: that share it. One ring passes each link once, but what all ranks exchange
                with all passes it at the same time.
            before: the rate of the links on which this was measured, where it is known. What operations
                made of them, they then make of the others, too; else all of it less TCP's headers.

        Example:
            >>> print(LinkCosts.of_gigabit().with_rate(1e8))
            allgather 0.2 ms + 95 Mbit/s, alltoall 0.2 ms + 95 Mbit/s
            >>> measured = LinkCosts(2e-4, 2e-4, 1e-8, 2e-8)  # 800 and 400 Mbit/s
            >>> print(measured.with_rate(1e8, before=1e9))
            allgather 0.2 ms + 80 Mbit/s, alltoall 0.2 ms + 40 Mbit/s
        """
        if before is not None:
            return self._slower(before / rate)
        byte = seconds_of_byte(rate)
        layers = self.layers
        if layers is not None:
            layers = replace(layers, peers=layers.peers.with_rate(rate / layers.ranks_per_node))
        shared = byte * ranks_per_node
        return replace(self, allgather_byte=byte, alltoall_byte=shared, layers=layers)

    def _slower(self, times: float) -> LinkCosts:
        """The same where a byte between hosts takes so many times as long."""
        layers = self.layers
        if layers is not None:
            layers = replace(layers, peers=layers.peers._slower(times))
        gathered, exchanged = times * self.allgather_byte, times * self.alltoall_byte
        return replace(self, allgather_byte=gathered, alltoall_byte=exchanged, layers=layers)

    def still(self, small: float, byte: float) -> bool:
        """Whether the network is as this says, by what
        :meth:`~hvd_adaptive.comm.transport.Transport.link_look` finds.

        Where small operations take longer and bytes about what they took, processes that share cores
        are in each other's way for a second or three: what was measured then would be of that.

        Args:
            small: seconds of a small allgather.
            byte: seconds of a byte in a large one.

        Example:
            >>> link = LinkCosts.of_gigabit()
            >>> link.still(3e-4, 8.4e-9), link.still(2e-4, 1.2e-8)
            (True, False)
            >>> link.still(4e-3, 1.2e-8), link.still(4e-3, 1.7e-8)  # disorder, and another network
            (True, False)
            >>> LinkCosts(4e-3, 4e-3, 8e-9, 8e-9).still(2e-4, 8e-9)
            False
        """
        other = abs(small - self.allgather) > SMALL_NOISE and apart(small, self.allgather, SMALL_APART)
        if other and small < self.allgather:
            return False
        return not apart(byte, self.allgather_byte, LARGE_DISORDER if other else LARGE_APART)

    def __str__(self) -> str:
        rates = [8e-6 / each for each in (self.allgather_byte, self.alltoall_byte)]
        return (
            f"allgather {_shown(1e3 * self.allgather, 2)} ms + {_shown(rates[0], 3)} Mbit/s, "
            f"alltoall {_shown(1e3 * self.alltoall, 2)} ms + {_shown(rates[1], 3)} Mbit/s"
        )


def apart(a: float, b: float, times: float) -> bool:
    """Whether one is more than so many times the other."""
    return max(a, b) > times * min(a, b)


def _shown(value: float, digits: int) -> str:
    """Without a power of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{digits}g}"


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
