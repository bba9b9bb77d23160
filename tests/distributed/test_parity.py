"""Without compression, training equals stock Horovod's to the bit, whatever the model does.

Where stock Horovod cannot do a thing, or does it wrongly, the reference is a plain optimizer whose
gradients are averaged by hand.
"""

from __future__ import annotations

import itertools
import time
import warnings
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hvd_adaptive as hva
from tests.distributed.workloads import (
    OPTIMIZERS,
    ByHand,
    Model,
    Wrap,
    assert_ranks_agree,
    assert_same,
    batch,
    bits,
    loss_of,
    make_model,
    ours,
    plain_step,
    sgd,
    snapshot,
    stock,
    train,
)

# The options of the signature


@pytest.mark.smoke
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_equals_stock_forevery_optimizer(optimizer: str) -> None:
    if hvd.size() == 16 and optimizer != next(iter(OPTIMIZERS)):
        pytest.skip("optimizers differ within a rank: four ranks show that")
    make = OPTIMIZERS[optimizer]
    assert_same(train(ours, optimizer=make), train(stock, optimizer=make))


@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum},
        {"op": hvd.Average},
        {"gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": 3.0},
        {"groups": 2},
        {"groups": 100},
        {"named_parameters": None},
    ],
    ids=str,
)
def test_training_equals_stock_forevery_option(options: dict[str, Any]) -> None:
    assert_same(train(ours, **options), train(stock, **options))


def test_num_groups_is_accepted_with_horovods_deprecation_warning() -> None:
    with pytest.warns(DeprecationWarning, match="groups"):
        mine = train(ours, num_groups=3)
    assert_same(mine, train(stock, groups=3))


def test_groups_of_tensors_train_as_stock_does() -> None:
    def grouped(wrap: Wrap) -> Any:
        def wrapped(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
            first, second, third, *_ = optimizer.param_groups[0]["params"]
            return wrap(optimizer, groups=[[third, first], [second]], **options)

        return wrapped

    assert_same(train(grouped(ours)), train(grouped(stock)))


@pytest.mark.parametrize("cap", [1e-6, 0.004, 25.0])
def test_the_size_of_buckets_does_not_change_the_result(cap: float) -> None:
    assert_same(train(ours, bucket_cap_mb=cap), train(stock))


def test_a_large_layer_that_is_sent_alone_trains_as_stock_does() -> None:
    def large() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 1100), nn.Linear(1100, 1100), nn.Linear(1100, 5))

    assert_same(train(ours, kind=large, steps=3), train(stock, kind=large, steps=3))


def test_compression_fp16_equals_stock_fp16_under_both_libraries_names() -> None:
    # on a busy machine Horovod's cycles may part its tensors, and halves then add up in another order
    trainings = [train(stock, compression=hvd.Compression.fp16) for _ in range(3)]
    kinds = [[bits(each) for step in run for each in step.values()] for run in trainings]
    expected = trainings[max(range(3), key=lambda run: kinds.count(kinds[run]))]
    for compression in ("fp16", hva.Compression.fp16, hvd.Compression.fp16):
        assert_same(train(ours, compression=compression), expected)


def test_horovods_own_compression_none_is_accepted() -> None:
    assert_same(train(ours, compression=hvd.Compression.none), train(stock))


def test_arguments_by_position_mean_what_they_mean_in_horovod() -> None:
    def run(wrap: Any, none: Any) -> Any:
        model = make_model()
        named = list(model.named_parameters())
        optimizer = wrap(
            sgd(model.parameters()), named, none, 2, hvd.Average, 2.0, 0, None, True,
            hvd.global_process_set,
        )  # fmt: skip
        snapshots = [snapshot(model)]
        for step in range(4):
            loss_of(model, step).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
            snapshots.append(snapshot(model))
        return snapshots

    assert_same(
        run(hva.DistributedOptimizer, hva.Compression.none),
        run(hvd.DistributedOptimizer, hvd.Compression.none),
    )


