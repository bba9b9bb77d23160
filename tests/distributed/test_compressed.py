"""With compression: nothing is lost, nothing spreads that should not, and ranks stay equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

import hvd_adaptive as hva
from tests.distributed.workloads import (
    Model,
    assert_ranks_agree,
    assert_same,
    bits,
    make_model,
    mean_of,
    ours,
    plain_step,
    residuals_of,
    set_gradients,
    sgd,
    snapshot,
    stock,
    train,
)


class Layers(nn.Module):
    """Parameters whose gradients a test sets as it likes; two are compressed, two are sent dense."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(70, 90))
        self.middle = nn.Parameter(torch.zeros(40, 50))
        self.bias = nn.Parameter(torch.zeros(90))
        self.small = nn.Parameter(torch.zeros(3, 4))
        self.hollow = nn.Parameter(torch.zeros(0, 40))


NAMES = ("large", "middle", "bias", "small", "hollow")
SHAPES = {name: getattr(Layers(), name).shape for name in NAMES}


def gradients(step: int, rank: int | None = None) -> dict[str, Tensor | None]:
    """Gradients of heavy tails, different by rank and step."""
    rank = hvd.rank() if rank is None else rank
    generator = torch.Generator().manual_seed(10_000 * rank + step)
    return {name: torch.randn(SHAPES[name], generator=generator).pow(3) for name in NAMES}


def wrapped(model: nn.Module, **options: Any) -> Any:
    options.setdefault("compression", "topk:density=0.05")
    return ours(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=model.named_parameters(),
        **options,
    )


class Ledger:
    """What the gradients of all ranks were, and what was applied."""

    def __init__(self) -> None:
        self.wanted = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in NAMES}
        self.applied = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in NAMES}

    def step(self, model: nn.Module, optimizer: Any, mine: dict[str, Tensor | None]) -> None:
        optimizer.zero_grad()
        set_gradients(model, mine)
        optimizer.synchronize()
        for name, parameter in model.named_parameters():
            own = mine[name]
            own = torch.zeros(SHAPES[name]) if own is None else own
            self.wanted[name] += mean_of(own.double(), f"ledger.{name}")
            assert parameter.grad is not None
            self.applied[name] += parameter.grad.double()
        with optimizer.skip_synchronize():
            optimizer.step()

    def check(self, optimizer: Any, factor: float = 1.0) -> None:
        """Applied + what all ranks still keep == wanted."""
        residuals = residuals_of(optimizer)
        for name in NAMES:
            kept = residuals.get(name, torch.zeros(self.wanted[name].numel())).double()
            kept = mean_of(kept, f"kept.{name}").view(SHAPES[name])
            total = self.applied[name] + factor * kept
            error = float((total - factor * self.wanted[name]).abs().sum())
            assert error <= 1e-6 * float(self.wanted[name].abs().sum() + 1), f"{name}: {error}"


def needs_peers() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank sends nothing")


@pytest.mark.smoke
@pytest.mark.ranks(2, 4, 16)
@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "int8"])
def test_what_is_applied_and_what_is_kept_add_up_to_all_gradients(values: str) -> None:
    if hvd.size() == 16 and values != "int8":
        pytest.skip("formats differ within a rank: four ranks show that")
    model, ledger = make_model(Layers), Ledger()
    optimizer = wrapped(model, compression=f"topk:density=0.05,values={values}")
    for step in range(6):
        ledger.step(model, optimizer, gradients(step))
        ledger.check(optimizer)
    residuals = residuals_of(optimizer)
    assert residuals["large"].norm() > 1
    assert_ranks_agree(model)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 4.0},
        {"bucket_cap_mb": 1e-6},
        {"bucket_cap_mb": 0.01},
        {"overrides": {"bias": "topk:density=0.1", "middle": "none"}},
        {"overrides": {"middle": "topk:density=0.5,values=fp32"}},
        {"groups": 2},
        {"dense_steps": 2},
    ],
    ids=str,
)
def test_mass_is_conserved_under_every_option(options: dict[str, Any]) -> None:
    model, ledger = make_model(Layers), Ledger()
    optimizer = wrapped(model, **options)
    for step in range(5):
        ledger.step(model, optimizer, gradients(step))
        ledger.check(optimizer, hvd.size() if options.get("op") == hvd.Sum else 1.0)
    assert_ranks_agree(model)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("compression", "digits"), [("fp16", 11), ("bf16", 8)])
