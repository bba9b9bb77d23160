"""What the network's operations cost among the ranks, measured where there is a network."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.comm.request import Operation, Request

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

    Example:
        >>> print(LinkCosts.of_gigabit())
        allgather 0.2 ms + 1e+03 Mbit/s, alltoall 0.2 ms + 1e+03 Mbit/s
    """

    allgather: float
    alltoall: float
    allgather_byte: float
    alltoall_byte: float

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


def measure_link(transport: Transport, prefix: str) -> LinkCosts:
    """Time small and large operations; all ranks call it at the same time.

    Cost: some operations of 128 KiB: 0.3 s with 16 ranks at 200 Mbit/s.

    Args:
        transport: between the ranks.
        prefix: of the operations' names.
    """
    if transport.size == 1:
        return LinkCosts.of_gigabit()
    costs = []
    operations: tuple[Operation, ...] = ("allgather", "alltoall")
    for operation in operations:
        small, large = (
            _seconds(transport, f"{prefix}.{operation}", operation, size) for size in (SMALL, LARGE)
        )
        received = LARGE * transport.size if operation == "allgather" else LARGE
        carried = transport.traffic(Request(operation, torch.zeros(LARGE, dtype=torch.uint8)), received)
        costs.append((small, max(LEAST_BYTE, (large - small) / carried)))
    (allgather, allgather_byte), (alltoall, alltoall_byte) = costs
    return LinkCosts(allgather, alltoall, allgather_byte, alltoall_byte)


def _seconds(transport: Transport, name: str, operation: Operation, size: int) -> float:
    """The fastest of some operations; the first is not counted, in which connections are made."""
    size -= size % transport.size
    seconds = []
    for repeat in range(1 + REPEATS):
        payload = torch.zeros(size, dtype=torch.uint8)
        started = time.perf_counter()
        transport.wait(transport.submit(Request(operation, payload), f"{name}.{size}", repeat))
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
