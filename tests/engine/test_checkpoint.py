"""Compression states: what is refused, and states for another number of ranks.

Without ranks; `tests/distributed/test_damaged_states.py` does it with states of real runs.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive import merge_compression_states
from hvd_adaptive.adaptation.candidates import candidates_of
from hvd_adaptive.adaptation.layer_samples import SIGNALS
from hvd_adaptive.adaptation.schedule import SAMPLES
from hvd_adaptive.adaptation.sketch import SKETCH
from hvd_adaptive.checkpoint import STATE_FORMAT, Run, check_state
from hvd_adaptive.compressors import format_spec, parse
from hvd_adaptive.config import CompressionConfig, ReducerOptions
from hvd_adaptive.layers import Layer
from hvd_adaptive.planning import parse as parse_recipe
from tests.damage import damaged

SPECS = {
    "residual": ("topk:density=0.01,values=bf16", "ef"),
    "bf16": ("topk:density=0.01,values=bf16", "ef:dtype=bf16"),
    "estimate": ("topk:density=0.01,values=bf16", "ef21"),
}


def state(values: list[float], slot: str = "residual", **changed: Any) -> dict[str, Any]:
    """As a run with a layer that is compressed, and one that is not, would save it."""
    compressor, rule = SPECS[slot]
    kept = torch.tensor(values, dtype=torch.bfloat16 if slot == "bf16" else torch.float32)
    slots = {"estimate": kept, "mean": kept.clone()} if slot == "estimate" else {"residual": kept}
    return {
        "format": STATE_FORMAT,
        "rounds": 3,
        "dense_until": None,
        "flat_steps": 0,
        "order": ["w", "b"],
        "routes": {"w": [compressor, rule], "b": ["none", "none"]},
        "kept": {"w": slots, "b": {}},
        "owned": {},
        "shards": {},
        "rates": {},
        "last_rates": (0.1,),
        "learn_next": False,
        "planned": {},
        "sums": {},
        "codecs": {},
        "controller": None,
        **changed,
    }


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
    merged = merge_compression_states([state([1.0], "bf16"), state([2.0], "bf16")])
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
        ([state([1.0]), state([1.0], rounds=4)], "not of one step of one run: rounds is 3 .* and 4"),
        ([state([1.0]), state([1.0], order=["b", "w"])], r"order is .*w.*b.* and .*b.*w"),
        ([state([1.0]), state([1.0, 2.0])], "rank 1 does not hold the residual of 'w'"),
        ([state([1.0]), state([1.0], "estimate")], "rank 0 and rank 1 .*: routes is"),
        ([state([1.0]), state([float("nan")])], r"rank 1: .* kept\['w'\]\['residual'\] holds NaN"),
        ([state([1.0]), None], "rank 1: compression state: it is None and no dict"),
        ([{"format": STATE_FORMAT}], "rank 0: compression state: rounds is missing"),
    ],
)
def test_states_that_do_not_belong_together_are_an_error(states: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_compression_states(states)


LAYERS = (Layer(0, "w", (64, 32)), Layer(1, "v", (40, 40)), Layer(2, "b", (64,)))
PLANNERS = (
    "lgreco",
    "lgreco-time:trials=2",
    "lgreco:metric=preconditioned",
    "kimad:seconds=1",
    "gravac",
    "accordion",
    "auto",
)


def planned_state(planner: str) -> tuple[dict[str, Any], Run]:
    """As a run with a planner would save it, after a decision and with another one on its way."""
    own, other = parse("powersgd:rank=2"), parse("qsgd:bits=4,coding=huffman")
    recipe = parse_recipe(planner)
    run = Run(
        LAYERS, CompressionConfig.of(own, None, "ef"), ReducerOptions(), recipe, (other,), ranks=2
    )
    rows = {layer.name: candidates_of(layer, [own, other]) for layer in LAYERS[:2]}
    twice = 2 if planner.endswith("preconditioned") else 1
    varying = len(other.levels(LAYERS[0]))
    signals = 1 + SAMPLES * SIGNALS if planner == "auto" else 0
    sums = {name: twice * (len(row) + 1) + varying + signals for name, row in rows.items()}
    chosen = {name: len(row) - 1 for name, row in rows.items()}
    planned = {name: rows[name][index] for name, index in chosen.items()}
    periods = planner.startswith("accordion")
    sketches = sum(min(layer.numel, SKETCH) + 1 for layer in LAYERS[:2]) if periods else 0
    controller = {
        "recipe": type(recipe).__name__,
        "planner": recipe.planner(2).state_dict(),
        "levels": chosen,
        "told": [list(chosen.values())],
        "sums": [0, -1],
        "expected": {"w": (0.5, 1.0)},
        "factor": 1.0,
        "decided": True,
        "factors": [10.0, 20.0],
        "factors_since": 3,
        "trigger": 12,
        "message": '{"levels": [[0, -1]], "changed": true, "factor": 1.0, "factors": [], "report": '
        '{"bytes": Infinity}, "reasons": ["why"], "errors": [[0.1, 0.0]], "energies": [[1.0, 2.0]], '
        '"sums": []}',
        "table": [0.0] * (sum(sums.values()) + sketches),
        "sampled": 2,
        "patience": 1,
        "planned": 9,
        "hurries": False,
        "measured": {name: [[0.5] * sums[name], 1, 1, None, None, 0] for name in rows},
        "shares": {"w": [11, [0.5] * len(rows["w"])]} if signals else {},
    }
    routes = {name: [format_spec(each.compressor), "ef"] for name, each in planned.items()}
    kept = {layer.name: {"residual": torch.ones(layer.numel)} for layer in LAYERS[:2]}
    warm = {"w": torch.ones(32, 2), "v": torch.ones(40, 1)}
    return (
        state(
            [1.0],
            order=["v", "b", "w"],
            routes={**routes, "b": ["none", "none"]},
            kept={**kept, "b": {}},
            rates={"w": 0.1},
            planned={
                name: [format_spec(each.compressor), each.level] for name, each in planned.items()
            },
            codecs={"powersgd:rank=1": warm},
            controller=controller,
        ),
        run,
    )


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_state_that_a_run_could_have_saved_is_taken(planner: str) -> None:
    saved, run = planned_state(planner)
    before = copy.deepcopy(saved)
    check_state(saved, run)
    assert str(saved) == str(before)  # nothing was changed


@settings(deadline=None, max_examples=400)
@given(planner=st.sampled_from(PLANNERS), seed=st.integers(0, 1 << 32))
def test_one_change_is_taken_or_refused_by_name(planner: str, seed: int) -> None:
    saved, run = planned_state(planner)
    changed, item = damaged(saved, seed)
    try:
        check_state(changed, run)
    except ValueError as error:
        refused = str(error)
    else:
        refused = item
    assert item in refused


def test_nearly_every_change_is_refused() -> None:
    """The others leave a state that a run could have saved, as without the next decision."""
    refused = 0
    for seed in range(500):
        saved, run = planned_state(PLANNERS[seed % len(PLANNERS)])
        try:
            check_state(damaged(saved, seed)[0], run)
        except ValueError:
            refused += 1
    assert refused > 475
