"""Learnt quantization levels: closed forms, optima, and the learner's contract."""

from __future__ import annotations

import doctest
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.compressors import distributions, parse
from hvd_adaptive.compressors import level_fitting as module
from hvd_adaptive.compressors.base import LayerContext
from hvd_adaptive.compressors.distributions import (
    Mixture,
    TabulatedDistribution,
    block_statistics,
    merge,
    model,
)
from hvd_adaptive.compressors.level_fitting import (
    LearnedLevels,
    amq,
    coordinate_descent,
    gradient_descent,
    psi,
)

FLAT = Mixture([0.5], [100.0], [1.0])
UNIFORM = [0.0, 1 / 3, 2 / 3, 1.0]
EXPONENTIAL = [0.0, 0.25, 0.5, 1.0]

# parents: inside, at the ends, far outside, wide, narrow
PARENTS = [
    (0.3, 0.1),
    (0.7, 0.2),
    (0.0, 0.1),
    (1.0, 0.05),
    (-0.5, 0.1),
    (-5.0, 0.5),
    (-5.0, 0.05),
    (1.5, 0.1),
    (6.0, 0.3),
    (-3.0, 0.01),
    (0.3, 1e-3),
    (0.5, 5.0),
    (-100.0, 30.0),
]


def powers(p: float, s: int) -> Float64s:
    return p ** np.arange(s, -1, -1.0)


