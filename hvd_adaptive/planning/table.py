"""What every candidate of every layer costs and loses, and the limits that a choice must keep.

Planners see nothing else of a model: a :class:`CandidateTable` comes in, and a *choice*, one candidate
for each layer, goes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.planning import knapsack
from hvd_adaptive.planning.knapsack import total

__all__ = ["DENSE", "CandidateTable", "Limits", "Prices"]

DENSE = -1
"""In a choice: this layer is not compressed."""


@dataclass(frozen=True, eq=False)
class CandidateTable:
    """What every candidate of every layer costs and loses; made by :meth:`of`.

    A layer's candidates stand in any order; a choice is ``int64[L]``: an index into them, or
    :data:`DENSE`.

    Args:
        names: of the layers.
        errors: ``float64[C_l]`` per layer: squared L2 error, or that in a metric (see
            :class:`~hvd_adaptive.planning.metrics.ErrorMetric`); all 0 where nobody needs them.
        sizes: ``float64[C_l]`` per layer: bytes that one rank sends.
        labels: the same text for the same setting in different layers.
        factors: ``float64[C_l]`` per layer: nominal compression factors (100 for top-k of 1 %).
        defaults: ``int64[L]``: the candidate of each layer that is known to keep accuracy.
        dense: ``float64[L]``: bytes of the gradient.
        weights: ``float64[L]``: price of a byte in each layer (``T_l``).
        energies: ``float64[L]``: squared L2 norm of what the errors are of; 0 where that is not known.
        returned: ``float64[L]``: share of each layer's bytes that are sums, compressed again at a level
            that may be another one; 0 where a candidate decides on all of them.
    """

    names: tuple[str, ...]
    errors: tuple[Float64s, ...]
    sizes: tuple[Float64s, ...]
    labels: tuple[tuple[str, ...], ...]
    factors: tuple[Float64s, ...]
    defaults: Int64s
    dense: Float64s
    weights: Float64s
    energies: Float64s
    returned: Float64s

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
        energies: npt.ArrayLike | None = None,
        returned: npt.ArrayLike | None = None,
    ) -> CandidateTable:
        """Check and convert.

        ``factors`` default to dense over compressed bytes, ``weights`` to 1, ``energies`` to 0.

        Raises:
            ValueError: a NaN, an Inf, a negative number, or lengths that differ; the message names the
                layer.

        Example:
            >>> table = CandidateTable.of(["w"], [[0, 1]], [[40, 10]], [["8 bit", "2 bit"]], [1], [160])
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
            np.zeros(len(names)) if energies is None else np.asarray(energies, dtype=np.float64),
            np.zeros(len(names)) if returned is None else np.asarray(returned, dtype=np.float64),
        )
        table._check()
        return table

    def _check(self) -> None:
        candidates = (self.errors, self.sizes, self.labels, self.factors)
        numbers = (self.defaults, self.dense, self.weights, self.energies, self.returned)
        lengths = [len(each) for each in (*candidates, *numbers)]
        if set(lengths) != {len(self.names)}:
            raise ValueError(f"{len(self.names)} layers, but entries for {lengths}")
        for name, default, *rows in zip(self.names, self.defaults, *candidates, strict=True):
            if len({len(row) for row in rows}) > 1 or not 0 <= default < len(rows[0]):
                raise ValueError(
                    f"{name}: errors, sizes, labels and factors have lengths "
                    f"{[len(row) for row in rows]}, and the default is candidate {default}"
                )
            figures = np.concatenate([rows[0], rows[1], rows[3]])
            if not (np.isfinite(figures) & (figures >= 0)).all():
                raise ValueError(f"{name}: an error, a size or a factor is negative or not finite")

    def error(self, choice: Int64s) -> float:
        """Total error of a choice; a dense layer has none."""
        return total(self._pick(self.errors, np.zeros(len(self.names)), choice))

    def bytes(self, choice: Int64s) -> float:
        """Bytes that one rank sends."""
        return total(self._pick(self.sizes, self.dense, choice))

    def bytes_of_both(self, choice: Int64s, sums: Int64s, prices: Prices | None = None) -> float:
        """Bytes that one rank sends, where sums come back at levels of their own.

        Args:
            choice: of what ranks send.
            sums: of the sums; :data:`DENSE` where it is that of ``choice``.
            prices: of a byte in each direction; None counts them.
        """
        prices = prices or Prices()
        back = np.where((sums == DENSE) | (choice == DENSE), choice, sums)
        shares = np.where(choice == DENSE, 0.0, self.returned)
        sent = self._pick(self.sizes, self.dense, choice) * (1 - shares)
        return prices.of("up") * total(sent) + prices.of("down") * total(
            self._pick(self.sizes, self.dense, back) * shares
        )

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

    def by_direction(self, prices: Prices) -> tuple[CandidateTable, CandidateTable]:
        """What ranks send, and the sums that come back: two tables, whose bytes are priced.

        The errors of sums are known to no rank alone: those of the ranks' own gradients stand for them.

        Returns:
            All layers; and those of which something comes back, as :attr:`returning` lists them.
        """
        back = self.returning

        def part(layers: Int64s, shares: Float64s, dense: Float64s) -> CandidateTable:
            chosen = layers.tolist()
            return CandidateTable(
                tuple(self.names[each] for each in chosen),
                tuple(self.errors[each] for each in chosen),
                tuple(self.sizes[each] * shares[each] for each in chosen),
                tuple(self.labels[each] for each in chosen),
                tuple(self.factors[each] for each in chosen),
                self.defaults[layers],
                dense[layers],
                self.weights[layers],
                energies=self.energies[layers],
                returned=np.zeros(len(chosen)),
            )

        up, down = prices.of("up"), prices.of("down")
        sent, sums = up * (1 - self.returned), down * self.returned
        # dense layers are summed by an allreduce, of which nothing is compressed again
        return (
            part(np.arange(len(self.names)), sent, up * self.dense),
            part(back, sums, sums * self.dense),
        )

    @property
    def returning(self) -> Int64s:
        """The layers of which sums come back at a level of their own."""
        return np.flatnonzero(self.returned > 0)

    def joined(self, other: CandidateTable) -> CandidateTable:
        """The layers of both, one after the other."""
        return CandidateTable(
            self.names + other.names,
            self.errors + other.errors,
            self.sizes + other.sizes,
            self.labels + other.labels,
            self.factors + other.factors,
            np.concatenate([self.defaults, other.defaults]),
            np.concatenate([self.dense, other.dense]),
            np.concatenate([self.weights, other.weights]),
            np.concatenate([self.energies, other.energies]),
            np.concatenate([self.returned, other.returned]),
        )

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
            >>> table = CandidateTable.of(["w"], [[0, 1]], [[16, 5]], [["10 %", "3 %"]], [0], [160])
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


