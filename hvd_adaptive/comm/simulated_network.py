"""A network that is a clock: what collectives of virtual ranks would take on links of any rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Rate", "SimulatedNetwork", "arrival", "sine_squared"]

Rate: TypeAlias = Callable[[float], float]
"""Bytes per second of a link in one direction, at a time in seconds."""

SLICE = 0.01
"""Seconds for which a rate is taken to be what it is in their middle."""


def sine_squared(low: float, high: float, period: float) -> Rate:
    """A rate that swings between two, as in the experiments of Kimad, section 4.

    Example:
        >>> rate = sine_squared(10.0, 30.0, period=4.0)
        >>> rate(0.0), rate(2.0), round(rate(3.0))
        (10.0, 30.0, 20)
    """
    return lambda now: low + (high - low) * math.sin(math.pi * now / period) ** 2


def arrival(nbytes: float, now: float, rate: Rate) -> float:
    """When that many bytes are through, if they are sent from ``now`` on.

    Raises:
        ValueError: the rate is not positive: they would never be.

    Example:
        >>> round(arrival(10.0, 1.0, lambda now: 5.0), 6)
        3.0
    """
    while nbytes > 1e-6:
        if not rate(now) > 0:
            raise ValueError(f"a rate of {rate(now)} at {now:g} s: write bytes per second above 0")
        middle = rate(now + min(SLICE, nbytes / rate(now)) / 2)
        span = min(SLICE, nbytes / middle)
        nbytes -= span * middle
        now += span
    return now


@dataclass(slots=True)
class SimulatedNetwork:
    """Links that ranks of a :class:`~hvd_adaptive.comm.local_group.LocalGroup` share no part of.

    Collectives follow each other, each takes ``latency`` and what its bytes on a rank's link take at
    the rates of that time; computing takes what it is said to. Nothing is hidden behind anything: the
    time of a step is the sum, as in Kimad's model of it. What is agreed on between ranks costs nothing.
    Planners see these seconds in the place of those of this process, so a run is repeatable.

    Args:
        rate: of every link.
        latency: seconds of a collective, whatever it carries.

    Example:
        >>> network = SimulatedNetwork(lambda now: 1e6, latency=0.001)
        >>> network.compute(0.1)
        >>> network.carry(50_000)
        >>> round(network.now(), 6), network.carried
        (0.151, 50000.0)
    """

    rate: Rate
    latency: float = 2e-4
    carried: float = 0.0
    """Bytes on each link since the start."""
    _now: float = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def compute(self, seconds: float) -> None:
        """Let ranks compute."""
        self._now += seconds

    def carry(self, nbytes: float) -> None:
        """Let a collective put so many bytes on each link.

        Raises:
            ValueError: the rate is not positive.
        """
        self.carried += nbytes
        self._now = arrival(nbytes, self._now + self.latency, self.rate)