def like_gradients(seed: int) -> Mixture:
    """Densities that fall from 0, of many widths, now and then with zeros among them."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 8))
    sigmas = 10 ** rng.uniform(-2.5, -0.2, count)
    means = -rng.uniform(0, 3, count) * sigmas
    weights = rng.uniform(0.1, 1, count)
    if rng.random() < 0.3:
        means, sigmas, weights = np.append(means, 0), np.append(sigmas, 0), np.append(weights, 0.5)
    return Mixture(means, sigmas, weights)


def anything(seed: int) -> Mixture:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 6))
    return Mixture(
        rng.uniform(-1, 2, count), 10 ** rng.uniform(-3, 1, count), rng.uniform(0.1, 1, count)
    )


seeds = st.integers(0, 2**32 - 1)


# --- closed forms -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "sigma"), PARENTS)
def test_partial_moments_are_the_integrals(mean: float, sigma: float) -> None:
    peak = min(max(mean, 0.0), 1.0)
    # where the density is: some sigmas, or some lengths of the exponential that a far tail is
    reach = 12 * sigma if peak == mean else min(12 * sigma, 45 * sigma**2 / abs(peak - mean))
    low, high = max(0.0, peak - reach), min(1.0, peak + reach)

    def integral(power: int, end: float) -> float:
        def integrand(r: float) -> float:
            return r**power * math.exp(-((r - mean) ** 2 - (peak - mean) ** 2) / (2 * sigma**2))

        middle = [peak] if low < peak < end else None
        return float(
            integrate.quad(integrand, low, end, epsabs=0, epsrel=1e-13, limit=500, points=middle)[0]
        )

    mixture, whole = Mixture([mean], [sigma], [1.0]), integral(0, high)
    for share in (0.05, 0.3, 0.6, 0.95, 1.0):
        end = low + share * (high - low)
        for power, found in enumerate(mixture.partial(end)):
            scale = integral(power, high) / whole
            assert abs(float(found) - integral(power, end) / whole) <= 1e-9 * scale


def test_differences_of_partial_moments_and_the_area_below_the_cdf() -> None:
    mixture = like_gradients(3)
    assert mixture.first(0.1, 0.4) == pytest.approx(mixture.partial(0.4)[1] - mixture.partial(0.1)[1])
    assert mixture.second(0.1, 0.4) == pytest.approx(mixture.partial(0.4)[2] - mixture.partial(0.1)[2])
    area = integrate.quad(lambda r: float(mixture.cdf(r)), 0, 0.4, epsrel=1e-11, limit=300)[0]
    assert mixture.area(0.4) == pytest.approx(area, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_the_inverse_undoes_the_cdf(seed: int) -> None:
    mixture = anything(seed)
    q = np.linspace(0.001, 0.999, 50)
    x = mixture.inverse(q)
    assert (mixture.cdf(x) >= q - 1e-14).all()
    assert (mixture.cdf(np.maximum(x - 1e-10, 0.0)) <= q).all()


def test_a_sigma_of_zero_is_a_point_mass() -> None:
    mixture = Mixture([0.0, 0.5, 3.0], [0.0, 0.0, 0.0], [1.0, 2.0, 1.0])
    assert mixture.cdf([0.0, 0.4999, 0.5, 0.9999, 1.0]).tolist() == [0.25, 0.25, 0.75, 0.75, 1.0]
    assert mixture.inverse([0.1, 0.5, 0.9]) == pytest.approx([0.0, 0.5, 1.0], abs=1e-12)
    assert mixture.second(0.0, 1.0) == pytest.approx(0.5 * 0.25 + 0.25)


@pytest.mark.parametrize(
    ("means", "sigmas", "weights", "wrong"),
    [
        ([], [], [], "at least one"),
        ([0.1], [0.1, 0.2], [1.0], "as many"),
        ([math.nan], [0.1], [1.0], "finite"),
        ([0.1], [-0.1], [1.0], "sigmas must lie in"),
        ([0.1], [1e4], [1.0], "sigmas must lie in"),
        ([0.1], [0.1], [0.0], "must be positive"),
    ],
)
def test_a_mixture_that_is_none_is_refused(means: Any, sigmas: Any, weights: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Mixture(means, sigmas, weights)


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_the_table_is_the_mixture(seed: int) -> None:
    mixture = like_gradients(seed)
    table, x = TabulatedDistribution(mixture), np.linspace(0, 1, 101)
    for exact, tabulated in zip(mixture.partial(x), table.partial(x), strict=True):
        np.testing.assert_allclose(tabulated, exact, atol=1e-3 * float(exact[-1]))
    assert psi(UNIFORM, table) == pytest.approx(psi(UNIFORM, mixture), rel=1e-3)
    q = np.linspace(float(table.cdf(0.0)) + 1e-3, 0.999, 20)
    np.testing.assert_allclose(table.cdf(table.inverse(q)), q, atol=1e-12)


# --- the expected variance ----------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(seed=seeds, zero=st.booleans())
def test_psi_is_the_expected_variance_of_rounding(seed: int, zero: bool) -> None:
    rng = np.random.default_rng(seed)
    inner = np.sort(rng.uniform(0.01, 0.99, 3))
    levels = np.concatenate([[0.0] if zero else [], inner, [1.0]])
    mixture = anything(seed)
    r = mixture.inverse((np.arange(5000) + 0.5) / 5000)
    above = np.clip(np.searchsorted(levels, r), 1, len(levels) - 1)
    variance = (levels[above] - r) * (r - levels[above - 1])
    variance = np.where(r < levels[0], levels[0] ** 2 - r**2, variance)
    assert psi(levels, mixture) == pytest.approx(variance.mean(), rel=5e-3, abs=1e-7)


@pytest.mark.parametrize(
    "levels", [[0.0, 0.2, 0.5, 1.0], [0.05, 0.3, 1.0], list(powers(0.5, 3)), [1.0]], ids=str
)
def test_psi_is_the_integral_of_the_variance(levels: list[float]) -> None:
    """Equation (3) by quadrature in float64, of a mixture whose density is written out here."""
    parents = [(0.1, 0.2, 0.7), (-0.3, 0.15, 0.2), (0.8, 0.05, 0.1)]

    def variance(r: float) -> float:
        above = int(np.searchsorted(levels, r, side="right"))
        if above == 0:  # below all levels the sign is random: both of them are r's neighbors
            return levels[0] ** 2 - r**2
        return (levels[above] - r) * (r - levels[above - 1]) if above < len(levels) else 0.0

    expected = 0.0
    for mean, sigma, weight in parents:

        def density(r: float, mean: float = mean, sigma: float = sigma) -> float:
            return math.exp(-(((r - mean) / sigma) ** 2) / 2)

        def part(r: float, of: Any = density) -> float:
            return float(variance(r) * of(r))

        points = sorted({*levels, min(max(mean, 0.0), 1.0)} - {0.0, 1.0}) or None
        whole = integrate.quad(density, 0, 1, points=points, epsabs=0, epsrel=1e-12)[0]
        expected += (
            weight * integrate.quad(part, 0, 1, points=points, epsabs=0, epsrel=1e-12)[0] / whole
        )
    means, sigmas, weights = zip(*parents, strict=True)
    assert psi(levels, Mixture(means, sigmas, weights)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "levels", [[0.0, 0.5], [0.5, 0.2, 1.0], [-0.1, 1.0], [], [[0.0, 1.0]], [math.nan]]
)
def test_levels_that_do_not_rise_to_one_are_refused(levels: Any) -> None:
    for function in (psi, coordinate_descent, gradient_descent):
        with pytest.raises(ValueError, match="rise within"):
            function(levels, FLAT)


@settings(max_examples=8, deadline=None)
@given(seed=seeds, zero=st.booleans())
def test_no_descent_ever_raises_psi(seed: int, zero: bool) -> None:
    rng, mixture = np.random.default_rng(seed), anything(seed)
    inner = np.sort(rng.uniform(0.001, 0.999, int(rng.integers(1, 8))))
    start = np.concatenate([[0.0] if zero else [], inner, [1.0]])
    values = [psi(start, mixture)]
    # a sweep may bring levels together, which is no table to start from: count from the same start
    values += [module._psi(coordinate_descent(start, mixture, n), mixture) for n in (1, 2, 4)]
    assert (np.diff(values) <= 1e-14).all()
    values = [psi(gradient_descent(start, mixture, n), mixture) for n in (0, 1, 5, 20, 100)]
    assert (np.diff(values) <= 0).all()
    p = float(rng.uniform(0.05, 0.95))
    for s in (1, 3, 7):
        values = [psi(powers(amq(p, s, mixture, n), s), mixture) for n in (0, 1, 5, 20, 60)]
        assert (np.diff(values) <= 1e-15).all()


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_one_free_level_goes_to_the_optimum(seed: int) -> None:
    mixture = TabulatedDistribution(like_gradients(seed))
    found = float(coordinate_descent([0.0, 0.5, 1.0], mixture)[1])
    grid = np.linspace(1e-4, 1 - 1e-4, 500)
    best = min(psi([0.0, level, 1.0], mixture) for level in grid)
    assert psi([0.0, found, 1.0], mixture) <= best * (1 + 1e-9) + 1e-15


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_a_free_lowest_level_goes_to_the_optimum(seed: int) -> None:
    mixture = TabulatedDistribution(like_gradients(seed))
    found = coordinate_descent([0.5, 1.0], mixture)
    best = min(psi([level, 1.0], mixture) for level in np.linspace(1e-4, 1 - 1e-4, 500))
    assert psi(found, mixture) <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("zero", [True, False])
def test_descent_ends_where_a_general_optimizer_ends(seed: int, zero: bool) -> None:
    mixture = TabulatedDistribution(like_gradients(seed))
    start = np.array(UNIFORM if zero else [1 / 7, 3 / 7, 5 / 7, 1.0])
    fixed = [0.0] if zero else []

    def value(inner: Float64s) -> float:
        if not (np.diff([0.0, *inner, 1.0]) > 0).all():
            return 1.0
        return psi([*fixed, *inner, 1.0], mixture)

    found = coordinate_descent(start, mixture, sweeps=1000, tolerance=1e-12)
    polished = optimize.minimize(
        value, found[len(fixed) : -1], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-15}
    )
    assert psi(found, mixture) <= polished.fun * (1 + 1e-6)
    slow = gradient_descent(start, mixture, steps=4000, tolerance=1e-12)
    assert psi(slow, mixture) == pytest.approx(psi(found, mixture), rel=1e-3)


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_the_optimum_is_a_fixed_point(seed: int) -> None:
    mixture = TabulatedDistribution(like_gradients(seed))
    end = coordinate_descent(UNIFORM, mixture, sweeps=1000, tolerance=1e-13)
    np.testing.assert_allclose(coordinate_descent(end, mixture, sweeps=1), end, atol=1e-9)
    # and the gradient of the paper's section 3.2 vanishes there
    scale = float(mixture.first(0.0, 1.0))
    assert np.abs(module._gradient(end, mixture)).max() <= 1e-6 * scale + 1e-9


@pytest.mark.parametrize("descend", [coordinate_descent, gradient_descent])
def test_a_flat_distribution_gets_uniform_levels(descend: Any) -> None:
    start = [0.0, 0.1, 0.2, 0.4, 1.0]
    np.testing.assert_allclose(
        descend(start, TabulatedDistribution(FLAT), 500), [0, 0.25, 0.5, 0.75, 1], atol=1e-4
    )
    start = [0.1, 0.2, 0.4, 1.0]
    np.testing.assert_allclose(
        descend(start, TabulatedDistribution(FLAT), 500), [1 / 7, 3 / 7, 5 / 7, 1], atol=1e-4
    )


@settings(max_examples=40, deadline=None)
@given(seed=seeds, s=st.sampled_from([1, 3, 7, 15]))
def test_the_multiplier_ends_in_a_local_minimum(seed: int, s: int) -> None:
    mixture = TabulatedDistribution(like_gradients(seed))
    p = amq(0.5, s, mixture)
    here = psi(powers(p, s), mixture)
    for near in (p * (1 - 1e-3), min(p * (1 + 1e-3), 1 - 1e-6)):
        assert here <= psi(powers(near, s), mixture) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_the_multipliers_slope_is_the_derivative(seed: int) -> None:
    mixture, h = anything(seed), 1e-6
    for p in (0.2, 0.5, 0.8):
        up, down = (psi(powers(p + sign * h, 3), mixture) for sign in (1, -1))
        assert module._amq_slope(p, 3, mixture) == pytest.approx(
            (up - down) / (2 * h), rel=1e-4, abs=1e-6
        )


def test_a_multiplier_outside_its_range_is_refused() -> None:
    for p, s in ((0.0, 3), (1.0, 3), (0.5, -1)):
        with pytest.raises(ValueError, match="multiplier in"):
            amq(p, s, FLAT)
    assert amq(0.5, 0, FLAT) == 0.5


# --- statistics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("numel", [1, 9, 10, 11, 1000, 1003])
def test_block_statistics_are_those_of_each_block(norm: Any, numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    rows = block_statistics(x, 10, norm)
    blocks = [np.abs(part.double().numpy()) for part in x.split(10)]
    assert len(rows) == len(blocks)
    for row, block in zip(rows, blocks, strict=True):
        length = np.linalg.norm(block) if norm == "l2" else block.max()
        r = block / length
        expected = [r.mean(), r.var(), length**2 * len(block) / 10]
        np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-7)


def test_blocks_of_zeros_or_not_finite_are_left_out_and_scale_does_not_matter() -> None:
    x = torch.tensor([0.0, 0.0, 1.0, 2.0, math.nan, 1.0, math.inf, 1.0, 3.0, 4.0])
    rows = block_statistics(x, 2, "max")
    assert rows[:, 0].tolist() == [0.75, 0.875]
    assert block_statistics(torch.zeros(0), 2, "l2").shape == (0, 3)
    for scale in (1e-42, 1e-30, 1e30, 1e38):
        scaled = block_statistics(torch.tensor([1.0, 0.5, 0.0, 1.0]) * scale, 4, "l2")
        np.testing.assert_allclose(scaled[0, :2], block_statistics(
            torch.tensor([1.0, 0.5, 0.0, 1.0]), 4, "l2")[0, :2], rtol=1e-2)  # fmt: skip


def test_blocks_need_a_size_and_a_norm() -> None:
    with pytest.raises(ValueError, match="got 0"):
        block_statistics(torch.ones(3), 0, "l2")
    with pytest.raises(ValueError, match="'l1'"):
        block_statistics(torch.ones(3), 2, "l1")  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(seed=seeds, count=st.integers(1, 500))
def test_merging_keeps_the_moments_of_the_whole(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.column_stack([rng.random(count), rng.random(count) * 0.1, rng.lognormal(0, 3, count)])
    merged = merge(rows, 16)
    assert len(merged) <= 16
    assert (np.diff(merged[:, 0]) >= 0).all()
    for part in (lambda m, v, w: w, lambda m, v, w: w * m, lambda m, v, w: w * (v + m * m)):
        assert part(*merged.T).sum() == pytest.approx(part(*rows.T).sum())
    assert np.array_equal(merge(rows[rng.permutation(count)], 16), merged)


@settings(max_examples=60, deadline=None)
@given(
    mean=st.floats(1e-5, 0.9999),
    spread=st.floats(1e-4, 0.9999),
)
def test_the_model_has_the_moments_that_were_measured(mean: float, spread: float) -> None:
    variance = spread * mean * (1 - mean)
    mixture = model([[mean, variance, 1.0]])
    first, second = float(mixture.first(0, 1)), float(mixture.second(0, 1))
    # beside the edge of what a truncated normal can have, Newton stops a little short
    assert first == pytest.approx(mean, rel=1e-2)
    assert second == pytest.approx(variance + mean**2, rel=1e-2)


def test_the_model_of_half_normal_blocks_is_half_normal() -> None:
    mixture = model([[0.1 * math.sqrt(2 / math.pi), 0.01 * (1 - 2 / math.pi), 1.0]])
    assert mixture.means == pytest.approx([0.0], abs=1e-6)
    assert mixture.sigmas == pytest.approx([0.1], rel=1e-6)


def test_a_model_needs_statistics() -> None:
    with pytest.raises(ValueError, match="no statistics"):
        model(np.empty((0, 3)))


# --- the learner --------------------------------------------------------------------------------------


def gradient(seed: int, numel: int = 50_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).pow(2)


def taught(
    seed: int = 0, **options: Any
) -> tuple[LearnedLevels, dict[str, list[float]], TabulatedDistribution]:
    options = {"kind": "alq", "block": 512, "norm": "max"} | options
    learned = LearnedLevels(**options)
    learned.collecting = True
    learned.observe(gradient(seed), np.array([0, 1000, 1000, 50_000]))
    statistics = learned.statistics()
    return learned, learned.fit([statistics]), TabulatedDistribution(model(statistics))


KINDS = [("alq", "cd", True), ("alq", "gd", True), ("alq", "cd", False), ("amq", "cd", True)]


@pytest.mark.parametrize(("kind", "method", "zero"), KINDS)
@pytest.mark.parametrize("start", ["uniform", "exponential"])
def test_tables_rise_to_one_before_and_after_learning(
    kind: str, method: str, zero: bool, start: str
) -> None:
    learned, fitted, _ = taught(kind=kind, method=method, zero=zero, start=start)
    has_zero = kind == "alq" and zero
    for _ in range(2):
        for bits in range(2 if has_zero else 1, 9):
            table = learned.table(bits)
            assert table.dtype == np.float32
            assert len(table) == 2 ** (bits - 1)
            assert (np.diff(table) > 0).all()
            assert table[-1] == 1.0
            assert table[0] == 0.0 if has_zero else table[0] >= 2.0**-126
        learned.adopt(json.loads(json.dumps(fitted)))
    assert learned.table(4).tolist() == fitted["4"]


def test_levels_start_as_those_of_qsgd_and_nuqsgd() -> None:
    start = LearnedLevels("alq", 64, "l2", start="uniform").table(3)
    np.testing.assert_allclose(start, UNIFORM, rtol=1e-6)
    assert LearnedLevels("alq", 64, "l2").table(3).tolist() == EXPONENTIAL
    assert LearnedLevels("amq", 64, "l2").table(3).tolist() == [0.125, 0.25, 0.5, 1.0]
    free = LearnedLevels("alq", 64, "l2", start="uniform", zero=False).table(2)
    np.testing.assert_allclose(free, [1 / 3, 1.0], rtol=1e-6)


@settings(max_examples=10, deadline=None)
@given(seed=seeds, norm=st.sampled_from(["l2", "max"]))
def test_learnt_levels_are_below_qsgd_nuqsgd_and_amq(seed: int, norm: str) -> None:
    _, fitted, grid = taught(seed, norm=norm)
    _, multiplied, _ = taught(seed, norm=norm, kind="amq")
    _, free, _ = taught(seed, norm=norm, zero=False)
    for bits in range(2, 9):
        fixed = LearnedLevels("alq", 512, "max", start="uniform")
        uniform, exponential = fixed.table(bits), LearnedLevels("alq", 512, "max").table(bits)
        fitted_psi = psi(fitted[str(bits)], grid)
        for other in (uniform, exponential):
            assert fitted_psi <= psi(other, grid) * (1 + 1e-6)
        # A table with zero has one code fewer: from 4 bits on that is outweighed.
        if bits >= 4:
            assert fitted_psi <= psi(multiplied[str(bits)], grid) * (1 + 1e-6)
        # both are minima of their own sweeps: hardly apart where levels are many
        best_other = min(fitted_psi, psi(multiplied[str(bits)], grid))
        assert psi(free[str(bits)], grid) <= best_other * 1.005


@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_free_levels_are_below_all_others_on_any_mixture(seed: int) -> None:
    grid = TabulatedDistribution(like_gradients(seed))
    free = LearnedLevels("alq", 512, "max", zero=False)._best_free(3, grid)
    zero = LearnedLevels("alq", 512, "max")._best_free(3, grid)
    assert psi(zero, grid) <= min(psi(UNIFORM, grid), psi(EXPONENTIAL, grid)) * (1 + 1e-9)
    assert psi(free, grid) <= psi(module._best_powers(3, grid), grid) * 1.005
    assert psi(free, grid) <= psi(zero, grid) * 1.005


def test_what_is_learnt_is_the_variance_of_other_data_of_the_kind() -> None:
    """The model's promise holds on a gradient that it has not seen."""
    _, fitted, grid = taught(1)
    levels = np.array(fitted["3"])
    total = promised = 0.0
    for block in gradient(2).double().abs().split(512):
        r = (block / block.max()).numpy()
        above = np.clip(np.searchsorted(levels, r), 1, 3)
        total += float(block.max() ** 2) * float(((levels[above] - r) * (r - levels[above - 1])).sum())
        promised += float(block.max() ** 2) * len(r) * psi(levels, grid)
    assert total == pytest.approx(promised, rel=0.1)


