"""Two-shot: residuals at both ends, damage, changes of the shards, and EF21 in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from hvd_adaptive import VirtualRanks, merge_compression_states  # noqa: E402
from hvd_adaptive.buckets import Bucket  # noqa: E402
from hvd_adaptive.collectives.shards import GRAIN, cut  # noqa: E402
from hvd_adaptive.comm.local_group import LocalTransport  # noqa: E402
from hvd_adaptive.comm.request import Request  # noqa: E402
from hvd_adaptive.engine.reducer import Reducer  # noqa: E402
from hvd_adaptive.layers import Layer, PayloadKind  # noqa: E402
from hvd_adaptive.wire import WireError, frame  # noqa: E402
from tests.collectives.helpers import (  # noqa: E402
    OVERRIDES,
    SHAPES,
    Layers,
    everyone,
    train,
    waiting,
)

TRIALS = 60


def ranks_of(size: int, model: nn.Module, compression: str, **options: Any) -> VirtualRanks:
    options.setdefault("scheme", "two_shot")
    return VirtualRanks(size, model.named_parameters(), compression, **options)


# --- where a bucket is cut --------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20_000), st.floats(0.0, 32.0)), max_size=8),
    st.integers(1, 70),
)
def test_shards_hold_every_element_once_and_weigh_the_same(
    layers: list[tuple[int, float]], ranks: int
) -> None:
    rows = tuple(Layer(i, f"{i}", (numel,)) for i, (numel, _) in enumerate(layers))
    device = torch.device("cpu")
    bucket = Bucket(0, PayloadKind.ENCODED, rows, (), torch.float32, device, "none", "two_shot")
    weights = [weight for _, weight in layers]
    shards = cut(bucket, weights, ranks)
    assert len(shards.bounds) == ranks + 1
    assert shards.bounds[0] == 0
    assert shards.bounds[-1] == bucket.numel
    assert all(a <= b for a, b in zip(shards.bounds[:-1], shards.bounds[1:], strict=True))
    loads = np.cumsum([0.0, *np.repeat(weights, [numel for numel, _ in layers])])
    if len(loads) > 1 and loads[-1] > 0:
        shares = np.diff(loads[list(shards.bounds)])
        # two cuts may each be off by half a grain of the heaviest layer
        assert shares.max() <= loads[-1] / ranks + GRAIN * max(weights) + 1e-3


# --- sums and residuals -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
def test_what_steps_and_what_waits_are_the_gradients(size: int) -> None:
    model = Layers()
    ranks = ranks_of(size, model, "topk:density=0.05", overrides=OVERRIDES)
    for name in SHAPES:
        getattr(model, name).grad = None
    summed, applied = train(ranks, model, size)
    states = ranks.compression_state_dicts()
    for name, shape in SHAPES.items():
        waits = waiting(states, name).view(shape)
        torch.testing.assert_close(applied[name] + waits, summed[name], rtol=1e-5, atol=1e-4)
    assert any(state["owned"] for state in states)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("compression", ["topk:density=0.05,values=fp32", "qsgd:bits=4", "onebit"])
@pytest.mark.parametrize("feedback", ["ef", "ef21"])
def test_a_layer_that_is_not_finite_leaves_all_residuals(
    bad: float, compression: str, feedback: str
) -> None:
    model = Layers()
    ranks = ranks_of(3, model, compression, feedback=feedback, overrides={"*": compression})
    for step in range(3):
        ranks.reduce(everyone(3, step))
    before = ranks.compression_state_dicts()
    spoiled = everyone(3, 3)
    spoiled[1]["wide"].view(-1)[-7] = bad  # one piece of it: the others are finite
    ranks.reduce(spoiled)
    after = ranks.compression_state_dicts()
    assert not bool(model.wide.grad.isfinite().any())
    assert all(bool(getattr(model, name).grad.isfinite().all()) for name in SHAPES if name != "wide")
    for one, other in zip(before, after, strict=True):
        for slot, held in one["kept"]["wide"].items():
            torch.testing.assert_close(other["kept"]["wide"][slot], held, rtol=1e-4, atol=1e-4)
        assert [start for start, _ in one["owned"].get("wide", ())] == [
            start for start, _ in other["owned"].get("wide", ())
        ]
        for (_, a), (_, b) in zip(
            one["owned"].get("wide", ()), other["owned"].get("wide", ()), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_sums_that_are_sent_whole_are_those_of_the_allgather() -> None:
    results = []
    for scheme in ("allgather", "two_shot:level=1.0"):
        model = Layers()
        ranks = ranks_of(4, model, "topk:density=0.05", overrides=OVERRIDES, scheme=scheme)
        for step in range(3):
            ranks.reduce(everyone(4, step))
        results.append([getattr(model, name).grad.clone() for name in SHAPES])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# --- changes ----------------------------------------------------------------------------------------


def continued(states: Sequence[Mapping[str, Any]], size: int, **options: Any) -> tuple[nn.Module, Any]:
    model = Layers()
    ranks = ranks_of(size, model, "topk:density=0.05", overrides=OVERRIDES, **options)
    ranks.load_compression_state_dicts(states)
    return model, ranks


@pytest.mark.parametrize("feedback", ["ef", "ef21", "ef21-sgdm:momentum=0.5", "dgc:momentum=0.5"])
def test_a_run_that_is_resumed_goes_on_to_the_bit(feedback: str) -> None:
    model = Layers()
    ranks = ranks_of(4, model, "topk:density=0.05", overrides=OVERRIDES, feedback=feedback)
    for step in range(3):
        ranks.reduce(everyone(4, step))
    other, resumed = continued(ranks.compression_state_dicts(), 4, feedback=feedback)
    for step in range(3, 6):
        ranks.reduce(everyone(4, step))
        resumed.reduce(everyone(4, step))
        for name in SHAPES:
            assert torch.equal(getattr(model, name).grad, getattr(other, name).grad), name


@pytest.mark.parametrize("size", [1, 3, 8])
def test_no_gradient_is_lost_with_another_number_of_ranks(size: int) -> None:
    ranks = ranks_of(4, Layers(), "topk:density=0.05", overrides=OVERRIDES)
    for step in range(3):
        ranks.reduce(everyone(4, step))
    states = ranks.compression_state_dicts()
    assert any(state["owned"] for state in states)
    merged = merge_compression_states(states)
    _, others = continued([merged] * size, size)
    for name in SHAPES:
        mean = waiting(others.compression_state_dicts(), name) / size
        torch.testing.assert_close(mean, waiting(states, name) / 4, rtol=1e-5, atol=1e-5)


def test_what_is_owned_goes_on_as_ones_own_where_nothing_is_compressed_twice() -> None:
    ranks = ranks_of(4, Layers(), "topk:density=0.05", overrides=OVERRIDES)
    for step in range(3):
        ranks.reduce(everyone(4, step))
    states = ranks.compression_state_dicts()
    model, others = continued(states, 4, scheme="allgather")
    nothing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    others.reduce([dict(nothing) for _ in range(4)])
    after = others.compression_state_dicts()
    assert not any(state["owned"] for state in after)
    for name, shape in SHAPES.items():
        left = waiting(after, name) + 4 * getattr(model, name).grad.double().view(-1)
        torch.testing.assert_close(left, waiting(states, name), rtol=1e-5, atol=1e-4)
        assert shape == getattr(model, name).grad.shape


def skewed(size: int, step: int) -> list[dict[str, Tensor]]:
    """Gradients of which a tenth of the largest layer is far larger than the rest."""
    everything = everyone(size, step)
    for grads in everything:
        grads["wide"][:10] *= 100.0
    return everything


def test_shards_follow_the_mass_and_a_resumed_run_cuts_alike() -> None:
    model = Layers()
    ranks = ranks_of(4, model, "topk:density=0.05", overrides=OVERRIDES)
    ranks.reduce(skewed(4, 0))
    (first,) = ranks.compression_state_dicts()[0]["shards"].values()
    for step in range(1, 15):
        ranks.reduce(skewed(4, step))
    states = ranks.compression_state_dicts()
    (last,) = states[0]["shards"].values()
    assert last["bounds"] != first["bounds"]
    assert max(last["loads"]) < 1.3 * np.mean(last["loads"])
    assert all(state["shards"] == states[0]["shards"] for state in states)
    other, resumed = continued(states, 4)
    for step in range(15, 40):
        ranks.reduce(skewed(4, step))
        resumed.reduce(skewed(4, step))
        for name in SHAPES:
            assert torch.equal(getattr(model, name).grad, getattr(other, name).grad), (name, step)


# --- damage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["alltoall", "allgather"])
@pytest.mark.parametrize("compression", ["topk:density=0.05", "qsgd:bits=4", "alq:bits=3"])
def test_damage_on_the_way_is_told_on_every_rank_or_changes_nothing_but_values(
    monkeypatch: pytest.MonkeyPatch, operation: str, compression: str
) -> None:
    generator = np.random.default_rng(3)
    submit = LocalTransport.submit

    def damaging(self: LocalTransport, request: Request, name: str, step: int) -> Callable[[], Tensor]:
        if request.operation == operation and self.rank == 1 and request.tensor.dtype == torch.uint8:
            damaged = request.tensor.clone()
            for place in generator.integers(0, damaged.numel(), size=generator.integers(1, 4)):
                damaged[place] ^= int(generator.integers(1, 256))
            request = Request(operation, damaged, request.splits)
        return submit(self, request, name, step)

    synchronize = Reducer.synchronize

    def told(self: Reducer) -> None:
        try:
            synchronize(self)
        except WireError:
            errors.append(self)

    monkeypatch.setattr(LocalTransport, "submit", damaging)
    monkeypatch.setattr(Reducer, "synchronize", told)
    found = 0
    for trial in range(TRIALS):
        errors: list[Reducer] = []
        ranks = ranks_of(3, Layers(), compression, overrides={"*": compression})
        ranks.reduce(everyone(3, trial))
        assert len(errors) in (0, 3)
        found += bool(errors)
    # headers, counts and lengths do not fit then; a value may just be another value
    assert found > TRIALS // 10


@pytest.mark.parametrize("limit", [3000, 9000])
def test_what_is_too_large_is_told_on_every_rank(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    messages: list[str] = []
    synchronize = Reducer.synchronize

    def told(self: Reducer) -> None:
        try:
            synchronize(self)
        except ValueError as error:
            messages.append(str(error))

    monkeypatch.setattr(frame, "MAX_GATHERED_BYTES", limit)  # of shards, or of the sums
    monkeypatch.setattr(Reducer, "synchronize", told)
    ranks = ranks_of(3, Layers(), "qsgd:bits=4", overrides={"*": "qsgd:bits=4"})
    ranks.reduce(everyone(3, 0))
    assert len(messages) == 3
    assert all("bytes to send for bucket" in message for message in messages), messages


# --- EF21 in both directions ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 16])
def test_ef21_in_both_directions_converges_linearly_on_a_quadratic(size: int) -> None:
    """Kimad's section 4.1: f(x) = 1/2 sum a_i x_i^2; with n ranks, each has a part of its own."""
    dim, density, rate = 1024, 0.1, 0.02
    generator = torch.Generator().manual_seed(1)
    curvature = torch.linspace(0.5, 5.0, dim)
    shifts = torch.randn(size, dim, generator=generator)
    shifts -= shifts.mean(0)  # so that the minimum of the mean is at 0
    model = Layers({"x": (32, 32)})
    spec = f"topk:density={density},values=fp32"
    ranks = ranks_of(size, model, spec, feedback="ef21")
    x = torch.randn(dim, generator=generator)
    distances = []
    for _ in range(900):
        distances.append(float(x.double().norm()))
        grads = [{"x": (curvature * (x + shift)).view(32, 32)} for shift in shifts]
        ranks.reduce(grads)
        x = x - rate * model.x.grad.view(-1)
    # a straight line in the logarithm, down to what float32 resolves beside the ranks' own parts
    logs = np.log(distances)
    first, second = logs[200] - logs[500], logs[500] - logs[800]
    assert first > 1.0
    assert second > 0.5 * first or distances[800] < 1e-5 * distances[0]
    assert distances[-1] < 1e-2 * distances[0]