def test_a_single_rank_trains_as_the_plain_optimizer_does() -> None:
    if hvd.size() > 1:
        # The same in a process set of one.
        sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
        options = {"process_set": sets[hvd.rank()]}
    else:
        options = {}
    plain = train(lambda optimizer, **_: optimizer)
    assert_same(train(ours, **options), plain)
    assert_same(train(ours, compression="topk:density=0.01", **options), plain)
    if hvd.size() > 1:
        for each in sets:
            hvd.remove_process_set(each)


# Gradients that are missing, sparse, frozen, oddly typed or oddly laid out


def uses_branch_on(which: str, step: int) -> bool:
    uses: dict[str, bool] = {
        "one rank leaves it out": hvd.rank() != 0,
        "one rank uses it": hvd.rank() == hvd.size() - 1,
        "no rank uses it": False,
        "changing": (hvd.rank() + step) % 3 != 0,
        "used later": step >= 2,
        "used first": step < 2,
    }
    return uses[which]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "which",
    [
        "one rank leaves it out",
        "one rank uses it",
        "no rank uses it",
        "changing",
        "used later",
        "used first",
    ],
)
def test_parameters_without_a_gradient_train_as_with_stock(which: str, set_to_none: bool) -> None:
    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model, step, branch=uses_branch_on(which, step)).backward()
        optimizer.step()

    assert_same(train(ours, one_step, steps=6), train(stock, one_step, steps=6))


def test_a_step_without_any_backward_pass_on_one_rank_trains_as_with_stock() -> None:
    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        if hvd.rank() != 0 or step != 2:
            loss_of(model, step).backward()
        optimizer.step()

    assert_same(train(ours, one_step), train(stock, one_step))


