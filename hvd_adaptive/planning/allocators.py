"""How an allowance is shared out over the layers.

A :class:`Table` says what every candidate of every layer costs and loses, a budget makes an
:class:`Limits` of it, and an :class:`Allocator` picks one candidate a layer:

* :class:`FollowReference`: the allowance's own reference.
* :class:`Uniform`: one label for all layers.
* :class:`MinCostKnapsack`: least bytes or time within the allowed error (L-GreCo).
* :class:`MinErrorKnapsack`: least error within the allowed bytes (Kimad+).
* :class:`GlobalThreshold`: what one magnitude threshold for the model would do (global top-k).
* :class:`KMeans`: layers in clusters, one level a cluster (CGX).

Allocators hold options only, and no state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hvd_adaptive.planning import knapsack
from hvd_adaptive.planning.knapsack import Infeasible, total
from hvd_adaptive.planning.measurements import Float64s, Int64s, Measurement, Options

__all__ = [
    "DENSE",
    "Allocator",
    "FollowReference",
    "GlobalThreshold",
    "KMeans",
    "Limits",
    "MinCostKnapsack",
    "MinErrorKnapsack",
    "Table",
    "Uniform",
]

DENSE = -1
"""In a choice: this layer is not compressed."""


@dataclass(frozen=True, eq=False)
class Table:
    """What every candidate of every layer costs and loses; made by :meth:`of`.

    A layer's candidates stand in any order; a choice is ``int64[L]``: an index into them, or
    :data:`DENSE`.

    Args:
        names: of the layers.
        errors: ``float64[C_l]`` a layer: squared L2 error; all 0 where nobody needs them.
        sizes: ``float64[C_l]`` a layer: bytes that one rank sends.
        labels: the same text for the same setting in different layers.
        factors: ``float64[C_l]`` a layer: nominal compression factors (100 for top-k of 1 %).
        defaults: ``int64[L]``: the candidate of each layer that is known to keep accuracy.
        dense: ``float64[L]``: bytes of the gradient.
        weights: ``float64[L]``: price of a byte in each layer (``T_l``).
    """

    names: tuple[str, ...]
    errors: tuple[Float64s, ...]
    sizes: tuple[Float64s, ...]
    labels: tuple[tuple[str, ...], ...]
    factors: tuple[Float64s, ...]
    defaults: Int64s
    dense: Float64s
    weights: Float64s

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        errors: knapsack.Rows,
        sizes: knapsack.Rows,
        labels: Sequence[Sequence[str]],
        defaults: npt.ArrayLike,
        dense: npt.ArrayLike,
        factors: knapsack.Rows | None = None,
        weights: npt.ArrayLike | None = None,
    ) -> Table:
        """Check and convert; ``factors`` default to dense over compressed bytes, ``weights`` to 1.

        Raises:
            ValueError: a NaN, an Inf, a negative number, or lengths that differ; the message names the
                layer.

        Example:
            >>> table = Table.of(["w"], [[0, 1]], [[40, 10]], [["8 bit", "2 bit"]], [1], [160])
            >>> table.factors[0].tolist(), table.error(np.array([1])), table.bytes(np.array([DENSE]))
            ([4.0, 16.0], 1.0, 160.0)
        """
        dense = np.asarray(dense, dtype=np.float64)
        byte_rows = _rows(sizes)
        if factors is None:
            factors = [whole / np.maximum(row, 1) for whole, row in zip(dense, byte_rows, strict=True)]
        table = cls(
            tuple(names),
            _rows(errors),
            byte_rows,
            tuple(map(tuple, labels)),
            _rows(factors),
            np.asarray(defaults, dtype=np.int64),
            dense,
            np.ones(len(names)) if weights is None else np.asarray(weights, dtype=np.float64),
        )
        table._check()
        return table

    def _check(self) -> None:
        candidates = (self.errors, self.sizes, self.labels, self.factors)
        lengths = [len(each) for each in (*candidates, self.defaults, self.dense, self.weights)]
        if set(lengths) != {len(self.names)}:
            raise ValueError(f"{len(self.names)} layers, but entries for {lengths}")
        for name, default, *rows in zip(self.names, self.defaults, *candidates, strict=True):
            if len({len(row) for row in rows}) > 1 or not 0 <= default < len(rows[0]):
                raise ValueError(
                    f"{name}: errors, sizes, labels and factors have lengths "
                    f"{[len(row) for row in rows]}, and the default is candidate {default}"
                )
            numbers = np.concatenate([rows[0], rows[1], rows[3]])
            if not (np.isfinite(numbers) & (numbers >= 0)).all():
                raise ValueError(f"{name}: an error, a size or a factor is negative or not finite")

    def error(self, choice: Int64s) -> float:
        """Squared L2 error of a choice; a dense layer has none."""
        return total(self._pick(self.errors, np.zeros(len(self.names)), choice))

    def bytes(self, choice: Int64s) -> float:
        """Bytes that one rank sends."""
        return total(self._pick(self.sizes, self.dense, choice))

    def cost(self, choice: Int64s) -> float:
        """Bytes times the price of each layer's bytes."""
        return total(self._pick(self.sizes, self.dense, choice) * self.weights)

    def costs(self) -> list[Float64s]:
        """Every candidate's price."""
        return [row * weight for row, weight in zip(self.sizes, self.weights, strict=True)]

    @staticmethod
    def _pick(rows: tuple[Float64s, ...], dense: Float64s, choice: Int64s) -> Float64s:
        picked = [
            whole if index == DENSE else row[index]
            for row, whole, index in zip(rows, dense, choice, strict=True)
        ]
        return np.array(picked, dtype=np.float64)

    def all_dense(self) -> Int64s:
        """The choice that compresses nothing."""
        return np.full(len(self.names), DENSE, dtype=np.int64)

    def cheapest(self) -> Int64s:
        """The fewest bytes; of equal ones, the least error."""
        order = [np.lexsort((e, s))[0] for e, s in zip(self.errors, self.sizes, strict=True)]
        return np.array(order, dtype=np.int64)

    def at_factor(self, factor: float) -> Int64s:
        """In each layer, the candidate whose nominal factor is nearest; dense for a factor of 1.

        Example:
            >>> table = Table.of(["w"], [[0, 1]], [[16, 5]], [["10 %", "3 %"]], [0], [160])
            >>> [table.at_factor(factor).tolist() for factor in (12, 1000, 1)]
            [[0], [1], [-1]]
        """
        if factor <= 1:
            return self.all_dense()
        return np.array([_nearest(row, factor) for row in self.factors], dtype=np.int64)

    def resized(self, choice: Int64s, multiples: Float64s) -> Int64s:
        """In each layer, the candidate nearest to a multiple (``float64[L]``) of a choice's bytes."""
        bytes_now = self._pick(self.sizes, self.dense, choice)
        rows = zip(self.sizes, bytes_now * multiples, strict=True)
        return np.array([_nearest(sizes, wanted) for sizes, wanted in rows], dtype=np.int64)

    def uniform(self) -> dict[str, Int64s]:
        """The choice for every label that any layer has.

        A layer without it takes its candidate that is nearest in size, as a share of the dense bytes,
        to what the label means in the layers that have it.
        """
        found = {}
        places = [{label: index for index, label in enumerate(row)} for row in self.labels]
        for label in dict.fromkeys(label for row in self.labels for label in row):
            has = [row.get(label, DENSE) for row in places]
            layers = [layer for layer, index in enumerate(has) if index != DENSE]
            sent = sum(self.sizes[layer][has[layer]] for layer in layers)
            share = sent / max(sum(self.dense[layer] for layer in layers), 1.0)
            found[label] = np.array(
                [
                    index if index != DENSE else _nearest(self.sizes[layer], share * self.dense[layer])
                    for layer, index in enumerate(has)
                ],
                dtype=np.int64,
            )
        return found


