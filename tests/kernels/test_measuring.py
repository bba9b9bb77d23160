"""What every backend of the measuring family keeps to; one row per backend: ``MODULES``."""

from __future__ import annotations

import doctest
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.kernels.cpu import measuring as cpu
from hvd_adaptive.kernels.reference import measuring as reference
from hvd_adaptive.kernels.signs import COLUMNS, DRAWS, GROUPS, Signs
from tests.kernels.inputs import KINDS, SIZES, numbers, usual

MODULES = pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
MODERATE = [kind for kind in KINDS if kind not in ("wide", "one huge")]
"""Kinds whose squares are float32s."""


def in_double(x: np.ndarray, signs: Signs) -> np.ndarray:
    """The sums, element by element, from what the signs are said to be."""
    places = np.arange(len(x))
    rows, columns = places // COLUMNS, places % COLUMNS
    found = np.zeros((DRAWS, GROUPS))
    for draw in range(DRAWS):
        sign = signs.rows[draw].numpy()[rows] * signs.columns[draw].numpy()[columns]
        np.add.at(found[draw], columns // (COLUMNS // GROUPS), sign * x.astype(np.float64))
    return found


@MODULES
@pytest.mark.parametrize("with_minus", [False, True], ids=["alone", "minus"])
@usual
@given(st.sampled_from(MODERATE), st.sampled_from([*SIZES, 10_000]), st.integers(0, 2**63 - 1))
def test_signed_sums_are_those_in_double_precision(
    kernels: ModuleType, with_minus: bool, kind: str, numel: int, seed: int
) -> None:
    x, minus = numbers(kind, numel, seed % 1000), numbers("normal", numel, seed % 1000 + 1)
    signs = Signs.of(numel, seed)
    y = x - minus if with_minus else x
    found = kernels.signed_sums(
        torch.from_numpy(x), signs, torch.from_numpy(minus) if with_minus else None
    )
    largest = np.abs(y).sum(dtype=np.float64)
    np.testing.assert_allclose(found.numbers, in_double(y, signs), atol=2e-6 * largest + 1e-44)
    assert found.energy == pytest.approx(
        float(np.square(y.astype(np.float64)).sum()), rel=1e-5, abs=1e-37
    )
    assert found.nonzero == np.count_nonzero(y)


@MODULES
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 600, 2999])
def test_what_is_not_finite_shows_in_the_energy(kernels: ModuleType, value: float, place: int) -> None:
    x = torch.ones(3000)
    x[place] = value
    assert not np.isfinite(kernels.signed_sums(x, Signs.of(3000, 1)).energy)


@MODULES
@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-6, 1e-8, 3e4])
def test_a_cast_loses_what_casting_loses(
    kernels: ModuleType, dtype: torch.dtype, kind: str, scale: float
) -> None:
    x = torch.from_numpy(numbers(kind, 4500, 3)) * scale
    limit = torch.finfo(dtype).max
    lost = x.double() - x.clamp(-limit, limit).to(dtype).double()
    assert kernels.cast_error(x, dtype) == pytest.approx(float(lost @ lost), rel=1e-12)


@DTYPES
def test_every_rounding_is_to_the_nearest_or_the_even_one(dtype: torch.dtype) -> None:
    """At all exponents: a number, half a step above it, and next to that, with even and odd ends."""
    steps = 13 if dtype == torch.float16 else 16
    starts = np.arange(0, 0x7F80_0000, 1 << steps, dtype=np.int64)[:: 37 if steps == 13 else 5]
    half = 1 << (steps - 1)
    words = (starts[:, None] + np.array([0, half - 1, half, half + 1])).clip(0, 0x7F7F_FFFF)
    for x in torch.from_numpy(words.astype(np.int32).view(np.float32).ravel()).split(997):
        assert cpu.cast_error(x, dtype) == pytest.approx(reference.cast_error(x, dtype), rel=1e-12)


@MODULES
@DTYPES
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_cast_of_what_is_not_finite_has_no_finite_error(
    kernels: ModuleType, dtype: torch.dtype, value: float
) -> None:
    assert not np.isfinite(kernels.cast_error(torch.tensor([1.0, value, 2.0]), dtype))
    assert kernels.cast_error(torch.empty(0), dtype) == 0


@MODULES
def test_other_tensors_are_refused(kernels: ModuleType) -> None:
    signs = Signs.of(4, 0)
    for x in (torch.ones(4, dtype=torch.float64), torch.ones(2, 2), torch.ones(8)[::2]):
        with pytest.raises(ValueError, match="must be 1-D contiguous float32"):
            kernels.signed_sums(x, signs)
        with pytest.raises(ValueError, match="must be 1-D contiguous float32"):
            cpu.cast_error(x, torch.float16)
    for x, minus in ((torch.ones(COLUMNS + 1), None), (torch.ones(4), torch.ones(3))):
        with pytest.raises(ValueError, match="do not fit"):
            kernels.signed_sums(x, signs, minus)


@MODULES
def test_examples_in_docstrings(kernels: ModuleType) -> None:
    assert doctest.testmod(kernels).failed == 0