def test_feedback_makes_up_for_the_rounding_of_each_ranks_own_values(
    compression: str, digits: int
) -> None:
    # The value lies a quarter of a step above a number that the format can hold.
    value, steps = 1 + 2.0 ** -(digits + 1), 64
    for feedback, slack in (("ef", 2.0 ** (2 - digits)), ("none", 0.0)):
        model = make_model(Layers)
        optimizer = wrapped(model, compression=compression, feedback=feedback)
        for _ in range(steps):
            optimizer.zero_grad()
            set_gradients(model, {"large": torch.full(SHAPES["large"], value)})
            optimizer.step()
        applied = -float(model.large.detach().double().mean())
        wanted = steps * value if feedback == "ef" else steps
        assert abs(applied - wanted) <= slack, f"{applied} in place of {wanted}"


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("who", ["one rank", "all ranks", "changing"])
def test_mass_is_conserved_when_gradients_are_missing(who: str) -> None:
    model, ledger = make_model(Layers), Ledger()
    optimizer = wrapped(model)
    for step in range(6):
        mine = gradients(step)
        missing = {
            "one rank": hvd.rank() == 0,
            "all ranks": step in (1, 3),
            "changing": (hvd.rank() + step) % 2 == 0,
        }[who]
        if missing:
            mine["large"] = None
            mine["bias"] = None
        ledger.step(model, optimizer, mine)
        ledger.check(optimizer)
    assert_ranks_agree(model)


@pytest.mark.ranks(2, 4)
def test_a_gradient_of_zeros_on_one_rank_or_all_conserves_mass() -> None:
    model, ledger = make_model(Layers), Ledger()
    optimizer = wrapped(model)
    for step in range(5):
        mine = gradients(step)
        if hvd.rank() == 0 or step in (0, 3):
            mine = {name: torch.zeros(SHAPES[name]) for name in NAMES}
        ledger.step(model, optimizer, mine)
        ledger.check(optimizer)
    assert_ranks_agree(model)


@pytest.mark.ranks(2, 4)
def test_mass_is_conserved_over_frozen_and_unfrozen_steps() -> None:
    model, ledger = make_model(Layers), Ledger()
    optimizer = wrapped(model)
    for step in range(6):
        if step in (2, 4):
            # Between its steps the layer's residual waits for its return.
            model.middle.requires_grad_(step == 4)
        mine = gradients(step)
        if not model.middle.requires_grad:
            optimizer.zero_grad()
            set_gradients(model, {**mine, "middle": None})
            optimizer.synchronize()
            for name, parameter in model.named_parameters():
                own = mine[name]
                if name != "middle" and own is not None:
                    ledger.wanted[name] += mean_of(own.double(), f"ledger.{name}")
                    ledger.applied[name] += parameter.grad.double()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            ledger.step(model, optimizer, mine)
        ledger.check(optimizer)
    assert_ranks_agree(model)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("compression", ["topk:density=0.05", "topk:density=0.05,values=int8"])
def test_a_nan_on_one_rank_reaches_all_ranks_and_stays_in_its_layer(
    bad: float, compression: str
) -> None:
    model = make_model(Layers)
    optimizer = wrapped(model, compression=compression)
    for step in range(5):
        optimizer.zero_grad()
        mine = gradients(step)
        poisoned = step == 2
        if poisoned and hvd.rank() == hvd.size() - 1:
            large = mine["large"]
            assert large is not None
            large[3, 5] = bad
        set_gradients(model, mine)
        optimizer.synchronize()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            finite = bool(parameter.grad.isfinite().all())
            assert finite == (not (poisoned and name == "large")), f"{name} in step {step}"
        residuals = residuals_of(optimizer)
        assert all(kept.isfinite().all() for kept in residuals.values())
        with optimizer.skip_synchronize():
            if not poisoned:  # as a gradient scaler does
                optimizer.step()
    assert_ranks_agree(model)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@pytest.mark.parametrize("feedback", ["ef", "none"])
