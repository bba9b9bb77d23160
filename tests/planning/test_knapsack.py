"""The knapsack: bounds are never broken, and results stand against brute force and MILP."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import nn

from hvd_adaptive.adaptation.candidates import candidates_of, table_of
from hvd_adaptive.compressors import parse
from hvd_adaptive.layers import Layer
from hvd_adaptive.planning import knapsack
from hvd_adaptive.planning.knapsack import Infeasible, equal_slopes, min_cost, min_error, total

Rows = list[np.ndarray]
Problem = tuple[Rows, Rows]

GAP = 0.005


def picked(rows: Any, choice: np.ndarray) -> float:
    return total([row[index] for row, index in zip(rows, choice, strict=True)])


def brute(values: Any, weights: Any, bound: float) -> float:
    """The least value of all choices within the bound; infinite if there is none."""
    best = math.inf
    for choice in itertools.product(*(range(len(row)) for row in values)):
        if picked(weights, np.array(choice)) <= bound:
            best = min(best, picked(values, np.array(choice)))
    return best


def gap(values: Rows, weights: Rows, bound: float, choice: np.ndarray) -> float:
    """How far a choice is above what MILP proves that none within the bound can beat, relative."""
    counts = [len(row) for row in values]
    owner = np.repeat(np.arange(len(counts)), counts)
    one_each = sparse.csr_matrix((np.ones(len(owner)), (owner, np.arange(len(owner)))))
    reached = picked(values, choice)  # the unit: the solver's tolerances are absolute
    if reached == 0:
        return 0.0
    found = milp(
        np.concatenate(values) / reached,
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint((np.concatenate(weights) / bound)[None], -np.inf, 1),
        ],
        integrality=np.ones(len(owner)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-4, "time_limit": 10},
    )
    return float(1 / found.mip_dual_bound - 1)


# --- tables ---------------------------------------------------------------------------------------


def sparse_like(rng: np.random.Generator, layers: int, count: int) -> Problem:
    """Convex, as top-k's: layers from 1e3 to 3e6 elements, energies over ten powers of ten."""
    errors, sizes = [], []
    for _ in range(layers):
        numel, tail = 10 ** rng.uniform(3, 6.5), rng.uniform(0.3, 2)
        energy = np.sort(np.abs(rng.standard_normal(2048)) ** (1 / tail))[::-1] ** 2
        energy *= 10 ** rng.uniform(-8, 2) / energy.sum()
        density = 0.1 * np.arange(count, 0, -1) / count
        sent = np.interp(density, np.linspace(0, 1, 2049), np.concatenate([[0], np.cumsum(energy)]))
        errors.append(np.maximum(energy.sum() - sent, 0))
        sizes.append(np.round(density * numel) * 5 + 8)
    return errors, sizes


def quantizer_like(rng: np.random.Generator, layers: int, count: int) -> Problem:
    """Few levels, errors that fall fourfold with every bit, with noise: not convex."""
    bits = np.arange(count + 1, 1, -1.0)
    numel = np.round(10 ** rng.uniform(3, 6.5, layers))
    energy = 10 ** rng.uniform(-6, 2, layers)
    errors = [e * 4.0**-bits * rng.uniform(0.7, 1.4, count) for e in energy]
    return errors, [np.round(n * bits / 8) for n in numel]


def random_like(rng: np.random.Generator, layers: int, count: int) -> Problem:
    """No structure: any number of candidates, most of them dominated."""
    counts = rng.integers(1, count + 1, layers)
    return [rng.random(c) for c in counts], [np.round(rng.random(c) * 1000) for c in counts]


def real(seed: int) -> Problem:
    """Candidates of three families on the gradients of a small network."""
    torch.manual_seed(seed)
    sizes = [24, 96, 160, 64, 128, 48, 10]
    model = nn.Sequential(
        *itertools.chain(*((nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)))
    )
    x = torch.randn(64, sizes[0])
    nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
    families = [parse("topk:density=0.02"), parse("qsgd:bits=4"), parse("powersgd:rank=4")]
    tables = []
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.dim() > 1 and parameter.grad is not None:
            layer = Layer(index, name, tuple(parameter.shape))
            tables.append(table_of(parameter.grad.flatten(), layer, candidates_of(layer, families)))
    return [errors for errors, _ in tables], [sizes.astype(np.float64) for _, sizes in tables]


Maker = Callable[[np.random.Generator, int, int], Problem]
MAKERS: list[Maker] = [sparse_like, quantizer_like, random_like]


