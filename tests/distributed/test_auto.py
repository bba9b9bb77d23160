"""compression="auto" over real ranks: they measure together, and agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.engine.cost_measurement import CostMeasurement
from tests.distributed.workloads import make_model, ours, set_gradients

SHAPES = {"wide": (128, 512), "tall": (4000, 8), "bias": (64,)}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
    return {name: torch.randn(shape, generator=generator).pow(3) for name, shape in SHAPES.items()}


def train(optimizer: Any, model: nn.Module, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        set_gradients(model, gradients(step))
        optimizer.report_loss(1.0)
        optimizer.step()


def everyone(value: Any) -> list[Any]:
    found: list[Any] = hvd.allgather_object(value)
    return found


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of 1 Mbit/s is assumed."""
    build = CostMeasurement.__init__

    def assume(self: CostMeasurement, *arguments: Any) -> None:
        build(self, *arguments, LinkCosts(1e-3, 1e-3, 8e-6, 8e-6), 0.01)

    monkeypatch.setattr(CostMeasurement, "__init__", assume)


def make(spec: str = "auto:period=8,accuracy=fast") -> tuple[nn.Module, Any]:
    model = make_model(Layers)
    optimizer = ours(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=spec,
    )
    return model, optimizer


@pytest.mark.ranks(2)
def test_ranks_compress_alike_where_the_network_is_slow(slow: None) -> None:
    model, optimizer = make()
    assert {row.compressor.partition(":")[0] for row in optimizer.plan} == {"fp16"}
    train(optimizer, model, range(40))
    plan = optimizer.plan
    assert {row.compressor.partition(":")[0] for row in plan} & {"topk", "qsgdinf"}
    assert plan.wire_bytes < plan.dense_bytes / 3
    assert any(reason.startswith("auto: ") for reason in plan.reasons)
    assert len(set(everyone((plan.digest, plan.reasons)))) == 1
    weights = [parameter.detach() for parameter in model.parameters()]
    for each in weights:
        assert torch.equal(each, hvd.broadcast(each, 0))


@pytest.mark.ranks(2)
def test_a_run_continues_from_its_state(slow: None) -> None:
    model, optimizer = make()
    train(optimizer, model, range(27))
    state = optimizer.compression_state_dict()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan = optimizer.plan.wire_bytes
    again, resumed = make()
    again.load_state_dict(weights)
    resumed.load_compression_state_dict(state)
    train(resumed, again, range(27, 45))
    assert plan < optimizer.plan.dense_bytes / 3
    assert resumed.plan.wire_bytes < resumed.plan.dense_bytes / 3
    assert len(set(everyone(resumed.plan.digest))) == 1


@pytest.mark.ranks(2)
def test_costs_are_measured_and_are_the_same_on_all_ranks() -> None:
    model, optimizer = make("auto:period=8")
    train(optimizer, model, range(60))
    outlook = optimizer._reducer.controller.outlook
    # its own costs are counted where plans are made
    assert (outlook.deciding_share > 0) == (hvd.rank() == 0)
    costs = outlook.costs
    assert not costs.assumed
    assert set(costs.compressors) == {"topk:values=int8", "qsgdinf:correlated=true", "fp16", "none"}
    lines = [line for row in costs.compressors.values() for line in row.schemes]
    assert all(line.latency > 0 and line.byte > 0 for line in lines)
    assert len({str(each) for each in everyone(costs.to_dict())}) == 1
    assert len(set(everyone(optimizer.plan.digest))) == 1
    assert optimizer.plan.reasons


@pytest.mark.ranks(2, 4)
def test_the_network_is_looked_at_before_it_is_measured_again_by_all_ranks_alike() -> None:
    model, optimizer = make("auto:period=8")
    train(optimizer, model, range(4))
    outlook = optimizer._reducer.controller.outlook
    known, first = outlook._measure._known, outlook.measured
    known._link = replace(first.link, allgather_byte=1.0)
    outlook.price_again()
    changed = outlook.measured
    assert changed.link.allgather_byte < 1e-3
    assert changed != first
    # of an unchanged one: ranks see differently well, and go by what the first one sees
    look = known.network_is_as_known
    known.network_is_as_known = lambda: look() is None or hvd.rank() == 0
    outlook.price_again()
    assert outlook.measured == changed
    for _ in range(2):  # it is looked at twice where measuring had found what was known
        outlook.price_again()
    assert outlook.measured != changed
    assert len({str(each) for each in everyone(outlook.measured.to_dict())}) == 1