def test_a_nan_under_dense_compression_reaches_all_ranks_and_is_not_kept(
    compression: str, feedback: str
) -> None:
    model = make_model(Layers)
    optimizer = wrapped(model, compression=compression, feedback=feedback)
    for step in range(4):
        optimizer.zero_grad()
        mine = gradients(step)
        if step == 1 and hvd.rank() == 0:
            large = mine["large"]
            assert large is not None
            large[0, 0] = float("nan")
        set_gradients(model, mine)
        optimizer.synchronize()
        assert model.large.grad is not None
        assert model.middle.grad is not None
        assert bool(model.large.grad.isnan().any()) == (step == 1)
        assert bool(model.middle.grad.isfinite().all())
        with optimizer.skip_synchronize():
            if step != 1:
                optimizer.step()
    assert_ranks_agree(model)


@pytest.mark.ranks(2, 4)
def test_topk_sends_few_elements_and_the_largest_ones() -> None:
    model = make_model(Layers)
    optimizer = wrapped(model, compression="topk:density=0.01,values=fp32")
    mine = gradients(0)
    set_gradients(model, mine)
    optimizer.synchronize()
    count = round(0.01 * SHAPES["large"].numel())
    expected = torch.zeros(SHAPES["large"])
    for rank in range(hvd.size()):
        large = gradients(0, rank)["large"]
        assert large is not None
        order = large.flatten().abs().topk(count).indices
        expected.view(-1)[order] += large.flatten()[order] / hvd.size()
    assert model.large.grad is not None
    torch.testing.assert_close(model.large.grad, expected, rtol=1e-6, atol=1e-6)
    assert int(model.large.grad.count_nonzero()) <= count * hvd.size()


@pytest.mark.ranks(2, 4)
def test_layers_under_an_override_of_none_are_averaged_exactly() -> None:
    model = make_model(Layers)
    optimizer = wrapped(model, overrides={"mid*": "none", "bias": "none"})
    for step in range(3):
        optimizer.zero_grad()
        mine = gradients(step)
        set_gradients(model, mine)
        optimizer.synchronize()
        for name in ("middle", "bias", "small"):
            own = mine[name]
            assert own is not None
            assert bits(getattr(model, name).grad) == bits(mean_of(own, f"exact.{name}"))
        with optimizer.skip_synchronize():
            optimizer.step()
    assert set(residuals_of(optimizer)) == {"large"}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("cap", [1e-6, 0.004, 0.02, 25.0])
def test_the_size_of_buckets_does_not_change_a_compressed_run(cap: float) -> None:
    options: dict[str, Any] = {"compression": "topk:density=0.05", "steps": 5}
    mine = train(ours, bucket_cap_mb=cap, **options)
    assert_same(mine, train(ours, **options))


def test_a_density_of_one_in_full_precision_trains_almost_as_stock_does() -> None:
    mine = train(ours, compression="topk:density=1.0,values=fp32", steps=5)
    expected = train(stock, steps=5)
    for left, right in zip(mine, expected, strict=True):
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_dtypes_are_compressed_and_ranks_stay_equal(dtype: torch.dtype) -> None:
    def kind() -> nn.Module:
        return Model().to(dtype)

    model = make_model(kind)
    optimizer = ours(
        torch.optim.SGD(model.parameters(), lr=0.05),
        named_parameters=model.named_parameters(),
        compression="topk:density=0.1",
    )
    before = snapshot(model)
    for step in range(4):
        plain_step(model, optimizer, step)
        assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
    assert bits(before["first.weight"]) != bits(model.first.weight)
    assert_ranks_agree(model)


