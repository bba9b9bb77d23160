"""One candidate for every layer: least cost within an error, or least error within a cost.

Both are readings of one table, the least cost for every error bin, and both end with exact numbers:

1. Dominated candidates are dropped. What remains of a layer is its *front*: as the one quantity rises,
   the other falls.
2. Equal slopes on the fronts' convex hulls, or one index for all layers, give a first choice; moves of
   one layer or two improve it until none helps.
3. A Lagrangian bound tells which candidates no better choice can hold. The others, mostly a few a
   layer, lie close together, and that is what makes bins fine.
4. Errors, counted from each layer's least, are rounded up to bins, and dynamic programming over the
   layers finds the least cost for every number of bins.
5. Rounding up adds less than one bin a layer, so a solution that keeps the bound may stand up to L bins
   beyond it. The table has these bins too; solutions are read there and checked with exact sums.
6. What slack is left is spent by such moves as in step 2.

A *weight* is here what is bounded and a *value* what is made small: errors and costs, or the reverse.
Sums that decide are ``math.fsum``, which rounds once: a bound made with it is met to the last bit.

Source: Alimohammadi, Markov, Frantar and Alistarh, "L-GreCo" (2023), section 4, algorithm 1; the other
reading is Kimad+ of "Kimad: Adaptive Gradient Compression with Bandwidth Awareness", section 3.2.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_adaptive.arrays import Float64s, Int64s

__all__ = ["Infeasible", "Rows", "equal_slopes", "min_cost", "min_error", "total"]

Rows: TypeAlias = Sequence[npt.ArrayLike] | npt.NDArray[Any]
"""One row of numbers a layer: rows may have different lengths."""

_MOST_CANDIDATES = 2**16


@functools.cache
def _kernels() -> ModuleType:
    """The inner loops, loaded when they are first needed."""
    return importlib.import_module("hvd_adaptive.planning.knapsack_kernels")


class Infeasible(ValueError):  # noqa: N818 - a finding, which callers act on
    """No choice keeps the bound.

    Args:
        what: what is bounded, for the message.
        bound: that was asked for.
        least: the least that can be had; infinite if a layer has no finite candidate.
    """

    def __init__(self, what: str, bound: float, least: float) -> None:
        super().__init__(f"the least total {what} is {least:g}, above the bound {bound:g}")
        self.least = least


def min_cost(errors: Rows, costs: Rows, max_error: float, bins: int = 10_000) -> Int64s:
    """The cheapest choice whose total error is at most ``max_error``.

    Never costs more than the best choice of one index for all layers; in practice within 0.5 % of the
    optimum. Cost: O(bins * layers * candidates) time, O(bins * layers) memory (2 bytes each).

    Args:
        errors: one row of candidates a layer, at least 0; infinite forbids a candidate.
        costs: of the same shape, at least 0; infinite forbids a candidate.
        max_error: bound of the sum of the chosen errors; may be infinite.
        bins: resolution of the errors.

    Returns:
        ``int64[L]``: the index of each layer's candidate; the first of equal ones.

    Raises:
        Infeasible: the least total error is above ``max_error``.
        ValueError: a NaN or a negative number, a layer without candidates, shapes that differ.

    Example:
        >>> min_cost([[0, 1, 5], [0, 2, 3]], [[9, 4, 1], [9, 8, 2]], max_error=4).tolist()
        [1, 2]
        >>> min_cost([[1, 2], [1, 2]], [[2, 1], [2, 1]], max_error=1)
        Traceback (most recent call last):
        ...
        hvd_adaptive.planning.knapsack.Infeasible: the least total error is 2, above the bound 1
    """
    return _solve(_Problem.of(errors, costs, "error", max_error, bins), _cheapest_within)


def min_error(errors: Rows, costs: Rows, max_cost: float, bins: int = 1_000) -> Int64s:
    """The choice of the least total error whose total cost is at most ``max_cost``.

    Never worse than the best choice of one index for all layers; in practice within 0.5 % of the
    optimum. Arguments, result, cost and errors raised are those of :func:`min_cost`; ``bins``
    divide the error of a good choice, so fewer suffice.

    Example:
        >>> min_error([[0, 1, 5], [0, 2, 3]], [[9, 4, 1], [9, 8, 2]], max_cost=6).tolist()
        [1, 2]
    """
    return _solve(_Problem.of(costs, errors, "cost", max_cost, bins), _most_faithful_within)


def equal_slopes(
    errors: Rows, costs: Rows, *, max_error: float = math.inf, max_cost: float = math.inf
) -> Int64s:
    """The choice at which one more unit of cost would save equally much error in every layer.

    It is what a single magnitude threshold for the whole model does: an element of magnitude ``x``
    costs as much as any other and saves ``x**2``. Only candidates on the convex hull of a layer are
    used, and nothing is spent on what does not share the slope. Cost: O(candidates * log(candidates)).

    Args:
        errors: as for :func:`min_cost`.
        costs: as for :func:`min_cost`.
        max_error: if finite, the cheapest such choice within this error is taken.
        max_cost: otherwise, the most faithful one within this cost.

    Returns:
        ``int64[L]``, as :func:`min_cost`.

    Raises:
        Infeasible: not even the most faithful (cheapest) candidates keep the bound.
        ValueError: as :func:`min_cost`.

    Example:
        >>> equal_slopes([[0, 1, 5], [0, 2, 3]], [[9, 4, 1], [9, 8, 2]], max_error=4).tolist()
        [1, 2]
    """
    if math.isfinite(max_error):
        problem = _Problem.of(errors, costs, "error", max_error)
    else:
        problem = _Problem.of(costs, errors, "cost", max_cost)
    return problem.index[_slide(problem)]


def total(numbers: npt.ArrayLike) -> float:
    """The sum, rounded once; infinite where it is too large.

    Example:
        >>> total([0.1] * 10)
        1.0
    """
    try:
        return math.fsum(np.asarray(numbers, dtype=np.float64).tolist())
    except OverflowError:
        return math.inf


# --- the problem ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Problem:
    """All layers' fronts side by side; a choice is one position in these arrays a layer.

    Args:
        index: of the candidate in its layer's row.
        weights: bounded; rising in a layer.
        values: made small; falling in a layer.
        starts: ``int64[L + 1]``: where each layer's front begins.
        uniform: choices of one index for all layers; forbidden ones are left out.
        bound: of the sum of weights.
        what: a weight is.
        bins: of the table.
    """

    index: Int64s
    weights: Float64s
    values: Float64s
    starts: Int64s
    uniform: tuple[Int64s, ...]
    bound: float
    what: str
    bins: int

    @classmethod
    def of(cls, weights: Rows, values: Rows, what: str, bound: float, bins: int = 1) -> _Problem:
        if math.isnan(bound) or bins < 1:
            raise ValueError(f"the bound is {bound} and bins are {bins}: write a number and at least 1")
        rows = _checked(weights, values)
        fronts = [_front(*row) for row in rows]
        if not all(map(len, fronts)):
            raise Infeasible(what, bound, math.inf)
        starts = np.cumsum([0, *map(len, fronts)], dtype=np.int64)
        pairs = list(zip(rows, fronts, strict=True))
        return cls(
            np.concatenate([np.empty(0, np.int64), *fronts]),
            np.concatenate([np.empty(0), *(row[0][front] for row, front in pairs)]),
            np.concatenate([np.empty(0), *(row[1][front] for row, front in pairs)]),
            starts,
            _uniform(rows, fronts, starts),
            bound,
            what,
            bins,
        )

    @property
    def layers(self) -> int:
        return len(self.starts) - 1

    @property
    def lightest(self) -> float:
        """The least total weight."""
        return total(self.weights[self.starts[:-1]])

    @property
    def least_value(self) -> float:
        """The least total value, whatever its weight."""
        return total(self.values[self.starts[1:] - 1])

    def fits(self, choice: Int64s) -> bool:
        return total(self.weights[choice]) <= self.bound

    def is_least(self, choice: Int64s) -> bool:
        return bool((choice == self.starts[1:] - 1).all())

    def better(self, one: Int64s, other: Int64s) -> Int64s:
        """The one of less value; the first, if they are equal."""
        return other if total(self.values[other]) < total(self.values[one]) else one

    def start(self) -> Int64s:
        """A good choice that fits: the least value, if it does; else equal slopes, or one index."""
        least = self.starts[1:] - 1
        best = least if self.fits(least) else _slide(self)
        for choice in self.uniform:
            if self.fits(choice):
                best = self.better(best, choice)
        return best


def _checked(weights: Rows, values: Rows) -> list[tuple[Float64s, Float64s]]:
    if len(weights) != len(values):
        raise ValueError(f"{len(weights)} rows of one kind and {len(values)} of the other")
    rows = []
    for layer, (weight, value) in enumerate(zip(weights, values, strict=True)):
        pair = np.asarray(weight, dtype=np.float64), np.asarray(value, dtype=np.float64)
        if pair[0].ndim != 1 or pair[0].shape != pair[1].shape:
            raise ValueError(
                f"layer {layer}: errors and costs must be rows of equal length, got shapes "
                f"{pair[0].shape} and {pair[1].shape}"
            )
        if not 1 <= len(pair[0]) <= _MOST_CANDIDATES:
            raise ValueError(
                f"layer {layer} has {len(pair[0])} candidates: there must be 1 to {_MOST_CANDIDATES}"
            )
        if not all((row >= 0).all() for row in pair):
            raise ValueError(f"layer {layer}: an error or a cost is NaN or negative")
        rows.append(pair)
    return rows


def _front(weights: Float64s, values: Float64s) -> Int64s:
    """Indices of the candidates that no other one dominates: weights rising, values falling."""
    order = np.lexsort((np.arange(len(weights)), values, weights))
    order = order[np.isfinite(weights[order]) & np.isfinite(values[order])]
    least = np.minimum.accumulate(values[order])
    return order[np.flatnonzero(np.diff(least, prepend=np.inf) < 0)].astype(np.int64)


def _uniform(
    rows: list[tuple[Float64s, Float64s]], fronts: list[Int64s], starts: Int64s
) -> tuple[Int64s, ...]:
    """For every index that all layers have: what dominates that candidate, layer by layer."""
    common = min((len(row[0]) for row in rows), default=0)
    places = np.empty((common, len(rows)), dtype=np.int64)
    allowed = np.ones(common, dtype=np.bool_)
    for layer, ((weights, values), front) in enumerate(zip(rows, fronts, strict=True)):
        places[:, layer] = (
            starts[layer] + np.searchsorted(weights[front], weights[:common], "right") - 1
        )
        allowed &= np.isfinite(weights[:common]) & np.isfinite(values[:common])
    return tuple(places[allowed])


# --- the steps ------------------------------------------------------------------------------------


def _solve(problem: _Problem, read: Callable[[_Problem, Int64s], Int64s]) -> Int64s:
    """All steps, one after the other; ``read`` is what tells the two readings apart."""
    best = problem.start()
    if not problem.is_least(best):
        problem, best = _core(problem, _improve(problem, best))
        best = _improve(problem, read(problem, best))
    return problem.index[best]


def _core(problem: _Problem, best: Int64s) -> tuple[_Problem, Int64s]:
    """What remains without the candidates that no choice better than ``best`` can hold.

    At any price of weight, the least total of value and priced weight is a lower bound of the value,
    and a candidate's distance from its layer's least is what the bound rises by if it is chosen.
    """
    price = _price(problem)
    with np.errstate(over="ignore", invalid="ignore"):
        priced = problem.values + price * problem.weights
        rise = priced - np.repeat(
            np.minimum.reduceat(priced, problem.starts[:-1]), np.diff(problem.starts)
        )
        bound = total(np.minimum.reduceat(priced, problem.starts[:-1])) - price * problem.bound
        value = total(problem.values[best])
        kept = ~(rise > value - bound + 1e-9 * value)  # keeps all if the numbers are too large
    kept[best] = True
    places = np.cumsum(kept) - 1
    smaller = replace(
        problem,
        index=problem.index[kept],
        weights=problem.weights[kept],
        values=problem.values[kept],
        starts=np.concatenate([[0], np.cumsum(kept)])[problem.starts],
        uniform=(),
    )
    return smaller, places[best]


# --- equal slopes ---------------------------------------------------------------------------------


def _slide(problem: _Problem) -> Int64s:
    """From the lightest choice along the convex hulls, steepest step first, as far as it fits."""
    if problem.lightest > problem.bound:
        raise Infeasible(problem.what, problem.bound, problem.lightest)
    ends, heavier, _ = _steps(problem)
    taken = int(np.searchsorted(np.cumsum(heavier), problem.bound - problem.lightest, "right"))
    while True:
        choice = problem.starts[:-1].copy()
        owners = np.searchsorted(problem.starts, ends[:taken], "right") - 1
        np.maximum.at(choice, owners, ends[:taken])
        if problem.fits(choice):
            return choice
        taken -= 1  # the running sum was rounded down


def _price(problem: _Problem) -> float:
    """What one unit of weight saves where :func:`_slide` stops."""
    _, heavier, slopes = _steps(problem)
    taken = int(np.searchsorted(np.cumsum(heavier), problem.bound - problem.lightest, "right"))
    return float(-slopes[min(taken, len(slopes) - 1)])


def _steps(problem: _Problem) -> tuple[Int64s, Float64s, Float64s]:
    """All steps along the hulls, steepest first: where each ends, what it adds, and its slope."""
    corners = np.flatnonzero(_kernels().hull(problem.weights, problem.values, problem.starts))
    owners = np.searchsorted(problem.starts, corners, "right") - 1
    within = np.flatnonzero(owners[1:] == owners[:-1])
    heavier = np.diff(problem.weights[corners])[within]
    with np.errstate(over="ignore"):
        slopes = np.diff(problem.values[corners])[within] / heavier
    order = np.argsort(slopes, kind="stable")
    return corners[within + 1][order], heavier[order], slopes[order]


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """The least price for every number of bins, and the path to it.

    Args:
        steps: bins of every candidate.
        least: ``float64[bins + L + 1]``: the least total price of at most so many bins.
        picks: ``uint16[L, bins + L + 1]``: the last layer's candidate that leads there.
        starts: where each layer's candidates begin.
    """

    steps: Int64s
    least: Float64s
    picks: npt.NDArray[np.uint16]
    starts: Int64s

    @classmethod
    def of(cls, problem: _Problem, amounts: Float64s, prices: Float64s, reach: float) -> _Table:
        """Amounts, above each layer's least, in bins of a share of ``reach``, rounded up."""
        starts, bins = problem.starts, problem.bins
        most = bins + problem.layers
        least = np.minimum.reduceat(amounts, starts[:-1])
        above = amounts - np.repeat(least, np.diff(starts))
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            # in this order: what is a whole number of bins stays one
            steps = np.where(above > 0, np.ceil(above * bins / reach), 0.0)
        steps = np.minimum(steps, most + 1).astype(np.int64)
        found, picks = _kernels().fill(steps, prices, starts, most)
        return cls(steps, found, picks, starts)

    def choice(self, bins: int) -> Int64s:
        """The choice behind ``least[bins]``."""
        return np.asarray(_kernels().walk(self.steps, self.picks, self.starts, bins))


