"""The alpha-beta model of scaling.py: what a collective costs, fitted and carried on to more ranks.

``seconds = fixed + rounds * alpha + volume * beta``: ``rounds`` messages follow each other, and
``volume`` bytes pass each rank's link in one direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_adaptive.collectives import SCHEMES
from hvd_adaptive.planning.costs import nonnegative_least_squares

TCP_SHARE = 0.95
"""Of a link's rate; the rest are headers."""

# --- collectives --------------------------------------------------------------------------------------


def rounds(collective: str, ranks: int) -> int:
    """Messages that a rank sends one after the other.

    Example:
        >>> [rounds(kind, 16) for kind in ("allreduce", "allgather", "two-shot", "hierarchical")]
        [30, 15, 30, 6]
    """
    match collective:
        case "allreduce" | "two-shot":
            return 2 * (ranks - 1)
        case "allgather":
            return ranks - 1
        case "hierarchical":
            group = group_size(ranks)
            return group - 1 + ranks // group - 1
    raise ValueError(f"unknown collective {collective!r}")


def volume(collective: str, ranks: int, nbytes: float) -> float:
    """Bytes on a rank's link in one direction, where every rank has ``nbytes`` to share.

    Example:
        >>> [volume(kind, 4, 100) for kind in ("allreduce", "allgather", "two-shot", "hierarchical")]
        [150.0, 300.0, 150.0, 200]
    """
    if collective in _SCHEMES:
        return SCHEMES[_SCHEMES[collective]]().link_bytes(nbytes, ranks)
    return rounds(collective, ranks) * nbytes


_SCHEMES = {"allreduce": "allreduce", "allgather": "allgather", "two-shot": "cast_two_shot"}
"""The library's schemes with the traffic of each collective; its
hierarchical one is another: it adds densely in a node, while the groups here exchange payloads."""


def group_size(ranks: int) -> int:
    """Ranks in each group of a hierarchical exchange: the divisor nearest to the square root."""
    divisors = [each for each in range(1, math.isqrt(ranks) + 1) if ranks % each == 0]
    return divisors[-1]


# --- measured points, and the line through them -----------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A measurement.

    Args:
        collective: ``allreduce`` or ``allgather``.
        operations: of which it is made, one after the other.
        ranks: how many took part.
        nbytes: of each rank.
        seconds: taken.
    """

    collective: str
    operations: int
    ranks: int
    nbytes: int
    seconds: float

    @property
    def row(self) -> tuple[float, float, float]:
        """What fixed, alpha and beta are multiplied with."""
        messages = self.operations * rounds(self.collective, self.ranks)
        return 1.0, float(messages), volume(self.collective, self.ranks, self.nbytes)


@dataclass(frozen=True)
class Line:
    """Seconds: of any operation, of a message, and of a byte."""

    fixed: float
    alpha: float
    beta: float

    def seconds(self, point: Point) -> float:
        """What it says of a point."""
        return float(np.dot(point.row, (self.fixed, self.alpha, self.beta)))

    def error(self, point: Point) -> float:
        """By how much that is off, relative to what was measured."""
        return self.seconds(point) / point.seconds - 1


def fit(points: Sequence[Point]) -> Line:
    """The line of least squared relative error, without negative costs.

    Example:
        >>> true = Line(1e-3, 2e-5, 1e-9)
        >>> points = [Point("allgather", 1, n, size, 0) for n in (1, 2, 4) for size in (10**3, 10**6)]
        >>> points = [Point("allgather", 1, p.ranks, p.nbytes, true.seconds(p)) for p in points]
        >>> found = fit(points)
        >>> round(1e3 * found.fixed, 6), round(1e5 * found.alpha, 6), round(1e9 * found.beta, 6)
        (1.0, 2.0, 1.0)
    """
    rows = np.array([point.row for point in points]) / np.array([[p.seconds] for p in points])
    solution = nonnegative_least_squares(rows.T @ rows, rows.sum(0))
    return Line(*map(float, solution))


def limited_by_link(point: Point, machine: float, rate: float, cores: int, smallest: int) -> bool:
    """Whether a point tells of the link and not of this machine. A rule that sees no residual.

    With one rank nothing is sent: only the smallest payload counts, as the floor. Up to as many ranks
    as cores all count. With more ranks the wire must need twice what the machine alone does.

    Args:
        point: its seconds are not looked at.
        machine: seconds of the same operation by the same ranks on links without a limit.
        rate: of the links, bit per second.
        cores: of the machine.
        smallest: payload of this scheme.
    """
    if point.ranks == 1:
        return point.nbytes == smallest
    wire = point.row[2] * byte_seconds(rate)
    return point.ranks <= cores or wire >= 2 * machine


def byte_seconds(rate: float) -> float:
    """Seconds that TCP needs for a byte on a link of ``rate`` bit per second."""
    return 8 / (TCP_SHARE * rate)


# --- many ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What one core does for each element of a layer, beside the network.

    Args:
        nbytes: on the wire.
        encode: seconds of compressing, once; for what is reduced, also of decompressing.
        decode: seconds of adding one payload.
        add: seconds in which a ring adds what it receives.
    """

    nbytes: float
    encode: float
    decode: float
    add: float = 0.0


@dataclass(frozen=True)
class ScaledMethod:
    """A compressor and how its payloads meet."""

    work: Work
    collective: str
    operations: int = 1

    def busy(self, ranks: int, elements: float) -> float:
        """Seconds of one core in a step.

        A two-shot exchange adds the slices of all ranks (one payload in all), compresses its slice of
        the sum, and decodes the result; a hierarchical one adds the group's payloads, compresses their
        sum, and adds those of the groups.
        """
        work = self.work
        match self.collective:
            case "allreduce":
                each = work.encode + work.add * (ranks - 1) / ranks
            case "allgather":
                each = work.encode + ranks * work.decode
            case "two-shot":
                each = work.encode * (1 + 1 / ranks) + 2 * work.decode
            case _:
                group = group_size(ranks)
                each = 2 * work.encode + (group + ranks // group) * work.decode
        return each * elements

    def network_seconds(self, ranks: int, elements: float, line: Line, buckets: int) -> float:
        """Seconds on the network in a step: every bucket is a collective of its own."""
        messages = rounds(self.collective, ranks)
        latency = buckets * self.operations * (line.fixed + messages * line.alpha)
        return latency + volume(self.collective, ranks, self.work.nbytes * elements) * line.beta

    def step(self, ranks: int, elements: float, line: Line, buckets: int) -> float:
        """Both, one after the other."""
        return self.busy(ranks, elements) + self.network_seconds(ranks, elements, line, buckets)


def crossing(slow: Mapping[int, float], fast: Mapping[int, float]) -> int | None:
    """The first number of ranks from which on ``slow`` takes at least as long as ``fast``.

    Args:
        slow: seconds by ranks.
        fast: those of what it is compared with, at the same ranks.

    Returns:
        None if it never does so to the last.

    Example:
        >>> ranks = range(2, 400)
        >>> gathered = {n: volume("allgather", n, 0.03) for n in ranks}
        >>> crossing(gathered, {n: volume("allreduce", n, 2.0) for n in ranks})
        134
    """
    found = None
    for ranks in sorted(slow, reverse=True):
        if slow[ranks] < fast[ranks]:
            break
        found = ranks
    return found