@pytest.mark.ranks(2, 4)
def test_channels_last_weights_are_compressed_as_contiguous_ones_are() -> None:
    def run(layout: torch.memory_format) -> list[Any]:
        torch.manual_seed(3)
        conv = nn.Conv2d(16, 32, 3)
        conv.to(memory_format=layout)  # type: ignore[call-overload]
        optimizer = ours(
            torch.optim.SGD(conv.parameters(), lr=0.1),
            named_parameters=conv.named_parameters(),
            compression="topk:density=0.05,values=fp32",
        )
        snapshots = [snapshot(conv)]
        for step in range(4):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * hvd.rank() + step)
            gradient = torch.randn(conv.weight.shape, generator=generator)
            assert conv.bias is not None
            set_gradients(conv, {"weight": gradient, "bias": conv.bias.detach() + hvd.rank()})
            optimizer.step()
            snapshots.append(snapshot(conv))
        return snapshots

    assert_same(run(torch.channels_last), run(torch.contiguous_format))


@pytest.mark.ranks(2, 4)
def test_accumulated_passes_are_compressed_once() -> None:
    model, ledger = make_model(Layers), Ledger()
    optimizer = wrapped(model, backward_passes_per_step=3)
    for step in range(4):
        optimizer.zero_grad()
        parts = [gradients(3 * step + number) for number in range(3)]
        for part in parts:
            set_gradients(model, part)
        optimizer.synchronize()
        for name, parameter in model.named_parameters():
            own = torch.zeros(SHAPES[name])
            for part in parts:
                gradient = part[name]
                assert gradient is not None
                own += gradient
            ledger.wanted[name] += mean_of(own.double(), f"ledger.{name}")
            assert parameter.grad is not None
            ledger.applied[name] += parameter.grad.double()
        with optimizer.skip_synchronize():
            optimizer.step()
        ledger.check(optimizer)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("compression", ["topk:density=0.05", "fp16"])
def test_a_resumed_run_equals_an_uninterrupted_one(compression: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"compression": compression, "feedback": "ef"}
    whole = train(ours, steps=6, **options)
    model = make_model()
    optimizer = ours(sgd(model.parameters()), named_parameters=model.named_parameters(), **options)
    for step in range(3):
        plain_step(model, optimizer, step)
    torch.save(
        [model.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()],
        tmp_path / "checkpoint",
    )
    del optimizer
    weights, state, compression_state = torch.load(tmp_path / "checkpoint")
    again = make_model()
    again.load_state_dict(weights)
    resumed = ours(sgd(again.parameters()), named_parameters=again.named_parameters(), **options)
    resumed.load_state_dict(state)
    resumed.load_compression_state_dict(compression_state)
    for step in range(3, 6):
        plain_step(again, resumed, step)
    assert_same([whole[0], whole[-1]], [whole[0], snapshot(again)])


@pytest.mark.ranks(2, 4)
def test_residuals_are_this_ranks_own_and_not_in_the_state_that_is_broadcast() -> None:
    model = make_model(Layers)
    optimizer = wrapped(model)
    set_gradients(model, gradients(0))
    optimizer.step()
    before = {name: kept.clone() for name, kept in residuals_of(optimizer).items()}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    after = residuals_of(optimizer)
    assert all(bits(before[name]) == bits(after[name]) for name in before)
    root = hvd.broadcast(after["large"].clone(), root_rank=0, name="root")
    assert (bits(root) == bits(after["large"])) == (hvd.rank() == 0)


@pytest.mark.ranks(2, 4)
def test_a_state_of_another_model_is_refused() -> None:
    model = make_model(Layers)
    optimizer = wrapped(model)
    state = optimizer.compression_state_dict()
    foreign = {"large": {"residual": torch.zeros(3)}}
    with pytest.raises(ValueError, match="another model"):
        optimizer.load_compression_state_dict({**state, "kept": foreign})
    with pytest.raises(ValueError, match="format"):
        optimizer.load_compression_state_dict({"kept": {}})


@pytest.mark.ranks(2, 4)
def test_dense_steps_train_as_stock_does_and_then_compression_begins() -> None:
    options: dict[str, Any] = {"compression": "topk:density=0.02", "steps": 6}
    mine = train(ours, dense_steps=3, **options)
    expected = train(stock, steps=6)
    assert_same(mine[:4], expected[:4])
    assert bits(mine[4]["first.weight"]) != bits(expected[4]["first.weight"])


