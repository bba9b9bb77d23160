"""A compression state that does not fit is refused on all ranks, and then nothing has changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import horovod.torch as hvd
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hvd_adaptive as hva
from tests.damage import damaged
from tests.distributed.workloads import make_model, ours, set_gradients

State: TypeAlias = dict[str, Any]

SHAPES = {"wide": (48, 64), "tall": (300, 8), "bias": (48,)}
KINDS: dict[str, dict[str, Any]] = {
    "ef": {"compression": "topk:density=0.05", "feedback": "ef:lr_correction=true"},
    "bf16": {"compression": "qsgd:bits=2", "feedback": "ef:dtype=bf16"},
    "ef21": {"compression": "topk:density=0.05", "feedback": "ef21"},
    "two shots": {"compression": "topk:density=0.05", "scheme": "two_shot"},
    "dgc": {"compression": "topk:density=0.05", "feedback": "dgc", "dense_steps": 1},
    "powersgd": {"compression": "powersgd:rank=2"},
    "alq": {"compression": "alq:bits=3,updates=2/6"},
    "lgreco": {"compression": "topk:density=0.05", "planner": "lgreco:period=6"},
    "kimad": {"compression": "topk:density=0.05", "planner": "kimad:period=3,warmup=2,seconds=0.05"},
    "gravac": {"compression": "topk:density=0.05", "planner": "gravac:window=2,epsilon=0.05"},
    "accordion": {
        "compression": "qsgd:bits=4,coding=huffman",
        "planner": "accordion:period=6",
        "candidates": ["topk:density=0.05"],
    },
}
STEPS = 14
MORE = 2
"""Fewer than a planner needs for a new plan, whose time depends on the machine."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def make(kind: str) -> tuple[nn.Module, Any]:
    model = make_model(Layers)
    wrapped = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, ours(wrapped, named_parameters=model.named_parameters(), **KINDS[kind])


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
        optimizer.zero_grad()
        set_gradients(
            model, {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        )
        optimizer.step()


class Saved:
    """A run's state on this rank, and where the run has come to a little later."""

    def __init__(self, kind: str) -> None:
        model, optimizer = make(kind)
        train(model, optimizer, range(8))
        optimizer.compression_state_dict()  # waits for the planner, so that its plan is in force soon
        train(model, optimizer, range(8, STEPS))
        self.kind = kind
        self.weights = copy.deepcopy(model.state_dict())
        self.state: State = optimizer.compression_state_dict()
        self.goal = self.resume(self.state)

    def resume(self, state: State) -> dict[str, Tensor]:
        """The weights, some steps after a resume."""
        model, optimizer = make(self.kind)
        model.load_state_dict(self.weights)
        optimizer.load_compression_state_dict(state)
        train(model, optimizer, range(STEPS, STEPS + MORE))
        optimizer.compression_state_dict()  # waits for what planners have under way
        return copy.deepcopy(model.state_dict())


_saved: dict[str, Saved] = {}


def saved(kind: str) -> Saved:
    """Trained once."""
    if kind not in _saved:
        _saved[kind] = Saved(kind)
    return _saved[kind]


def same(one: Any, other: Any) -> bool:
    """To the bit."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def put(*path: Any) -> Callable[[State], None]:
    """Set what is at all but the last of the path to the last."""

    def change(state: State) -> None:
        node: Any = state
        for key in path[:-2]:
            node = node[key]
        node[path[-2]] = path[-1](node[path[-2]]) if callable(path[-1]) else path[-1]

    return change


def drop(*path: Any) -> Callable[[State], None]:
    def change(state: State) -> None:
        node: Any = state
        for key in path[:-1]:
            node = node[key]
        del node[path[-1]]

    return change


def spoiled(value: float) -> Callable[[Tensor], Tensor]:
    def spoil(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[5] = value
        return tensor

    return spoil


WIDE = ("kept", "wide")
ITEMS = (
    "format rounds flat_steps order routes kept owned shards rates last_rates learn_next planned sums "
    "codecs controller"
)
PILOT = (
    "recipe planner levels told sums expected factor decided factors factors_since trigger message "
    "table sampled measured"
)
Damage: TypeAlias = tuple[str, Callable[[State], None], str]
DAMAGE: list[Damage] = [
    *[("ef", drop(key), rf"{key} is (missing|None)") for key in ITEMS.split()],
    *[("ef", put(key, 1.5), rf"{key} ") for key in ITEMS.split()],
    *[
        ("lgreco", drop("controller", key), rf"controller\['{key}'\] is missing")
        for key in PILOT.split()
    ],
    *[("lgreco", put("controller", key, b"x"), rf"controller\['{key}'\]") for key in PILOT.split()],
    ("ef", put("format", 4), "format is 4, expected 11"),
    ("ef", put("rounds", -1), r"rounds must be a whole number of at least 0, got -1"),
    ("ef", put("rounds", True), "rounds must be a whole number"),
    ("ef", put("dense_until", -1), "dense_until must be a whole number of at least 0"),
    ("ef", drop("dense_until"), "dense_until is (missing|1)"),
    ("ef", put("rounds", 1 << 70), "rounds must be a whole number"),
    ("ef", put("order", lambda order: [*order, order[0]]), "order names '.*' twice"),
    ("ef", put("order", lambda order: [*order, "gone"]), "order must name the same layers: 'gone'"),
    ("ef", drop(*WIDE), r"kept\['wide'\] has the slots \[\]: its feedback 'ef.*' keeps"),
    ("ef", drop(*WIDE, "residual"), r"kept\['wide'\] has the slots \[\]"),
    ("ef", put(*WIDE, "what", torch.zeros(3072)), r"kept\['wide'\] has the slot 'what'"),
    ("ef", put(*WIDE, "velocity", torch.zeros(3072)), r"kept\['wide'\] has the slots .*velocity"),
    ("ef", put("kept", "gone", {"residual": torch.zeros(3)}), "kept names 'gone': the model has no"),
    ("ef", put(*WIDE, "residual", spoiled(math.nan)), r"kept\['wide'\]\['residual'\] holds NaN"),
    ("ef", put(*WIDE, "residual", spoiled(math.inf)), r"kept\['wide'\]\['residual'\] holds NaN or Inf"),
    ("ef", put(*WIDE, "residual", Tensor.double), r"kept\['wide'\]\['residual'\] must be .*float64"),
    ("ef", put(*WIDE, "residual", Tensor.int), r"kept\['wide'\]\['residual'\] must be .*int32"),
    (
        "ef",
        put(*WIDE, "residual", Tensor.bfloat16),
        r"is of torch.bfloat16: its feedback",
    ),
    ("ef", put(*WIDE, "residual", lambda held: held[1:]), "has 3071 elements.*another model"),
    ("ef", put(*WIDE, "residual", lambda held: held.view(48, 64)), "must be a 1-D tensor"),
    ("ef", put(*WIDE, "residual", Tensor.tolist), r"\['residual'\] must be a 1-D tensor"),
    ("ef", put(*WIDE, "residual", Tensor.to_sparse), r"\['residual'\] must be a 1-D tensor"),
    ("ef", put("rates", "wide", 0.0), r"rates\['wide'\] must be a finite number above 0"),
    ("ef", put("rates", "gone", 0.1), "rates names 'gone'"),
    ("ef", put("last_rates", (math.nan,)), r"last_rates\[0\] must be a finite number"),
    ("ef", put("routes", "wide", ["topq", "ef"]), r"routes\['wide'\]\[0\] is no compressor"),
    ("ef", put("routes", "wide", ["topk", "eff"]), r"routes\['wide'\]\[1\] is no feedback rule"),
    ("ef", put("planned", {"wide": [None, 0]}), "planned must be empty where controller is None"),
    ("ef", put("codecs", {"topk": {}}), r"codecs\['topk'\] is of a compressor that learns nothing"),
    ("two shots", put("owned", "gone", [(0, torch.ones(3))]), r"owned\['gone'\] must be pieces of a"),
    ("two shots", put("owned", "wide", [(3070, torch.ones(3))]), r"owned\['wide'\] must be pieces of"),
    ("two shots", put("owned", "wide", [(-1, torch.ones(3))]), r"owned\['wide'\]\[0\]\[0\] must be a"),
    ("two shots", put("owned", "wide", [(0, spoiled(math.nan)(torch.ones(9)))]), r"holds NaN or Inf"),
    ("two shots", put("owned", "wide", [(0,)]), r"owned\['wide'\]\[0\] must be a list of 2"),
    (
        "two shots",
        put("shards", lambda found: {name: {**each, "bounds": [5, 0]} for name, each in found.items()}),
        "which share nothing out",
    ),
    ("bf16", put(*WIDE, "residual", Tensor.float), r"is of torch.float32: its feedback"),
    ("ef21", drop(*WIDE, "mean"), r"kept\['wide'\] has the slots \['estimate'\]: its feedback 'ef21'"),
    ("dgc", drop("kept", "bias", "velocity"), r"kept\['bias'\] has the slots"),
    ("powersgd", put("codecs", {}), r"codecs\['powersgd:rank=1'\] is missing"),
    *[
        ("powersgd", put("codecs", "powersgd:rank=1", "wide", change), r"codecs\['powersgd:rank=1'\]")
        for change in (Tensor.double, spoiled(math.nan), Tensor.t, lambda q: q[1:], lambda q: None)
    ],
    ("powersgd", put("codecs", "powersgd:rank=1", "gone", torch.ones(3, 1)), "no layer 'gone'"),
    ("alq", put("codecs", {}), r"codecs\['alq.*'\] is missing"),
    ("lgreco", put("controller", None), "planned must be empty where controller is None"),
    ("lgreco", put("controller", "recipe", "CGX"), "is the planner CGX, this run has LGreCo"),
    ("lgreco", put("controller", "levels", "wide", 100), r"controller\['levels'\]\['wide'\] is 100"),
    ("lgreco", put("controller", "levels", "wide", lambda index: index ^ 1), r"planned\['wide'\] is"),
    (
        "lgreco",
        put("controller", "told", [[0, 1, 2]]),
        r"controller\['told'\] must have a number for each",
    ),
    ("lgreco", put("controller", "message", "{"), r"controller\['message'\] is no JSON"),
    (
        "lgreco",
        put("controller", "message", '{"levels": []}'),
        r"controller\['message'\]\['changed'\] is miss",
    ),
    ("lgreco", put("controller", "table", [1.0]), r"controller\['table'\] must have"),
    (
        "lgreco",
        put("controller", "measured", "wide", 1, -1),
        r"controller\['measured'\]\['wide'\]\[1\]",
    ),
    ("lgreco", put("controller", "planner", "trial", -1), r"controller\['planner'\]\['trial'\]"),
    (
        "lgreco",
        put("controller", "planner", "costs", {}),
        r"controller\['planner'\] cannot be loaded: KeyError",
    ),
    ("lgreco", put("planned", "wide", 1, 0.123), r"planned\['wide'\] has the level 0.123"),
    ("lgreco", drop("planned", "wide"), r"planned\['wide'\] is None: controller\['levels'\] gives"),
    (
        "accordion",
        put("controller", "planner", "budget", "rate", True),
        r"\['budget'\]\['rate'\] is True",
    ),
    (
        "accordion",
        put("controller", "planner", "budget", "norms", [1.0]),
        "a number for each of 2 layers",
    ),
    (
        "gravac",
        put("controller", "planner", "budget", "gains", [[2.0, math.nan]]),
        r"\['gains'\]\[0\]\[1\]",
    ),
]


@pytest.mark.ranks(2)
def test_a_damaged_state_on_one_rank_is_refused_on_all_and_changes_nothing() -> None:
    optimizers = {kind: make(kind)[1] for kind in KINDS}
    fresh = {kind: optimizer.compression_state_dict() for kind, optimizer in optimizers.items()}
    for number, (kind, damage, message) in enumerate(DAMAGE):
        state = copy.deepcopy(saved(kind).state)
        guilty = number % hvd.size()
        if hvd.rank() == guilty:
            damage(state)
        with pytest.raises(ValueError, match=message) as caught:
            optimizers[kind].load_compression_state_dict(state)
        if hvd.rank() != guilty:
            assert f"load_compression_state_dict: rank {guilty} failed" in str(caught.value)
        assert same(optimizers[kind].compression_state_dict(), fresh[kind]), message


@pytest.mark.ranks(2)
def test_a_refused_state_leaves_a_run_as_it_was() -> None:
    for kind in KINDS:
        run = saved(kind)
        model, optimizer = make(kind)
        model.load_state_dict(run.weights)
        optimizer.load_compression_state_dict(run.state)
        broken = {**run.state, "rounds": -1} if hvd.rank() == 0 else run.state
        with pytest.raises(ValueError, match="rounds"):
            optimizer.load_compression_state_dict(broken)
        train(model, optimizer, range(STEPS, STEPS + MORE))
        optimizer.compression_state_dict()
        assert same(model.state_dict(), run.goal), kind


DIFFERENCES: list[Damage] = [
    ("ef", put("rounds", 13), "rounds is 13"),
    ("ef", put("order", lambda order: order[::-1]), "order is"),
    ("ef", put("learn_next", True), "learn_next is true"),
    ("powersgd", put("codecs", "powersgd:rank=1", "wide", spoiled(1.0)), "codecs is sha256"),
    ("lgreco", put("controller", "factors_since", 3), r"controller\['factors_since'\] is 3"),
    ("lgreco", put("controller", "sampled", 99), r"controller\['sampled'\] is 99"),
    ("gravac", put("controller", "factors", [2.0]), r"controller\['factors'\] is \[2.0\]"),
]


@pytest.mark.ranks(2)
def test_states_that_differ_between_ranks_are_refused_on_all() -> None:
    for kind, change, item in DIFFERENCES:
        state = copy.deepcopy(saved(kind).state)
        if hvd.rank() == 1:
            change(state)
        _, optimizer = make(kind)
        with pytest.raises(ValueError, match="must load what it saved at the same step") as caught:
            optimizer.load_compression_state_dict(state)
        if hvd.rank() == 1:
            assert caught.match(f"{item}.* on rank 1 but .* on rank 0")


@pytest.mark.ranks(2)
def test_a_state_that_is_loaded_in_mid_step_is_a_runtime_error_on_every_rank() -> None:
    run = saved("ef")
    model, optimizer = make("ef")
    if hvd.rank() == 1:
        set_gradients(model, {name: torch.ones(shape) for name, shape in SHAPES.items()})
    with pytest.raises(RuntimeError, match="only be loaded between steps"):
        optimizer.load_compression_state_dict(run.state)
    if hvd.rank() == 0:
        set_gradients(model, {name: torch.ones(shape) for name, shape in SHAPES.items()})
    optimizer.step()


@pytest.mark.ranks(2)
def test_a_state_can_be_saved_again_before_a_step() -> None:
    for kind in KINDS:
        run = saved(kind)
        _, optimizer = make(kind)
        optimizer.load_compression_state_dict(run.state)
        again = optimizer.compression_state_dict()
        assert same(run.resume(again), run.goal), kind


@pytest.mark.ranks(2)
def test_a_state_of_another_feedback_rule_is_refused_unless_it_is_a_residual() -> None:
    _, plain = make("ef")
    with pytest.raises(ValueError, match=r"slot '(estimate|mean)', but in this run .* is 'ef:"):
        plain.load_compression_state_dict(saved("ef21").state)
    model = make_model(Layers)
    dense = ours(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
    dense.load_compression_state_dict(saved("ef").state)
    train(model, dense, range(STEPS, STEPS + 1))
    assert not any(dense.compression_state_dict()["kept"].values())  # the residual has been sent


@pytest.mark.ranks(2)
@settings(
    max_examples=100,
    phases=[Phase.generate],
    derandomize=True,  # all ranks draw the same
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 1 << 32))
def test_one_change_is_refused_or_of_no_consequence(kind: str, seed: int) -> None:
    run = saved(kind)
    state, item = run.state, "load_compression_state_dict"
    if hvd.rank() == seed % hvd.size():
        state, item = damaged(state, seed)
    try:
        weights = run.resume(state)
    except ValueError as error:
        refused = str(error)
    else:
        refused = item
        assert same(weights, run.goal)
    assert item in refused


@pytest.mark.ranks(2)
def test_states_of_every_kind_are_merged_unless_one_is_damaged() -> None:
    for kind in KINDS:
        states = hvd.allgather_object(saved(kind).state)
        merged = hva.merge_compression_states([*states, states[1]])
        _, optimizer = make(kind)
        optimizer.load_compression_state_dict(merged)
        for seed in range(20):
            changed, item = damaged(states[1], seed)
            try:
                found = hva.merge_compression_states([states[0], changed])
            except ValueError as error:
                refused = str(error)
            else:
                refused = f"rank 1 {item}"
                assert same(found["kept"], hva.merge_compression_states(states)["kept"])
            assert "rank 1" in refused
            assert item in refused or item == "kept"
