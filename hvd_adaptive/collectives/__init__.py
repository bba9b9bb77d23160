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

__all__ = ["SCHEMES", "Scheme", "scheme_for"]


def scheme_for(kind: PayloadKind) -> Scheme:
    """The scheme that reduces payloads of a kind.

    Example:
        >>> scheme_for(PayloadKind.ENCODED).name
        'allgather'
    """
    return next(scheme for scheme in SCHEMES.values() if scheme.carries is kind)
