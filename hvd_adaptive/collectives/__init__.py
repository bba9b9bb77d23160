"""The collective schemes, by name.

A new member is one module and one row of ``SCHEMES``. See :mod:`hvd_adaptive.collectives.base`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from hvd_adaptive import specs
from hvd_adaptive.collectives.allgather import AllGather
from hvd_adaptive.collectives.allreduce import AllReduce
from hvd_adaptive.collectives.base import EncodedScheme, Scheme
from hvd_adaptive.collectives.cast_two_shot import CastTwoShot
from hvd_adaptive.collectives.hierarchical import Hierarchical
from hvd_adaptive.collectives.sparse import SparseAllGather
from hvd_adaptive.collectives.two_shot import TwoShot
from hvd_adaptive.layers import PayloadKind

SCHEMES: Mapping[str, type[Scheme]] = {
    scheme.name: scheme
    for scheme in (AllReduce, CastTwoShot, AllGather, TwoShot, Hierarchical, SparseAllGather)
}

AUTO = "auto"
"""In the place of a scheme of encoded payloads: the fastest one, as far as can be foreseen."""

__all__ = [
    "AUTO",
    "SCHEMES",
    "Scheme",
    "check_scheme",
    "encoded_schemes",
    "planned_link_bytes",
    "reduces_in_nodes",
    "scheme_for",
    "scheme_named",
]


@functools.lru_cache(maxsize=256)
def scheme_named(text: str) -> Scheme:
    """Make a scheme of ``"name"`` or ``"name:option=value"``.

    Raises:
        ValueError: unknown name or option, or a value that does not fit.

    Example:
        >>> scheme_named("two_shot:level=8")
        TwoShot(level=8.0)
    """
    return specs.read("scheme", SCHEMES, text)


def scheme_for(kind: PayloadKind, encoded: str = AllGather.name) -> str:
    """The scheme that reduces payloads of a kind, as text; all but encoded ones have but one.

    Args:
        kind: of the payloads.
        encoded: the scheme of those that are encoded.

    Example:
        >>> scheme_for(PayloadKind.ENCODED), scheme_for(PayloadKind.SUMMABLE, "two_shot")
        ('allgather', 'allreduce')
    """
    if kind is PayloadKind.ENCODED:
        return encoded
    return next(name for name, scheme in SCHEMES.items() if scheme.carries is kind)


def encoded_schemes(in_nodes: bool = False) -> dict[str, EncodedScheme]:
    """The schemes of encoded payloads, by name, with their options at their defaults.

    Args:
        in_nodes: also those that reduce in a node first.

    Example:
        >>> list(encoded_schemes()), list(encoded_schemes(in_nodes=True))
        (['allgather', 'two_shot'], ['allgather', 'two_shot', 'hierarchical'])
    """
    made = {name: scheme_named(name) for name in SCHEMES if in_nodes or not reduces_in_nodes(name)}
    return {name: scheme for name, scheme in made.items() if isinstance(scheme, EncodedScheme)}


def check_scheme(text: str) -> str:
    """``text``, if it is "auto" or names a scheme that carries encoded payloads.

    Raises:
        ValueError: it names none, or one for other payloads.

    Example:
        >>> check_scheme("allreduce")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: scheme 'allreduce' carries no encoded payloads: use one of auto, ...
    """
    if text == AUTO:
        return text
    if scheme_named(text).carries is not PayloadKind.ENCODED:
        able = [name for name, each in SCHEMES.items() if each.carries is PayloadKind.ENCODED]
        raise ValueError(
            f"scheme {text!r} carries no encoded payloads: use one of {', '.join([AUTO, *able])}"
        )
    return text


def reduces_in_nodes(text: str) -> bool:
    """Whether a scheme, as text, adds the gradients of a node before it sends them to others."""
    return text != AUTO and isinstance(scheme_named(text), Hierarchical)


def planned_link_bytes(payload: float, scheme: str, ranks: int, ranks_per_node: int = 1) -> float:
    """Bytes on one rank's link, as planners count them.

    A lone rank counts as one of two: it sends nothing, which would leave nothing to decide.

    Args:
        payload: bytes of one rank.
        scheme: that reduces it, as text.
        ranks: number of ranks.
        ranks_per_node: how many of them share a node.

    Example:
        >>> [planned_link_bytes(100, "allgather", ranks) for ranks in (1, 2, 4)]
        [100.0, 100.0, 300.0]
    """
    return scheme_named(scheme).link_bytes(payload, max(2, ranks), ranks_per_node)
