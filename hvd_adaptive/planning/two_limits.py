"""One candidate for every layer: the least cost within two limits, with a certified gap.

The knapsack of ``auto``: a candidate costs seconds, and it withholds part of the gradient (a first
weight) or adds noise to it (a second one). Every layer has a candidate that weighs nothing: dense.

1. Weights are divided by their limits, so that both limits are 1.
2. With prices ``p, q >= 0`` on the two weights the layers no longer depend on each other::

       bound(p, q) = sum_l min_c (cost + p first + q second) - p - q

   is below the cost of every choice within the limits, and concave in the prices. Its maximum is found
   by cutting a polygon of prices through its center of gravity, which takes away 37 % of the area or
   more each time (Levin; Newman, 1965). The maximum lies within ``p + q <= cost of the weightless
   choice - least cost``, because the weightless choice alone bounds ``bound(p, q)`` from above by its
   cost less ``p + q``.
3. Choices met on the way are repaired where they break a limit, and improved by moves of one layer.
4. Candidates that no better choice can hold are dropped: their distance from their layer's least, added
   to the bound, is above the best cost. What remains is solved layer by layer, keeping the partial
   choices whose bound is below the best cost. Where these are few enough the result is exact.

Source: Lagrangian relaxation as in Kellerer, Pferschy and Pisinger, "Knapsack Problems" (2004), chapter
11, for a multiple-choice knapsack of two constraints.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.planning.knapsack import Rows, total

__all__ = ["Solution", "least_cost", "padded"]

_CUTS = 45
"""Of the polygon: each leaves 63 % of its area at most."""
_STARTS = 4
"""Choices that are repaired and improved: the last ones met, which are next to the best prices."""
_MOST_WORK = 10_000
"""Partial choices that the exact search may look at; with more, the gap is what the bound says."""
_SLACK = 1e-11
"""Share of a limit that rounding may take."""


@dataclass(frozen=True, eq=False)
class Solution:
    """A choice within both limits.

    Args:
        choice: ``int64[L]``: the index of each layer's candidate.
        cost: of all layers.
        bound: no choice within the limits costs less.
    """

    choice: Int64s
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """By what share of the bound the cost may be above the optimum; 0 where it is exact."""
        if self.cost <= self.bound:
            return 0.0
        return (self.cost - self.bound) / self.bound if self.bound > 0 else math.inf


def least_cost(
    costs: Rows,
    first: Rows,
    second: Rows,
    max_first: float,
    max_second: float,
    *,
    thorough: bool = True,
) -> Solution:
    """The cheapest choice whose weights keep both limits.

    Cost: O(layers * candidates) per cut and per move; 2 to 10 ms for 161 layers of 110 candidates.

    Args:
        costs: one row of candidates per layer, at least 0; infinite forbids a candidate.
        first: of the same shapes, at least 0; every layer needs a candidate of finite cost that has 0
            in both weights.
        second: likewise.
        max_first: limit of the sum of the chosen ``first``, at least 0; may be infinite.
        max_second: likewise.
        thorough: False looks for a third of the time: the gap is then wider, and as certain.

    Raises:
        ValueError: a layer has no weightless candidate, a number is NaN or negative, or shapes differ.

    Example:
        >>> costs, first, second = [[9, 4, 2], [9, 5, 1]], [[0, 2, 0]] * 2, [[0, 0, 3]] * 2
        >>> found = least_cost(costs, first, second, 3, 3)
        >>> found.choice.tolist(), found.cost, found.gap
        ([1, 2], 5.0, 0.0)
    """
    problem = _Problem.of(costs, first, second, max_first, max_second)
    if not len(problem.cost):
        return Solution(np.zeros(0, np.int64), 0.0, 0.0)
    cuts, starts = (_CUTS, _STARTS) if thorough else (_CUTS // 3, 1)
    met, bound, prices = _by_prices(problem, cuts)
    best = problem.weightless
    for choice in met:
        best = _better(problem, choice, best)
    for choice in met[-starts:]:
        best = _better(problem, _between(problem, choice, best), best)
    core, place = _core(problem, best, bound, prices)
    inner = _improved(core, place(best))
    for choice in met[-starts:]:
        inner = _better(core, _improved(core, _between(core, place(choice), place(best))), inner)
    exact = _search(core, inner, bound, prices)
    found = inner if exact is None else exact
    cost = core.price(found)
    bound = cost if exact is not None else min(bound, cost)
    return Solution(core.index[np.arange(len(found)), found], cost, bound)


@dataclass(frozen=True, eq=False)
class _Problem:
    """Rows side by side, ``float64[L, C]``; what is no candidate costs infinitely much."""

    cost: Float64s
    first: Float64s
    second: Float64s
    weightless: Int64s
    index: Int64s
    """Of the candidates in their rows."""

    @classmethod
    def of(
        cls, costs: Rows, first: Rows, second: Rows, max_first: float, max_second: float
    ) -> _Problem:
        if not (max_first >= 0 and max_second >= 0):
            raise ValueError(f"limits {max_first} and {max_second}: write numbers of at least 0")
        if not [*map(len, costs)] == [*map(len, first)] == [*map(len, second)]:
            raise ValueError("costs and both weights must have rows of equal lengths")
        cost, one, other = padded(costs), padded(first), padded(second)
        if not all((table >= 0).all() for table in (cost, one, other)):
            raise ValueError("a cost or a weight is NaN or negative")
        width = cost.shape[1]
        one, other = _in_units(one, max_first), _in_units(other, max_second)
        allowed = np.isfinite(cost) & (one <= 1 + _SLACK) & (other <= 1 + _SLACK)
        cost = np.where(allowed, cost, np.inf)
        one, other = np.where(allowed, one, 0.0), np.where(allowed, other, 0.0)
        free = np.where((one == 0) & (other == 0), cost, np.inf)
        weightless = free.argmin(axis=1) if width else np.zeros(len(cost), np.int64)
        if width and not np.isfinite(free.min(axis=1)).all():
            raise ValueError("every layer needs a candidate that weighs nothing, such as a dense one")
        # mostly a few levels are left: nothing else need be looked at
        columns = np.flatnonzero(allowed.any(axis=0))
        place = np.searchsorted(columns, weightless).astype(np.int64)
        index = np.broadcast_to(columns, (len(cost), len(columns)))
        return cls(cost[:, columns], one[:, columns], other[:, columns], place, index)

    def pick(self, table: Float64s, choice: Int64s) -> Float64s:
        return np.asarray(table[np.arange(len(choice)), choice])

    def price(self, choice: Int64s) -> float:
        return total(self.pick(self.cost, choice))

    def excess(self, choice: Int64s) -> tuple[float, float]:
        """By how much a choice is above each limit; below 0 where there is room."""
        one, other = self.pick(self.first, choice).sum(), self.pick(self.second, choice).sum()
        return float(one) - 1.0, float(other) - 1.0

    def fits(self, choice: Int64s) -> bool:
        return max(self.excess(choice)) <= _SLACK


def padded(rows: Rows) -> Float64s:
    """Rows side by side, ``float64[L, C]``; infinite where a row is shorter than others."""
    if isinstance(rows, np.ndarray) and rows.ndim == 2:
        return np.asarray(rows, dtype=np.float64)
    lines = [np.asarray(row, dtype=np.float64) for row in rows]
    table = np.full((len(lines), max(map(len, lines), default=0)), np.inf)
    for line, row in zip(table, lines, strict=True):
        line[: len(row)] = row
    return table


def _in_units(weights: Float64s, limit: float) -> Float64s:
    """Weights as shares of their limit."""
    if math.isinf(limit):
        return np.where(np.isfinite(weights), 0.0, np.inf)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(weights == 0, 0.0, weights / limit)


# --- prices ---------------------------------------------------------------------------------------


def _by_prices(problem: _Problem, cuts: int) -> tuple[list[Int64s], float, tuple[float, float]]:
    """Choices met on the way, the highest bound, and its prices."""
    least = problem.cost.argmin(axis=1)
    reach = problem.price(problem.weightless) - problem.price(least)
    if problem.fits(least) or reach <= 0:
        return [least], problem.price(least), (0.0, 0.0)
    polygon = [(0.0, 0.0), (reach, 0.0), (0.0, reach)]
    bound, prices, met = problem.price(least), (0.0, 0.0), {least.tobytes(): least}
    for _ in range(cuts):
        p, q = _center(polygon)
        priced = problem.cost + p * problem.first + q * problem.second
        choice = priced.argmin(axis=1)
        met[choice.tobytes()] = choice
        value = float(problem.pick(priced, choice).sum()) - p - q
        if value > bound:
            bound, prices = value, (p, q)
        slope = problem.excess(choice)
        if slope == (0.0, 0.0):
            break
        # the maximum lies where the slope points to
        polygon = _cut(polygon, slope, (p, q))
        if len(polygon) < 3:
            break
    return list(met.values()), bound, prices


def _core(
    problem: _Problem, best: Int64s, bound: float, prices: tuple[float, float]
) -> tuple[_Problem, Callable[[Int64s], Int64s]]:
    """Without the candidates that no choice better than ``best`` can hold, and where others went."""
    priced = problem.cost + prices[0] * problem.first + prices[1] * problem.second
    rise = priced - priced.min(axis=1, keepdims=True)
    kept = rise <= problem.price(best) * (1 + 1e-12) - bound
    rows = np.arange(len(best))
    kept[rows, best] = kept[rows, problem.weightless] = kept[rows, rise.argmin(axis=1)] = True
    width = int(kept.sum(axis=1).max())
    columns = np.argsort(~kept, axis=1, kind="stable")[:, :width]
    index = np.take_along_axis(problem.index, columns, 1)
    cost, first, second = (
        np.take_along_axis(each, columns, 1) for each in (problem.cost, problem.first, problem.second)
    )
    cost = np.where(np.take_along_axis(kept, columns, 1), cost, np.inf)
    places = np.cumsum(kept, axis=1) - 1

    def place(choice: Int64s) -> Int64s:
        picked = np.where(kept[rows, choice], choice, problem.weightless)
        return np.asarray(places[rows, picked], dtype=np.int64)

    return _Problem(cost, first, second, place(problem.weightless), index), place


_Point: TypeAlias = tuple[float, float]


def _center(polygon: list[_Point]) -> _Point:
    """Center of gravity; of the corners where the area is next to nothing."""
    start_x, start_y = polygon[0]
    around = [(x - start_x, y - start_y) for x, y in polygon]  # the edge back to it spans no area
    area = sum_x = sum_y = 0.0
    for (x, y), (next_x, next_y) in itertools.pairwise(around):
        cross = x * next_y - next_x * y
        area += cross / 2
        sum_x += (x + next_x) * cross
        sum_y += (y + next_y) * cross
    if abs(area) <= 1e-300:
        return sum(x for x, _ in polygon) / len(polygon), sum(y for _, y in polygon) / len(polygon)
    return max(0.0, sum_x / (6 * area) + start_x), max(0.0, sum_y / (6 * area) + start_y)


def _cut(polygon: list[_Point], slope: _Point, point: _Point) -> list[_Point]:
    """What of a polygon lies on the side of ``point`` that ``slope`` points to."""
    heights = [(x - point[0]) * slope[0] + (y - point[1]) * slope[1] for x, y in polygon]
    corners = []
    for index, ((x, y), here) in enumerate(zip(polygon, heights, strict=True)):
        after = (index + 1) % len(polygon)
        if here >= 0:
            corners.append((x, y))
        if here * heights[after] < 0:
            share = here / (here - heights[after])
            next_x, next_y = polygon[after]
            corners.append((x + share * (next_x - x), y + share * (next_y - y)))
    return corners


# --- moves ----------------------------------------------------------------------------------------


def _between(problem: _Problem, choice: Int64s, kept: Int64s) -> Int64s:
    """``choice``, with as many layers as ``kept`` has them as it takes to keep the limits.

    Args:
        problem: the problem.
        choice: any.
        kept: within the limits.
    """
    excess = problem.excess(choice)
    if max(excess) <= _SLACK:
        return choice
    lighter = np.zeros(len(choice))
    for over, table in zip(excess, (problem.first, problem.second), strict=True):
        if over > _SLACK:
            lighter += (problem.pick(table, choice) - problem.pick(table, kept)) / over
    dearer = problem.pick(problem.cost, kept) - problem.pick(problem.cost, choice)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(lighter > 0, dearer / lighter, np.inf)
    order = np.argsort(ratio, kind="stable")
    low, high = 0, len(order)  # with all of them it is ``kept``
    while low < high:
        count = (low + high) // 2
        mixed = choice.copy()
        mixed[order[:count]] = kept[order[:count]]
        low, high = (low, count) if problem.fits(mixed) else (count + 1, high)
    mixed = choice.copy()
    mixed[order[:low]] = kept[order[:low]]
    return mixed if problem.fits(mixed) else kept


def _improved(problem: _Problem, choice: Int64s) -> Int64s:
    """The move of one layer that saves most, again and again, while one keeps the limits."""
    choice = choice.copy()
    while True:
        room = -np.array(problem.excess(choice))
        change = problem.cost - problem.pick(problem.cost, choice)[:, None]
        fits = problem.first - problem.pick(problem.first, choice)[:, None] <= room[0]
        fits &= problem.second - problem.pick(problem.second, choice)[:, None] <= room[1]
        saving = np.where(fits, change, 0.0)
        place = int(saving.argmin())
        if saving.flat[place] >= -1e-15 * max(problem.price(choice), 1e-300):
            return choice
        moved = choice.copy()
        moved[place // problem.cost.shape[1]] = place % problem.cost.shape[1]
        if not problem.fits(moved):
            return choice
        choice = moved


# --- exact search ---------------------------------------------------------------------------------


def _search(
    problem: _Problem, best: Int64s, bound: float, prices: tuple[float, float]
) -> Int64s | None:
    """The optimum; None where there are too many partial choices that could lead to it."""
    priced = problem.cost + prices[0] * problem.first + prices[1] * problem.second
    rise = priced - priced.min(axis=1, keepdims=True)
    room = problem.price(best) * (1 + 1e-12) - bound
    work = 0
    # layers of many close candidates last: what is decided first is bounded best
    close = rise <= room
    count = close.sum(axis=1)
    order = np.argsort(count, kind="stable")
    alone, order = order[count[order] == 1], order[count[order] > 1]
    found = close.argmax(axis=1)
    cost, first, second, above = (
        np.atleast_1d(table[alone, found[alone]].sum())
        for table in (problem.cost, problem.first, problem.second, rise)
    )
    trail: list[tuple[Int64s, Int64s]] = []
    for layer in order:
        kept = np.flatnonzero(close[layer])
        work += len(cost) * len(kept)
        if work > _MOST_WORK:
            return None
        grid = np.add.outer(above, rise[layer, kept])
        heavier = np.add.outer(first, problem.first[layer, kept])
        noisier = np.add.outer(second, problem.second[layer, kept])
        alive = (grid <= room) & (heavier <= 1 + _SLACK) & (noisier <= 1 + _SLACK)
        parents, picks = np.nonzero(alive)
        cost = cost[parents] + problem.cost[layer, kept[picks]]
        above, first, second = grid[alive], heavier[alive], noisier[alive]
        unbeaten = _unbeaten(cost, first, second)
        cost, above = cost[unbeaten], above[unbeaten]
        first, second = first[unbeaten], second[unbeaten]
        trail.append((parents[unbeaten], kept[picks[unbeaten]]))
    if not len(cost):
        return best
    found[order] = _walk(trail, int(cost.argmin()))
    return _better(problem, found, best)


def _unbeaten(cost: Float64s, first: Float64s, second: Float64s) -> Int64s:
    """Indices of states that are not the same as a cheaper one in both weights."""
    order = np.lexsort((cost, second, first))
    same = (np.diff(first[order]) == 0) & (np.diff(second[order]) == 0)
    kept: npt.NDArray[np.bool_] = np.concatenate([[True], ~same])[: len(order)]
    return order[kept].astype(np.int64)


def _walk(trail: list[tuple[Int64s, Int64s]], state: int) -> list[int]:
    """What a state of the last layer has picked of each."""
    picked = []
    for parents, picks in reversed(trail):
        picked.append(int(picks[state]))
        state = int(parents[state])
    return picked[::-1]


def _better(problem: _Problem, one: Int64s, other: Int64s) -> Int64s:
    if not problem.fits(one) or problem.price(other) <= problem.price(one):
        return other
    return one
