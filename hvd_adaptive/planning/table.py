"""What every candidate of every layer costs and loses, and the limits that a choice must keep.

Planners see nothing else of a model: a :class:`CandidateTable` comes in, and a *choice*, one candidate
for each layer, goes out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.planning import knapsack
from hvd_adaptive.planning.knapsack import total

__all__ = ["DENSE", "CandidateTable", "Limits"]

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
        )
        table._check()
        return table

    def _check(self) -> None:
        candidates = (self.errors, self.sizes, self.labels, self.factors)
        numbers = (self.defaults, self.dense, self.weights, self.energies)
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
