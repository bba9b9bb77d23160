"""One sentence about where a step's time went, and what that was not."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

__all__ = ["Placement", "verdict"]

_LITTLE = 0.1
"""A share of the step below which it is not worth a change."""


@dataclass(frozen=True)
class Placement:
    """Where the ranks run.

    Args:
        ranks: how many take part.
        hosts: on how many hosts, as Horovod counts them.
        sharing: ranks that share this machine's cores.
        cores: cores that those ranks may use.
    """

    ranks: int = 1
    hosts: int = 1
    sharing: int = 1
    cores: int = 1

    @classmethod
    def alone(cls) -> Placement:
        """Of a single process."""
        return cls(cores=len(usable_cores()))

    @property
    def crowded(self) -> bool:
        """Whether ranks must share cores."""
        return self.sharing > self.cores


def usable_cores() -> list[int]:
    """The cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def verdict(
    total: float,
    exposed: float,
    compression: float,
    placement: Placement,
    least_exposed: float = math.nan,
) -> str:
    """What bounds a step, in one sentence.

    Args:
        total: seconds per step.
        exposed: of them, exposed communication.
        compression: of them, compressing and decompressing.
        placement: where the ranks run.
        least_exposed: the least exposed communication of any rank, where that is known. The rank that
            joins last waits for nobody, so this is what the network itself took at most.

    Returns:
        The sentence; "" where no step is complete.

    Example:
        >>> verdict(1.0, 0.74, 0.02, Placement(ranks=16, hosts=1, sharing=16, cores=2))
        '74 % exposed: 16 ranks on 2 cores, not the network'
        >>> verdict(1.0, 0.6, 0.02, Placement(ranks=4, hosts=4, sharing=1, cores=8))
        '60 % exposed: the network'
        >>> verdict(1.0, 0.03, 0.02, Placement(ranks=4, hosts=4, sharing=1, cores=8))
        'compute bound: 3 % exposed, so more compression cannot make it faster'
    """
    if not total > 0 or math.isnan(exposed):
        return ""
    waits, works = exposed / total, compression / total
    if max(waits, works) < _LITTLE:
        return f"compute bound: {_percent(waits)} exposed, so more compression cannot make it faster"
    if works > waits:
        why = (
            f", with {placement.sharing} ranks on {placement.cores} cores" if placement.crowded else ""
        )
        return f"{_percent(works)} compressing and decompressing{why}: a cheaper compressor pays"
    return f"{_percent(waits)} exposed: {_cause(exposed, placement, least_exposed)}"


def _cause(exposed: float, placement: Placement, least_exposed: float) -> str:
    ranks, crowd = placement.ranks, f"{placement.sharing} ranks on {placement.cores} cores"
    if placement.hosts == 1:
        return f"{crowd if placement.crowded else 'ranks wait for each other'}, not the network"
    if least_exposed < 0.5 * exposed:
        share = f"one of the {ranks} ranks waits only {_percent(least_exposed / exposed)} as long"
        cause = crowd if placement.crowded else "slower ranks"
        return f"{cause}, not the network ({share})"
    return f"the network, and {crowd}" if placement.crowded else "the network"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
