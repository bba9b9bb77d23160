"""Compression states for another number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive import merge_compression_states


def state(values: list[float], slot: str = "residual", **changed: Any) -> dict[str, Any]:
    kept = {"w": {slot: torch.tensor(values)}, "b": {}}
    return {"format": 4, "rounds": 3, "order": ["w", "b"], "kept": kept, **changed}


@settings(deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda size: st.lists(
            st.lists(
                st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=size, max_size=size
            ),
            min_size=1,
            max_size=6,
        )
    )
)
def test_the_mean_over_ranks_is_kept(values: list[list[float]]) -> None:
    merged = merge_compression_states([state(each) for each in values])
    mean = torch.tensor(values, dtype=torch.float64).mean(dim=0)
    held = merged["kept"]["w"]["residual"]
    assert held.dtype == torch.float32
    torch.testing.assert_close(held.double(), mean, rtol=1e-6, atol=1e-6)
    assert merged["order"] == ["w", "b"]
    assert merged["kept"]["b"] == {}


def test_a_half_precision_residual_stays_one() -> None:
    states = [state([1.0]), state([2.0])]
    for each in states:
        each["kept"]["w"]["residual"] = each["kept"]["w"]["residual"].bfloat16()
    merged = merge_compression_states(states)
    assert merged["kept"]["w"]["residual"].dtype == torch.bfloat16
    assert merged["kept"]["w"]["residual"].item() == 1.5


def test_what_was_given_is_left_alone() -> None:
    states = [state([1.0]), state([2.0])]
    merge_compression_states(states)["kept"]["w"]["residual"].zero_()
    assert [each["kept"]["w"]["residual"].item() for each in states] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "no compression state"),
        ([state([1.0]), state([1.0], rounds=4)], "not of one step: rounds is 3 on the one and 4"),
        ([state([1.0]), state([1.0, 2.0])], "rank 1 does not hold the residual of 'w'"),
        ([state([1.0]), state([1.0], slot="estimate")], "rank 1 does not hold the residual of 'w'"),
    ],
)
def test_states_that_do_not_belong_together_are_an_error(states: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_compression_states(states)