class Words(nn.Module):
    """An embedding with sparse gradients, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8, sparse=True)
        self.out = nn.Linear(8, 3)

    def forward(self, index: Tensor) -> Tensor:
        out: Tensor = self.out(self.words(index).mean(1))
        return out


def words_step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(100 * hvd.rank() + step)
    index = torch.randint(0, 50, (4, 6), generator=generator)
    model(index).square().mean().backward()
    optimizer.step()


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients_train_as_with_stock(sparse_as_dense: bool) -> None:
    options: dict[str, Any] = {"kind": Words, "optimizer": plain_sgd}
    mine = train(ours, words_step, sparse_as_dense=sparse_as_dense, **options)
    assert_same(mine, train(stock, words_step, sparse_as_dense=sparse_as_dense, **options))


def test_sparse_gradients_stay_sparse_for_the_wrapped_optimizer() -> None:
    for sparse_as_dense in (False, True):
        model = make_model(Words)
        optimizer = ours(
            torch.optim.SparseAdam([model.words.weight]),
            named_parameters=[("words", model.words.weight)],
            sparse_as_dense=sparse_as_dense,
        )
        before = model.words.weight.detach().clone()
        for step in range(2):
            words_step(model, optimizer, step)
        assert not torch.equal(before, model.words.weight)
        assert_ranks_agree(model.words)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("without", [0, 2])
def test_a_rank_without_a_sparse_gradient_takes_part(without: int, sparse_as_dense: bool) -> None:
    # Stock Horovod sends dense zeros here and fails where the others send sparse ones.
    def one_step(model: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        index = torch.tensor([[step, 3 + hvd.rank(), 7]])
        if step == without and hvd.rank() == 0:
            model.out(torch.ones(1, 8)).square().mean().backward()
        else:
            model(index).square().mean().backward()
        optimizer.step()

    class Densified(ByHand):
        """As dense zeros, which an optimizer without momentum does not tell from nothing."""

        def synchronize(self) -> None:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad.to_dense()
            super().synchronize()

    options: dict[str, Any] = {"kind": Words, "optimizer": plain_sgd}
    mine = train(ours, one_step, sparse_as_dense=sparse_as_dense, **options)
    expected = train(Densified, one_step, **options)
    for left, right in zip(mine, expected, strict=True):
        for name in left:
            if not name.endswith(".grad"):
                torch.testing.assert_close(left[name], right[name])


def test_frozen_parameters_train_as_with_stock() -> None:
    def frozen() -> nn.Module:
        model = Model()
        model.first.requires_grad_(False)
        return model

    mine = train(ours, kind=frozen)
    assert_same(mine, train(stock, kind=frozen))
    assert bits(mine[0]["first.weight"]) == bits(mine[-1]["first.weight"])


def test_parameters_unfrozen_and_frozen_again_during_training_are_averaged_by_hand() -> None:
    # Stock Horovod has no hook for a parameter that was frozen at construction: ranks drift apart.
    def frozen() -> nn.Module:
        model = Model()
        model.first.requires_grad_(False)
        return model

    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        assert isinstance(model, Model)
        optimizer.zero_grad()
        model.first.requires_grad_(step in (2, 3, 6))
        model.branch.requires_grad_(step != 4)
        loss_of(model, step).backward()
        optimizer.step()
        assert_ranks_agree(model)

    mine = train(ours, one_step, kind=frozen, steps=8)
    assert_same(mine, train(ByHand, one_step, kind=frozen, steps=8))
    assert bits(mine[0]["first.weight"]) != bits(mine[-1]["first.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_gradients_of_other_dtypes_train_as_with_stock(dtype: torch.dtype) -> None:
    def kind() -> nn.Module:
        return Model().to(dtype)

    assert_same(train(ours, kind=kind), train(stock, kind=kind))


def test_bfloat16_gradients_are_averaged_in_float32() -> None:
    # Horovod cannot add bfloat16 on CPU.
    def kind() -> nn.Module:
        return Model().to(torch.bfloat16)

    assert_same(train(ours, kind=kind), train(ByHand, kind=kind))


def test_a_model_of_mixed_dtypes_trains_as_with_stock() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lower = nn.Linear(40, 30).to(torch.float16)
            self.middle = nn.Linear(30, 20)
            self.upper = nn.Linear(20, 5).to(torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.upper(self.middle(self.lower(x.half()).float()).double())
            return out

    assert_same(train(ours, kind=Mixed), train(stock, kind=Mixed))


def test_channels_last_gradients_are_averaged_and_keep_their_layout() -> None:
    # Horovod refuses gradients that are not contiguous.
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 8, 3)
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def forward(self, x: Tensor) -> Tensor:
            images = x.reshape(-1, 4, 5, 6).contiguous(memory_format=torch.channels_last)
            out: Tensor = self.conv(images)
            return out

    def one_step(model: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        model(batch(step, features=240)).square().mean().backward()
        assert not model.conv.weight.grad.is_contiguous()
        optimizer.step()
        assert model.conv.weight.grad.is_contiguous(memory_format=torch.channels_last)

    mine = train(ours, one_step, kind=Convolution)
    assert_same(mine, train(ByHand, one_step, kind=Convolution))


def test_transposed_and_scalar_and_empty_parameters_are_averaged() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transposed = nn.Parameter(torch.randn(40, 7).t())
            self.scalar = nn.Parameter(torch.tensor(1.5))
            self.empty = nn.Parameter(torch.empty(0))
            self.hollow = nn.Parameter(torch.empty(0, 5))

        def forward(self, x: Tensor) -> Tensor:
            nothing = self.empty.sum() + self.hollow.sum()
            return (x @ self.transposed.t()) * self.scalar + nothing

    mine = train(ours, kind=Odd)
    assert_same(mine, train(ByHand, kind=Odd))


# Graphs that are not the same everywhere, or not simple


class Branches(nn.Module):
    """Three branches of equal shapes, joined by a sum: any order of evaluation is right."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        # Chained, so that backward meets the branches in the reverse of this order.
        for number in order:
            x = x + self.branches[number](x).tanh()
        return x


