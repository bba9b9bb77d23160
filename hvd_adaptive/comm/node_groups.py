"""Process sets of nodes and of peers: whom a hierarchical scheme's operations are among.

Horovod registers a process set on all ranks, members or not, and runs operations of a set only among
those. Two optimizers use the same sets.
"""

from __future__ import annotations

import horovod.torch as hvd

from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.topology import Topology, node_name
from hvd_adaptive.comm.world import NODES_REMEDY, NodeGroups

_made: dict[tuple[int, ...], hvd.ProcessSet] = {}


def node_groups(control: Control) -> NodeGroups:
    """Agree with all ranks of the world on their nodes, and make the process sets that these need.

    All ranks call it. Cost: one small allgather; the first time, a few cycles of Horovod for each set.

    Args:
        control: agreement among all ranks of Horovod.

    Raises:
        ValueError: Horovod was started without process sets that can be added; on all ranks.
    """
    topology = Topology(tuple(control.allgather(node_name())))
    if not topology.is_layered:
        return NodeGroups(topology)
    rank = control.rank
    neighbors, peers = topology.neighbors(rank), topology.peers(rank)
    if not (_is_alive(neighbors, rank) and _is_alive(peers, rank)):
        _made.clear()
        for ranks in topology.groups:
            _made[ranks] = _added(ranks)
    return NodeGroups(topology, {"node": _made[neighbors], "peers": _made[peers]})


def remove_node_groups() -> None:
    """Remove all process sets that were made, whoever uses them; all ranks of Horovod call it."""
    for process_set in _made.values():
        hvd.remove_process_set(process_set)
    _made.clear()


def _added(ranks: tuple[int, ...]) -> hvd.ProcessSet:
    try:
        return hvd.add_process_set(hvd.ProcessSet(list(ranks)))
    except ValueError as error:
        remedy = (
            "remove yours with hvd.remove_process_set()" if "duplicate" in str(error) else NODES_REMEDY
        )
        raise ValueError(
            f"a hierarchical scheme needs a process set of ranks {list(ranks)}, which could not be "
            f"added ({error}): {remedy}"
        ) from error


def _is_alive(ranks: tuple[int, ...], rank: int) -> bool:
    """Whether Horovod still knows the set, of which this rank is one: when shut down it forgets all."""
    known = _made.get(ranks)
    try:
        return known is not None and (known.size(), known.rank()) == (len(ranks), ranks.index(rank))
    except ValueError:
        return False
