"""How a budget's limits are shared out over the layers.

A :class:`CandidateTable` says what every candidate of every layer costs and loses, a budget makes
:class:`Limits` of it, and an :class:`Allocator` picks one candidate per layer:

* :class:`FollowReference`: the reference of the limits.
* :class:`Uniform`: one label for all layers.
* :class:`MinCostKnapsack`: least bytes or time within the allowed error (L-GreCo).
* :class:`MinErrorKnapsack`: least error within the allowed bytes (Kimad+).
* :class:`KMeans`: layers in clusters, one level per cluster (CGX).

Allocators hold options only, and no state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.planning import knapsack
from hvd_adaptive.planning.knapsack import Infeasible
from hvd_adaptive.planning.measurements import CheckedOptions, Measurement
from hvd_adaptive.planning.table import CandidateTable, Limits

__all__ = [
    "Allocator",
    "FollowReference",
    "KMeans",
    "MinCostKnapsack",
    "MinErrorKnapsack",
    "Uniform",
]


class Allocator(CheckedOptions, ABC):
    """Picks one candidate per layer. Members are frozen dataclasses: their fields are their options."""

    allocator_needs: ClassVar[frozenset[Measurement]] = frozenset({Measurement.ERRORS})

    @abstractmethod
    def allocate(self, table: CandidateTable, allowed: Limits) -> Int64s:
        """A choice within the limits.

        Returns:
            ``int64[L]``.

        Raises:
            Infeasible: there is none.
            ValueError: the limits lack what this allocator needs.
        """

    def allocate_directions(
        self, up: CandidateTable, down: CandidateTable, allowed: Limits
    ) -> tuple[Int64s, Int64s]:
        """A choice for what ranks send and one for the sums that come back, within one limit of both.

        Args:
            up: as of :meth:`CandidateTable.by_direction`.
            down: likewise.
            allowed: bytes, in the units of these tables.

        Returns:
            ``int64[L]`` of each.

        Raises:
            Infeasible: there is none.
        """
        both = self.allocate(up.joined(down), allowed)
        return both[: len(up.names)], both[len(up.names) :]


@dataclass(frozen=True)
class FollowReference(Allocator):
    """The reference itself: for budgets that know a level for every layer."""

    allocator_needs: ClassVar[frozenset[Measurement]] = frozenset()

    def allocate(self, table: CandidateTable, allowed: Limits) -> Int64s:
        """The reference; ValueError if there is none."""
        del table
        return _reference(self, allowed)


@dataclass(frozen=True)
class Uniform(Allocator):
    """One label for all layers: the cheapest within the error, or the most faithful within the bytes.

    Source: Xin, Ilin, Zhang, Canini and Richtárik, "Kimad" (2023), section 3.1.

    Example:
        >>> errors, sizes, labels = [[0, 1]] * 2, [[40, 10]] * 2, [["8", "2"]] * 2
        >>> table = CandidateTable.of("ab", errors, sizes, labels, [0, 0], [160] * 2)
        >>> Uniform().allocate(table, Limits(max_bytes=79)).tolist()
        [1, 1]
    """

    def allocate(self, table: CandidateTable, allowed: Limits) -> Int64s:
        """Cost: O(labels * layers)."""
        choices = list(table.uniform().values())
        fitting = [choice for choice in choices if allowed.admits(table, choice)]
        by_error = math.isfinite(allowed.max_error)
        if not fitting:
            if by_error:
                least = min(map(table.error, choices), default=0.0)
                raise Infeasible("error of one label", allowed.max_error, least)
            least = min(map(table.bytes, choices), default=0.0)
            raise Infeasible("bytes of one label", allowed.max_bytes, least)
        return min(
            fitting,
            key=lambda choice: (table.bytes(choice), table.error(choice))[:: 1 if by_error else -1],
        )

    def allocate_directions(
        self, up: CandidateTable, down: CandidateTable, allowed: Limits
    ) -> tuple[Int64s, Int64s]:
        """One label for each direction, of half of the limit each; what one leaves is the other's."""
        least = [min(map(table.bytes, table.uniform().values()), default=0.0) for table in (up, down)]
        if sum(least) > allowed.max_bytes:
            raise Infeasible("bytes of one label", allowed.max_bytes, sum(least))
        # a direction that cannot do with half of it takes what it needs
        half = min(max(allowed.max_bytes / 2, least[0]), allowed.max_bytes - least[1])
        first = self.allocate(up, Limits(max_bytes=half))
        second = self.allocate(down, Limits(max_bytes=allowed.max_bytes - up.bytes(first)))
        first = self.allocate(up, Limits(max_bytes=allowed.max_bytes - down.bytes(second)))
        return first, second


@dataclass(frozen=True)
class MinCostKnapsack(Allocator):
    """The least price within the allowed error. Source: L-GreCo, section 4.

    Args:
        bins: resolution of the error, 1 to 1,000,000.

    Raises:
        ValueError: bins out of their range.

    Example:
        >>> errors, sizes, labels = [[0, 9], [0, 1]], [[8, 4]] * 2, [["8", "4"]] * 2
        >>> table = CandidateTable.of("ab", errors, sizes, labels, [0, 1], [32] * 2)
        >>> MinCostKnapsack().allocate(table, Limits(max_error=2)).tolist()
        [0, 1]
    """

    bins: int = 10_000

    def __post_init__(self) -> None:
        _check_bins(self.bins)
        super().__post_init__()

    def allocate(self, table: CandidateTable, allowed: Limits) -> Int64s:
        """See :func:`hvd_adaptive.planning.knapsack.min_cost`; never costs more than the reference."""
        if not math.isfinite(allowed.max_error):
            raise ValueError(f"{type(self).__name__} needs a budget that bounds the error")
        choice = knapsack.min_cost(table.errors, table.costs(), allowed.max_error, self.bins)
        reference = allowed.reference
        if reference is None or not allowed.admits(table, reference):
            return choice
        # which may have another index in each layer, unlike what the knapsack starts from
        return reference if table.cost(reference) < table.cost(choice) else choice


