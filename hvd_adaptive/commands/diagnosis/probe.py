"""How fast ranks and hosts reach each other, over what training uses: Horovod's operations."""

from __future__ import annotations

import time
from typing import Final

import torch

from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.request import Request
from hvd_adaptive.comm.topology import Topology
from hvd_adaptive.comm.transport import Transport
from hvd_adaptive.commands.diagnosis.facts import Link

SMALL: Final = 64
LARGE: Final = 1 << 20
"""Bytes of an exchange between two hosts: 42 ms at 200 Mbit/s."""
REPEATS: Final = 4
MOST_HOSTS: Final = 32
"""Hosts whose links are measured; of more, some in equal distances."""


def measure_links(transport: Transport, control: Control, topology: Topology) -> tuple[Link, ...]:
    """Between the first host and each other; all ranks call it at the same time.

    Cost: about 0.3 s per host at 200 Mbit/s.

    Args:
        transport: between the ranks.
        control: among the same ranks.
        topology: of the same ranks.
    """
    hosts = topology.nodes[1:]
    stride = -(-len(hosts) // MOST_HOSTS) if hosts else 1
    links = []
    for number, host in enumerate(hosts[::stride]):
        pair = (0, topology.names.index(host))
        small, large = (
            _seconds(transport, f"hva.doctor.link.{number}.{size}", pair, size)
            for size in (SMALL, LARGE)
        )
        told = control.allgather([small, large])
        small, large = (max(told[rank][which] for rank in pair) for which in (0, 1))
        rate = 8 * (LARGE - SMALL) / max(1e-9, large - small)
        links.append(Link((topology.nodes[0], host), small, rate))
    return tuple(links)


def _seconds(transport: Transport, name: str, pair: tuple[int, int], size: int) -> float:
    """The fastest exchange of so many bytes between two ranks; the others take part without any."""
    splits = [0] * transport.size
    if transport.rank in pair:
        splits[pair[0] if transport.rank == pair[1] else pair[1]] = size
    seconds = []
    for repeat in range(1 + REPEATS):
        request = Request("alltoall", torch.zeros(sum(splits), dtype=torch.uint8), tuple(splits))
        started = time.perf_counter()
        transport.wait(transport.submit(request, name, repeat))
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
