"""What an optimizer of an elastic run does between its ranks, as far as it needs no rank to come or go.

tests/failures/test_elastic.py has ranks that do.
"""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor, nn

from hvd_adaptive.comm.horovod_transport import HorovodTransport
from hvd_adaptive.comm.request import Request
from tests.distributed.workloads import (
    assert_ranks_agree,
    make_model,
    mean_of,
    ours,
    residuals_of,
    set_gradients,
)

RATE = 0.1
SPECS: dict[str, dict[str, Any]] = {
    "none": {},
    "topk": {"compression": "topk:density=0.05"},
    "topk-sum": {"compression": "topk:density=0.05", "op": hvd.Sum},
    "powersgd": {"compression": "powersgd:rank=2"},
    "qsgd-bf16": {"compression": "qsgd:bits=3", "feedback": "ef:dtype=bf16"},
    "ef21": {"compression": "topk:density=0.05", "feedback": "ef21"},
    "ef21-sgdm": {"compression": "topk:density=0.05", "feedback": "ef21-sgdm"},
    "dgc": {"compression": "topk:density=0.05", "feedback": "dgc"},
    "lgreco": {"compression": "topk:density=0.05", "planner": "lgreco:period=4"},
}


@pytest.fixture(autouse=True)
def elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")


def built(options: dict[str, Any]) -> tuple[nn.Module, Any]:
    model = make_model(lambda: nn.Linear(48, 48))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return model, ours(optimizer, named_parameters=list(model.named_parameters()), **options)


def take_steps(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Gradients that depend on the step and the rank alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        optimizer.zero_grad()
        set_gradients(
            model,
            {
                name: torch.randn(parameter.shape, generator=generator)
                for name, parameter in model.named_parameters()
            },
        )
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def test_building_an_optimizer_asks_nothing_of_ranks_that_train() -> None:
    model, optimizer = built({"compression": "topk:density=0.05", "planner": "lgreco:period=4"})
    if hvd.rank() == 0:  # as a rank that joins while the others are in their own operations
        built({"compression": "topk:density=0.05", "planner": "lgreco:period=4"})
        hvd.barrier()
    else:
        hvd.barrier()
        built({"compression": "topk:density=0.05", "planner": "lgreco:period=4"})
    take_steps(model, optimizer, range(3))
    assert_ranks_agree(model)


@pytest.mark.ranks(2, 4)
def test_ranks_with_other_options_are_refused_when_they_meet() -> None:
    density = 0.05 if hvd.rank() == 0 else 0.1
    model, optimizer = built({"compression": f"topk:density={density}"})
    with pytest.raises(ValueError, match=r"compression is topk:density=0\.\d+.* on rank"):
        take_steps(model, optimizer, range(1))
    model, optimizer = built({"compression": "topk:density=0.05"})
    optimizer.set_compression(f"topk:density={density}")
    with pytest.raises(ValueError, match=r"set_compression: compression is topk:density=0\.\d+"):
        take_steps(model, optimizer, range(1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", SPECS)
def test_a_restored_commit_continues_as_if_nothing_had_come_after_it(name: str) -> None:
    """Residuals, velocities, estimates and warm starts are those of the weights."""
    model, optimizer = built(SPECS[name])
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    take_steps(model, optimizer, range(3))
    state.save()
    take_steps(model, optimizer, range(10, 12))
    state.restore()
    state.sync()
    take_steps(model, optimizer, range(3, 6))

    twin, other = built(SPECS[name])
    take_steps(twin, other, range(3))
    # a planner starts again
    if "planner" in SPECS[name]:
        hvd.elastic.TorchState(model=twin, optimizer=other).sync()
    take_steps(twin, other, range(3, 6))
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-5, atol=1e-6)
    assert_ranks_agree(model)
    for layer, residual in residuals_of(optimizer).items():
        torch.testing.assert_close(residual, residuals_of(other)[layer], rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_a_rank_whose_residuals_are_of_other_weights_drops_them_and_no_gradient_counts_twice(
    op: int, capfd: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = built({"compression": "topk:density=0.05,values=fp32", "op": op})
    take_steps(model, optimizer, range(2))
    older = hvd.elastic.TorchState(optimizer=optimizer)
    take_steps(model, optimizer, range(2, 4))
    own = residuals_of(optimizer)["weight"].clone()
    at_rank_0 = hvd.broadcast(own, 0, name="own")
    before = weights(model)[: own.numel()].clone()
    # as where rank 0 committed a step that the others did not
    if hvd.rank() > 0:
        older.restore()
    older.sync()
    capfd.readouterr()
    set_gradients(model, {"weight": torch.zeros(48, 48), "bias": torch.zeros(48)})
    optimizer.step()
    said = capfd.readouterr().err
    assert ("dropped what was not sent yet" in said) == (hvd.rank() == 0), said
    after = weights(model)[: own.numel()]
    unsent = mean_of(residuals_of(optimizer)["weight"], "unsent", op)
    # ranks that begin with the mean have rank 0's where gradients are averaged, else nothing
    torch.testing.assert_close(after - RATE * unsent, before - RATE * at_rank_0, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
def test_an_operation_left_over_from_before_a_restart_is_an_error_of_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Horovod would raise ValueError, which ends a rank; an elastic run begins again instead."""
    transport = HorovodTransport(hvd.Sum, hvd.global_process_set)
    requests = [Request("allreduce", torch.ones(4)) for _ in range(3)]
    if hvd.rank() == 0:
        handle = transport.submit(requests[0], "left over", 0)  # waits for the other rank
        with pytest.raises(HorovodInternalError, match="left over from before Horovod's restart"):
            transport.submit(requests[1], "left over", 0)
        monkeypatch.delenv("HOROVOD_ELASTIC")
        with pytest.raises(ValueError, match="same name"):
            transport.submit(requests[2], "left over", 0)
    hvd.barrier()
    if hvd.rank() == 1:
        handle = transport.submit(requests[0], "left over", 0)
    assert transport.wait(handle).tolist() == [2.0] * 4