def _rows(rows: knapsack.Rows) -> tuple[Float64s, ...]:
    return tuple(np.asarray(row, dtype=np.float64) for row in rows)


def _nearest(numbers: Float64s, wanted: float) -> int:
    """Index of the number nearest in ratio; the first of equal ones."""
    tiny = np.finfo(np.float64).tiny
    return int(np.argmin(np.abs(np.log(np.maximum(numbers, tiny)) - math.log(max(wanted, tiny)))))


@dataclass(frozen=True, eq=False)
class Limits:
    """What a budget grants.

    Args:
        max_error: total squared error; infinite where it is not bounded.
        max_bytes: total bytes that one rank sends; counts where ``max_error`` is infinite.
        reference: ``int64[L]``: the choice that the bounds come from; None if there is none.
    """

    max_error: float = math.inf
    max_bytes: float = math.inf
    reference: Int64s | None = None

    @classmethod
    def like(cls, table: Table, reference: Int64s) -> Limits:
        """To lose and to send no more than a given choice does."""
        return cls(table.error(reference), table.bytes(reference), reference)

    def admits(self, table: Table, choice: Int64s) -> bool:
        """Whether a choice keeps the error, or the bytes where no error is given."""
        if math.isfinite(self.max_error):
            return table.error(choice) <= self.max_error
        return table.bytes(choice) <= self.max_bytes