@dataclass(frozen=True)
class MinErrorKnapsack(Allocator):
    """The least error within the allowed bytes. Source: Kimad+, section 3.2.

    Args:
        bins: resolution of the error, 1 to 1,000,000.

    Raises:
        ValueError: bins out of their range.

    Example:
        >>> errors, sizes, labels = [[0, 9], [0, 1]], [[8, 4]] * 2, [["8", "4"]] * 2
        >>> table = CandidateTable.of("ab", errors, sizes, labels, [0, 1], [32] * 2)
        >>> MinErrorKnapsack().allocate(table, Limits(max_bytes=12)).tolist()
        [0, 1]
    """

    bins: int = 1_000

    def __post_init__(self) -> None:
        _check_bins(self.bins)
        super().__post_init__()

    def allocate(self, table: CandidateTable, allowed: Limits) -> Int64s:
        """See :func:`hvd_adaptive.planning.knapsack.min_error`."""
        return knapsack.min_error(table.errors, table.sizes, allowed.max_bytes, self.bins)


@dataclass(frozen=True)
class KMeans(Allocator):
    """Layers in clusters by size and error; each cluster has its level, by the clusters' order.

    A layer is a point: the logarithms of its dense bytes and of its default's error, each in units of
    its spread. Clusters are ordered by error per byte; the one with most gets the most faithful
    candidate, the one with least the most compressed, and the others those between. Where that breaks
    the limits, all levels are drawn towards the reference (the cheapest, where there is none), a
    tenth of the way at a time. Starts from quantiles, so it is deterministic. Source: Markov et al.,
    "CGX" (2022), as L-GreCo's section 5.3 describes it.

    Args:
        clusters: at most; at least 2.

    Example:
        >>> errors = [[1, 100], [0.001, 0.002]]
        >>> table = CandidateTable.of("ab", errors, [[80, 20]] * 2, [["8", "2"]] * 2, [0, 0], [320] * 2)
        >>> KMeans(clusters=2).allocate(table, Limits(max_error=2)).tolist()
        [0, 1]
    """

    clusters: int = 6

    def __post_init__(self) -> None:
        if self.clusters < 2:
            raise ValueError(f"clusters={self.clusters}: write at least 2")
        super().__post_init__()

    def allocate(self, table: CandidateTable, allowed: Limits) -> Int64s:
        """Cost: O(clusters * layers) per round of k-means."""
        goal = allowed.reference if allowed.reference is not None else table.cheapest()
        # places count from the most bytes to the fewest
        orders = [np.lexsort((e, -s)) for e, s in zip(table.errors, table.sizes, strict=True)]
        ranks = [np.argsort(order) for order in orders]
        last = np.array([len(order) - 1 for order in orders])
        anchor = np.array([rank[index] for rank, index in zip(ranks, goal, strict=True)])
        ladder = self._shares(table) * last
        for tenths in range(10, -1, -1):
            places = np.rint(anchor + tenths / 10 * (ladder - anchor)).astype(np.int64)
            choice = np.array([o[p] for o, p in zip(orders, places, strict=True)], dtype=np.int64)
            if allowed.admits(table, choice):
                return choice
        if math.isfinite(allowed.max_error):
            raise Infeasible("error", allowed.max_error, table.error(choice))
        raise Infeasible("bytes", allowed.max_bytes, table.bytes(choice))

    def _shares(self, table: CandidateTable) -> Float64s:
        """For each layer, how far its cluster stands between most faithful (0) and most compressed."""
        tiny = np.finfo(np.float64).tiny
        errors = [row[index] for row, index in zip(table.errors, table.defaults, strict=True)]
        size, error = np.log(np.maximum(table.dense, 1)), np.log(np.maximum(errors, tiny))
        clusters = _cluster(np.stack([size, error], axis=1), error - size, self.clusters)
        means = {c: (error - size)[clusters == c].mean() for c in np.unique(clusters)}
        ordered = sorted(means, key=lambda c: (-means[c], c))
        place = {c: k / max(len(ordered) - 1, 1) for k, c in enumerate(ordered)}
        return np.array([place[c] for c in clusters])


def _cluster(points: Float64s, order: Float64s, count: int) -> Int64s:
    """k-means of ``points`` in units of their spread, from quantiles of ``order``; their clusters."""
    spread = points.std(axis=0)
    points = points / np.where(spread > 0, spread, 1.0)
    count = min(count, len(points))
    quantiles = np.linspace(0, len(points) - 1, count).round().astype(np.int64)
    centres = points[np.argsort(order, kind="stable")[quantiles]]
    clusters = np.full(len(points), -1)
    while True:
        distances = ((points[:, None] - centres[None]) ** 2).sum(axis=2)
        nearest = distances.argmin(axis=1)
        if (nearest == clusters).all():
            return clusters
        clusters = nearest
        for c in np.unique(clusters):
            centres[c] = points[clusters == c].mean(axis=0)


def _check_bins(bins: int) -> None:
    """ValueError unless there are as many as memory can hold: each takes 2 bytes per layer."""
    if not 1 <= bins <= 1_000_000:
        raise ValueError(f"bins={bins}: write a number from 1 to 1,000,000, such as bins=10000")


def _reference(allocator: Allocator, allowed: Limits) -> Int64s:
    if allowed.reference is None:
        raise ValueError(f"{type(allocator).__name__} needs a budget that has a reference")
    return allowed.reference
