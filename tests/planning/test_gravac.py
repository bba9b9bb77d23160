"""GraVAC's search, with a model of what gains and speeds do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from hvd_adaptive.planning.budgets import Budget, Throughput
from hvd_adaptive.planning.measurements import Measurement, StepMeasurements

FACTORS = (10.0, 20.0, 40.0, 160.0, 1000.0)


def run(
    budget: Budget,
    steps: int,
    gain: Callable[[float], float],
    seconds: Callable[[float], float],
    first: int = 0,
) -> list[float]:
    """What each step was sent at; a decision counts from the next step on."""
    sent = []
    for step in range(first, first + steps):
        factor = budget.factor
        sent.append(factor)
        gains = {theta: gain(theta) for theta in budget.factors}
        budget.observe(StepMeasurements(step, seconds(factor), samples=64, factor=factor, gains=gains))
    return sent


def table(values: Mapping[float, float]) -> Callable[[float], float]:
    return lambda theta: values[theta]


def falling(theta: float) -> float:
    """0.97 at 10x, 0.73 at 1000x."""
    return 1.0 - 0.03 * (theta / 10) ** 0.48


def on_a_link(theta: float) -> float:
    """Computing, and 10 MB at 10 MB/s."""
    return 0.1 + 1.0 / theta


def test_where_nothing_saturates_the_highest_throughput_is_kept_and_not_the_last() -> None:
    budget = Throughput(window=10, epsilon=0.7).budget(100)
    throughput = {theta: 64 * falling(theta) / on_a_link(theta) for theta in FACTORS}
    assert max(throughput, key=lambda theta: throughput[theta]) == 160
    sent = run(budget, 100, falling, on_a_link)
    assert list(dict.fromkeys(sent)) == [1.0, 20.0, 40.0, 160.0, 1000.0, 10.0]  # 10x at last
    assert sent[50:] == [160.0] * 50
    report = budget.report()
    assert report["ideal"] == 160
    for theta in FACTORS:
        assert report[f"throughput_{theta:g}x"] == pytest.approx(throughput[theta])


def test_the_smallest_factor_is_kept_where_it_is_the_best() -> None:
    gain = table(dict(zip(FACTORS, (0.99, 0.9, 0.85, 0.8, 0.75), strict=True)))
    budget = Throughput(window=10).budget(100)
    sent = run(budget, 100, gain, lambda theta: 0.1)
    assert sent[40:] == [10.0] * 60
    assert budget.report()["ideal"] == 10


def test_factors_whose_gain_does_not_suffice_are_never_sent() -> None:
    gain = table(dict(zip(FACTORS, (0.95, 0.8, 0.71, 0.6, 0.9), strict=True)))
    budget = Throughput(window=10, epsilon=0.7).budget(100)
    sent = run(budget, 100, gain, on_a_link)
    assert list(dict.fromkeys(sent)) == [1.0, 20.0, 40.0, 10.0, 1000.0]  # 10x in the place of 160x
    assert set(sent[50:]) == {1000.0}


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_choice_is_looked_at_again_when_its_throughput_changes(noise: float) -> None:
    rng = np.random.default_rng(0)

    def link(rate: float) -> Callable[[float], float]:
        return lambda theta: (0.1 + rate / theta) * float(np.exp(noise * rng.standard_normal()))

    budget = Throughput(window=20).budget(4)
    run(budget, 200, falling, link(1.0))
    assert budget.report()["ideal"] == 160
    run(budget, 400, falling, link(1.0), 200)
    assert budget.report()["ideal"] == 160
    state = json.loads(json.dumps(budget.state_dict()))
    sent = run(budget, 400, falling, link(20.0), 600)  # a twentieth of the bandwidth
    assert set(sent) == set(FACTORS)
    assert budget.report()["ideal"] == 1000
    again = Throughput(window=20).budget(4)
    again.load_state_dict(state)
    rng = np.random.default_rng(1)
    run(again, 400, falling, link(20.0), 600)
    assert again.report()["ideal"] == 1000


def test_a_choice_is_looked_at_again_as_soon_as_its_gain_falls_below_epsilon() -> None:
    budget = Throughput(window=10).budget(100)
    run(budget, 60, falling, on_a_link)
    assert budget.report()["ideal"] == 160
    sent = run(budget, 100, lambda theta: falling(theta) - 0.19, on_a_link, 60)
    assert sent[0] == 160
    assert sent[1] == 20
    assert set(sent[60:]) == {40.0}  # at 160x it is 0.69 now
    assert budget.report()["ideal"] == 40


@pytest.mark.parametrize("epsilon", [0.7, 0.9])
def test_dense_is_never_kept_and_is_left_where_feedback_raises_the_gain(epsilon: float) -> None:
    """With an empty residual 10x sends 0.66 of a Gaussian gradient's norm; with its own, all of it."""
    residual, sent = 0.0, []
    budget = Throughput(window=50, epsilon=epsilon).budget(4)
    for step in range(600):
        factor = budget.factor
        sent.append(factor)
        gains = {theta: min(1.0, 0.66 + residual) * (10 / theta) ** 0.02 for theta in budget.factors}
        budget.observe(StepMeasurements(step, 0.1 + 0.9 / factor, factor=factor, gains=gains))
        residual = 0.0 if factor == 1 else min(0.34, residual + 0.05)
    assert sent.count(1.0) <= 60
    assert 1.0 not in sent[-100:]
    kept = budget.report()["ideal"]
    assert kept == {0.7: 1000, 0.9: 1000}[epsilon]


def test_trials_get_rarer_where_nothing_suffices() -> None:
    budget = Throughput(window=200, epsilon=1.0).budget(100)
    sent = run(budget, 1000, lambda theta: 0.8 * falling(theta), lambda theta: 0.1)
    assert sent[:20] == [1.0] * 20
    assert sent[20:40] == [10.0] * 20
    assert set(sent) == {1.0, 10.0}
    assert sent[500:].count(10.0) <= 60


def test_gains_above_1_count_as_1_in_throughputs() -> None:
    """What is sent beyond a gradient's norm is of earlier ones."""
    budget = Throughput(window=10).budget(100)
    budget.observe(StepMeasurements(0, 0.5, samples=8, factor=20.0, gains={10.0: 1.2, 20.0: 1.3}))
    assert budget.report()["throughput_20x"] == 16
    assert budget.report()["gain_20x"] == 1.3


def test_the_papers_formula_is_an_option() -> None:
    assert Measurement.FEEDBACK_GAINS in Throughput(gain="feedback").budget().needs
    assert Measurement.FEEDBACK_GAINS not in Throughput().budget().needs
    with pytest.raises(ValueError, match="gain='norm' is not one of raw, feedback"):
        Throughput(gain="norm")


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        (Throughput(), FACTORS),
        (Throughput(theta_min=1.5, theta_max=40, policy="geometric"), (1.5, 3, 6, 12, 24, 40)),
        (Throughput(theta_min=8, theta_max=8), (8,)),
    ],
)
def test_the_factors_that_candidates_are_needed_for(
    options: Throughput, factors: tuple[float, ...]
) -> None:
    assert options.candidate_factors() == factors
