"""Kimad's section 4.1: what the paper says of its synthetic experiments."""

from __future__ import annotations

import math

import pytest

from benchmarks.accuracy import quadratic
from benchmarks.accuracy.quadratic import PATTERNS, Kimad, Pattern, fixed, minimize


@pytest.mark.parametrize("name", PATTERNS)
def test_kimad_gains_over_the_best_fixed_k_where_the_paper_says_so(name: str) -> None:
    found = quadratic.measure(PATTERNS[name], quadratic.STEP_SIZES[1:5:2])
    ratio = found["EF21"][0] / found["Kimad"][0]
    if PATTERNS[name].gains:
        assert ratio > 1.15  # with all step sizes 1.78 and 1.36
        assert found["EF21"][0] < 0.8 * found["GD"][0]
    else:
        assert 0.8 < ratio < 1.1


def test_bytes_take_the_integral_of_the_rate() -> None:
    pattern = Pattern(100.0, 300.0, 2.0, "", True)
    # sin^2 is one half on average over a period
    assert pattern.sent(400.0, 0.0) == pytest.approx(2.0, abs=1e-3)
    assert pattern.rate(0.0) == 100.0
    assert pattern.rate(1.0) == pytest.approx(300.0)


def test_gradient_descent_takes_the_steps_that_theory_says() -> None:
    flat = Pattern(quadratic.DENSE_BYTES, quadratic.DENSE_BYTES, 1.0, "", False)  # 1 s of sending
    steps = minimize(flat, fixed(quadratic.DIMENSIONS), 1.0) / (1.0 + quadratic.COMPUTING)
    # the flattest direction decides: it shrinks by 1 - 1 / 100 a step, from a share of its curvature
    share = 1.0 / quadratic.CURVATURES.sum()
    assert steps == pytest.approx(math.log(quadratic.GOAL / share) / (2 * math.log(0.99)), rel=0.05)


def test_kimad_sends_what_the_rate_carries() -> None:
    difference = quadratic.CURVATURES
    kimad = Kimad(0.1)
    assert [kimad(difference, rate) for rate in (10.0, 80.0, 250.0, 1e6)] == [1, 1, 3, 30]