class Allocator(Options, ABC):
    """Picks one candidate a layer. Members are frozen dataclasses: their fields are their options."""

    allocator_needs: ClassVar[frozenset[Measurement]] = frozenset({Measurement.ERRORS})

    @abstractmethod
    def allocate(self, table: Table, allowed: Limits) -> Int64s:
        """A choice that keeps the allowance.

        Returns:
            ``int64[L]``.

        Raises:
            Infeasible: there is none.
            ValueError: the allowance lacks what this allocator goes by.
        """


@dataclass(frozen=True)
class FollowReference(Allocator):
    """The reference itself: for budgets that know a level for every layer."""

    allocator_needs: ClassVar[frozenset[Measurement]] = frozenset()

    def allocate(self, table: Table, allowed: Limits) -> Int64s:
        """The reference; ValueError if there is none."""
        del table
        return _reference(self, allowed)


@dataclass(frozen=True)
class Uniform(Allocator):
    """One label for all layers: the cheapest within the error, or the most faithful within the bytes.

    Source: Xin, Ilin, Zhang, Canini and Richtárik, "Kimad" (2023), section 3.1.

    Example:
        >>> table = Table.of("ab", [[0, 1]] * 2, [[40, 10]] * 2, [["8", "2"]] * 2, [0, 0], [160] * 2)
        >>> Uniform().allocate(table, Limits(max_bytes=79)).tolist()
        [1, 1]
    """

    def allocate(self, table: Table, allowed: Limits) -> Int64s:
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


@dataclass(frozen=True)
class MinCostKnapsack(Allocator):
    """The least price within the allowed error. Source: L-GreCo, section 4.

    Args:
        bins: resolution of the error, 1 to 1,000,000.

    Raises:
        ValueError: bins out of their range.

    Example:
        >>> table = Table.of("ab", [[0, 9], [0, 1]], [[8, 4]] * 2, [["8", "4"]] * 2, [0, 1], [32] * 2)
        >>> MinCostKnapsack().allocate(table, Limits(max_error=2)).tolist()
        [0, 1]
    """

    bins: int = 10_000

    def __post_init__(self) -> None:
        _check_bins(self.bins)
        super().__post_init__()

    def allocate(self, table: Table, allowed: Limits) -> Int64s:
        """See :func:`hvd_adaptive.planning.knapsack.min_cost`."""
        if not math.isfinite(allowed.max_error):
            raise ValueError(f"{type(self).__name__} needs a budget that bounds the error")
        return knapsack.min_cost(table.errors, table.costs(), allowed.max_error, self.bins)