@dataclass(frozen=True)
class Prices:
    """What a byte costs in each direction, in units of what the bytes of :class:`Limits` cost.

    Args:
        by_direction: ``up``, what ranks send, and ``down``, sums that were compressed again.

    Example:
        >>> Prices({"up": 0.5, "down": 1.5}).of("down"), Prices().of("up")
        (1.5, 1.0)
    """

    by_direction: Mapping[str, float] = field(default_factory=dict)

    def of(self, direction: str) -> float:
        """The price of a byte; 1 where the direction was not seen."""
        return self.by_direction.get(direction, 1.0)


@dataclass(frozen=True, eq=False)
class Limits:
    """What a budget grants.

    Args:
        max_error: total error, in the table's metric; infinite where it is not bounded.
        max_bytes: total bytes that one rank sends; counts where ``max_error`` is infinite.
        reference: ``int64[L]``: the choice that the bounds come from; None if there is none.
    """

    max_error: float = math.inf
    max_bytes: float = math.inf
    reference: Int64s | None = None

    @classmethod
    def like(cls, table: CandidateTable, reference: Int64s) -> Limits:
        """To lose and to send no more than a given choice does."""
        return cls(table.error(reference), table.bytes(reference), reference)

    def admits(self, table: CandidateTable, choice: Int64s) -> bool:
        """Whether a choice keeps the error, or the bytes where no error is given."""
        if math.isfinite(self.max_error):
            return table.error(choice) <= self.max_error
        return table.bytes(choice) <= self.max_bytes