def test_two_ranks_learn_what_one_learns_from_both() -> None:
    one, two, both = (LearnedLevels("alq", 1000, "l2") for _ in range(3))
    x = gradient(5, 60_000)
    for learned, part in ((one, x[:30_000]), (two, x[30_000:]), (both, x)):
        learned.collecting = True
        learned.observe(part, np.array([0, len(part)]))
    parts, whole = [one.statistics(), two.statistics()], both.statistics()
    assert sorted(parts[0] + parts[1]) == sorted(whole)
    assert one.fit(parts) == two.fit(parts[::-1]) == both.fit([whole])


def test_statistics_are_few_and_forgotten() -> None:
    learned = LearnedLevels("alq", 64, "l2")
    learned.observe(gradient(1), np.array([0, 50_000]))
    assert learned.statistics() == []
    learned.collecting = True
    for seed in range(5):
        learned.observe(gradient(seed), np.array([0, 50_000]))
    statistics = learned.statistics()
    assert 32 <= len(statistics) <= 64
    assert json.loads(json.dumps(statistics)) == statistics
    assert learned.statistics() == []


def test_without_statistics_the_tables_stay() -> None:
    learned, fitted, _ = taught()
    learned.adopt(fitted)
    assert learned.fit([[], []]) == fitted
    learned.observe(torch.zeros(1000), np.array([0, 1000]))
    assert learned.statistics() == []


