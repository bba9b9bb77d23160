"""Random subsets that all ranks draw alike."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from hvd_adaptive.kernels import orders
from hvd_adaptive.kernels.cpu import subset as cpu_subset
from hvd_adaptive.kernels.reference import subset as reference_subset
from hvd_adaptive.rng import mix

SUBSETS = pytest.mark.parametrize("subset", [reference_subset, cpu_subset], ids=["reference", "cpu"])


@SUBSETS
@pytest.mark.parametrize("numel", [0, 1, 2, 5, 4097, 131_071, 131_073, 300_007])
def test_a_random_order_holds_every_number_once_and_begins_alike_forevery_count(
    subset: ModuleType, numel: int
) -> None:
    order = subset.first_indices(numel, numel, key=9)
    assert order.sort().values.tolist() == list(range(numel))
    for count in {0, min(1, numel), numel // 3, max(0, numel - 1)}:
        assert torch.equal(subset.first_indices(numel, count, key=9), order[:count])
    assert torch.equal(order, reference_subset.first_indices(numel, numel, key=9))


@pytest.mark.parametrize(("numel", "count"), [(7, 3), (300_007, 1001), (300_007, 200_003)])
def test_all_elements_are_equally_likely_to_be_drawn(numel: int, count: int) -> None:
    draws, sections = 2000 if numel < 10 else 400, min(numel, 7)
    found = np.zeros(sections)
    for key in range(draws):
        indices = cpu_subset.first_indices(numel, count, mix(key)).numpy()
        found += np.bincount(indices * sections // numel, minlength=sections)
    shares = found / found.sum() * sections
    # runs of neighbors are drawn together, so that they count once
    deviation = np.sqrt(sections * orders.run_length(numel) / (draws * count))
    assert np.abs(shares - 1).max() < 5 * deviation


def test_the_ends_are_drawn_as_often_as_the_middle_though_runs_do_not_divide_the_tensor() -> None:
    numel, draws = 262_147, 4000  # runs of 4, of which the last has 3
    places = torch.tensor([0, 1, 2, 3, 131_000, numel - 4, numel - 3, numel - 2, numel - 1])
    count = numel // 2 + 1  # ends inside a run
    seen = torch.zeros(len(places))
    for key in range(draws):
        x = torch.zeros(numel)
        cpu_subset.add_(x, torch.ones(count), mix(key))
        seen += x[places]
    assert float((seen / draws - 0.5).abs().max()) < 5 * 0.5 / draws**0.5


@SUBSETS
@pytest.mark.parametrize("numel", [0, 1, 100, 300_007])
def test_values_are_taken_from_where_the_indices_say_and_added_there(
    subset: ModuleType, numel: int
) -> None:
    x, count = torch.randn(numel, generator=torch.Generator().manual_seed(1)), numel // 3
    indices = subset.first_indices(numel, count, key=5)
    rest = x.clone()
    values = subset.take_(rest, count, key=5)
    assert torch.equal(values, x[indices])
    expected = x.clone()
    expected[indices] = 0.0
    assert torch.equal(rest, expected)
    subset.add_(rest, values, key=5, scale=-2.0, skip=count // 2)
    expected[indices[count // 2 :]] -= 2.0 * values[count // 2 :]
    assert torch.equal(rest, expected)


@SUBSETS
def test_more_elements_than_there_are_cannot_be_drawn(subset: ModuleType) -> None:
    with pytest.raises(ValueError, match="cannot draw 4 different numbers below 3"):
        subset.take_(torch.zeros(3), 4, key=1)