def bounds_of(rows: Rows, rng: np.random.Generator) -> float:
    """A bound between the least and the most that can be chosen."""
    least, most = total([row.min() for row in rows]), total([row.max() for row in rows])
    return float(least + rng.uniform(0.02, 0.6) ** 2 * (most - least))


# --- against the optimum --------------------------------------------------------------------------


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(("layers", "count"), [(1, 7), (2, 7), (5, 6), (30, 12), (100, 7)])
@pytest.mark.parametrize("seed", range(3))
def test_both_readings_are_within_half_a_percent_of_the_optimum(
    maker: Maker, layers: int, count: int, seed: int
) -> None:
    rng = np.random.default_rng([seed, layers])
    errors, costs = maker(rng, layers, count)
    check_gaps(errors, costs, bounds_of(errors, rng), bounds_of(costs, rng))


def check_gaps(errors: Rows, costs: Rows, max_error: float, max_cost: float) -> None:
    cheapest = min_cost(errors, costs, max_error)
    assert picked(errors, cheapest) <= max_error
    assert gap(costs, errors, max_error, cheapest) <= GAP
    nearest = min_error(errors, costs, max_cost)
    assert picked(costs, nearest) <= max_cost
    assert gap(errors, costs, max_cost, nearest) <= GAP


@pytest.mark.parametrize("share", [0.05, 0.3, 0.7])
def test_error_tables_of_three_families_of_compressors(share: float) -> None:
    errors, costs = real(0)
    least, most = (total([f(row) for row in errors]) for f in (np.min, np.max))
    cheap, dear = (total([f(row) for row in costs]) for f in (np.min, np.max))
    check_gaps(errors, costs, least + share * (most - least), cheap + share * (dear - cheap))


def test_a_whole_model_as_in_the_paper() -> None:
    errors, costs = sparse_like(np.random.default_rng(0), 161, 100)
    default = [row[89] for row in errors]  # a hundredth
    check_gaps(errors, costs, total(default), total([row[89] for row in costs]))
    start = time.process_time()
    min_cost(errors, costs, total(default))
    assert time.process_time() - start < 1.5  # benchmarks/micro/planner.py has the real bar


numbers = st.one_of(
    st.integers(0, 6).map(float), st.floats(0, 10, allow_subnormal=False), st.just(math.inf)
)
layer_rows = st.integers(1, 4).flatmap(
    lambda count: st.tuples(*[st.lists(numbers, min_size=count, max_size=count)] * 2)
)
tables = st.lists(layer_rows, min_size=1, max_size=4)


@settings(deadline=None, max_examples=300)
@given(tables, st.floats(0, 30), st.integers(1, 50))
@example([([1.0], [1.0])], 1.0, 1)
@example([([0.0, 0.0], [2.0, 1.0])], 0.0, 1)
@example([([0.1, 0.0], [0.0, 1.0])] * 3, 0.1 + 0.1 + 0.1, 7)
@example([([5e-324, 0.0], [0.0, 1.0])] * 2, 5e-324, 10)
def test_bounds_hold_and_one_index_for_all_is_never_better(
    rows: list[tuple[list[float], list[float]]], bound: float, bins: int
) -> None:
    errors, costs = ([row[side] for row in rows] for side in (0, 1))
    for solve, weights, values in ((min_cost, errors, costs), (min_error, costs, errors)):
        best = brute(values, weights, bound)
        if math.isinf(best):
            with pytest.raises(Infeasible):
                solve(errors, costs, bound, bins)
            continue
        choice = solve(errors, costs, bound, bins)
        assert choice.dtype == np.int64
        assert picked(weights, choice) <= bound
        assert best <= picked(values, choice) < math.inf
        for index in range(min(len(row) for row in errors)):
            uniform = np.full(len(rows), index)
            if picked(weights, uniform) <= bound:
                assert picked(values, choice) <= picked(values, uniform)


whole_rows = st.integers(1, 4).flatmap(
    lambda count: st.tuples(*[st.lists(st.integers(0, 12), min_size=count, max_size=count)] * 2)
)


@settings(deadline=None, max_examples=200)
@given(st.lists(whole_rows, min_size=1, max_size=5), st.integers(0, 40))
def test_the_table_is_exact_where_a_bin_is_a_unit(
    rows: list[tuple[list[int], list[int]]], bound: int
) -> None:
    errors, costs = ([row[side] for row in rows] for side in (0, 1))
    reach = bound - sum(map(min, errors))
    if reach > 0:
        problem = knapsack._Problem.of(errors, costs, "error", bound, reach)
        table = knapsack._Table.of(problem, problem.weights, problem.values, reach)
        assert table.least[reach] == brute(costs, errors, bound)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(-200, 200), st.integers(-200, 200))
