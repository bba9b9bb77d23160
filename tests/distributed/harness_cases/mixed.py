"""Passing, skipped and failing tests, for tests/harness/test_harness.py. Not collected by itself."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch


def test_passes_everywhere() -> None:
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="all").tolist() == [hvd.size()] * 3


def test_fails_everywhere() -> None:
    print(f"printed by rank {hvd.rank()}")
    raise AssertionError(f"rank {hvd.rank()} fails on purpose")


@pytest.mark.parametrize("value", [1, 2, 3])
def test_fails_on_the_last_rank_for_one_parameter(value: int) -> None:
    hvd.allreduce(torch.ones(3), op=hvd.Sum, name="all")
    assert value != 2 or hvd.rank() < hvd.size() - 1, "only the last rank says so"


def test_leaves_an_operation_behind_on_rank_0_and_fails() -> None:
    if hvd.rank() == 0:
        hvd.allreduce_async(torch.ones(3), name="left")
        raise AssertionError("left behind")


def test_uses_the_name_that_was_left_behind() -> None:
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="left").tolist() == [hvd.size()] * 3


def test_skips_everywhere() -> None:
    pytest.skip("for a reason")


def test_skips_on_rank_1_only() -> None:
    if hvd.rank() == 1:
        pytest.skip("only here")


@pytest.mark.ranks(3)
def test_is_for_three_ranks() -> None:
    raise AssertionError("not at size 2")


@pytest.mark.xfail(strict=True, reason="known")
def test_fails_as_expected() -> None:
    raise AssertionError("known")


@pytest.fixture
def broken_on_rank_1() -> None:
    if hvd.rank() == 1:
        raise RuntimeError("the fixture is broken here")


@pytest.mark.usefixtures("broken_on_rank_1")
def test_has_a_fixture_that_fails_on_rank_1() -> None:
    pass