@dataclass(frozen=True)
class MinErrorKnapsack(Allocator):
    """The least error within the allowed bytes. Source: Kimad+, section 3.2.

    Args:
        bins: resolution of the error, 1 to 1,000,000.

    Raises:
        ValueError: bins out of their range.

    Example:
        >>> table = Table.of("ab", [[0, 9], [0, 1]], [[8, 4]] * 2, [["8", "4"]] * 2, [0, 1], [32] * 2)
        >>> MinErrorKnapsack().allocate(table, Limits(max_bytes=12)).tolist()
        [0, 1]
    """

    bins: int = 1_000

    def __post_init__(self) -> None:
        _check_bins(self.bins)
        super().__post_init__()

    def allocate(self, table: Table, allowed: Limits) -> Int64s:
        """See :func:`hvd_adaptive.planning.knapsack.min_error`."""
        return knapsack.min_error(table.errors, table.sizes, allowed.max_bytes, self.bins)


@dataclass(frozen=True)
class GlobalThreshold(Allocator):
    """Equal marginal error in all layers: what one magnitude threshold for the whole model does.

    Its error is the least for its bytes, but a layer may get next to nothing. Source: Sahu et al.,
    "Rethinking Gradient Sparsification as Total Error Minimization" (2021), as L-GreCo's section 5.3
    compares with it.

    Example:
        >>> table = Table.of("ab", [[0, 9], [0, 1]], [[8, 4]] * 2, [["8", "4"]] * 2, [0, 1], [32] * 2)
        >>> GlobalThreshold().allocate(table, Limits(max_bytes=12)).tolist()
        [0, 1]
    """

    def allocate(self, table: Table, allowed: Limits) -> Int64s:
        """See :func:`hvd_adaptive.planning.knapsack.equal_slopes`."""
        return knapsack.equal_slopes(
            table.errors, table.sizes, max_error=allowed.max_error, max_cost=allowed.max_bytes
        )


@dataclass(frozen=True)
class KMeans(Allocator):
    """Layers in clusters by size and error; each cluster has its level, by the clusters' order.

    A layer is a point: the logarithms of its dense bytes and of its default's error, each in units of
    its spread. Clusters are ordered by error a byte; the one with most gets the most faithful
    candidate, the one with least the most compressed, and the others those between. Where that breaks
    the allowance, all levels are drawn towards the reference (the cheapest, where there is none), a
    tenth of the way at a time. Starts from quantiles, so it is deterministic. Source: Markov et al.,
    "CGX" (2022), as L-GreCo's section 5.3 describes it.

    Args:
        clusters: at most; at least 2.

    Example:
        >>> errors = [[1, 100], [0.001, 0.002]]
        >>> table = Table.of("ab", errors, [[80, 20]] * 2, [["8", "2"]] * 2, [0, 0], [320] * 2)
        >>> KMeans(clusters=2).allocate(table, Limits(max_error=2)).tolist()
        [0, 1]
    """

    clusters: int = 6

    def __post_init__(self) -> None:
        if self.clusters < 2:
            raise ValueError(f"clusters={self.clusters}: write at least 2")
        super().__post_init__()

    def allocate(self, table: Table, allowed: Limits) -> Int64s:
        """Cost: O(clusters * layers) a round of k-means."""
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

    def _shares(self, table: Table) -> Float64s:
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
    """Each takes 2 bytes a layer."""
    if not 1 <= bins <= 1_000_000:
        raise ValueError(f"bins={bins}: write a number from 1 to 1,000,000, such as bins=10000")


def _reference(allocator: Allocator, allowed: Limits) -> Int64s:
    if allowed.reference is None:
        raise ValueError(f"{type(allocator).__name__} needs a budget that has a reference")
    return allowed.reference
