"""Training with compressed gradients: against a simulation in one process, and to accuracy."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

import hvd_adaptive as hva
from hvd_adaptive.compressors import parse
from hvd_adaptive.config import CompressionConfig
from hvd_adaptive.layers import Layer

SPECS = (
    "topk:density=0.05,values=fp32",
    "topk:density=0.02,values=bf16",
    "topk:density=0.1,values=int8",
)


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 40, generator=generator)
    return x, torch.randint(0, 4, (8,), generator=generator)


def gradients(net: nn.Module, rank: int, step: int) -> list[Tensor]:
    x, y = batch(rank, step)
    loss = nn.functional.cross_entropy(net(x), y)
    return list(torch.autograd.grad(loss, list(net.parameters())))


def simulated(spec: str, ranks: int, steps: int) -> nn.Module:
    """The same training in one process: error feedback written out, payloads summed in rank order."""
    net = model()
    choice = CompressionConfig.of(spec, None, None)
    compressors = [
        choice.compressor_of(Layer(i, name, tuple(p.shape)))
        for i, (name, p) in enumerate(net.named_parameters())
    ]
    residuals = [[torch.zeros(p.numel()) for p in net.parameters()] for _ in range(ranks)]
    for step in range(steps):
        local = [gradients(net, rank, step) for rank in range(ranks)]
        for index, (p, compressor) in enumerate(zip(net.parameters(), compressors, strict=True)):
            total = torch.zeros(p.numel())
            for rank in range(ranks):
                x = residuals[rank][index].add_(local[rank][index].reshape(-1))
                payload = compressor.compress_(x, compressor.level)
                compressor.decompress_add_(payload, total, 1.0 / ranks)
            with torch.no_grad():
                p.sub_(total.view(p.shape), alpha=0.1)
    return net


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.ranks(2, 4)
def test_training_equals_a_simulation_in_one_process(spec: str) -> None:
    net = model()
    optimizer = hva.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1),
        named_parameters=net.named_parameters(),
        compression=spec,
        bucket_cap_mb=0.01,
    )
    for step in range(8):
        optimizer.zero_grad()
        x, y = batch(hvd.rank(), step)
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    expected = simulated(spec, hvd.size(), 8)
    for p, q in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    data = datasets.load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    held_out = torch.arange(len(x)) % 5 == 0
    return x[~held_out], y[~held_out], x[held_out], y[held_out]


def batches(x: Tensor, y: Tensor, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each rank its share of the same permutations, 16 samples at a time."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator)
        order = order[: len(order) // (16 * hvd.size()) * 16 * hvd.size()]
        for rows in order.view(-1, hvd.size(), 16)[:, hvd.rank()]:
            yield x[rows], y[rows]


def accuracy(spec: str) -> float:
    """Share of the held-out digits that are recognized after 15 epochs."""
    x, y, x_held, y_held = digits()
    torch.manual_seed(5)
    net = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = hva.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.05 * hvd.size(), momentum=0.5),
        named_parameters=net.named_parameters(),
        compression=spec,
    )
    for x_batch, y_batch in batches(x, y, epochs=15):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x_batch), y_batch).backward()
        optimizer.step()
    with torch.no_grad():
        return float((net(x_held).argmax(1) == y_held).float().mean())


@pytest.mark.ranks(2)
def test_one_percent_of_the_gradient_with_error_feedback_reaches_dense_accuracy() -> None:
    dense = accuracy("none")
    assert dense > 0.93
    assert accuracy("topk:density=0.01") >= dense - 0.015


@pytest.mark.smoke
def test_all_ranks_hold_the_same_parameters_after_training() -> None:
    net = model()
    optimizer = hva.DistributedOptimizer(
        torch.optim.Adam(net.parameters()), named_parameters=net.named_parameters(), compression="topk"
    )
    for step in range(5):
        optimizer.zero_grad()
        x, y = batch(hvd.rank(), step)
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    flat = torch.cat([p.detach().view(-1) for p in net.parameters()])
    everyone = hvd.allgather(flat[None], name="parameters")
    assert torch.equal(everyone, everyone[:1].expand_as(everyone))
    assert parse("topk").level == optimizer.plan.layers[0].level


def test_the_example_in_the_docstring_runs() -> None:
    outcome = doctest.testmod(importlib.import_module("hvd_adaptive.optimizer"))
    assert (outcome.attempted > 0, outcome.failed) == (True, 0)


def trained_by_horovod(compression: object) -> list[Tensor]:
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1),
        named_parameters=net.named_parameters(),
        compression=compression,
    )
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(hvd.rank(), step)
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.ranks(2, 4)
def test_linear_compressors_work_in_horovods_own_optimizer() -> None:
    dense = trained_by_horovod(hvd.Compression.none)
    for ours, horovods in [
        (hva.Compression.none, hvd.Compression.none),
        (hva.Compression.fp16, hvd.Compression.fp16),
    ]:
        for p, q in zip(trained_by_horovod(ours), trained_by_horovod(horovods), strict=True):
            assert torch.equal(p, q)
    for p, q in zip(trained_by_horovod(hva.Compression.bf16), dense, strict=True):
        torch.testing.assert_close(p, q, rtol=0.01, atol=1e-3)
        assert not torch.equal(p, q) or p.numel() < 10


@pytest.mark.ranks(2, 4)
def test_random_k_in_horovods_own_optimizer_sends_the_same_elements_from_all_ranks() -> None:
    whole = hva.Compression.randomk(density=1.0, unbiased=True)
    dense = trained_by_horovod(hvd.Compression.none)
    for p, q in zip(trained_by_horovod(whole), dense, strict=True):
        torch.testing.assert_close(p, q)
    before = [p.detach().clone() for p in model().parameters()]
    after = trained_by_horovod(hva.Compression.randomk(density=0.05, unbiased=True))
    for index, (start, p, q) in enumerate(zip(before, after, dense, strict=True)):
        gathered = hvd.allgather(p.reshape(1, -1), name=f"randomk.{index}")
        assert all(torch.equal(row, gathered[0]) for row in gathered)
        moved = float((p != start).float().mean())
        if p.dim() > 1 and p.numel() >= 1024:  # three draws of 5 %
            assert 0.1 < moved <= 0.15
        else:
            assert moved == pytest.approx(float((q != start).float().mean()), abs=0.1)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["topk", "powersgd"])
def test_what_cannot_be_summed_once_is_refused_in_horovods_own_optimizer(name: str) -> None:
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1),
        named_parameters=net.named_parameters(),
        compression=getattr(hva.Compression, name)(),
    )
    x, y = batch(hvd.rank(), 0)
    with pytest.raises(TypeError, match=r"use hvd_adaptive\.DistributedOptimizer"):
        nn.functional.cross_entropy(net(x), y).backward()
    del optimizer


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("compression", ["none", "topk:density=0.1"])
def test_a_parameter_that_is_frozen_between_steps_no_longer_moves(compression: str) -> None:
    net = model()
    optimizer = hva.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
        named_parameters=net.named_parameters(),
        compression=compression,
    )
    frozen = net.get_parameter("2.weight")
    for step in range(6):
        if step == 3:
            # its gradient of the step before is still there
            frozen.requires_grad_(False)
            before = frozen.detach().clone()
        if step != 3:
            optimizer.zero_grad()
        x, y = batch(hvd.rank(), step)
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert torch.equal(frozen, before)
    assert "2.weight" not in [row.layer for row in optimizer.plan]
