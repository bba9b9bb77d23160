"""Budgets: hand-computed traces, the papers' own figures, and states that can be taken up again."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from hvd_adaptive.planning.budgets import (
    Bandwidth,
    Budget,
    CriticalRegimes,
    Static,
    Throughput,
)
from hvd_adaptive.planning.measurements import Measurement, StepMeasurements, Transfer
from tests.planning.helpers import top_k_table, transfers_at


def reference(budget: Budget) -> list[int]:
    found = budget.allow(top_k_table()).reference
    assert found is not None
    return found.tolist()


# --- static ---------------------------------------------------------------------------------------


def test_the_static_budget_is_what_the_defaults_lose_and_send() -> None:
    allowed = Static().budget().allow(top_k_table())
    assert allowed.max_error == 2 * (1 - 1 / 40)
    assert allowed.max_bytes == 400
    assert Static().budget().needs == frozenset()


# --- bandwidth ------------------------------------------------------------------------------------


def test_bytes_are_what_the_network_carries_in_the_time_that_is_left() -> None:
    budget = Bandwidth(seconds=0.5, warmup=5).budget()
    for step in range(5):
        assert not budget.ready
        # a slow step in the warm-up is an outlier; what comes after it does not count
        computing = 3.0 if step == 2 else 0.1
        budget.observe(
            StepMeasurements(step, compute_seconds=computing, transfers=transfers_at(step, 1e6, 0.01))
        )
    assert budget.ready
    budget.observe(StepMeasurements(5, compute_seconds=9.0, transfers=transfers_at(5, 1e6, 0.01)))
    # three collectives of 10 ms each leave 0.37 s
    assert budget.allow(top_k_table()).max_bytes == pytest.approx(0.37e6, rel=1e-6)
    assert budget.report()["bandwidth_up"] == pytest.approx(1e6, rel=1e-6)
    assert budget.report()["compute_seconds"] == pytest.approx(0.1)


def test_two_directions_share_the_time() -> None:
    budget = Bandwidth(seconds=0.6, warmup=1).budget()
    for step in range(4):
        up, down = transfers_at(step, 1e6, 0.0), transfers_at(step, 4e6, 0.0, "down")
        budget.observe(StepMeasurements(step, compute_seconds=0.1, transfers=[*up, *down]))
    # the bytes are those of both directions, which carry as many: one takes 0.625 us on average
    assert budget.allow(top_k_table()).max_bytes == pytest.approx(0.5 / 0.625e-6, rel=1e-6)
    assert budget.prices.of("up") == pytest.approx(1.6)
    assert budget.prices.of("down") == pytest.approx(0.4)
    # a byte more in one direction only costs what it takes there
    assert budget.seconds(1e5 * budget.prices.of("up")) == pytest.approx(0.1 + 1e5 * 1e-6)


def test_directions_count_by_their_bytes() -> None:
    budget = Bandwidth(seconds=0.6, warmup=1, probe=0).budget()
    for step in range(4):
        size = 1000.0 * (1 + step)
        moved = [Transfer(3 * size, 3e-6 * size), Transfer(size, 4e-6 * size, "down")]
        if step == 3:  # of one direction nothing is known now: its bytes do not cost less for that
            moved = moved[:1]
        budget.observe(StepMeasurements(step, compute_seconds=0.1, transfers=moved))
    mean = (12000 * 1e-6 + 3000 * 4e-6) / 15000
    assert budget.allow(top_k_table()).max_bytes == pytest.approx(0.5 / mean, rel=1e-6)


def test_a_direction_that_has_just_appeared_costs_what_the_slowest_known_one_does() -> None:
    """As when dense steps have ended, and sums are compressed for the first time."""
    budget = Bandwidth(seconds=0.6, warmup=1, probe=0).budget()
    for step in range(6):
        transfers = [Transfer(nbytes, nbytes / 1e6) for nbytes in (1000 + step, 2000)]
        budget.observe(StepMeasurements(step, compute_seconds=0.1, transfers=transfers))
    assert budget.ready
    both = [Transfer(2000, 0.002), Transfer(2000, 0.001, "down")]
    budget.observe(StepMeasurements(6, compute_seconds=0.1, transfers=both))
    assert not budget.ready, "it waits for a second sample, but a plan may be under way"
    assert budget.allow(top_k_table()).max_bytes == pytest.approx(0.5e6, rel=0.01)


def test_the_budget_follows_the_bandwidth() -> None:
    budget = Bandwidth(seconds=0.5, warmup=1, probe=0).budget()
    granted = []
    for step in range(60):
        rate = 1e6 if (step // 20) % 2 == 0 else 1e5
        budget.observe(
            StepMeasurements(step, compute_seconds=0.0, transfers=transfers_at(step, rate, 0.0))
        )
        if step % 20 == 19:
            granted.append(budget.allow(top_k_table()).max_bytes)
    assert granted == pytest.approx([5e5, 5e4, 5e5], rel=0.01)


def test_caution_asks_for_less() -> None:
    granted = []
    for caution in (0.0, 2.0):
        budget, rng = (
            Bandwidth(seconds=1.0, warmup=1, caution=caution).budget(),
            np.random.default_rng(0),
        )
        for step in range(10):
            noisy = [
                Transfer(each.nbytes, each.seconds * rng.uniform(0.8, 1.2))
                for each in transfers_at(step, 1e6, 0.0)
            ]
            budget.observe(StepMeasurements(step, compute_seconds=0.1, transfers=noisy))
        granted.append(budget.allow(top_k_table()).max_bytes)
    assert 0.8 * granted[0] < granted[1] < 0.99 * granted[0]


def test_the_margin_follows_the_steps_that_took_too_long() -> None:
    budget = Bandwidth(seconds=0.5, warmup=1, share=0.8, probe=0).budget()
    # 0.4 s of computing is left 0.1 s: 100,000 bytes
    fast = StepMeasurements(0, seconds=0.45, compute_seconds=0.4, transfers=transfers_at(0, 1e6, 0.0))
    slow = StepMeasurements(1, seconds=0.55, compute_seconds=0.4, transfers=transfers_at(1, 1e6, 0.0))
    granted = []
    for steps in ([fast], [slow, slow], [slow, slow], [fast, slow], [fast] * 5, [fast] * 20):
        for facts in steps:
            budget.observe(facts)
        granted.append(budget.allow(top_k_table()).max_bytes / 1e5)
    # a miss widens the margin by 0.1 * 0.8, a hit narrows it by 0.1 * 0.2; steps ahead of the second
    # allowance are not under the first one's plan
    assert granted == pytest.approx([1.0, 1.0, 0.84, 0.78, 0.88, 1.0])
    assert budget.report()["margin"] == 0


@pytest.mark.parametrize("share", [0.8, 0.95])
def test_the_wanted_share_of_steps_keeps_the_time_whatever_the_network_does(share: float) -> None:
    """Rates that rise and fall between plans, and noise: an estimate alone would miss every other."""
    budget = Bandwidth(seconds=0.5, warmup=5, share=share).budget()
    rng, nbytes, kept = np.random.default_rng(0), 1e5, []
    for step in range(2000):
        rate = 1e6 * (1 + 0.5 * math.sin(step / 40)) * math.exp(0.1 * rng.standard_normal())
        seconds = nbytes / rate
        facts = StepMeasurements(
            step, seconds=0.1 + seconds, compute_seconds=0.1, transfers=[Transfer(nbytes, seconds)]
        )
        budget.observe(facts)
        kept.append(0.1 + seconds <= 0.5)
        if step >= 5 and step % 10 == 0:
            nbytes = budget.allow(top_k_table()).max_bytes
    assert share - 0.03 <= np.mean(kept[100:]) <= share + 0.06


def test_computing_time_is_of_the_last_steps() -> None:
    budget = Bandwidth(seconds=0.5, warmup=5).budget()
    for step in range(20):
        computing = 0.1 if step < 10 else 0.3
        budget.observe(
            StepMeasurements(step, compute_seconds=computing, transfers=transfers_at(step, 1e6, 0.0))
        )
    assert budget.allow(top_k_table()).max_bytes == pytest.approx(0.2e6, rel=1e-6)


def test_what_a_byte_takes_to_be_compressed_counts_as_what_it_takes_to_travel() -> None:
    budget = Bandwidth(seconds=0.5, warmup=5).budget()
    for step in range(20):
        nbytes = 1e5 if step % 8 < 4 else 3e5
        moved = [Transfer(nbytes, 0.02 + nbytes / 2e6)]
        computing = 0.1 + nbytes / 5e6
        budget.observe(
            StepMeasurements(step, compute_seconds=computing, nbytes=nbytes, transfers=moved)
        )
    # of 0.5 s, 0.12 s are fixed; a byte takes 0.5 us to be sent and 0.2 us to be compressed
    assert budget.allow(top_k_table()).max_bytes == pytest.approx(0.38 / 0.7e-6, rel=1e-6)


@pytest.mark.parametrize("probe", [0, 3])
def test_a_bandwidth_that_bytes_follow_is_told_from_latency_by_probing(probe: int) -> None:
    budget = Bandwidth(seconds=0.4, warmup=10, share=0.9, probe=probe).budget()
    rng, nbytes, errors = np.random.default_rng(0), 1e6, []
    for step in range(600):
        rate = 1e7 * (1 + 0.8 * math.sin(step / 25))
        seconds = (0.1 + nbytes / rate) * math.exp(0.05 * rng.standard_normal())
        facts = StepMeasurements(
            step, seconds=0.1 + seconds, compute_seconds=0.1, transfers=[Transfer(nbytes, seconds)]
        )
        budget.observe(facts)
        if step >= 10 and step % 5 == 0:
            nbytes = budget.allow(top_k_table()).max_bytes
            errors.append(abs(budget.report()["bandwidth_up"] / rate - 1))
    error = np.median(errors[20:])
    assert error < 0.15 if probe else error > 0.2


def test_computing_longer_than_the_budget_leaves_no_bytes() -> None:
    budget = Bandwidth(seconds=0.5, warmup=1).budget()
    budget.observe(StepMeasurements(0, compute_seconds=0.7, transfers=transfers_at(0, 1e6, 0.0)))
    assert budget.allow(top_k_table()).max_bytes == 0


# --- GraVAC ---------------------------------------------------------------------------------------


def gains(budget: Budget, values: dict[float, float]) -> dict[float, float]:
    return {theta: values[theta] for theta in budget.factors}


def test_the_candidates_are_the_papers() -> None:
    for policy, end, expected in (
        ("exponential", 1000, [20, 40, 160, 1000, 1000]),
        ("geometric", 2000, [20, 40, 80, 160, 320, 640, 1280, 2000, 2000]),
    ):
        options = Throughput(theta_min=10, theta_max=end, policy=policy)
        theta, found = 10.0, []
        for _ in expected:
            theta = options.after(theta)
            found.append(theta)
        assert found == expected


def test_the_papers_resnet_stays_at_1280() -> None:
    """Section IV-B2: windows of 2,000 steps; 1029.9 at 1280x and 1035.4 at 2000x are within 1 %.

    After eight windows, at step 16,000, the search is over.
    """
    window = 20  # hundredth of the paper's
    budget = Throughput(theta_min=10, theta_max=2000, window=window, policy="geometric").budget(32)
    candidates = [20, 40, 80, 160, 320, 640, 1280, 2000]
    gain = dict(zip([10, *candidates], np.linspace(0.98, 0.80, 9).tolist(), strict=True))
    wanted = dict(
        zip([10, *candidates], [200, 330, 450, 560, 680, 790, 900, 1029.9, 1035.4], strict=True)
    )
    wanted[1] = 50
    gain[1] = 1.0
    sent = []
    for step in range(10 * window):
        factor = budget.factor
        sent.append(factor)
        seconds = 1024 * gain[factor] / wanted[factor]
        facts = StepMeasurements(
            step, seconds=seconds, samples=1024, factor=factor, gains=gains(budget, gain)
        )
        budget.observe(facts)
    # the very first step has no history: dense
    assert sent[0] == 1
    for index, candidate in enumerate(candidates):
        tried = sent[max(1, index * window) : (index + 1) * window]
        assert set(tried) == {candidate}
    assert sent[8 * window :] == [1280.0] * (2 * window)
    report = budget.report()
    assert report["ideal"] == 1280
    assert report["throughput_1280x"] == pytest.approx(1029.9)
    assert report["throughput_2000x"] == pytest.approx(1035.4)
    assert report["theta_min"] == 10


def test_a_trace_by_hand() -> None:
    """Four ranks: a new value weighs 0.04; epsilon 0.8; windows of 3; exponential to 160."""
    budget = Throughput(theta_min=10, theta_max=160, epsilon=0.8, window=3).budget(4)
    rows: list[tuple[dict[float, float], float, float, tuple[float, ...]]] = [
        # gains of the step, its seconds, the factor for the next step, the factors of the next step
        ({10: 0.90, 20: 0.82}, 1.0, 20.0, (10, 20, 40)),
        # EWMA of 20x: 0.82 + 0.04 (0.30 - 0.82) = 0.7992 < 0.8 <= 0.90
        ({10: 0.90, 20: 0.30}, 0.5, 10.0, (10, 20, 40)),
        # 10x: 0.90 - 0.04 * 0.9 = 0.864; 20x: 0.7992 + 0.04 * 0.2008 = 0.807232: next, 40x is unknown
        ({10: 0.00, 20: 1.00}, 0.8, 10.0, (10, 40, 160)),
        # 10x: 0.86944; 40x: 0.862: within 1 % of it, but a window is not over
        ({10: 1.00, 40: 0.862}, 0.8, 40.0, (10, 40, 160)),
        ({10: 0.86944, 40: 0.862}, 0.4, 40.0, (10, 40, 160)),
        # the window's end: |0.86944 - 0.862| / 0.86944 = 0.86 % <= 1 %: 40x is the smallest now
        ({10: 0.86944, 40: 0.862}, 0.4, 40.0, (40, 160)),
        # 40x falls below epsilon, 160x is below: dense
        ({40: -1.0, 160: 0.5}, 0.4, 1.0, (40, 160)),
    ]
    factor = budget.factor
    assert (factor, budget.factors) == (1.0, (10.0, 20.0, 40.0))
    for step, (measured, seconds, expected, factors) in enumerate(rows):
        budget.observe(
            StepMeasurements(step, seconds=seconds, samples=8, factor=factor, gains=measured)
        )
        factor = budget.factor
        assert factor == expected, step
        assert budget.factors == factors, step
    report = budget.report()
    # gains: 10x as above; 40x 0.862 + 0.04 (-1.862) = 0.78752
    assert report["gain_10x"] == pytest.approx(0.86944)
    assert report["gain_20x"] == pytest.approx(0.807232)
    assert report["gain_40x"] == pytest.approx(0.78752)
    assert report["gain_160x"] == 0.5
    # 8 samples: dense 8 / 1; 20x 8 / 0.5 * 0.7992 = 12.7872; 10x the mean of 8 / 0.8 * 0.864 = 8.64
    # and 8 / 0.8 * 0.86944 = 8.6944
    assert report["throughput_1x"] == 8.0
    assert report["throughput_20x"] == pytest.approx(12.7872)
    assert report["throughput_10x"] == pytest.approx(8.6672)
    # 40x: 8 / 0.4 * 0.862 = 17.24 twice, then 15.7504
    assert report["throughput_40x"] == pytest.approx((2 * 17.24 + 15.7504) / 3)
    assert report["ideal"] == 0


@pytest.mark.parametrize("gain", [0.1, 0.9])
def test_the_level_that_nobody_chose_is_left_once_a_gain_is_known(gain: float) -> None:
    budget = Throughput(theta_min=10, epsilon=0.7).budget(4)
    assert not budget.urgent
    budget.observe(StepMeasurements(0, gains={10.0: gain, 20.0: gain}))
    assert budget.urgent  # also for dense gradients
    restored = Throughput(theta_min=10, epsilon=0.7).budget(4)
    restored.load_state_dict(json.loads(json.dumps(budget.state_dict())))
    assert restored.urgent
    budget.allow(top_k_table())
    assert not budget.urgent


def test_the_exact_order_decides_with_the_gains_of_the_step_itself() -> None:
    options = Throughput(theta_min=10, window=100, exact=True)
    budget = options.budget(100)  # no smoothing
    assert budget.needs == {Measurement.GAINS, Measurement.GAINS_BEFORE_SEND}
    assert Throughput().budget().needs == {Measurement.GAINS}
    for step, measured, expected in (
        (0, {10.0: 0.9, 20.0: 0.8}, 20.0),
        (1, {10.0: 0.9, 20.0: 0.6}, 10.0),
        (2, {10.0: 0.6, 20.0: 0.5}, 1.0),
    ):
        budget.observe(StepMeasurements(step, gains=measured))
        assert budget.factor == expected
        budget.observe(StepMeasurements(step, seconds=1.0, samples=10, factor=expected))
    report = budget.report()
    # each with the gain of its own step
    assert (report["throughput_20x"], report["throughput_10x"]) == (8.0, 9.0)
    assert report["throughput_1x"] == 10.0


def test_a_plan_is_urgent_when_the_factor_has_changed() -> None:
    budget = Throughput(theta_min=10).budget(100)
    assert not budget.urgent
    budget.observe(StepMeasurements(0, gains={10.0: 0.9, 20.0: 0.8}))
    assert budget.urgent
    assert reference(budget) == [1, 1]
    assert not budget.urgent
    budget.observe(StepMeasurements(1, gains={10.0: math.nan, 20.0: math.nan}))  # says nothing
    assert not budget.urgent
    budget.observe(StepMeasurements(1, gains={10.0: 0.9, 20.0: 0.1}))
    assert budget.urgent
    assert reference(budget) == [0, 0]


def test_a_plan_is_urgent_when_gains_of_other_factors_are_wanted() -> None:
    """Or they would not be measured where no candidate suffices."""
    budget = Throughput(theta_min=10, window=3).budget(100)
    for step in range(3):
        measured = {10.0: 0.9, 20.0: 0.1, 40.0: 0.05}
        budget.observe(StepMeasurements(step, seconds=1.0, factor=10.0, gains=measured))
        assert budget.urgent == (step in (0, 2))  # 10x suffices; 160x is wanted
        if step == 0:
            assert reference(budget) == [0, 0]
    assert reference(budget) == [0, 0]
    assert not budget.urgent


def test_gains_of_every_tenth_step_are_smoothed_as_those_of_ten() -> None:
    one, other = (Throughput(theta_min=10, window=100).budget(4) for _ in range(2))
    for step in range(41):
        measured = {10.0: 0.9 if step == 0 else 0.8}
        one.observe(StepMeasurements(step, gains=measured))
        if step % 10 == 0:
            other.observe(StepMeasurements(step, gains=measured))
    assert one.report()["gain_10x"] == pytest.approx(0.8 + 0.1 * 0.96**40)
    assert other.report()["gain_10x"] == pytest.approx(one.report()["gain_10x"])


def test_a_slow_first_step_counts_as_one_of_many() -> None:
    budget = Throughput(theta_min=10, window=100).budget(4)
    for step in range(80):
        seconds = 1.0 if step == 0 else 0.1
        budget.observe(
            StepMeasurements(step, seconds=seconds, samples=8, factor=10.0, gains={10.0: 1.0})
        )
    assert budget.report()["throughput_10x"] == pytest.approx(80, rel=0.01)


def test_steps_of_a_candidate_that_is_gone_are_not_counted_for_another() -> None:
    budget = Throughput(theta_min=10, window=1).budget(100)
    budget.observe(StepMeasurements(0, seconds=1.0, gains={10.0: 0.9, 20.0: 0.8}))
    budget.observe(StepMeasurements(1, seconds=0.1, factor=20.0))  # late: 40 is tried now
    assert set(budget.report()) >= {"throughput_1x"}
    assert "throughput_20x" not in budget.report()


# --- Accordion ------------------------------------------------------------------------------------


def period(*norms: float, steps: int = 10, rate: float | None = None) -> StepMeasurements:
    return StepMeasurements(0, period_energy=np.square(norms), period_steps=steps, learning_rate=rate)


def test_regimes_by_hand() -> None:
    budget = CriticalRegimes(eta=0.5, low=4.0, high=0.25).budget()
    low, high = 0, 4  # 200 bytes are the default's: 800 and 50
    assert reference(budget) == [low, low]  # nothing is known
    for norms, expected in (
        ((2.0, 3.0), [low, low]),  # the first period
        ((2.9, 1.6), [high, high]),  # by 45 %, and by 46.7 % less
        ((1.45, 1.5), [low, high]),  # by exactly half; hardly
        ((1.45, 0.0), [high, low]),
        ((1.45, 0.0), [high, high]),  # zeros do not change
        ((1.45, 1.0), [high, low]),
    ):
        budget.observe(period(*norms))
        assert reference(budget) == expected
    assert budget.report() == {"critical": 0.5}


def test_periods_of_other_lengths_are_not_compared() -> None:
    """The mean of one gradient is mostly noise, and that of a hundred is not."""
    budget = CriticalRegimes().budget()
    for steps, critical in ((1, 1), (100, 1), (99, 0), (50, 0), (24, 1), (30, 0)):
        budget.observe(period(1.0, 1.0, steps=steps))
        assert reference(budget) == [1 if critical else 3] * 2
        assert budget.report() == {"critical": critical}


def test_a_fall_of_the_learning_rate_is_critical_for_all_layers_at_once() -> None:
    budget = CriticalRegimes().budget()
    for rate in (0.1, 0.1, 0.099, 0.098):  # as a schedule that falls with every step
        budget.observe(period(1.0, 1.0, rate=rate))
        reference(budget)
        assert not budget.urgent
    budget.observe(period(1.0, 1.0, rate=0.01))
    assert budget.urgent
    assert reference(budget) == [1, 1]
    assert not budget.urgent
    budget.observe(period(1.0, 1.0, rate=0.01))
    assert reference(budget) == [3, 3]


def test_energies_that_are_not_finite_are_left_out_and_others_must_fit() -> None:
    budget = CriticalRegimes().budget()
    for norms in ((1.0, 1.0), (math.inf, 1.0), (math.nan, 1.0)):
        budget.observe(period(*norms))
    reference(budget)
    budget.observe(period(1.0, 1.0))
    assert reference(budget) == [3, 3]
    budget.observe(period(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="energies of 3 layers, but the table has 2"):
        budget.allow(top_k_table())


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bandwidth(), "seconds=0.0: write the wanted time"),
        (lambda: Bandwidth(seconds=1, warmup=0), "warmup=0"),
        (lambda: Throughput(theta_min=1), "must be 1 < min"),
        (lambda: Throughput(theta_max=5), "must be 1 < min"),
        (lambda: Throughput(epsilon=1.5), "epsilon=1.5"),
        (lambda: Throughput(window=0), "window=0"),
        (lambda: Throughput(policy="linear"), "not one of exponential, geometric"),
        (lambda: CriticalRegimes(eta=0), "eta=0"),
        (lambda: CriticalRegimes(low=0.1), "low=0.1"),
    ],
)
def test_options_out_of_their_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