def test_normalized_weights_are_the_blocks_shares_of_the_elements() -> None:
    learned = LearnedLevels("alq", 100, "l2", weighting="normalized")
    learned.collecting = True
    learned.observe(gradient(0, 1000) * torch.logspace(0, 6, 1000), np.array([0, 1000]))
    assert {weight for _, _, weight in learned.statistics()} == {1.0}
    # a short block's variance is a sum over fewer elements
    learned.observe(gradient(0, 225), np.array([0, 225]))
    assert sorted(weight for _, _, weight in learned.statistics()) == [0.25, 1.0, 1.0]
    with pytest.raises(ValueError, match="'alike'"):
        block_statistics(torch.ones(3), 2, "l2", "alike")  # type: ignore[arg-type]


def blocks_apart(scale: float) -> torch.Tensor:
    """Every other block of 100 is nearly flat; the others are normal, and larger."""
    rows = torch.randn(200, 100, generator=torch.Generator().manual_seed(7))
    rows[::2] = rows[::2].sign() * (1 + 0.1 * rows[::2].abs())
    rows[1::2] *= scale
    return rows.reshape(-1)


def measured_variance(x: torch.Tensor, table: Any, norm: str, normalized: bool) -> float:
    """Sum over blocks of |Q(v) - v|^2 in expectation, divided by |v|^2 or not: by the definition."""
    levels, total = np.asarray(table, np.float64), 0.0
    for block in x.double().abs().split(100):
        length = float(block.norm() if norm == "l2" else block.max())
        r = (block / length).numpy()
        above = np.clip(np.searchsorted(levels, r), 1, len(levels) - 1)
        each = (levels[above] - r) * (r - levels[above - 1])
        each = np.where(r < levels[0], levels[0] ** 2 - r**2, each)
        total += float(each.sum()) * (1.0 if normalized else length**2)
    return total