@pytest.mark.ranks(2, 4)
def test_two_compressed_optimizers_keep_their_residuals_apart() -> None:
    first, second = make_model(Layers), make_model(Layers)
    one, two = Ledger(), Ledger()
    left, right = wrapped(first), wrapped(second, compression="topk:density=0.2")
    for step in range(4):
        one.step(first, left, gradients(2 * step))
        two.step(second, right, gradients(2 * step + 1))
        one.check(left)
        two.check(right)


@pytest.mark.ranks(2, 4)
def test_a_sparse_embedding_beside_compressed_layers_trains_on_all_ranks() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(200, 40, sparse=True)
            self.out = nn.Linear(40, 50)

    for sparse_as_dense in (False, True):
        model = make_model(Words)
        optimizer = ours(
            torch.optim.SGD(model.parameters(), lr=0.5),
            named_parameters=model.named_parameters(),
            compression="topk:density=0.05",
            sparse_as_dense=sparse_as_dense,
        )
        before = snapshot(model)
        for step in range(4):
            optimizer.zero_grad()
            index = torch.tensor([[1 + step, 7 * hvd.rank(), 9]])
            if hvd.rank() == 0 and step == 2:
                model.out(torch.ones(1, 40)).square().mean().backward()
            else:
                model.out(model.words(index).mean(1)).square().mean().backward()
            optimizer.step()
        assert bits(before["words.weight"]) != bits(model.words.weight)
        assert_ranks_agree(model)


@pytest.mark.smoke
def test_telemetry_is_written_by_rank_0_alone_and_counts_what_was_sent(
    shared_tmp_path: Path,
) -> None:
    folder = shared_tmp_path / "log"
    model = make_model()
    optimizer = ours(
        sgd(model.parameters()),
        named_parameters=model.named_parameters(),
        compression="topk:density=0.01",
        telemetry=hva.Telemetry(logdir=str(folder), every=2, samples_per_step=6 * hvd.size()),
    )
    for step in range(7):
        plain_step(model, optimizer, step)
    optimizer.meter.close()
    summary = optimizer.meter.summary()
    assert summary.steps == 6
    hvd.barrier()
    assert len(list(folder.glob("telemetry.jsonl"))) == 1
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    if hvd.size() > 1:
        dense = sum(p.numel() for p in model.parameters()) * 4
        assert summary.dense_bytes == dense
        assert 0 < summary.payload_bytes < dense / 3
        assert 0 < summary.gain < 1
        lines = [json.loads(line) for line in (folder / "telemetry.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines if "time/step_ms" in line.get("scalars", {})]
        assert steps == [2, 4, 6]


@pytest.mark.ranks(2, 4)
def test_the_plan_tells_what_each_layer_does() -> None:
    model = make_model(Layers)
    optimizer = wrapped(model, overrides={"middle": "fp16"})
    set_gradients(model, gradients(0))
    optimizer.step()
    rows = {row.layer: row for row in optimizer.plan}
    assert set(rows) == set(NAMES)
    assert rows["large"].compressor.startswith("topk")
    assert rows["middle"].compressor == "fp16"
    assert rows["middle"].wire_bytes == SHAPES["middle"].numel() * 2
    assert rows["bias"].compressor == "none"
    digests = hvd.allgather_object(optimizer.plan.digest)
    assert len(set(digests)) == 1


@pytest.mark.ranks(2, 4)
def test_a_small_regression_converges_under_compression() -> None:
    torch.manual_seed(0)
    truth = torch.randn(64, 32)
    model = nn.Linear(64, 32, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = ours(
        torch.optim.SGD(model.parameters(), lr=0.5),
        named_parameters=model.named_parameters(),
        compression="topk:density=0.05",
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(120):
        x = torch.randn(16, 64, generator=generator)
        optimizer.zero_grad()
        (model(x) - x @ truth).square().sum(1).mean().div(32).backward()
        optimizer.step()
    assert float((model.weight - truth.t()).norm() / truth.norm()) < 0.05
