"""The knapsack of two limits: against every choice there is, and its bound where there are too many."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.planning.two_limits import least_cost

Row = tuple[np.ndarray, np.ndarray, np.ndarray]


def rows_of(seed: int, layers: int, candidates: int) -> list[Row]:
    """Costs and two weights per layer; the first candidate weighs nothing, others one or both."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(layers):
        count = int(rng.integers(1, candidates + 1))
        cost = np.round(rng.uniform(0, 10, count), 1)
        weights = np.where(rng.random((2, count)) < 0.4, 0.0, rng.uniform(0, 5, (2, count)))
        weights[:, 0] = 0.0
        rows.append((cost, weights[0], weights[1]))
    return rows


def best_of_all(rows: list[Row], first: float, second: float) -> float:
    found = math.inf
    for choice in itertools.product(*(range(len(row[0])) for row in rows)):
        cost, one, other = (
            sum(row[part][index] for row, index in zip(rows, choice, strict=True)) for part in range(3)
        )
        if one <= first * (1 + 1e-12) and other <= second * (1 + 1e-12):
            found = min(found, cost)
    return found


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.floats(0, 12), st.floats(0, 12))
def test_no_choice_within_both_limits_costs_less(
    seed: int, layers: int, first: float, second: float
) -> None:
    rows = rows_of(seed, layers, 5)
    found = least_cost(*zip(*rows, strict=True), first, second)
    picked = [[row[part][i] for row, i in zip(rows, found.choice, strict=True)] for part in range(3)]
    assert sum(picked[1]) <= first * (1 + 1e-9)
    assert sum(picked[2]) <= second * (1 + 1e-9)
    assert found.cost == pytest.approx(sum(picked[0]))
    assert found.gap == 0.0
    assert found.cost == pytest.approx(best_of_all(rows, first, second))


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_a_large_problem_is_below_every_choice_and_near_the_one_found(seed: int) -> None:
    rng, rows = np.random.default_rng(seed), []
    for _ in range(120):
        numel, energy = 10 ** rng.uniform(3, 6.5), 10 ** rng.uniform(-3, 0)
        density, bits = np.linspace(0.1, 0.001, 60), np.arange(8, 1, -1.0)
        rows.append(
            (
                np.concatenate([[2 * numel], 3.2 * density * numel, numel * bits / 8]),
                np.concatenate([[0], 1e-4 * energy / density**2, 0 * bits]),
                np.concatenate([[0], 0 * density, energy * 4.0**-bits]),
            )
        )
    found = least_cost(*zip(*rows, strict=True), 0.1, 0.1)
    assert 0 <= found.gap < 0.03
    for share in rng.random(40):  # greedy choices within the limits
        one = other = cost = 0.0
        for costs, first, second in rows:
            fits = (one + first <= 0.1) & (other + second <= 0.1)
            index = int(np.argmin(np.where(fits, costs * (1 + share * rng.random(len(costs))), np.inf)))
            cost, one, other = cost + costs[index], one + first[index], other + second[index]
        assert cost >= found.bound


def test_infinite_limits_take_the_cheapest_and_limits_of_0_what_weighs_nothing() -> None:
    rows = rows_of(3, 6, 5)
    columns = list(zip(*rows, strict=True))
    free = least_cost(*columns, math.inf, math.inf)
    assert free.cost == pytest.approx(sum(row[0].min() for row in rows))
    bound = least_cost(*columns, 0.0, 0.0)
    lightest = [min(c for c, a, b in zip(*row, strict=True) if a == b == 0) for row in rows]
    assert bound.cost == pytest.approx(sum(lightest))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (([1.0], [1.0], [0.0]), "weighs nothing"),
        (([1.0], [0.0], [np.nan]), "NaN or negative"),
        (([1.0], [0.0, 1.0], [0.0]), "equal lengths"),
    ],
)
def test_rows_that_make_no_problem_are_refused(row: tuple[list[float], ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        least_cost(*([part] for part in row), 1.0, 1.0)
