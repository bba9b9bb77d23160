"""Which ranks share a node, and so which of them a slow link lies between. Pure: no Horovod, no MPI."""

from __future__ import annotations

import os
import socket
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property

NODE_VARIABLE = "HVA_NODE"
"""Environment variable that names a rank's node where its host's name does not: two containers of one
host, or the racks of a cluster whose hosts are well connected."""


def node_name() -> str:
    """The name of this process's node, the same for all ranks on it and for no other."""
    return os.environ.get(NODE_VARIABLE) or socket.gethostname()


@dataclass(frozen=True)
class Topology:
    """The nodes of the ranks of a process set.

    Args:
        names: of each rank, the name of its node. Ranks of one node need not follow each other.

    Example:
        >>> topology = Topology(("a", "b", "a", "b"))
        >>> topology.neighbors(2), topology.peers(2), topology.is_layered
        ((0, 2), (2, 3), True)
    """

    names: tuple[str, ...]

    @classmethod
    def flat(cls, ranks: int) -> Topology:
        """Every rank is a node of its own."""
        return _flat(ranks)

    @classmethod
    def of_nodes(cls, ranks: int, ranks_per_node: int) -> Topology:
        """Ranks one after the other on nodes of one size; the last may have fewer."""
        return cls(tuple(str(rank // ranks_per_node) for rank in range(ranks)))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.names)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names, in the order of their first ranks."""
        return tuple(dict.fromkeys(self.names))

    @cached_property
    def is_even(self) -> bool:
        """Whether all nodes have the same number of ranks."""
        return len(set(Counter(self.names).values())) == 1

    @property
    def is_layered(self) -> bool:
        """Whether there is something to gain: several nodes, with equally many ranks, more than one."""
        return not self.obstacle

    @property
    def obstacle(self) -> str:
        """Why there is nothing to gain from reducing in a node first; empty where there is."""
        if len(self.nodes) == 1:
            return f"all {self.size} ranks are on one node"
        if not self.is_even:
            counts = Counter(self.names)
            rows = [f"{name}:{counts[name]}" for name in self.nodes]
            shown = ",".join(rows[:8]) + (",..." if len(rows) > 8 else "")
            return f"nodes have different numbers of ranks ({shown})"
        if self.size == len(self.nodes):
            return "every node has one rank"
        return ""

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node, where that allows to reduce in a node first; else 1."""
        return self.size // len(self.nodes) if self.is_layered else 1

    def neighbors(self, rank: int) -> tuple[int, ...]:
        """The ranks on this rank's node, itself among them."""
        return tuple(other for other, name in enumerate(self.names) if name == self.names[rank])

    def local_rank(self, rank: int) -> int:
        """Position of a rank among its neighbors."""
        return self.neighbors(rank).index(rank)

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that have this rank's position on their nodes: one a node, itself among them."""
        return tuple(sorted(self._columns[self.local_rank(rank)]))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every node, and then all peers, in one order on all ranks."""
        return tuple(dict.fromkeys([self.neighbors(rank) for rank in range(self.size)])) + tuple(
            dict.fromkeys([self.peers(rank) for rank in range(self.size)])
        )

    @cached_property
    def _columns(self) -> tuple[tuple[int, ...], ...]:
        rows = [[rank for rank, name in enumerate(self.names) if name == node] for node in self.nodes]
        least = min(map(len, rows), default=0)
        return tuple(tuple(row[local] for row in rows) for local in range(least))


@cache
def _flat(ranks: int) -> Topology:
    return Topology(tuple(str(rank) for rank in range(ranks)))
