"""What every budget, allocator and recipe does: one row per member."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.planning import DENSE, REGISTRY, Decision, StepMeasurements, parse
from hvd_adaptive.planning.allocators import (
    Allocator,
    FollowReference,
    KMeans,
    MinCostKnapsack,
    MinErrorKnapsack,
    Uniform,
)
from hvd_adaptive.planning.budgets import (
    Accuracy,
    Bandwidth,
    Budget,
    BudgetOptions,
    CriticalRegimes,
    Static,
    Throughput,
)
from hvd_adaptive.planning.knapsack import Infeasible
from hvd_adaptive.planning.recipes import format_recipe
from hvd_adaptive.planning.table import Limits
from tests.planning.helpers import (
    LAYERS,
    MODEL_FACTORS,
    RECIPES,
    drive,
    quantizer_table,
    top_k_table,
    transfers_at,
    with_signals,
)

ALLOCATORS = (
    Uniform(),
    MinCostKnapsack(),
    MinErrorKnapsack(),
    KMeans(),
    FollowReference(),
)
BUDGETS: list[BudgetOptions] = [
    Static(),
    Bandwidth(seconds=0.5, warmup=3),
    Throughput(window=4, policy="geometric"),
    CriticalRegimes(),
    Accuracy(),
]


# --- allocators ----------------------------------------------------------------------------------

seeds = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=60)
@given(seeds, st.sampled_from(ALLOCATORS), st.floats(0, 1))
def test_every_allocator_keeps_its_limits_or_says_that_none_can(
    seed: int, member: Allocator, share: float
) -> None:
    table = quantizer_table(seed)
    most, least = table.bytes(np.zeros(8, np.int64)), table.bytes(table.cheapest())
    by_bytes = Limits(max_bytes=least + share * (most - least))
    for allowed in (Limits.like(table, table.defaults), by_bytes):
        if isinstance(member, MinCostKnapsack | FollowReference) and allowed is by_bytes:
            continue
        choice = member.allocate(table, allowed)
        assert choice.dtype == np.int64
        if isinstance(member, MinErrorKnapsack):
            assert table.bytes(choice) <= allowed.max_bytes
        else:
            assert allowed.admits(table, choice)
        assert (member.allocate(table, allowed) == choice).all()


@pytest.mark.parametrize("member", [Uniform(), MinErrorKnapsack(), KMeans()])
def test_bytes_that_cannot_be_kept_are_infeasible(member: Allocator) -> None:
    table = quantizer_table(0)
    least = table.bytes(table.cheapest())
    with pytest.raises(Infeasible) as caught:
        member.allocate(table, Limits(max_bytes=least - 1))
    assert caught.value.least == least


@pytest.mark.parametrize("member", [MinCostKnapsack(), Uniform(), KMeans()])
def test_errors_that_cannot_be_kept_are_infeasible(member: Allocator) -> None:
    table = quantizer_table(0)
    with pytest.raises(Infeasible):
        member.allocate(table, Limits(max_error=table.error(np.zeros(8, np.int64)) / 2))


# --- budgets -------------------------------------------------------------------------------------


def random_facts(budget: Budget, rng: np.random.Generator, step: int) -> StepMeasurements:
    return StepMeasurements(
        step,
        seconds=float(rng.uniform(0.5, 1)),
        compute_seconds=0.1,
        factor=budget.factor,
        gains={theta: float(rng.uniform(0.6, 1)) for theta in budget.factors},
        period_energy=rng.uniform(0, 4, 2),
        learning_rate=0.1 if step < 25 else 0.01,
        transfers=transfers_at(step, float(rng.uniform(1e5, 1e6)), 1e-3),
    )


@pytest.mark.parametrize("options", BUDGETS)
@pytest.mark.parametrize("cut", [0, 1, 17, 26])
def test_a_budget_continues_from_its_state(options: BudgetOptions, cut: int) -> None:
    seen: list[list[Any]] = []
    for resumed in (False, True):
        budget, rng = options.budget(20), np.random.default_rng(0)
        found: list[Any] = []
        for step in range(40):
            if resumed and step == cut:
                state = json.loads(json.dumps(budget.state_dict()))
                budget = options.budget(20)
                budget.load_state_dict(state)
            budget.observe(random_facts(budget, rng, step))
            found.append((budget.urgent, budget.factor, budget.ready))
            if budget.ready and step % 3 == 0:
                facts = with_signals(step, top_k_table())
                budget.inform(facts)
                allowed = budget.allow(facts.table)
                found.append((allowed.max_error, allowed.max_bytes, budget.report()))
        seen.append(found)
    assert seen[0] == seen[1]


# --- recipes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", RECIPES.values())
def test_every_recipe_decides_levels_that_exist_and_keeps_its_bounds(spec: str) -> None:
    decisions = drive(parse(spec).planner(ranks=16), range(120))
    assert decisions
    for decision in decisions:
        assert decision.levels.shape == (LAYERS,)
        assert ((decision.levels >= DENSE) & (decision.levels < len(MODEL_FACTORS))).all()
        report = decision.report
        assert all(isinstance(value, float | int) for value in report.values())
        if math.isfinite(report["max_error"]):
            assert report["error"] <= report["max_error"]
        elif report["shortfall"] == 0:
            assert report["bytes"] <= report["max_bytes"]


def plain(decisions: list[Decision]) -> list[Any]:
    return [(each.levels.tolist(), each.factor, each.report, each.reasons) for each in decisions]


@pytest.mark.parametrize("spec", RECIPES.values())
@pytest.mark.parametrize("cut", [1, 55])
def test_a_planner_continues_from_its_state(spec: str, cut: int) -> None:
    recipe = parse(spec + (",period=7" if ":" in spec else ":period=7"))
    whole = drive(recipe.planner(ranks=16), range(90))
    first = recipe.planner(ranks=16)
    found = drive(first, range(cut))
    again = recipe.planner(ranks=16)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    # the factor of the last decision is the caller's to keep
    resumed = drive(again, range(cut, 90), found[-1].factor if found else 1.0)
    assert plain(found + resumed) == plain(whole)


@pytest.mark.parametrize("spec", RECIPES.values())
def test_a_recipe_is_its_text(spec: str) -> None:
    recipe = parse(spec)
    assert parse(format_recipe(recipe)) == recipe
    assert parse(recipe) is recipe


def test_every_recipe_of_the_registry_is_exported() -> None:
    from hvd_adaptive import planning

    for recipe in REGISTRY.values():
        assert getattr(planning, recipe.__name__) is recipe
        assert recipe.__name__ in planning.__all__
