"""Noise and delay of gradients, against gradients whose noise and delay are known."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_adaptive.planning.gradient_signals import noise_of, withheld_steps

RANKS, SIZE = 4, 64


def test_signal_and_noise_are_unbiased_estimates() -> None:
    rng = np.random.default_rng(0)
    true, found = rng.standard_normal(SIZE), []
    for _ in range(4000):
        gradients = true + 3 * rng.standard_normal((RANKS, SIZE))
        energy = (gradients**2).sum(1).mean()
        mean = (gradients.mean(0) ** 2).sum()
        found.append((RANKS * mean - energy) / (RANKS - 1))
        signal, noise = noise_of(np.array([energy]), np.array([mean]), RANKS)
        assert noise[0] == pytest.approx((energy - mean) * RANKS / (RANKS - 1))
        assert signal[0] == pytest.approx(max(0.0, found[-1]))
    assert np.mean(found) == pytest.approx((true**2).sum(), rel=0.05)


def test_one_rank_has_no_noise_that_could_be_seen() -> None:
    signal, noise = noise_of(np.array([3.0]), np.array([3.0]), 1)
    assert (signal[0], noise[0]) == (3.0, 0.0)


@pytest.mark.parametrize("noisy", [0.0, 1.0, 30.0])
def test_the_steps_that_a_residual_withholds_are_counted_whatever_the_noise(noisy: float) -> None:
    """The ratio of norms is as far off as the square root where noise dominates."""
    rng = np.random.default_rng(1)
    true, steps, found, ratios = rng.standard_normal(SIZE), 50, [], []
    for _ in range(200):
        residual = (true + noisy * rng.standard_normal((steps, SIZE))).sum(0)
        square = np.array([(residual**2).sum()])
        signal, noise = np.array([(true**2).sum()]), np.array([noisy**2 * SIZE])
        found.append(withheld_steps(square, signal, noise)[0])
        ratios.append(np.sqrt(square / (signal + noise))[0])
    assert np.mean(found) == pytest.approx(steps, rel=0.1)
    if noisy == 30.0:
        assert np.mean(ratios) < 10


def test_nothing_waits_where_there_is_no_residual_or_no_gradient() -> None:
    zero = np.zeros(1)
    assert withheld_steps(zero, np.ones(1), np.ones(1))[0] == 0.0
    assert withheld_steps(zero, zero, zero)[0] == 0.0
