"""The collective schemes, by name.

A new member is one module and one row of ``SCHEMES``. See :mod:`hvd_adaptive.collectives.base`.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvd_adaptive.collectives.allgather import AllGather
from hvd_adaptive.collectives.allreduce import AllReduce
from hvd_adaptive.collectives.base import Scheme
from hvd_adaptive.collectives.cast_two_shot import CastTwoShot
from hvd_adaptive.collectives.sparse import SparseAllGather
from hvd_adaptive.layers import PayloadKind

SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme for scheme in (AllReduce(), CastTwoShot(), AllGather(), SparseAllGather())
}

_BY_KIND = {scheme.carries: scheme for scheme in SCHEMES.values()}

__all__ = ["SCHEMES", "Scheme", "planned_link_bytes", "scheme_for"]


def scheme_for(kind: PayloadKind) -> Scheme:
    """The scheme that reduces payloads of a kind.

    Example:
        >>> scheme_for(PayloadKind.ENCODED).name
        'allgather'
    """
    return _BY_KIND[kind]


def planned_link_bytes(payload: float, kind: PayloadKind, ranks: int) -> float:
    """Bytes on one rank's link, as planners count them.

    A lone rank counts as one of two: it sends nothing, which would leave nothing to decide.

    Args:
        payload: bytes of one rank.
        kind: of the payload.
        ranks: number of ranks.

    Example:
        >>> [planned_link_bytes(100, PayloadKind.ENCODED, ranks) for ranks in (1, 2, 4)]
        [100.0, 100.0, 300.0]
    """
    return scheme_for(kind).link_bytes(payload, max(2, ranks))