def _cheapest_within(problem: _Problem, best: Int64s) -> Int64s:
    """With bins of weight: the solution of least value that keeps the bound exactly."""
    reach = problem.bound - problem.lightest
    table = _Table.of(problem, problem.weights, problem.values, reach)
    for bins in range(len(table.least) - 1, -1, -1):
        if math.isfinite(table.least[bins]) and problem.fits(choice := table.choice(bins)):
            return problem.better(best, choice)
    return best


def _most_faithful_within(problem: _Problem, best: Int64s) -> Int64s:
    """With bins of value: of the solutions that keep the bound, that of least exact value.

    The first number of bins that is within the bound is one of the best; rounding hides which is.
    """
    reach = total(problem.values[best]) - problem.least_value
    table = _Table.of(problem, problem.values, problem.weights, reach)
    first = int(np.searchsorted(-table.least, -problem.bound * (1 + 1e-12)))
    for bins in range(first, min(first + problem.layers + 1, len(table.least))):
        if problem.fits(choice := table.choice(bins)):
            best = problem.better(best, choice)
    return best


# --- the slack ------------------------------------------------------------------------------------


def _improve(problem: _Problem, choice: Int64s) -> Int64s:
    """Make the move that saves most value, of one layer or of two, until none does."""
    while True:
        slack = problem.bound - total(problem.weights[choice])
        moved = _kernels().best_move(
            problem.weights, problem.values, problem.starts, choice, slack - 1e-13 * problem.bound
        )
        if not problem.fits(moved) or problem.better(choice, moved) is choice:
            return choice
        choice = moved