@pytest.mark.parametrize("spec", ["alq:zero=true", "alq:method=gd,coding=fixed", "amq"])
@pytest.mark.parametrize("norm", ["l2", "max"])
def test_each_weighting_has_the_least_of_its_own_variance(spec: str, norm: str) -> None:
    """ALQ and AMQ against ALQ-N and AMQ-N, on blocks of very different norms, by brute force."""
    x, tables = blocks_apart(1e3), {}
    for weighting in ("expected", "normalized"):
        separator = "," if ":" in spec else ":"
        options = f"norm={norm},block=100,weighting={weighting}"
        compressor = parse(f"{spec}{separator}{options}")
        state = compressor.new_state()
        assert isinstance(state, LearnedLevels)
        state.collecting = True
        state.observe(x, np.array([0, len(x)]))
        statistics = state.statistics()
        tables[weighting] = state.fit([statistics])["3"]
        promised = psi(tables[weighting], model(statistics))
        own = measured_variance(x, tables[weighting], norm, weighting == "normalized")
        weight = sum(row[2] for row in statistics) * 100
        assert own == pytest.approx(promised * weight, rel=0.2)
    for weighting, other in (("expected", "normalized"), ("normalized", "expected")):
        normalized = weighting == "normalized"
        mine = measured_variance(x, tables[weighting], norm, normalized)
        assert mine < 0.995 * measured_variance(x, tables[other], norm, normalized)


