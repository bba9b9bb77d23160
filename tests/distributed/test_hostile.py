"""What training scripts do to gradients that nobody expects: ranks stay equal, or all of them raise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

from tests.distributed.workloads import (
    assert_ranks_agree,
    assert_same,
    loss_of,
    make_model,
    ours,
    plain_step,
    residuals_of,
    set_gradients,
    sgd,
    stock,
    train,
)

SPECS = ("none", "topk:density=0.05", "powersgd:rank=2", "qsgd:bits=4")


# --- gradients that are bound to another tensor -------------------------------------------------------


def _replaced(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = torch.nan_to_num(parameter.grad)


def _added(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad + 0


def _by_data(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.data = parameter.grad.data.clone()


def _changed_on_one_rank(parameter: nn.Parameter) -> None:
    if hvd.rank() == 0:
        parameter.grad = torch.full_like(parameter, 3.0)


def _expanded(parameter: nn.Parameter) -> None:
    parameter.grad = torch.zeros(()).expand_as(parameter)


FORMS: dict[str, Callable[[nn.Parameter], None]] = {
    "nan_to_num": _replaced,
    "plus zero": _added,
    "data": _by_data,
    "another value on one rank": _changed_on_one_rank,
    "expanded": _expanded,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_that_is_bound_to_another_tensor_gets_the_result(form: str, spec: str) -> None:
    models: list[nn.Module] = []

    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        models[:] = [model]
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for parameter in model.parameters():
            FORMS[form](parameter)
        held = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
        for parameter, grad in zip(model.parameters(), held, strict=True):
            assert parameter.grad is grad, "who holds the new tensor must see the result"

    rebound = train(ours, one_step, compression=spec)
    assert_ranks_agree(models[0])
    assert_same(rebound, train(ours, compression=spec))
    # stock Horovod writes into the memory that "data" has freed
    if spec == "none" and form != "data":
        assert_same(rebound, train(stock, one_step))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("at", [0, 2])
def test_all_ranks_raise_where_a_gradient_was_dropped_on_one(at: int, spec: str) -> None:
    model = make_model()
    optimizer = ours(
        sgd(model.parameters()), named_parameters=model.named_parameters(), compression=spec
    )
    for step in range(at):
        plain_step(model, optimizer, step)
    optimizer.zero_grad()
    loss_of(model, at).backward()
    if hvd.rank() == 1:
        model.branch.weight.grad = None
    with pytest.raises(RuntimeError, match=r"None in step\(\).*branch.weight on rank 1"):
        optimizer.step()
    assert_ranks_agree(model)
    plain_step(model, optimizer, at + 1)
    assert_ranks_agree(model)


@pytest.mark.ranks(2)
def test_a_sparse_gradient_that_is_bound_to_another_tensor_gets_the_result() -> None:
    def as_it_is(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        model(torch.tensor([step, hvd.rank() + 3])).square().sum().backward()
        optimizer.step()

    def rebound(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        model(torch.tensor([step, hvd.rank() + 3])).square().sum().backward()
        model.weight.grad = 1.0 * model.weight.grad  # type: ignore[operator]
        optimizer.step()

    def embedding() -> nn.Module:
        return nn.Embedding(30, 40, sparse=True)

    def make(p: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(p, lr=0.1)

    runs = [train(ours, each, kind=embedding, optimizer=make) for each in (as_it_is, rebound)]
    assert_same(*runs, parameters_only=True)


# --- parameters of other kinds ------------------------------------------------------------------------


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(40, 40, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(40))
        self.table = nn.Parameter(torch.arange(40), requires_grad=False)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("spec", ["none", "topk:density=0.05"])
def test_complex_parameters_are_refused_by_name_on_all_ranks(spec: str) -> None:
    model = Complex()
    with pytest.raises(ValueError, match=r"'phase' is torch.complex64: .*view_as_real"):
        ours(sgd(model.parameters()), named_parameters=model.named_parameters(), compression=spec)
    model.phase.requires_grad = False
    optimizer = ours(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=spec,
    )
    # complex and integer parameters that are not trained do not matter
    model.scale.square().sum().backward()
    optimizer.step()
    assert_ranks_agree(model)
    model.phase.requires_grad = True
    optimizer.zero_grad()
    (model.scale.sum() * model.phase.abs().sum()).backward()
    with pytest.raises(ValueError, match=r"'phase' is torch.complex64"):
        optimizer.step()


class Transposed(nn.Module):
    """A weight whose memory is that of its transpose, and a convolution of channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(40, 48).t())
        self.conv = nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        image = nn.functional.linear(x, self.weight.t().t()).view(x.shape[0], 1, 6, 8)
        image = image.expand(-1, 16, -1, -1).contiguous(memory_format=torch.channels_last)
        out: Tensor = self.conv(image)
        return out


