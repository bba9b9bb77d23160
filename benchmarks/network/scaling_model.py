"""The alpha-beta model of scaling.py: what a collective costs, fitted and carried on to more ranks.

``wire = fixed + rounds * alpha + volume * beta``: ``rounds`` messages follow each other, and ``volume``
bytes pass each rank's link in one direction. Where more than one rank sends to each at once, in two
shots, the ranks' flows meet in front of one link, and bytes take longer by a share, the crowding.
Where all ranks share one machine, what the machine alone needs for a collective partly overlaps with
the wire: ``seconds = sqrt(machine^2 + wire^2)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_adaptive.collectives import SCHEMES

# --- collectives --------------------------------------------------------------------------------------


def rounds(collective: str, ranks: int) -> int:
    """Messages that a rank sends one after the other.

    Example:
        >>> [rounds(kind, 16) for kind in ("allreduce", "allgather", "two-shot")]
        [30, 15, 30]
    """
    match collective:
        case "allreduce" | "two-shot":
            return 2 * (ranks - 1)
        case "allgather":
            return ranks - 1
    raise ValueError(f"unknown collective {collective!r}")


def volume(collective: str, ranks: int, nbytes: float) -> float:
    """Bytes on a rank's link in one direction, where every rank has ``nbytes`` to share.

    Example:
        >>> [volume(kind, 4, 100) for kind in ("allreduce", "allgather", "two-shot")]
        [150.0, 300.0, 150.0]
    """
    return SCHEMES[collective.replace("-", "_")]().link_bytes(nbytes, ranks)


def is_crowded(collective: str, ranks: int) -> bool:
    """Whether several ranks send to each at once; in a ring, one does.

    Example:
        >>> is_crowded("two-shot", 2), is_crowded("two-shot", 4), is_crowded("allgather", 4)
        (False, True, False)
    """
    return collective == "two-shot" and ranks > 2


# --- measured points, and the line through them -----------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A measurement.

    Args:
        collective: ``allreduce``, ``allgather`` or ``two-shot``.
        operations: of which it is made, one after the other.
        ranks: how many took part.
        nbytes: of each rank.
        seconds: taken.
        machine: that the same ranks take on links without a limit.
    """

    collective: str
    operations: int
    ranks: int
    nbytes: int
    seconds: float
    machine: float = 0.0

    @property
    def messages(self) -> int:
        """That follow each other."""
        return self.operations * rounds(self.collective, self.ranks)


@dataclass(frozen=True)
class Line:
    """Seconds: of any operation, of a message, and of a byte; the share that crowding adds to bytes."""

    fixed: float
    alpha: float
    beta: float
    crowding: float = 0.0

    def bytes_seconds(self, collective: str, ranks: int, nbytes: float) -> float:
        """Of the bytes of a collective alone."""
        share = self.crowding * is_crowded(collective, ranks)
        return volume(collective, ranks, nbytes) * self.beta * (1.0 + share)

    def seconds(self, point: Point) -> float:
        """What it says of a point."""
        latency = self.fixed + point.messages * self.alpha
        return math.hypot(
            point.machine, latency + self.bytes_seconds(point.collective, point.ranks, point.nbytes)
        )

    def error(self, point: Point) -> float:
        """By how much that is off, relative to what was measured."""
        return self.seconds(point) / point.seconds - 1


def fit(points: Sequence[Point]) -> Line:
    """The line of least squared relative error among those whose wire is all bytes.

    The measured links carry with a rate and delay nothing: what is fixed, and each message, is the
    machine's. To first order, the relative error of a point's seconds is that of its wire times the
    wire's share of the squared seconds.

    Example:
        >>> import dataclasses
        >>> true = Line(0, 0, 1e-9)
        >>> points = [Point("allgather", 1, 4, size, 0, 1e-3) for size in (10**3, 10**6)]
        >>> found = fit([dataclasses.replace(each, seconds=true.seconds(each)) for each in points])
        >>> round(1e9 * found.beta, 6)
        1.0
    """
    wires = np.sqrt([max(0.0, p.seconds**2 - p.machine**2) for p in points])
    weights = wires / np.array([p.seconds**2 for p in points])
    volumes = np.array([volume(p.collective, p.ranks, p.nbytes) for p in points])
    crowded = np.array([is_crowded(p.collective, p.ranks) for p in points])
    bytes_, wanted = weights * volumes, weights * wires
    if crowded.any() and not crowded.all():
        (beta, more), *_ = np.linalg.lstsq(np.stack([bytes_, bytes_ * crowded], 1), wanted, rcond=None)
        if beta > 0 and more > 0:
            return Line(0.0, 0.0, float(beta), float(more / beta))
    return Line(0.0, 0.0, float(bytes_ @ wanted / max(bytes_ @ bytes_, 1e-300)))


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
        the sum, and decodes the result.
        """
        work = self.work
        match self.collective:
            case "allreduce":
                each = work.encode + work.add * (ranks - 1) / ranks
            case "allgather":
                each = work.encode + ranks * work.decode
            case _:
                each = work.encode * (1 + 1 / ranks) + 2 * work.decode
        return each * elements

    def network_seconds(self, ranks: int, elements: float, line: Line, buckets: int) -> float:
        """Seconds on the network in a step: every bucket is a collective of its own."""
        messages = rounds(self.collective, ranks)
        latency = buckets * self.operations * (line.fixed + messages * line.alpha)
        return latency + line.bytes_seconds(self.collective, ranks, self.work.nbytes * elements)

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