def test_the_options_of_a_spec_reach_the_learner() -> None:
    def learner(spec: str) -> tuple[str, str, str]:
        state = parse(spec).new_state()
        assert isinstance(state, LearnedLevels)
        return state.norm, state.method, state.weighting

    assert learner("alq") == ("max", "cd", "expected")
    assert learner("alq:norm=l2,method=gd,weighting=normalized") == ("l2", "gd", "normalized")
    assert learner("amq:norm=l2,weighting=normalized") == ("l2", "cd", "normalized")
    # what differs in what is learned is learned apart; the bits are not
    keys = {
        parse(spec).state_key
        for spec in ("alq:bits=2", "alq:bits=4", "alq:method=gd", "alq:weighting=normalized")
    }
    assert len(keys) == 3
    with pytest.raises(ValueError, match="amq has no option 'method'"):
        parse("amq:method=gd")


def test_the_weighting_is_not_on_the_wire() -> None:
    bodies = [
        parse(spec).compress_(gradient(3, 2000), 3, LayerContext(key=5)).data.tolist()
        for spec in ("alq:norm=l2", "alq:norm=l2,method=gd,weighting=normalized")
    ]
    assert bodies[0] == bodies[1]


def test_updates_are_due_at_the_listed_steps_and_the_lasts_multiples() -> None:
    learned = LearnedLevels("alq", 64, "l2")
    due = [step for step in range(40_001) if learned.due(step)]
    assert due == [100, 2000, 10_000, 20_000, 30_000, 40_000]
    assert not any(LearnedLevels("alq", 64, "l2", updates=()).due(step) for step in range(100))


