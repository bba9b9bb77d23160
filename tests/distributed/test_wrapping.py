"""The wrapped optimizer: process sets, Adasum, parameters that come later, schedulers, states."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

from tests.distributed.workloads import (
    OPTIMIZERS,
    ByHand,
    Model,
    Wrap,
    assert_ranks_agree,
    assert_same,
    batch,
    bits,
    counted,
    loss_of,
    make_model,
    ours,
    plain_step,
    sgd,
    snapshot,
    stock,
    train,
)

# Process sets and Adasum


@pytest.mark.ranks(4)
@pytest.mark.parametrize("members", [[0, 2], [1, 2, 3]], ids=str)
def test_a_process_set_averages_among_its_members_only(members: list[int]) -> None:
    process_set = hvd.add_process_set(members)
    mine = train(ours, process_set=process_set)
    assert_same(mine, train(stock, process_set=process_set))
    if hvd.rank() not in members:
        assert_same(mine, train(lambda optimizer, **_: optimizer))
    compressed = train(ours, process_set=process_set, compression="topk:density=0.1")
    if hvd.rank() in members:
        assert bits(compressed[-1]["first.weight"]) != bits(mine[-1]["first.weight"])
    else:
        assert_same(compressed, mine)
    hvd.remove_process_set(process_set)


@pytest.mark.ranks(2, 4)
def test_adasum_trains_as_stock_does() -> None:
    assert_same(train(ours, op=hvd.Adasum), train(stock, op=hvd.Adasum), parameters_only=True)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "topk:density=0.1"},
        {"compression": "fp16"},
        {"overrides": {"*.weight": "topk:density=0.1"}},
    ],
    ids=str,
)
def test_adasum_with_compression_is_an_error(options: dict[str, Any]) -> None:
    model = make_model()
    with pytest.raises(ValueError, match="Adasum"):
        ours(
            sgd(model.parameters()),
            named_parameters=model.named_parameters(),
            op=hvd.Adasum,
            **options,
        )


# Life with the wrapped optimizer


def test_parameters_added_after_construction_are_averaged() -> None:
    class Growing(Model):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Linear(40, 5)

        def forward(self, x: Tensor, branch: bool = True) -> Tensor:
            out: Tensor = super().forward(x, branch) + self.late(x)
            return out

    def some(parameters: Any) -> torch.optim.Optimizer:
        return sgd(list(parameters)[:-2])

    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        assert isinstance(model, Growing)
        if step == 2:
            optimizer.add_param_group({"params": list(model.late.parameters()), "lr": 0.01})
        model.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()

    options: dict[str, Any] = {"kind": Growing, "optimizer": some, "steps": 5}
    for named in ("all", "none"):
        if named == "none":
            options["named_parameters"] = None
        mine = train(ours, one_step, **options)
        # The gradient of a parameter that no optimizer knows yet is each rank's own.
        assert_same(mine, train(ByHand, one_step, **options))


def test_several_optimizers_in_one_program_train_as_with_stock() -> None:
    def run(wrap: Wrap) -> Any:
        generator, critic = make_model(lambda: nn.Linear(40, 40)), make_model(lambda: nn.Linear(40, 1))
        first = wrap(sgd(generator.parameters()), named_parameters=named("g", generator))
        second = wrap(sgd(critic.parameters()), named_parameters=named("c", critic))
        snapshots = [snapshot(generator) | suffixed(snapshot(critic))]
        for step in range(4):
            second.zero_grad()
            fake = generator(batch(step))
            critic(fake.detach()).square().mean().backward()
            second.step()
            first.zero_grad()
            critic.requires_grad_(False)
            critic(fake).mean().backward()
            first.step()
            critic.requires_grad_(True)
            snapshots.append(snapshot(generator) | suffixed(snapshot(critic)))
        return snapshots

    assert_same(run(ours), run(stock))


def named(prefix: str, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(f"{prefix}.{name}", parameter) for name, parameter in model.named_parameters()]


def suffixed(values: dict[str, Any]) -> dict[str, Any]:
    return {f"critic.{name}": value for name, value in values.items()}


def test_optimizers_whose_backward_passes_interleave_train_as_with_stock() -> None:
    def run(wrap: Wrap) -> Any:
        left, right = make_model(), make_model()
        first = wrap(sgd(left.parameters()), named_parameters=named("l", left))
        second = wrap(sgd(right.parameters()), named_parameters=named("r", right))
        snapshots = [snapshot(left) | suffixed(snapshot(right))]
        for step in range(4):
            first.zero_grad()
            second.zero_grad()
            (loss_of(left, step) + 2 * loss_of(right, step)).backward()
            second.step()
            first.step()
            snapshots.append(snapshot(left) | suffixed(snapshot(right)))
        return snapshots

    assert_same(run(ours), run(stock))


def test_a_learning_rate_scheduler_works_on_the_wrapped_optimizer() -> None:
    def run(wrap: Wrap) -> Any:
        model = make_model()
        optimizer = wrap(sgd(model.parameters()), named_parameters=model.named_parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        snapshots = [snapshot(model)]
        for step in range(4):
            plain_step(model, optimizer, step)
            scheduler.step()
            snapshots.append(snapshot(model))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 16)
        return snapshots

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = run(ours)
    assert_same(mine, run(stock))


def test_a_scheduler_made_before_wrapping_drives_the_wrapped_optimizer() -> None:
    def run(wrap: Wrap) -> Any:
        model = make_model()
        plain = sgd(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
        optimizer = wrap(plain, named_parameters=model.named_parameters())
        snapshots = [snapshot(model)]
        for step in range(3):
            plain_step(model, optimizer, step)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scheduler.step()
            snapshots.append(snapshot(model))
        assert_ranks_agree(model)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
        return snapshots

    assert_same(run(ours), run(stock))


def test_the_wrapped_optimizer_is_an_instance_of_the_users_class() -> None:
    model = make_model()
    optimizer = ours(torch.optim.AdamW(model.parameters()), named_parameters=None)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert type(optimizer).__name__ == "AdamW"
    assert repr(optimizer).startswith("AdamW")


def test_hooks_and_defaults_of_the_users_optimizer_survive_wrapping() -> None:
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    calls: list[str] = []
    plain.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer = ours(plain, named_parameters=model.named_parameters())
    plain_step(model, optimizer, 0)
    assert calls == ["post"]
    assert optimizer.defaults["momentum"] == 0.5


def test_state_that_the_users_optimizer_has_already_is_kept() -> None:
    def run(wrap: Wrap) -> Any:
        model = make_model()
        plain = torch.optim.Adam(model.parameters(), lr=0.01)
        torch.manual_seed(0)
        for _ in range(2):
            plain.zero_grad()
            model(torch.randn(4, 40)).square().mean().backward()
            plain.step()
        plain.zero_grad()
        optimizer = wrap(plain, named_parameters=model.named_parameters())
        snapshots = [snapshot(model)]
        for step in range(3):
            plain_step(model, optimizer, step)
            snapshots.append(snapshot(model))
        return snapshots

    assert_same(run(ours), run(ByHand))


@pytest.mark.parametrize("make", ["sgd", "adam", "adamw"])
def test_a_state_dict_continues_a_run_in_a_new_optimizer_and_in_a_plain_one(make: str) -> None:
    whole = train(ours, optimizer=OPTIMIZERS[make], steps=6)

    model = make_model()
    optimizer = ours(OPTIMIZERS[make](model.parameters()), named_parameters=model.named_parameters())
    for step in range(3):
        plain_step(model, optimizer, step)
    saved_model = {name: value.clone() for name, value in model.state_dict().items()}
    # A state dict shares its tensors with the optimizer that it is loaded into.
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved.keys() == {"state", "param_groups"}

    for wrap in (ours, ByHand):
        again = make_model()
        again.load_state_dict(saved_model)
        plain = OPTIMIZERS[make](again.parameters())
        if wrap is ByHand:
            plain.load_state_dict(copy.deepcopy(saved))
        resumed: Any = wrap(plain, named_parameters=again.named_parameters())
        if wrap is ours:
            resumed.load_state_dict(copy.deepcopy(saved))
        for step in range(3, 6):
            plain_step(again, resumed, step)
        assert_same([whole[0], whole[-1]], [whole[0], snapshot(again)])


def test_load_state_dict_after_backward_forgets_the_gradients_of_that_step() -> None:
    model = make_model()
    optimizer = ours(sgd(model.parameters()), named_parameters=model.named_parameters())
    for step in range(2):
        plain_step(model, optimizer, step)
    loss_of(model, 2).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    for step in range(2, 4):
        plain_step(model, optimizer, step)
    assert_ranks_agree(model)


@pytest.mark.parametrize("make", ["sgd", "adam"])
@pytest.mark.parametrize("trained", [False, True])
def test_broadcasting_the_optimizers_state_sends_no_gradients_and_makes_ranks_equal(
    make: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    plain = OPTIMIZERS[make](model.parameters())
    for group in plain.param_groups:
        group["lr"] = 0.01 * (1 + hvd.rank())
    if trained and hvd.rank() == 0:
        # As after loading a checkpoint, which only rank 0 does.
        loss_of(model, 0).backward()
        plain.step()
        plain.zero_grad()
    optimizer = ours(plain, named_parameters=model.named_parameters())
    with counted(monkeypatch) as counts:
        # In this order: to create its state Horovod steps with gradients of zero, and weight decay
        # then moves the parameters.
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert sum(counts.values()) == 0
    assert optimizer.param_groups[0]["lr"] == 0.01
    with counted(monkeypatch) as counts:
        for step in range(2):
            plain_step(model, optimizer, step)
    assert (sum(counts.values()) > 0) == (hvd.size() > 1)
    assert_ranks_agree(model)


def test_a_broadcast_between_steps_does_not_disturb_training() -> None:
    model = make_model()
    optimizer = ours(OPTIMIZERS["adam"](model.parameters()), named_parameters=None)
    snapshots = [snapshot(model)]
    for step in range(4):
        plain_step(model, optimizer, step)
        snapshots.append(snapshot(model))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    expected = train(stock, optimizer=OPTIMIZERS["adam"])
    assert_same(snapshots, expected, parameters_only=True)


def test_a_model_and_optimizer_that_are_dropped_are_freed_and_their_hooks_removed() -> None:
    model = make_model()
    first = ours(sgd(model.parameters()), named_parameters=model.named_parameters())
    plain_step(model, first, 0)
    del first
    # A second optimizer on the same parameters must not meet the first one's hooks.
    second = ours(sgd(model.parameters()), named_parameters=model.named_parameters())
    for step in range(1, 4):
        plain_step(model, second, step)
    assert_ranks_agree(model)