def test_units_do_not_matter(seed: int, error_power: int, cost_power: int) -> None:
    rng = np.random.default_rng(seed)
    errors, costs = random_like(rng, 6, 5)
    bounds = bounds_of(errors, rng), bounds_of(costs, rng)
    scaled = [row * 2.0**error_power for row in errors], [row * 2.0**cost_power for row in costs]
    for solve, bound, unit in zip(
        (min_cost, min_error), bounds, (2.0**error_power, 2.0**cost_power), strict=True
    ):
        assert (solve(*scaled, bound * unit) == solve(errors, costs, bound)).all()


@pytest.mark.parametrize("seed", range(30))
def test_where_single_moves_are_stuck_the_table_is_not(seed: int) -> None:
    """Errors nearly proportional to what they save: only the table finds what fits exactly."""
    rng = np.random.default_rng(seed)
    saved = rng.integers(200, 600, 11)
    errors = [[0.0, float(each + rng.integers(0, 3))] for each in saved]
    costs = [[float(each), 0.0] for each in saved]
    max_error = float(total([row[1] for row in errors]) // 2)
    choice = min_cost(errors, costs, max_error)
    assert picked(costs, choice) <= 1.001 * brute(costs, errors, max_error)
    max_cost = float(saved.sum() // 2)
    choice = min_error(errors, costs, max_cost, bins=10_000)
    assert picked(errors, choice) <= 1.001 * brute(errors, costs, max_cost)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_no_move_of_one_layer_or_two_makes_a_result_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    errors, costs = random_like(rng, 7, 6)
    for solve, weights, values in ((min_cost, errors, costs), (min_error, costs, errors)):
        bound = bounds_of(weights, rng)
        choice = solve(errors, costs, bound, bins=2)  # too coarse to see anything
        for one, other in itertools.combinations(range(7), 2):
            for moved in itertools.product(range(len(errors[one])), range(len(errors[other]))):
                trial = choice.copy()
                trial[[one, other]] = moved
                if picked(weights, trial) <= bound:
                    assert picked(values, trial) >= picked(values, choice)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_the_table_holds_the_least_price_of_every_number_of_bins(seed: int, bins: int) -> None:
    rng = np.random.default_rng(seed)
    errors, costs = random_like(rng, 4, 5)
    bound = bounds_of(errors, rng)
    problem = knapsack._Problem.of(errors, costs, "error", bound, bins)
    table = knapsack._Table.of(problem, problem.weights, problem.values, bound - problem.lightest)
    split = [slice(a, b) for a, b in itertools.pairwise(problem.starts)]
    steps, prices = ([rows[each] for each in split] for rows in (table.steps, problem.values))
    for most, least in enumerate(table.least):
        assert least == pytest.approx(brute(prices, steps, most))
        if math.isfinite(least):
            choice = table.choice(most)
            assert table.steps[choice].sum() <= most
            assert problem.values[choice].sum() == pytest.approx(least)
    # rounding adds less than a bin a layer, for which the table has room
    optimum = brute(costs, errors, bound)
    assert table.least[-1] <= optimum * (1 + 1e-12)
    assert table.least[bins] >= optimum * (1 - 1e-12)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_the_core_holds_a_best_choice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    errors, costs = random_like(rng, 5, 5)
    for weights, values in ((errors, costs), (costs, errors)):
        bound = bounds_of(weights, rng)
        problem = knapsack._Problem.of(weights, values, "weight", bound, 1)
        start = problem.start()
        if problem.is_least(start):
            continue
        core, kept = knapsack._core(problem, start)
        assert (core.index[kept] == problem.index[start]).all()
        split = [slice(a, b) for a, b in itertools.pairwise(core.starts)]
        left = [[rows[each] for each in split] for rows in (core.weights, core.values)]
        assert brute(left[1], left[0], bound) == pytest.approx(brute(values, weights, bound))


def test_the_core_of_a_whole_model_is_small() -> None:
    errors, costs = sparse_like(np.random.default_rng(0), 161, 100)
    problem = knapsack._Problem.of(errors, costs, "error", total([row[89] for row in errors]), 1)
    core, _ = knapsack._core(problem, knapsack._improve(problem, problem.start()))
    assert len(core.index) < 0.1 * len(problem.index)


# --- the ends -------------------------------------------------------------------------------------


def test_what_cannot_be_had_names_the_least_that_can() -> None:
    with pytest.raises(Infeasible, match="least total error is 3, above the bound") as caught:
        min_cost([[1, 4], [2, 4]], [[1, 0], [1, 0]], 2.5)
    assert caught.value.least == 3
    with pytest.raises(Infeasible, match="least total cost is 4") as caught:
        min_error([[1, 4], [2, 4]], [[5, 2], [5, 2]], 3)
    assert caught.value.least == 4
    with pytest.raises(Infeasible) as caught:
        min_cost([[1.0], [math.inf]], [[1.0], [1.0]], math.inf)
    assert caught.value.least == math.inf


def test_without_a_bound_the_cheapest_and_the_most_faithful_are_chosen() -> None:
    errors, costs = [[0, 1, 5], [0, 2, 3]], [[9, 4, 1], [9, 8, 2]]
    assert min_cost(errors, costs, math.inf).tolist() == [2, 2]
    assert min_error(errors, costs, math.inf).tolist() == [0, 0]


def test_no_error_allowed_takes_the_cheapest_without_error() -> None:
    assert min_cost([[1, 0, 0], [0, 3, 9]], [[1, 5, 4], [7, 2, 1]], 0).tolist() == [2, 0]


def test_without_any_errors_the_cheapest_is_chosen() -> None:
    assert min_cost(np.zeros((2, 3)), np.array([[3, 1, 2], [5, 5, 4]]), 0).tolist() == [1, 2]
    assert min_error(np.zeros((2, 3)), np.array([[3, 1, 2], [5, 5, 4]]), 5).tolist() == [1, 2]


def test_of_equal_candidates_the_first_is_chosen() -> None:
    assert min_cost([[2, 1, 1, 1]], [[1, 3, 3, 3]], 1).tolist() == [1]
    assert min_error([[2, 1, 1, 1]], [[1, 3, 3, 3]], 3).tolist() == [1]


def test_no_layers_are_a_problem_with_an_empty_answer() -> None:
    assert min_cost([], [], 1.0).tolist() == []
    assert min_error([], [], 0.0).tolist() == []


def test_a_bound_that_is_met_to_the_last_bit_is_met() -> None:
    rows = [[0.1, 0.0]] * 10
    assert min_cost(rows, [[0, 1]] * 10, total([0.1] * 10)).tolist() == [0] * 10
    short = min_cost(rows, [[0, 1]] * 10, math.nextafter(total([0.1] * 10), 0))
    assert sorted(short.tolist()) == [0] * 9 + [1]


@pytest.mark.parametrize(
    ("errors", "costs", "bound", "bins", "message"),
    [
        ([[math.nan]], [[1]], 1, 10, "layer 0: an error or a cost is NaN"),
        ([[1]], [[-1]], 1, 10, "layer 0: an error or a cost is NaN or negative"),
        ([[1], []], [[1], []], 1, 10, "layer 1 has 0 candidates"),
        ([[1, 2]], [[1]], 1, 10, "rows of equal length"),
        ([[1], [1]], [[1]], 1, 10, "rows of one kind"),
        ([[1]], [[1]], math.nan, 10, "the bound is nan"),
        ([[1]], [[1]], 1, 0, "bins are 0"),
    ],
)
def test_what_is_no_problem_is_refused(
    errors: Any, costs: Any, bound: float, bins: int, message: str
) -> None:
    for solve in (min_cost, min_error):
        with pytest.raises(ValueError, match=message):
            solve(errors, costs, bound, bins)


# --- equal slopes ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_equal_slopes_are_the_best_for_their_own_cost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    errors, costs = random_like(rng, 4, 5)
    bound = bounds_of(costs, rng)
    choice = equal_slopes(errors, costs, max_cost=bound)
    spent = picked(costs, choice)
    assert spent <= bound
    assert picked(errors, choice) == pytest.approx(brute(errors, costs, spent), rel=1e-12)


def test_equal_slopes_are_one_magnitude_threshold_for_the_model() -> None:
    rng = np.random.default_rng(1)
    layers = [np.sort(np.abs(rng.normal(0, s, 200)))[::-1] for s in (0.1, 1.0, 3.0)]
    # candidate i leaves out the i smallest
    errors = [np.append(0.0, np.cumsum(x[::-1] ** 2)) for x in layers]
    sent = 200 - equal_slopes(errors, [8 * np.arange(200.0, -1, -1)] * 3, max_cost=8 * 150)
    assert sent.sum() == 150
    threshold = np.sort(np.concatenate(layers))[-150]
    assert sent.tolist() == [(x >= threshold).sum() for x in layers]


def test_equal_slopes_refuse_what_cannot_be_had() -> None:
    with pytest.raises(Infeasible, match="least total cost is 2"):
        equal_slopes([[0, 1]], [[9, 2]], max_cost=1)
    with pytest.raises(Infeasible, match="least total error is 1"):
        equal_slopes([[1, 2]], [[9, 2]], max_error=0.5)
