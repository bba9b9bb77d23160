"""Sketches: linear, the same on all ranks, and of the right norm in expectation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_adaptive.adaptation.sketch import NUMBERS, Gradient
from hvd_adaptive.arrays import Float64s


def signed_sums(x: torch.Tensor, layer: int, step: int) -> Float64s:
    return Gradient.seen(x, x, layer, step).numbers


def tensor(size: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    match kind:
        case "dense":
            return torch.randn(size, generator=generator)
        case "sparse":
            return torch.randn(size, generator=generator) * (
                torch.rand(size, generator=generator) < 0.01
            )
        case _:
            return torch.ones(size)


@pytest.mark.parametrize("size", [1, 100, 2048, 5000, 40_000])
@pytest.mark.parametrize("kind", ["dense", "sparse", "equal"])
def test_the_squared_norm_is_right_in_expectation(size: int, kind: str) -> None:
    x = tensor(size, kind)
    squares = [float((signed_sums(x, 3, step) ** 2).sum()) for step in range(400)]
    error = np.std(squares) / np.sqrt(len(squares))
    assert np.mean(squares) == pytest.approx(float(x @ x), abs=4 * error + 1e-6)
    if kind == "dense" and size >= 2048:
        assert np.std(squares) < 0.5 * float(x @ x)


def test_the_mean_of_sketches_is_the_sketch_of_the_mean() -> None:
    ranks = [tensor(5000, "dense") * (1 + rank) for rank in range(3)]
    mean = signed_sums(torch.stack(ranks).mean(0), 1, 7)
    assert np.allclose(np.mean([signed_sums(each, 1, 7) for each in ranks], axis=0), mean, atol=1e-3)


def test_signs_are_others_in_every_layer_and_step() -> None:
    x = tensor(3000, "dense")
    found = [signed_sums(x, *place) for place in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert (found[0] == found[3]).all()
    assert not np.allclose(found[0], found[1])
    assert not np.allclose(found[0], found[2])


def test_what_is_not_finite_leaves_no_trace() -> None:
    assert signed_sums(torch.tensor([1.0, float("nan")]), 0, 0).tolist() == [0.0] * NUMBERS
