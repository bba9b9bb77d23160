"""Hierarchical: sums in a node, residuals by chunk, ways from and to other schemes, damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from hvd_adaptive import VirtualRanks, merge_compression_states  # noqa: E402
from hvd_adaptive.comm.local_group import LocalTransport  # noqa: E402
from hvd_adaptive.comm.request import Group, Request  # noqa: E402
from hvd_adaptive.comm.topology import Topology  # noqa: E402
from hvd_adaptive.engine.reducer import Reducer  # noqa: E402
from hvd_adaptive.wire import WireError  # noqa: E402
from tests.collectives.helpers import (  # noqa: E402
    OVERRIDES,
    SHAPES,
    Layers,
    everyone,
    train,
    waiting,
)

SIZES = ((4, 2), (8, 4), (6, 2), (16, 4))
"""Ranks, and ranks of a node."""
WHOLE = "topk:density=1.0,values=fp32"


def ranks_of(size: int, per_node: int, model: nn.Module, **options: Any) -> VirtualRanks:
    options.setdefault("scheme", "hierarchical")
    options.setdefault("overrides", OVERRIDES)
    compression = options.pop("compression", "topk:density=0.05,values=fp32")
    return VirtualRanks(size, model.named_parameters(), compression, ranks_per_node=per_node, **options)


def results(model: nn.Module) -> list[Tensor]:
    return [getattr(model, name).grad.clone() for name in SHAPES]


# --- the topology -----------------------------------------------------------------------------------


def test_neighbors_and_peers_cross_in_one_rank() -> None:
    topology = Topology(("a", "b", "b", "a", "c", "c"))
    for rank in range(topology.size):
        assert set(topology.neighbors(rank)) & set(topology.peers(rank)) == {rank}
        assert topology.neighbors(rank)[topology.local_rank(rank)] == rank
    assert len(topology.groups) == 3 + 2
    assert topology.ranks_per_node == 2


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("aaaa", "all 4 ranks are on one node"),
        ("abcd", "every node has one rank"),
        ("aabcc", "nodes have different numbers of ranks (a:2,b:1,c:2)"),
    ],
)
def test_what_is_no_hierarchy_says_why(names: str, why: str) -> None:
    topology = Topology(tuple(names))
    assert not topology.is_layered
    assert topology.ranks_per_node == 1
    assert topology.obstacle == why


@pytest.mark.parametrize(("size", "per_node"), [(4, 4), (4, 1), (5, 2)])
def test_where_there_is_no_hierarchy_it_is_two_shot_to_the_bit(size: int, per_node: int) -> None:
    found = []
    for scheme in ("two_shot:level=0.1", "hierarchical:level=0.1"):
        model = Layers()
        ranks = ranks_of(size, per_node, model, scheme=scheme)
        for step in range(3):
            ranks.reduce(everyone(size, step))
        found.append(results(model))
    assert all(map(torch.equal, *found))


# --- sums and residuals -----------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "per_node"), SIZES)
@pytest.mark.parametrize("feedback", ["ef", "ef:dtype=bf16"])
def test_what_steps_and_what_waits_are_the_gradients(size: int, per_node: int, feedback: str) -> None:
    model = Layers()
    ranks = ranks_of(size, per_node, model, feedback=feedback)
    summed, applied = train(ranks, model, size)
    states = ranks.compression_state_dicts()
    rounding = 2.0**-7 * size if "bf16" in feedback else 1e-4
    for name, shape in SHAPES.items():
        waits = waiting(states, name).view(shape)
        scale = float(summed[name].abs().max()) if "bf16" in feedback else 1.0
        torch.testing.assert_close(
            applied[name] + waits, summed[name], rtol=1e-5, atol=rounding * scale
        )
    assert any(state["owned"] for state in states)


def test_each_rank_of_a_node_keeps_what_no_other_one_keeps() -> None:
    ranks = ranks_of(8, 4, Layers(), overrides={"*": "qsgd:bits=4"}, feedback="ef")
    for step in range(2):
        ranks.reduce(everyone(8, step))
    states = ranks.compression_state_dicts()
    kept = [torch.cat([state["kept"][name]["residual"] for name in SHAPES]).bool() for state in states]
    for node in (kept[:4], kept[4:]):
        counts = torch.stack(node).sum(0)
        assert int(counts.max()) == 1
        assert int(counts.count_nonzero()) > 0.5 * counts.numel()


@pytest.mark.parametrize(
    "feedback", ["ef", "ef:decay=0.5", "ef21", "ef21-sgdm:momentum=0.5", "dgc:momentum=0.5", "none"]
)
@pytest.mark.parametrize("dense_steps", [0, 2])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_what_is_sent_whole_steps_as_with_two_shot(feedback: str, dense_steps: int, op: int) -> None:
    found = []
    for scheme in ("two_shot", "hierarchical"):
        model, steps = Layers(), []
        ranks = ranks_of(
            6, 3, model, scheme=scheme, compression=WHOLE, overrides={"*": WHOLE},
            feedback=feedback, dense_steps=dense_steps, op=op,
        )  # fmt: skip
        for step in range(5):
            ranks.reduce(everyone(6, step))
            steps += results(model)
        found.append(steps)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("compression", ["topk:density=0.05,values=fp32", "qsgd:bits=4", "onebit"])
@pytest.mark.parametrize("feedback", ["ef", "ef21", "ef21-sgdm:momentum=0.5"])
def test_a_layer_that_is_not_finite_leaves_all_residuals(
    bad: float, compression: str, feedback: str
) -> None:
    model = Layers()
    ranks = ranks_of(
        8, 4, model, compression=compression, feedback=feedback, overrides={"*": compression}
    )
    for step in range(3):
        ranks.reduce(everyone(8, step))
    before = ranks.compression_state_dicts()
    spoiled = everyone(8, 3)
    spoiled[1]["wide"].view(-1)[-7] = bad  # in one of its chunks: the others are finite
    ranks.reduce(spoiled)
    after = ranks.compression_state_dicts()
    assert not bool(model.wide.grad.isfinite().any())
    assert all(bool(getattr(model, name).grad.isfinite().all()) for name in SHAPES if name != "wide")
    for one, other in zip(before, after, strict=True):
        for slot, held in one["kept"]["wide"].items():
            torch.testing.assert_close(other["kept"]["wide"][slot], held, rtol=1e-4, atol=1e-4)
        pairs = zip(one["owned"].get("wide", ()), other["owned"].get("wide", ()), strict=True)
        for (first, a), (second, b) in pairs:
            assert first == second
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_what_float16_cannot_hold_waits_and_comes() -> None:
    size, shape = 4, (64, 64)
    model = nn.Module()
    model.register_parameter("x", nn.Parameter(torch.zeros(shape, dtype=torch.float16)))
    ranks = ranks_of(
        size, 2, model, compression=WHOLE, overrides={"*": WHOLE}, feedback="ef", op=hvd.Sum
    )
    applied = torch.zeros(shape, dtype=torch.float64)
    for step in range(4):
        value = 40_000.0 if step == 0 else 0.0  # the sum is above 65,504
        ranks.reduce([{"x": torch.full(shape, value, dtype=torch.float16)} for _ in range(size)])
        assert bool(model.x.grad.isfinite().all())
        applied += model.x.grad.double()
    torch.testing.assert_close(applied, torch.full_like(applied, 4 * 40_000.0), rtol=1e-3, atol=0.0)


# --- changes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("feedback", ["ef", "ef21", "ef21-sgdm:momentum=0.5", "dgc:momentum=0.5"])
def test_a_run_that_is_resumed_continues_to_the_bit(feedback: str) -> None:
    model, twin = Layers(), Layers()
    ranks = ranks_of(4, 2, model, feedback=feedback)
    for step in range(3):
        ranks.reduce(everyone(4, step))
    resumed = ranks_of(4, 2, twin, feedback=feedback)
    resumed.load_compression_state_dicts(ranks.compression_state_dicts())
    for step in range(3, 6):
        ranks.reduce(everyone(4, step))
        resumed.reduce(everyone(4, step))
        assert all(map(torch.equal, results(model), results(twin)))


def reduced_with(
    states: Sequence[Mapping[str, Any]], size: int, per_node: int, scheme: str, feedback: str
) -> list[Tensor]:
    """The gradients of some more steps, in which everything that waits is sent.

    Their sum; of EF21, whose steps depend on no others then, the last.
    """
    model = Layers()
    ranks = ranks_of(
        size, per_node, model, scheme=scheme, feedback=feedback,
        compression=WHOLE, overrides={"*": WHOLE},
    )  # fmt: skip
    ranks.load_compression_state_dicts(states)
    steps = []
    for step in range(3):
        ranks.reduce(everyone(size, 7 + step))
        steps.append(results(model))
    return (
        steps[-1]
        if feedback == "ef21"
        else [torch.stack(each).sum(0) for each in zip(*steps, strict=True)]
    )


@pytest.mark.parametrize("before", ["two_shot", "allgather", "hierarchical"])
@pytest.mark.parametrize("feedback", ["ef", "ef21"])
def test_nothing_is_lost_on_the_way_from_and_to_other_schemes(before: str, feedback: str) -> None:
    ranks = ranks_of(6, 2, Layers(), scheme=before, feedback=feedback)
    for step in range(3):
        ranks.reduce(everyone(6, step))
    states = ranks.compression_state_dicts()
    found = [
        reduced_with(states, 6, 2, scheme, feedback)
        for scheme in ("allgather", "two_shot", "hierarchical")
    ]
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-4)


def test_a_state_of_all_ranks_is_continued_by_another_number_of_them() -> None:
    ranks = ranks_of(4, 2, Layers(), feedback="ef")
    for step in range(3):
        ranks.reduce(everyone(4, step))
    states = ranks.compression_state_dicts()
    merged = merge_compression_states(states)
    others = ranks_of(8, 4, Layers(), feedback="ef")
    others.load_compression_state_dicts([merged] * 8)
    for name in SHAPES:
        mean = waiting(others.compression_state_dicts(), name) / 8
        torch.testing.assert_close(mean, waiting(states, name) / 4, rtol=1e-5, atol=1e-5)


def test_clipping_of_whole_gradients_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'dgc:.*clip=1.*' looks at each rank's whole gradient.*two_shot"
    ):
        ranks_of(4, 2, Layers(), feedback="dgc:clip=1")


# --- damage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["alltoall", "allgather"])
def test_damage_between_two_nodes_is_told_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    submit, synchronize = LocalTransport.submit, Reducer.synchronize
    damaged: Group = "peers"

    def damaging(self: LocalTransport, request: Request, name: str, step: int) -> Callable[[], Tensor]:
        if (request.operation, request.group, self.rank) == (operation, damaged, 1):
            tensor = request.tensor.clone()
            tensor[0] ^= 255  # of the magic number
            request = Request(request.operation, tensor, request.splits, request.group)
        return submit(self, request, name, step)

    errors: list[str] = []

    def told(self: Reducer) -> None:
        try:
            synchronize(self)
        except WireError as error:
            errors.append(str(error))

    monkeypatch.setattr(LocalTransport, "submit", damaging)
    monkeypatch.setattr(Reducer, "synchronize", told)
    ranks_of(6, 2, Layers()).reduce(everyone(6, 0))
    assert len(errors) == 6
    assert all("magic number" in error for error in errors)


@pytest.mark.parametrize("compression", ["qsgd:bits=2", "qsgd:bits=2,correlated=true"])
def test_chunks_of_the_same_numbers_are_rounded_apart(
    monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    submit, sent = LocalTransport.submit, {}

    def watching(self: LocalTransport, request: Request, name: str, step: int) -> Callable[[], Tensor]:
        if (request.operation, request.group) == ("alltoall", "peers"):
            sent[self.rank] = request.tensor.clone()
        return submit(self, request, name, step)

    monkeypatch.setattr(LocalTransport, "submit", watching)
    model = nn.Module()
    model.register_parameter("x", nn.Parameter(torch.zeros(64, 64)))
    ranks = ranks_of(4, 2, model, overrides={"*": compression}, feedback="none")
    half = torch.randn(2048, generator=torch.Generator().manual_seed(0))
    ranks.reduce([{"x": torch.cat([half, half]).view(64, 64).clone()} for _ in range(4)])
    assert len(sent[0]) == len(sent[1])
    assert not torch.equal(sent[0], sent[1])
