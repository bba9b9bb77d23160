"""What bytes cost: fits against scipy and closed forms, and a monitor that is hard to mislead."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from hvd_adaptive.planning.costs import (
    BandwidthMonitor,
    BucketCosts,
    OnlineCosts,
    fit_bucket_costs,
    nonnegative_least_squares,
    random_plans,
    random_prices,
)

seeds = st.integers(0, 2**32 - 1)


# --- buckets --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(seeds, st.integers(1, 8), st.integers(-20, 20))
def test_non_negative_least_squares_are_scipys(seed: int, columns: int, power: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((columns + 5, columns)) * 10.0 ** rng.integers(-3, 4, columns)
    target = rng.standard_normal(columns + 5) * 2.0**power
    found = nonnegative_least_squares(matrix.T @ matrix, matrix.T @ target)
    expected, _ = optimize.nnls(matrix, target)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9 * np.abs(expected).max(initial=0))


@settings(deadline=None, max_examples=50)
@given(seeds)
def test_equal_and_empty_columns_do_no_harm(seed: int) -> None:
    rng = np.random.default_rng(seed)
    column = rng.random(9)
    matrix = np.column_stack([column, column, np.zeros(9), rng.random(9)])
    target = rng.random(9)
    found = nonnegative_least_squares(matrix.T @ matrix, matrix.T @ target)
    _, norm = optimize.nnls(matrix, target)
    assert (found >= 0).all()
    assert np.linalg.norm(matrix @ found - target) == pytest.approx(norm, abs=1e-7)


@pytest.mark.parametrize(("unit", "tick"), [(1.0, 1.0), (1e7, 1e-4), (1e-3, 1e3)])
def test_exact_costs_are_found_whatever_the_units(unit: float, tick: float) -> None:
    rng = np.random.default_rng(0)
    true = np.array([2.0, 0.0, 5.0, 0.1])
    nbytes = rng.uniform(1, 10, (40, 4))
    costs = fit_bucket_costs(nbytes * unit, (3.0 + nbytes @ true) * tick)
    assert costs.intercept == pytest.approx(3.0 * tick, rel=1e-6)
    np.testing.assert_allclose(costs.coefficients * unit / tick, true, atol=1e-6)
    assert costs.r2 == pytest.approx(1.0)


def test_a_bucket_that_seems_to_save_time_costs_nothing() -> None:
    rng = np.random.default_rng(1)
    nbytes = rng.uniform(1, 10, (200, 2))
    seconds = 20 + nbytes @ [3.0, -1.0] + 0.1 * rng.standard_normal(200)
    costs = fit_bucket_costs(nbytes, seconds)
    assert costs.coefficients[1] == 0
    line = np.polyfit(nbytes[:, 0], seconds, 1)
    assert costs.coefficients[0] == pytest.approx(line[0], rel=1e-9)
    left = seconds - np.polyval(line, nbytes[:, 0])
    assert costs.r2 == pytest.approx(1 - left.var() / seconds.var(), rel=1e-6)


def test_constant_seconds_are_all_intercept() -> None:
    costs = fit_bucket_costs(np.random.default_rng(0).random((9, 2)), np.full(9, 2.5))
    assert costs.intercept == pytest.approx(2.5)
    np.testing.assert_allclose(costs.coefficients, 0, atol=1e-9)


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [([[1.0]], [1.0, 2.0]), ([1.0], [1.0]), (np.empty((0, 2)), []), ([[math.nan]], [1]), ([[1]], [-1])],
)
def test_measurements_that_are_none_are_refused(nbytes: object, seconds: object) -> None:
    with pytest.raises(ValueError, match="bytes"):
        fit_bucket_costs(nbytes, seconds)  # type: ignore[arg-type]


def test_standard_errors_are_those_of_least_squares() -> None:
    """Against ``sigma^2 (X^T X)^-1`` and against the spread of many fits."""
    rng = np.random.default_rng(4)
    true, noise = np.array([5.0, 8.0, 3.0]), 0.3
    nbytes = rng.uniform(1, 10, (50, 3))
    rows = np.column_stack([np.ones(50), nbytes])
    fits = [
        fit_bucket_costs(nbytes, 100 + nbytes @ true + noise * rng.standard_normal(50))
        for _ in range(400)
    ]
    inverse = np.sqrt(np.diag(np.linalg.inv(rows.T @ rows)))[1:]
    spread = np.std([fit.coefficients for fit in fits], axis=0)
    assert spread == pytest.approx(noise * inverse, rel=0.15)
    assert np.mean([fit.errors for fit in fits], axis=0) == pytest.approx(noise * inverse, rel=0.05)
    seconds = 100 + nbytes @ true + noise * rng.standard_normal(50)
    residual = seconds - rows @ np.linalg.lstsq(rows, seconds)[0]
    exact = math.sqrt(residual @ residual / 46) * inverse
    assert fit_bucket_costs(nbytes, seconds).errors == pytest.approx(exact)
    online = OnlineCosts(half_life=math.inf, ridge=0.0, together=1)
    for row, value in zip(nbytes, seconds, strict=True):
        online.observe(row, float(value))
    found = online.fit()
    assert found is not None
    assert found.errors == pytest.approx(exact, rel=1e-6)


def test_what_the_bytes_do_not_determine_has_an_infinite_error() -> None:
    rng = np.random.default_rng(5)
    one = rng.uniform(1, 10, 30)
    nbytes = np.column_stack([one, np.full(30, 5.0), np.zeros(30), rng.uniform(1, 10, 30)])
    errors = fit_bucket_costs(nbytes, 1 + nbytes @ [1.0, 1.0, 1.0, 2.0]).errors
    assert np.isfinite(errors).tolist() == [True, False, False, True]
    together = np.column_stack([one, 2 * one, rng.uniform(1, 10, 30)])
    assert np.isfinite(fit_bucket_costs(together, 1 + one).errors).tolist() == [False, False, True]
    assert np.isinf(fit_bucket_costs(nbytes[:5], one[:5]).errors).all()  # no step more than unknowns


def test_prices_differ_as_far_as_the_coefficients_do_beyond_their_errors() -> None:
    costs = BucketCosts(0.0, np.array([10.0, 6.0, 6.0, 0.0]), 1.0, np.array([0, 1, math.inf, 0]), 4.0)
    assert costs.prices().tolist() == [10.0, 4 + 2 * (1 - 0.25), 4.0, 0.4]
    same = BucketCosts(0.0, np.full(2, 3.0), 1.0, np.zeros(2), 3.0)
    assert same.prices().tolist() == [3.0, 3.0]


def test_prices_of_trials_come_in_pairs_that_are_inverse() -> None:
    drawn = [random_prices(4, number) for number in range(40)]
    prices = np.array([each for each, _ in drawn])
    assert (prices[::2] * prices[1::2]) == pytest.approx(np.ones((20, 4)))
    assert prices.min() >= 1 / 8
    assert prices.max() <= 8
    shares = [share for _, share in drawn]
    assert min(shares) >= 0.25
    assert max(shares) <= 1
    assert len(set(shares)) == 40
    assert (random_prices(4, 7)[0] == prices[7]).all()
    assert (random_prices(4, 7, seed=1)[0] != prices[7]).any()


def test_random_plans_vary_buckets_apart_and_can_be_taken_up_again() -> None:
    counts, buckets = [100, 10, 1, 100], [0, 0, 1, 2]
    plans = np.array(list(itertools.islice(random_plans(counts, buckets), 400)))
    assert plans.min() == 0
    assert (plans.max(axis=0) == [99, 9, 0, 99]).all()
    assert (plans[:, 1] == plans[:, 0] // 10).all()
    assert abs(np.corrcoef(plans[:, 0], plans[:, 3])[0, 1]) < 0.15
    assert (next(random_plans(counts, buckets, start=7)) == plans[7]).all()
    assert (next(random_plans(counts, buckets, seed=1)) != plans[0]).any()


def test_without_forgetting_and_pull_online_costs_are_the_batch_fit() -> None:
    rng = np.random.default_rng(2)
    nbytes = rng.uniform(1, 10, (60, 3))
    seconds = 1 + nbytes @ [1.0, 2.0, 0.0] + 0.1 * rng.standard_normal(60)
    online = OnlineCosts(half_life=math.inf, ridge=0.0, together=1)
    for row, value in zip(nbytes, seconds, strict=True):
        online.observe(row, float(value))
    batch, found = fit_bucket_costs(nbytes, seconds), online.fit()
    assert found is not None
    np.testing.assert_allclose(found.coefficients, batch.coefficients, rtol=1e-9)
    assert found.r2 == pytest.approx(batch.r2, rel=1e-6)


def test_online_costs_follow_a_change() -> None:
    rng = np.random.default_rng(3)
    online = OnlineCosts(half_life=50)
    for true in ([1.0, 4.0], [4.0, 1.0]):
        for _ in range(400):
            row = rng.uniform(1, 10, 2)
            online.observe(row, 1 + float(row @ true))
        found = online.fit()
        assert found is not None
        np.testing.assert_allclose(found.coefficients, true, rtol=0.05)
    assert online.fit() is not None
    for _ in range(5):
        online.observe(np.ones(3), 1.0)
    assert online.fit() is None  # other buckets


def test_single_slow_steps_do_not_count() -> None:
    rng = np.random.default_rng(4)
    online, by_single_steps = OnlineCosts(), OnlineCosts(together=1)
    for plan in range(40):
        row = rng.uniform(1, 10, 2)
        online.settle()
        for step in range(7):  # the last two of each plan are too few
            slow = 50.0 if step == plan % 5 else 0.0
            online.observe(row, 1 + float(row @ [1.0, 4.0]) + slow)
            by_single_steps.observe(row, 1 + float(row @ [1.0, 4.0]) + slow)
    found, single = online.fit(), by_single_steps.fit()
    assert found is not None
    assert single is not None
    np.testing.assert_allclose(found.coefficients, [1.0, 4.0], rtol=0.02)
    assert found.r2 > 0.999 > 2 * single.r2


def test_what_never_varies_is_shared_out_evenly() -> None:
    online = OnlineCosts()
    for _ in range(20):
        online.observe([1e6, 3e6, 2e6], 0.06)
    found = online.fit()
    assert found is not None
    assert found.coefficients.max() == pytest.approx(found.coefficients.min(), rel=1e-3)
    state = json.loads(json.dumps(online.state_dict()))
    again = OnlineCosts()
    assert again.fit() is None
    again.load_state_dict(state)
    resumed = again.fit()
    assert resumed is not None
    assert resumed.coefficients.tolist() == found.coefficients.tolist()


# --- collectives ----------------------------------------------------------------------------------


def feed(
    monitor: BandwidthMonitor,
    rng: np.random.Generator,
    count: int,
    bandwidth: float,
    latency: float = 2e-4,
    noise: float = 0.0,
    delayed: float = 0.0,
) -> None:
    for _ in range(count):
        nbytes = 10 ** rng.uniform(3, 7)
        seconds = (latency + nbytes / bandwidth) * math.exp(noise * rng.standard_normal())
        if rng.random() < delayed:
            seconds *= rng.uniform(3, 20)
        monitor.observe(nbytes, seconds)


@pytest.mark.parametrize("bandwidth", [1e5, 1e8, 1.25e10])
@pytest.mark.parametrize("latency", [0.0, 1e-5, 1e-3])
def test_exact_times_give_exact_rates(bandwidth: float, latency: float) -> None:
    monitor = BandwidthMonitor()
    feed(monitor, np.random.default_rng(0), 30, bandwidth, latency)
    rate = monitor.estimate()
    assert rate.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert rate.latency == pytest.approx(latency, rel=1e-6, abs=1e-12)
    assert rate.bandwidth_error < 1e-6 * bandwidth
    assert rate.samples == 30


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("change", [0.1, 0.5, 3.0, 10.0])
def test_a_change_of_rate_is_followed_within_twenty_samples(seed: int, change: float) -> None:
    rng, monitor = np.random.default_rng(seed), BandwidthMonitor()
    feed(monitor, rng, 60, 1e8, noise=0.03)
    feed(monitor, rng, 20, 1e8 * change, noise=0.03)
    assert monitor.estimate().bandwidth == pytest.approx(1e8 * change, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_delayed_samples_do_not_mislead(seed: int) -> None:
    rng, monitor = np.random.default_rng(seed), BandwidthMonitor()
    feed(monitor, rng, 60, 1e8, noise=0.03, delayed=0.1)
    assert monitor.estimate().bandwidth == pytest.approx(1e8, rel=0.1)


def test_the_error_bar_is_of_the_size_of_the_error() -> None:
    units = []
    for seed in range(150):
        rng, monitor = np.random.default_rng(seed), BandwidthMonitor()
        feed(monitor, rng, 60, 1e8, noise=0.1)
        rate = monitor.estimate()
        units.append((rate.bandwidth - 1e8) / rate.bandwidth_error)
    assert 0.7 < np.median(np.abs(units)) / 0.6745 < 1.6


@settings(deadline=None, max_examples=25)
@given(seeds, st.integers(-30, 30), st.integers(-30, 30))
def test_an_estimate_is_free_of_scales(seed: int, power: int, tick: int) -> None:
    monitors = BandwidthMonitor(), BandwidthMonitor()
    for monitor, unit, time in zip(monitors, (1.0, 2.0**power), (1.0, 2.0**tick), strict=True):
        rng = np.random.default_rng(seed)
        for _ in range(15):
            nbytes = rng.uniform(1, 100)
            monitor.observe(nbytes * unit, (5 + nbytes) * rng.uniform(0.8, 1.2) * time)
    one, other = (monitor.estimate() for monitor in monitors)
    assert other.seconds_per_byte == pytest.approx(one.seconds_per_byte * 2.0 ** (tick - power))
    assert other.latency == pytest.approx(one.latency * 2.0**tick)
    assert other.error == pytest.approx(one.error * 2.0 ** (tick - power))


def test_samples_of_one_size_tell_no_latency() -> None:
    monitor = BandwidthMonitor()
    for seconds in (0.1, 0.11, 0.09, 0.1, 5.0, 0.1):
        monitor.observe(1e6, seconds)
    rate = monitor.estimate()
    assert rate.latency == 0
    assert rate.bandwidth == pytest.approx(1e7, rel=0.05)


def test_too_few_samples_are_no_estimate_and_two_have_no_error_bar() -> None:
    monitor = BandwidthMonitor()
    monitor.observe(1, 1)
    assert not monitor.ready
    with pytest.raises(ValueError, match="needs two"):
        monitor.estimate()
    monitor.observe(10, 2)
    assert monitor.ready
    assert monitor.estimate().latency == pytest.approx(8 / 9)
    assert monitor.estimate().error == math.inf


@pytest.mark.parametrize(("nbytes", "seconds"), [(0, 1), (1, 0), (math.nan, 1), (1, math.inf), (-1, 1)])
def test_a_transfer_that_is_none_is_refused(nbytes: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        BandwidthMonitor().observe(nbytes, seconds)


def test_a_monitor_continues_from_its_state() -> None:
    monitor, again = BandwidthMonitor(), BandwidthMonitor()
    feed(monitor, np.random.default_rng(0), 30, 1e8, noise=0.1)
    again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert again.estimate() == monitor.estimate()
