"""Allocators: each keeps its allowance, and picks what its definition says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hvd_adaptive.planning.allocators import (
    FollowReference,
    KMeans,
    MinCostKnapsack,
    MinErrorKnapsack,
    Uniform,
)
from hvd_adaptive.planning.table import DENSE, CandidateTable, Limits
from tests.planning.helpers import BITS, quantizer_table


def test_an_allocator_names_what_the_budget_lacks() -> None:
    with pytest.raises(ValueError, match="MinCostKnapsack needs a budget that bounds the error"):
        MinCostKnapsack().allocate(quantizer_table(0), Limits(max_bytes=1e9))
    with pytest.raises(ValueError, match="FollowReference needs a budget that has a reference"):
        FollowReference().allocate(quantizer_table(0), Limits(max_bytes=1e9))


def test_knapsacks_beat_the_uniform_default_where_layers_differ() -> None:
    table = quantizer_table(1)
    allowed = Limits.like(table, table.defaults)
    cheaper = MinCostKnapsack().allocate(table, allowed)
    assert table.bytes(cheaper) < 0.9 * table.bytes(table.defaults)
    better = MinErrorKnapsack().allocate(table, allowed)
    assert table.error(better) < 0.9 * table.error(table.defaults)


def test_weights_move_bytes_to_where_they_cost_less() -> None:
    weights = np.array([10.0, 1.0])
    fields = {"names": "ab", "errors": [[0, 1]] * 2, "sizes": [[8, 4]] * 2, "labels": [["8", "4"]] * 2}
    plain = CandidateTable.of(**fields, defaults=[0, 1], dense=[32, 32])  # type: ignore[arg-type]
    priced = CandidateTable.of(**fields, defaults=[0, 1], dense=[32, 32], weights=weights)  # type: ignore[arg-type]
    allowed = Limits(max_error=1)
    assert MinCostKnapsack().allocate(priced, allowed).tolist() == [1, 0]
    assert priced.cost(np.array([1, 0])) == 48
    assert plain.cost(np.array([1, 0])) == 12


# --- uniform --------------------------------------------------------------------------------------


def test_uniform_is_the_most_faithful_label_that_fits() -> None:
    table = quantizer_table(2)
    for index in range(len(BITS)):
        level = np.full(8, index)
        fits = Limits(max_bytes=table.bytes(level) * 1.01)
        assert (Uniform().allocate(table, fits) == level).all()
        assert (Uniform().allocate(table, Limits.like(table, level)) == level).all()


def test_a_layer_without_the_label_takes_what_is_nearest_in_size() -> None:
    table = CandidateTable.of(
        ["wide", "narrow", "single"],
        [[1, 2, 3, 4], [1, 2], [0]],
        [[640, 320, 160, 80], [160, 30], [100]],
        [["64", "32", "16", "8"], ["16", "4"], ["3"]],
        [1, 0, 0],
        [1280, 320, 400],
    )
    found = {label: choice.tolist() for label, choice in table.uniform().items()}
    assert found == {
        "64": [0, 0, 0],
        "32": [1, 0, 0],
        "16": [2, 0, 0],
        "8": [3, 1, 0],  # a sixteenth of 320 is 20: nearest is 30
        "4": [2, 1, 0],  # an eighth of 1280 is 160
        "3": [1, 0, 0],  # a quarter is 320, and 80: 160 is nearer than 30
    }


def test_compression_factors_find_their_candidates() -> None:
    table = quantizer_table(3, factors=[[100, 10, 1000, 500, 20]] * 8)
    assert table.at_factor(480).tolist() == [3] * 8
    assert table.at_factor(1).tolist() == [DENSE] * 8
    assert quantizer_table(3).factors[0].tolist() == pytest.approx([32 / bits for bits in BITS])


def test_resizing_goes_by_the_bytes_of_a_choice() -> None:
    table = quantizer_table(4)
    multiples = np.where(np.arange(8) % 2, 2.0, 0.5)
    assert table.resized(table.defaults, multiples).tolist() == [4, 0] * 4


# --- k-means --------------------------------------------------------------------------------------


def test_k_means_finds_clusters_that_are_far_apart_and_orders_them_by_error_a_byte() -> None:
    numel = np.array([1e3, 1.1e3, 1e6, 1.1e6, 1e6, 0.9e3])
    energy = np.array([10.0, 12.0, 9.0, 10.0, 1e-5, 11.0])  # dense in error; even; hardly any
    table = quantizer_table(
        0,
        6,
        errors=[[e * 4.0**-bits for bits in BITS] for e in energy],
        sizes=[[n * bits / 8 for bits in BITS] for n in numel],
        dense=4 * numel,
    )
    choice = KMeans(clusters=3).allocate(table, Limits(max_bytes=math.inf))
    assert choice.tolist() == [0, 0, 2, 2, 4, 0]


def test_k_means_is_drawn_towards_the_reference_until_it_fits() -> None:
    table = quantizer_table(5)
    free = KMeans(clusters=4).allocate(table, Limits(max_bytes=math.inf))
    strict = Limits(table.error(free) / 2, reference=np.zeros(8, np.int64))
    choice = KMeans(clusters=4).allocate(table, strict)
    assert table.error(choice) <= strict.max_error
    assert (choice <= free).all()
    assert (choice < free).any()
    assert choice.any()


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_k_means_copes_with_fewer_layers_than_clusters_and_with_equal_ones(layers: int) -> None:
    table = quantizer_table(
        0, layers, errors=[[1, 2, 3, 4, 5]] * layers, sizes=[[9, 8, 7, 6, 5]] * layers
    )
    assert len(KMeans().allocate(table, Limits(max_bytes=math.inf))) == layers


def test_k_means_needs_two_clusters() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        KMeans(clusters=1)


# --- the table ------------------------------------------------------------------------------------


def test_dense_layers_cost_their_bytes_and_lose_nothing() -> None:
    table = quantizer_table(6)
    choice = table.defaults.copy()
    choice[3] = DENSE
    without = table.bytes(table.defaults) - table.sizes[3][2] + table.dense[3]
    assert table.bytes(choice) == pytest.approx(without)
    assert table.error(choice) == pytest.approx(table.error(table.defaults) - table.errors[3][2])
    assert table.error(table.all_dense()) == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"defaults": [2] * 7 + [5]}, "layer7: .* the default is candidate 5"),
        ({"errors": [[1, 2]] + [[1] * 5] * 7}, "layer0: errors, sizes, labels and factors have"),
        ({"errors": [[1, 2, math.nan, 4, 5]] + [[1] * 5] * 7}, "layer0: an error, a size or a factor"),
        ({"errors": [[1, 2, math.inf, 4, 5]] + [[1] * 5] * 7}, "layer0: .* negative or not finite"),
        ({"labels": [["8"] * 5] * 7}, "8 layers, but entries for"),
    ],
)
def test_a_table_that_does_not_fit_names_the_layer(changed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantizer_table(0, **changed)