COMPRESSORS = (
    "none",
    "fp16",
    "bf16",
    "topk:density=0.05",
    "globaltopk:density=0.05",
    "threshold:threshold=0.01",
    "dgc:density=0.05",
    "redsync:density=0.05",
    "randomk:density=0.05",
    "powersgd:rank=2",
    "qsgd:bits=4",
    "terngrad",
    "alq",
    "signsgd",
    "onebit",
)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("spec", COMPRESSORS)
def test_parameters_that_are_not_contiguous_train_as_contiguous_ones(spec: str) -> None:
    def contiguous() -> nn.Module:
        model = Transposed()
        model.conv = model.conv.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        model.weight = nn.Parameter(model.weight.detach().contiguous())
        return model

    mine = train(ours, kind=Transposed, compression=spec)
    other = train(ours, kind=contiguous, compression=spec)
    for one, two in zip(mine[-1].values(), other[-1].values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


# --- the range of float16 -----------------------------------------------------------------------------


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(64, 64, dtype=torch.float16))
        self.bias = nn.Parameter(torch.zeros(64, dtype=torch.float16))


def half(**options: Any) -> tuple[Any, Any]:
    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, ours(optimizer, named_parameters=model.named_parameters(), **options)


HALF: dict[str, dict[str, Any]] = {
    "topk": {"compression": "topk:density=0.01"},
    "topk of bf16 residuals": {"compression": "topk:density=0.01", "feedback": "ef:dtype=bf16"},
    "dgc": {"compression": "topk:density=0.01", "feedback": "dgc:momentum=0.9"},
    "dgc's own": {"compression": "dgc:density=0.01", "feedback": "dgc:momentum=0.9"},
    "ef21": {"compression": "topk:density=0.01", "feedback": "ef21"},
    "ef21-sgdm": {"compression": "topk:density=0.01", "feedback": "ef21-sgdm:momentum=0.9"},
    "randomk": {"compression": "randomk:density=0.01"},
    "randomk of fp16": {"compression": "randomk:density=0.01,values=fp16"},
    "powersgd": {"compression": "powersgd:rank=1"},
    "signsgd": {"compression": "signsgd"},
    "onebit": {"compression": "onebit"},
    "fp16": {"compression": "fp16", "feedback": "ef"},
    "qsgd": {"compression": "qsgd:bits=2"},
    "bf16": {"compression": "bf16"},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
@pytest.mark.parametrize("name", HALF)
def test_float16_gradients_that_are_finite_never_become_inf(name: str, op: int) -> None:
    if op == hvd.Sum and name in ("qsgd", "bf16"):
        pytest.skip("without feedback a sum overflows as it does without compression")
    model, optimizer = half(op=op, **HALF[name])
    steps, size = 40, 20_000.0 if name != "bf16" else 65_504.0
    for _ in range(steps):
        optimizer.zero_grad()
        set_gradients(model, {"large": torch.full((64, 64), size, dtype=torch.float16)})
        optimizer.synchronize()
        assert bool(model.large.grad.isfinite().all())
        for parameter in model.parameters():
            parameter.grad = None
    for residual in residuals_of(optimizer).values():
        assert bool(residual.isfinite().all())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["topk", "dgc", "randomk", "randomk of fp16", "onebit"])
def test_what_float16_cannot_hold_waits_in_the_residual(name: str) -> None:
    model, optimizer = half(**HALF[name])
    applied = torch.zeros(64, 64, dtype=torch.float64)
    wanted, velocity = torch.zeros_like(applied), torch.zeros_like(applied)
    for _ in range(60):
        grad = torch.full((64, 64), 20_000.0, dtype=torch.float16)
        velocity = grad.double() + (0.9 * velocity if name == "dgc" else 0.0)
        wanted += velocity
        set_gradients(model, {"large": grad})
        optimizer.synchronize()
        applied += model.large.grad.double()
        for parameter in model.parameters():
            parameter.grad = None
    kept = residuals_of(optimizer)["large"].view(64, 64).double()
    if name == "dgc":
        # where something was sent, momentum was dropped on purpose
        wanted = torch.minimum(wanted, applied + kept)
    torch.testing.assert_close(applied + kept, wanted, rtol=2e-3, atol=20.0)


@pytest.mark.ranks(2)
def test_an_inf_in_the_local_gradient_is_still_seen() -> None:
    for options in HALF.values():
        model, optimizer = half(**options)
        grad = torch.ones(64, 64, dtype=torch.float16)
        grad[0, hvd.rank()] = math.inf
        set_gradients(model, {"large": grad})
        optimizer.synchronize()
        assert not bool(model.large.grad.isfinite().all()), options