def test_learning_is_quick() -> None:
    learned, _, _ = taught()
    learned.observe(gradient(0), np.array([0, 50_000]))
    statistics = learned.statistics()
    took = []
    for _ in range(3):
        started = time.perf_counter()
        learned.fit([statistics])
        took.append(time.perf_counter() - started)
    assert min(took) < 1.0  # 0.2 s on an idle core


def test_a_state_goes_round_exactly() -> None:
    learned, fitted, _ = taught()
    learned.adopt(fitted)
    other = LearnedLevels("alq", 512, "max")
    other.load_state_dict(learned.state_dict())
    for bits in other.all_bits:
        assert np.array_equal(other.table(bits), learned.table(bits))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"kind": "amq"}, "kind is 'amq'"),
        ({"block": 64}, "block is 64"),
        ({"norm": "l2"}, "norm is 'l2'"),
        ({"levels": None}, "levels for 2, 3"),
        ({"levels": {bits: [0.0, 1.0] for bits in range(2, 9)}}, "levels for 3 bits must be 4"),
    ],
)
def test_a_foreign_state_is_refused(change: dict[str, Any], wrong: str) -> None:
    learned, fitted, _ = taught()
    before = learned.table(3)
    with pytest.raises(ValueError, match=wrong):
        learned.load_state_dict(learned.state_dict() | change)
    with pytest.raises(ValueError, match="rise from 0"):
        learned.adopt(fitted | {"3": [0.0, 0.6, 0.5, 1.0]})
    assert learned.table(3) is before


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "alc"},
        {"block": 0},
        {"norm": "l1"},
        {"updates": (5, 5)},
        {"updates": (0, 5)},
        {"start": "zero"},
        {"method": "newton"},
        {"weighting": "none"},
    ],
)
def test_options_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    options = {"kind": "alq", "block": 64, "norm": "l2"} | wrong
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))[:4].strip("(")):
        LearnedLevels(**options)


def test_bits_without_a_table_are_refused() -> None:
    for kind, zero, wrong in (("alq", True, 1), ("alq", True, 9), ("amq", True, 0), ("alq", False, 0)):
        with pytest.raises(ValueError, match=f"{wrong} bits are not possible"):
            LearnedLevels(kind, 64, "l2", zero=zero).table(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("of", [distributions, module], ids=lambda each: each.__name__)
def test_the_examples_in_docstrings_run(of: ModuleType) -> None:
    outcome = doctest.testmod(of)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_the_benchmark_runs() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.micro.wire", "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "entropy" in done.stdout