@pytest.mark.smoke
@pytest.mark.parametrize("cap", [1e-6, 25.0])
def test_gradients_that_arrive_in_another_order_on_each_rank_train_as_with_stock(
    cap: float,
) -> None:
    orders = list(itertools.permutations(range(3)))

    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        order = orders[(hvd.rank() * 5 + step) % len(orders)]
        loss_of(model, step, order=order).backward()
        optimizer.step()

    options: dict[str, Any] = {"kind": Branches, "steps": 6}
    mine = train(ours, one_step, bucket_cap_mb=cap, **options)
    assert_same(mine, train(stock, one_step, **options))


def test_a_weight_that_is_used_twice_trains_as_with_stock() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(40, 40)
            self.second = nn.Linear(40, 40)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x).tanh())
            return out

    assert_same(train(ours, kind=Tied), train(stock, kind=Tied))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_train_as_with_stock(reentrant: bool) -> None:
    class Checkpointed(Model):
        def forward(self, x: Tensor, branch: bool = True) -> Tensor:
            x = self.norm(self.first(x)).relu()
            x = x + checkpoint(self.branch, x, use_reentrant=reentrant)
            out: Tensor = self.last(x)
            return out

    assert_same(train(ours, kind=Checkpointed), train(stock, kind=Checkpointed))


def test_a_backward_pass_in_two_parts_trains_as_with_stock() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(40, 30), nn.Linear(40, 30)

    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        assert isinstance(model, Halves)
        optimizer.zero_grad()
        model.left(batch(step)).square().mean().backward()
        model.right(batch(step)).square().mean().backward()
        optimizer.step()

    options: dict[str, Any] = {"kind": Halves}
    assert_same(train(ours, one_step, **options), train(stock, one_step, **options))


# Accumulation


@pytest.mark.parametrize("passes", [1, 3])
def test_accumulated_gradients_train_as_with_stock(passes: int) -> None:
    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        for number in range(passes):
            loss_of(model, passes * step + number).backward()
        optimizer.step()

    options: dict[str, Any] = {"backward_passes_per_step": passes}
    assert_same(train(ours, one_step, **options), train(stock, one_step, **options))


def test_a_step_before_all_backward_passes_trains_as_with_stock() -> None:
    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        for number in range(1 + step % 3):
            loss_of(model, 3 * step + number).backward()
        optimizer.step()

    options: dict[str, Any] = {"backward_passes_per_step": 3}
    assert_same(train(ours, one_step, **options), train(stock, one_step, **options))


def test_the_number_of_backward_passes_can_be_changed() -> None:
    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        passes = 1 + step % 3
        optimizer.set_backward_passes_per_step(passes)
        assert optimizer.backward_passes_per_step == passes
        optimizer.zero_grad()
        for number in range(passes):
            loss_of(model, 3 * step + number).backward()
        optimizer.step()

    assert_same(train(ours, one_step, steps=6), train(stock, one_step, steps=6))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_takes_torchs_argument(set_to_none: bool) -> None:
    # Stock Horovod's zero_grad takes no argument (horovod#3405).
    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == (set_to_none or step == 0) for p in model.parameters())
        loss_of(model, step).backward()
        optimizer.step()

    assert_same(train(ours, one_step), train(stock))