@pytest.mark.ranks(2)
def test_a_residual_that_is_sent_with_dense_gradients_fits_into_float16() -> None:
    model, optimizer = half(compression="topk:density=0.001")
    applied, wanted = torch.zeros(64, 64, dtype=torch.float64), 0.0
    for step in range(45):
        if step == 30:
            optimizer.set_compression("none")
        size = math.inf if step == 31 and hvd.rank() == 0 else 20_000.0
        wanted += 20_000.0 if step != 31 else 0.0
        set_gradients(model, {"large": torch.full((64, 64), size, dtype=torch.float16)})
        optimizer.synchronize()
        if step != 31:
            applied += model.large.grad.double()
            assert bool(model.large.grad.isfinite().all())
        for parameter in model.parameters():
            parameter.grad = None
    kept = residuals_of(optimizer).get("large", torch.zeros(64 * 64)).view(64, 64).double()
    torch.testing.assert_close(applied + kept, torch.full_like(applied, wanted), rtol=2e-3, atol=20.0)


# --- states that would never be finite again ----------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_learning_rate_near_zero_does_not_blow_up_the_corrected_residual() -> None:
    model = make_model()
    optimizer = ours(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression="topk:density=0.01",
        feedback="ef:lr_correction=true",
    )
    rates = [0.1, 1e-30, 1e-42, 0.0, 1e-300, *(10.0**-power for power in range(2, 60)), 0.1, 0.1]
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        plain_step(model, optimizer, step)
        for name, residual in residuals_of(optimizer).items():
            assert bool(residual.isfinite().all()), (name, rate)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.ranks(2)
def test_a_velocity_recovers_from_gradients_near_the_end_of_float32() -> None:
    model = make_model()
    optimizer = ours(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression="topk:density=0.01",
        feedback="dgc:momentum=0.9",
    )
    for step in range(40):
        optimizer.zero_grad()
        size = 3e38 if step < 6 else 1.0
        set_gradients(model, {name: torch.full_like(p, size) for name, p in model.named_parameters()})
        optimizer.synchronize()
    for slots in optimizer.compression_state_dict()["kept"].values():
        assert all(bool(kept.isfinite().all()) for kept in slots.values())
    # with ordinary gradients all is as it ever was
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


# --- the learning rate --------------------------------------------------------------------------------


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["alq", "amq"])
def test_levels_are_learned_again_when_the_learning_rate_falls_and_not_by_a_cosine(name: str) -> None:
    model = make_model()
    optimizer = ours(
        sgd(model.parameters()),
        named_parameters=model.named_parameters(),
        compression=f"{name}:bits=3,updates=2/1000",
    )
    learned: list[int] = []
    plain_step(model, optimizer, 0)
    for step in range(1, 30):
        optimizer.param_groups[0]["lr"] *= 0.1 if step in (12, 20) else 0.97
        before = _tables(optimizer)
        plain_step(model, optimizer, step)
        if _tables(optimizer) != before:
            learned.append(step)
    assert learned == [2, 13, 21]


def _tables(optimizer: Any) -> list[Any]:
    states = optimizer.compression_state_dict()["codecs"].values()
    return [[table.tolist() for table in state["levels"].values()] for state in states]


# --- uneven data --------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("spec", ["none", "fp16", "powersgd:rank=2", "randomk:density=0.1"])
def test_a_rank_that_runs_out_of_data_may_join_where_payloads_are_summed(spec: str) -> None:
    model = make_model()
    optimizer = ours(
        sgd(model.parameters()), named_parameters=model.named_parameters(), compression=spec
    )
    for step in range(3 if hvd.rank() == 1 else 6):
        plain_step(model, optimizer, step)
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), 0)
    assert_ranks_agree(model)


GATHERED: dict[str, dict[str, Any]] = {
    "topk": {"compression": "topk:density=0.05"},
    "qsgd": {"compression": "qsgd:bits=4"},
    "bf16": {"compression": "bf16"},
    "a planner": {"compression": "powersgd:rank=2", "planner": "lgreco:period=4"},
    "a planner that decides first": {
        "compression": "randomk:density=0.1",
        "planner": "gravac:window=4,exact=true",
    },
}


# Where several ranks raise and then join, too, Horovod's own coordinator may abort.
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", GATHERED)
@pytest.mark.parametrize("at", [0, 3])
def test_a_rank_that_joins_is_named_where_payloads_are_not_summed(name: str, at: int) -> None:
    model = make_model()
    optimizer = ours(
        sgd(model.parameters()), named_parameters=model.named_parameters(), **GATHERED[name]
    )
    for step in range(at):
        plain_step(model, optimizer, step)
    if hvd.rank() != 1:
        with pytest.raises(RuntimeError, match=r"called hvd.join\(\).*drop_last"):
            plain_step(model, optimizer, at)
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), 0)
    # whoever catches the error may continue
    for step in range(3):
        plain_step(model, optimizer, step)
    assert_ranks_agree(model)
