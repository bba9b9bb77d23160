"""Timing of collectives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CollectiveTiming:
    """One operation of a step.

    Args:
        bucket: index of the bucket.
        traffic: bytes that this rank's link carried in one direction.
        launched: when, in seconds.
        done: when its result was there at the latest.
        exposed: seconds for which training waited for it.
    """

    bucket: int
    traffic: int
    launched: float
    done: float
    exposed: float
