"""Metrics of errors: formulas against numbers worked out by hand, and the bound that plans keep."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.planning import DENSE, CandidateTable, Decision, LGreCo, PlanningInput, parse
from hvd_adaptive.planning.allocators import MinCostKnapsack
from hvd_adaptive.planning.knapsack import min_cost
from hvd_adaptive.planning.metrics import METRICS, SQUARED, ErrorMetric
from hvd_adaptive.planning.table import Limits
from tests.planning.helpers import quantizer_table

ERRORS = [[0.0, 4.0, 9.0], [1.0, 16.0, 25.0]]
ENERGIES = [10.0, 50.0]


def two_layers(
    errors: list[list[float]] = ERRORS, defaults: tuple[int, int] = (1, 1)
) -> CandidateTable:
    sizes, labels = [[8, 4, 2]] * 2, [["8", "4", "2"]] * 2
    return CandidateTable.of("ab", errors, sizes, labels, defaults, [32] * 2, energies=ENERGIES)


def errors_in(metric: ErrorMetric, **given: CandidateTable) -> list[list[float]]:
    return [row.tolist() for row in metric.applied(two_layers(), **given)[0].errors]


# --- formulas -------------------------------------------------------------------------------------


def test_each_metric_is_its_formula() -> None:
    assert errors_in(ErrorMetric("squared")) == ERRORS
    assert errors_in(ErrorMetric("norm")) == [[0, 2, 3], [1, 4, 5]]
    assert errors_in(ErrorMetric("relative")) == [[0, 0.4, 0.9], [0.02, 0.32, 0.5]]
    assert SQUARED.applied(two_layers())[1] == ()


def test_preconditioned_errors_count_where_there_are_second_moments() -> None:
    metric = ErrorMetric("preconditioned")
    scaled = two_layers([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    assert errors_in(metric, preconditioned=scaled) == [[0, 1, 2], [3, 4, 5]]
    assert errors_in(metric) == ERRORS
    assert "no second moments" in metric.applied(two_layers())[1][0]
    assert errors_in(ErrorMetric("norm"), preconditioned=scaled) == errors_in(ErrorMetric("norm"))


def test_an_energy_that_is_not_known_is_that_of_the_largest_error() -> None:
    table = replace(two_layers(), energies=np.array([0.0, 50.0]))
    found, _ = ErrorMetric("relative").applied(table)
    assert found.errors[0].tolist() == [0, 4 / 9, 1]
    nothing = two_layers([[0.0] * 3] * 2)
    assert all(not row.any() for row in ErrorMetric("relative").applied(nothing)[0].errors)


def test_a_floor_excludes_levels_that_send_less_but_not_the_reference() -> None:
    table = two_layers()  # sends 100, 60 and 10 %, 98, 68 and 50 %
    norms, _ = ErrorMetric("norm").applied(table)
    for floor, wanted in (
        (0.05, [[0, 2, 3], [1, 4, 5]]),
        (0.2, [[0, 2, math.inf], [1, 4, 5]]),
        (0.65, [[0, math.inf, math.inf], [1, 4, math.inf]]),
    ):
        admitted = ErrorMetric("norm", floor=floor).admitted(norms, table, None)
        assert [row.tolist() for row in admitted.errors] == wanted
    kept = ErrorMetric("norm", floor=0.65).admitted(norms, table, np.array([2, DENSE]))
    assert [row.tolist() for row in kept.errors] == [[0, math.inf, 3], [1, 4, math.inf]]
    most = ErrorMetric("norm", floor=0.99).admitted(norms, table, None)
    assert most.errors[1].tolist() == [1, math.inf, math.inf]  # something must be sent
    unknown = replace(table, energies=np.zeros(2))
    assert ErrorMetric("norm", floor=0.99).admitted(norms, unknown, None).errors[0].tolist() == [
        0,
        2,
        3,
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lgreco:metric=l2", "metric='l2' is not one of squared, norm, relative, preconditioned"),
        ("lgreco:floor=1", "floor=1: write the least share of a layer's energy that is sent"),
        ("accordion+lgreco:floor=-0.1", "floor=-0.1"),
    ],
)
def test_options_out_of_range_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(spec)


def test_recipes_of_lgreco_have_a_metric_and_the_others_squared_errors() -> None:
    for name in ("lgreco", "lgreco-time", "accordion+lgreco", "gravac+lgreco"):
        assert parse(name).error_metric == parse(name)
        assert parse(name).error_metric.metric == "norm"
    for name in ("cgx", "kimad+:seconds=1", "gravac", "accordion"):
        assert parse(name).error_metric == SQUARED
        assert not parse(name).accumulate
    assert parse("lgreco").accumulate
    assert not parse("gravac+lgreco:exact=true").accumulate


# --- plans ----------------------------------------------------------------------------------------


def unequal_table(seed: int, layers: int = 8) -> CandidateTable:
    """Defaults that have another place in every layer, and energies of which much may be lost."""
    rng = np.random.default_rng(seed)
    base = quantizer_table(seed, layers, defaults=rng.integers(0, 5, layers))
    worst = np.array([row.max() for row in base.errors])
    return replace(base, energies=worst / rng.uniform(0.01, 1.0, layers))


def preconditioned(table: CandidateTable) -> list[np.ndarray]:
    """As with an optimizer that scales some layers' gradients up."""
    return [row * 10.0 ** (3 * (layer % 3)) for layer, row in enumerate(table.errors)]


