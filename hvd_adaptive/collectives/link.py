"""Bytes that a payload puts on the link of one rank."""

from __future__ import annotations

from hvd_adaptive.layers import Collective


def on_link(payload: float, collective: Collective, ranks: int) -> float:
    """Bytes that a link carries in one direction for a payload of one rank (ring algorithms).

    Example:
        >>> on_link(100, Collective.GATHER, 4), on_link(100, Collective.REDUCE, 4)
        (300.0, 150.0)
    """
    if ranks == 1:
        return float(payload)
    if collective is Collective.GATHER:
        return float(payload) * (ranks - 1)
    return payload * 2 * (ranks - 1) / ranks