@pytest.mark.ranks(2, 4)
def test_zero_grad_between_backward_and_step_is_an_error_and_training_can_continue() -> None:
    for wrap in (ours, stock):
        model = make_model()
        optimizer = wrap(sgd(model.parameters()), named_parameters=model.named_parameters())
        for step in range(3):
            loss_of(model, step).backward()
            with pytest.raises(AssertionError, match="zero_grad"):
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        assert_ranks_agree(model)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("before", [0, 2])
def test_too_many_backward_passes_are_an_error_and_training_can_continue(before: int) -> None:
    for wrap in (ours, stock):
        model = make_model()
        optimizer = wrap(sgd(model.parameters()), named_parameters=model.named_parameters())
        for step in range(before):
            plain_step(model, optimizer, step)
        loss_of(model, 5).backward()
        # Long enough for what the first pass has launched to arrive.
        time.sleep(0.02)
        with pytest.raises(AssertionError, match="backward_passes_per_step"):
            loss_of(model, 6).backward()
        optimizer.step()
        plain_step(model, optimizer, 7)
        if wrap is ours:
            # Stock has averaged in place by then, and the second pass adds each rank's own gradient.
            assert_ranks_agree(model)


# synchronize() and what users do between it and step()


@pytest.mark.smoke
def test_clipping_between_synchronize_and_step_trains_as_with_stock() -> None:
    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, step).mul(100).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0.5
        with optimizer.skip_synchronize():
            optimizer.step()

    assert_same(train(ours, one_step), train(stock, one_step))


def test_step_after_synchronize_outside_the_context_warns_once_a_step() -> None:
    model = make_model()
    optimizer = ours(sgd(model.parameters()), named_parameters=model.named_parameters())
    for step in range(3):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.synchronize()
            optimizer.step()
        assert len(seen) == 1
        # scripts, and Horovod's own test, filter on this sentence
        expected = "optimizer.step() called without optimizer.skip_synchronize()"
        assert str(seen[0].message).startswith(expected)
        assert seen[0].filename == __file__


def test_step_after_synchronize_outside_the_context_reduces_once() -> None:
    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()

    assert_same(train(ours, one_step, op=hvd.Sum), train(stock, op=hvd.Sum))


def test_the_usual_ways_to_step_do_not_warn() -> None:
    def clipped(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(ours, plain_step)
        train(ours, clipped)


def test_an_overflow_on_one_rank_makes_all_ranks_skip_the_step_together() -> None:
    scales: dict[str, list[float]] = {}

    def run(name: str, wrap: Wrap) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

        def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            if step == 2 and hvd.rank() == hvd.size() - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            scales.setdefault(name, []).append(scaler.get_scale())

        return train(wrap, one_step, steps=6)

    mine = run("ours", ours)
    # A NaN's payload bits are nobody's business: gradients of the skipped step are not compared.
    assert_same(mine, run("stock", stock), parameters_only=True)
    assert scales["ours"] == scales["stock"]
    assert scales["ours"][2] < scales["ours"][1]
    assert bits(mine[2]["first.weight"]) == bits(mine[3]["first.weight"])
    assert bits(mine[3]["first.weight"]) != bits(mine[4]["first.weight"])


def test_a_closures_gradients_are_reduced_before_the_update() -> None:
    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        mean = optimizer.step(closure)
        assert mean is not None

    assert_same(train(ours, one_step), train(ByHand, one_step))


def test_lbfgs_evaluates_its_closure_many_times_and_stays_equal_on_all_ranks() -> None:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=5, line_search_fn="strong_wolfe")

    def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)
        assert_ranks_agree(model)

    options: dict[str, Any] = {"optimizer": lbfgs, "steps": 2}
    mine = train(ours, one_step, **options)
    assert_same(mine, train(ByHand, one_step, **options))


def test_the_loss_that_a_step_returns_is_that_of_the_closure() -> None:
    model = make_model()
    optimizer = ours(sgd(model.parameters()), named_parameters=model.named_parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss.detach()

    expected = torch.stack([loss_of_rank(model, rank) for rank in range(hvd.size())]).mean()
    assert float(optimizer.step(closure)) == pytest.approx(float(expected), rel=1e-5)


def loss_of_rank(model: nn.Module, rank: int) -> Tensor:
    with torch.no_grad():
        loss: Tensor = model(batch(0, rank=rank)).square().mean()
    return loss