def plan(table: CandidateTable, metric: str, floor: float = 0.0) -> Decision:
    recipe = LGreCo(metric=metric, floor=floor)
    scaled = replace(table, errors=tuple(preconditioned(table)))
    return recipe.planner().plan(PlanningInput(0, table, preconditioned=scaled))


def measured_in(table: CandidateTable, metric: str) -> list[np.ndarray]:
    """The errors of a metric, by its definition."""
    return {
        "squared": list(table.errors),
        "norm": [row**0.5 for row in table.errors],
        "relative": [row / e for row, e in zip(table.errors, table.energies, strict=True)],
        "preconditioned": preconditioned(table),
    }[metric]


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32 - 1), st.sampled_from(METRICS), st.sampled_from([0.0, 0.05, 0.6, 0.99]))
def test_a_plan_never_sends_or_loses_more_than_the_default_in_its_metric(
    seed: int, metric: str, floor: float
) -> None:
    table = unequal_table(seed)
    decision = plan(table, metric, floor)
    rows = measured_in(table, metric)
    allowed = math.fsum(row[d] for row, d in zip(rows, table.defaults, strict=True))
    lost = math.fsum(row[c] for row, c in zip(rows, decision.levels, strict=True))
    assert lost <= allowed * (1 + 1e-12)
    assert decision.report["error"] == pytest.approx(lost)
    assert decision.report["max_error"] == pytest.approx(allowed)
    assert decision.report["error"] <= decision.report["max_error"]
    assert decision.report["squared_error"] == pytest.approx(table.error(decision.levels))
    assert table.bytes(decision.levels) <= table.bytes(table.defaults)
    for layer, (chosen, default) in enumerate(zip(decision.levels, table.defaults, strict=True)):
        sent = 1 - table.errors[layer][chosen] / table.energies[layer]
        assert chosen == default or sent >= floor * (1 - 1e-12)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_is_the_cheapest_of_all_that_keep_the_bound(metric: str, seed: int) -> None:
    table = unequal_table(seed, layers=5)
    rows = measured_in(table, metric)
    allowed = sum(row[d] for row, d in zip(rows, table.defaults, strict=True))
    everything = np.array(list(itertools.product(range(5), repeat=5)))
    lost = sum(rows[layer][everything[:, layer]] for layer in range(5))
    sizes = sum(table.sizes[layer][everything[:, layer]] for layer in range(5))
    assert plan(table, metric).report["bytes"] <= sizes[lost <= allowed].min() * 1.005


def test_metrics_lead_to_different_plans() -> None:
    plans = {metric: tuple(plan(unequal_table(0), metric).levels.tolist()) for metric in METRICS}
    assert len(set(plans.values())) == len(METRICS)


def test_a_reference_that_costs_less_than_what_the_knapsack_finds_stays() -> None:
    table, _ = ErrorMetric("norm").applied(unequal_table(0, layers=3))
    allowed = Limits.like(table, table.defaults)
    assert table.cost(min_cost(table.errors, table.costs(), allowed.max_error, bins=1)) > table.cost(
        table.defaults
    )
    choice = MinCostKnapsack(bins=1).allocate(table, allowed)
    assert choice.tolist() == table.defaults.tolist()
