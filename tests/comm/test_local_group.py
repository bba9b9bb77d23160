"""Many ranks in one process: their collectives, and what holds for every compressor at any number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from hvd_adaptive import VirtualRanks  # noqa: E402
from hvd_adaptive.comm.local_group import (  # noqa: E402
    LocalGroup,
    LocalGroupError,
    LocalRank,
    recursive_doubling,
)
from hvd_adaptive.comm.request import Request  # noqa: E402
from hvd_adaptive.commands.precompile import precompile  # noqa: E402
from hvd_adaptive.compressors import REGISTRY, parse  # noqa: E402

SIZES = (1, 2, 3, 4, 7, 16, 64)
SHAPES = {"wide": (40, 60), "tall": (70, 20), "bias": (33,), "empty": (0, 4)}


def gradients(size: int, step: int) -> list[dict[str, Tensor]]:
    """Heavy tails, different by rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + size)
    return [
        {name: torch.randn(shape, generator=generator).pow(3) for name, shape in SHAPES.items()}
        for _ in range(size)
    ]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def make(size: int, spec: str, **options: Any) -> tuple[nn.Module, VirtualRanks]:
    model = Layers()
    return model, VirtualRanks(size, model.named_parameters(), spec, **options)


# --- collectives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_sum_is_the_sum_within_the_rounding_of_its_dtype(size: int, dtype: torch.dtype) -> None:
    given = [
        torch.randn(100, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)
    ]
    expected = sum(tensor.double() for tensor in given)
    total = recursive_doubling(given).double()
    torch.testing.assert_close(total, expected, rtol=1e-2, atol=30 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("size", SIZES)
def test_every_collective_gives_each_rank_what_is_its(size: int) -> None:
    def work(rank: LocalRank) -> None:
        transport = rank.transport(hvd.Sum)
        mine = torch.full((size,), float(rank.rank))
        handles = [
            transport.submit(Request(operation, mine.clone()), operation, 0)
            for operation in ("allreduce", "allgather", "alltoall")
        ]
        summed, gathered, exchanged = (transport.wait(handle) for handle in handles)
        everyone = torch.arange(float(size))
        assert torch.equal(summed, everyone.sum().expand(size))
        assert torch.equal(gathered, everyone.repeat_interleave(size))
        assert torch.equal(exchanged, everyone)
        gathered.zero_()  # is its own
        channel = rank.channel("plan")
        pending = channel.mean(torch.full((2,), float(rank.rank)).numpy())
        assert channel.broadcast(f"from {rank.rank}") == "from 0"
        assert pending().tolist() == [(size - 1) / 2] * 2

    LocalGroup(size).run(work)


def test_ranks_that_start_different_collectives_fail_with_both_names() -> None:
    def work(rank: LocalRank) -> None:
        rank.control(f"of rank {rank.rank}").allgather(1)

    with pytest.raises(LocalGroupError, match=r"starts 'of rank 1' where others .* 'of rank 0'"):
        LocalGroup(3).run(work)


def test_a_rank_that_others_wait_for_is_named() -> None:
    def work(rank: LocalRank) -> None:
        if rank.rank != 1:
            rank.control("lonely").allgather(1)

    with pytest.raises(LocalGroupError, match=r"rank 0 waits in 'lonely'.*rank 1 has ended"):
        LocalGroup(3).run(work)


def test_what_one_rank_raises_ends_all() -> None:
    ended = []

    def work(rank: LocalRank) -> None:
        if rank.rank == 1:
            raise KeyError("no such layer")
        try:
            rank.control("all").allgather(1)
        finally:
            ended.append(rank.rank)

    with pytest.raises(KeyError, match="no such layer"):
        LocalGroup(3).run(work)
    assert sorted(ended) == [0, 2]


# --- what holds for every compressor ------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", REGISTRY)
def test_nothing_is_lost_and_all_ranks_get_the_same(name: str, size: int) -> None:
    _, ranks = make(size, name, feedback="ef")
    wanted = {layer: torch.zeros(shape, dtype=torch.float64) for layer, shape in SHAPES.items()}
    applied = {layer: torch.zeros(shape, dtype=torch.float64) for layer, shape in SHAPES.items()}
    for step in range(3):
        given = gradients(size, step)
        for mine in given:
            for layer, grad in mine.items():
                wanted[layer] += grad.double() / size
        ranks.reduce(given)
        for mine in given[1:]:
            for layer, grad in mine.items():
                assert torch.equal(grad, given[0][layer]), "ranks hold different results"
        for layer, grad in given[0].items():
            applied[layer] += grad.double()
    for state in ranks.compression_state_dicts():
        for layer, slots in state["kept"].items():
            for residual in slots.values():
                applied[layer] += residual.double().view(SHAPES[layer]) / size
    # sums are rounded to what is sent, once a step and level of the tree, and nobody keeps that
    rounding = {"fp16": 2.0**-11, "bf16": 2.0**-8}.get(name, 1e-5)
    for layer in SHAPES:
        error = (applied[layer] - wanted[layer]).abs().sum()
        assert float(error) <= 4.0 * rounding * float(wanted[layer].abs().sum()), layer


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize(
    "feedback", ["none", "ef", "ef:dtype=bf16", "ef21", "ef21-sgdm:momentum=0.9", "dgc:momentum=0.9"]
)
def test_a_layer_that_is_not_finite_on_one_rank_changes_nothing_that_is_kept(
    feedback: str, size: int
) -> None:
    _, ranks = make(size, "topk:density=0.05", feedback=feedback)
    ranks.reduce(gradients(size, 0))
    before = ranks.compression_state_dicts()
    given = gradients(size, 1)
    given[-1]["wide"][3, 4] = torch.nan
    ranks.reduce(given)
    assert all(not bool(mine["wide"].isfinite().all()) for mine in given)
    for old, new in zip(before, ranks.compression_state_dicts(), strict=True):
        for slot, kept in old["kept"].get("wide", {}).items():
            # of the sum of residual and gradient, up to some 30
            tolerance = 0.25 if kept.dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(new["kept"]["wide"][slot], kept, rtol=0.01, atol=tolerance)


@pytest.fixture(scope="module")
def compiled() -> None:
    """A planner whose kernels must be compiled first is late, and then delays its switch."""
    precompile()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("size", [2, 7])
@pytest.mark.parametrize("planner", ["lgreco:period=6", "cgx:period=6", "accordion:period=6"])
def test_planners_switch_all_virtual_ranks_at_the_same_step(planner: str, size: int) -> None:
    _, ranks = make(size, "topk:density=0.05", planner=planner)
    digests = []
    for step in range(30):
        given = gradients(size, step)
        ranks.reduce(given)
        digests.append(ranks.plan.digest)
        assert all(torch.equal(given[0]["wide"], mine["wide"]) for mine in given)
    assert len(set(digests)) > 1


def test_a_state_continues_bit_for_bit() -> None:
    model, ranks = make(4, "topk:density=0.05")
    other_model, others = make(4, "topk:density=0.05")
    for step in range(3):
        ranks.reduce(gradients(4, step))
    others.load_compression_state_dicts(ranks.compression_state_dicts())
    for one in (ranks, others):
        one.reduce(gradients(4, 3))
    for mine, other in zip(model.parameters(), other_model.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


def test_a_state_that_differs_on_one_rank_is_refused_and_the_ranks_are_named() -> None:
    ranks = VirtualRanks(3, Layers().named_parameters(), "topk:density=0.1")
    ranks.reduce(gradients(3, 0))
    states = ranks.compression_state_dicts()
    states[1]["rounds"] += 1
    with pytest.raises(ValueError, match=r"rounds is [12] on rank"):
        ranks.load_compression_state_dicts(states)


def test_other_numbers_of_gradients_than_ranks_are_refused() -> None:
    _, ranks = make(4, "none")
    with pytest.raises(ValueError, match="3 ranks' gradients given for a group of 4"):
        ranks.reduce(gradients(3, 0))


def test_every_compressor_is_built_from_its_name_alone() -> None:
    assert all(parse(name).name == name for name in REGISTRY)
