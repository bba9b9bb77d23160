"""Every compressor and every feedback rule over real ranks, against the same thing done by hand.

The simulation writes each rule out from its paper, keeps float64, and uses compressors only through
the calls for one layer: it knows nothing of buckets, memories, frames or rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

import hvd_adaptive as hva
from hvd_adaptive import rng
from hvd_adaptive.comm import process_set_control
from hvd_adaptive.compressors import (
    REGISTRY,
    Compressor,
    GatheredCompressor,
    LinearCompressor,
    parse,
)
from hvd_adaptive.compressors.base import LayerContext, Learner
from hvd_adaptive.compressors.linear import CastCompressor, LinearBatch
from hvd_adaptive.config import CompressionConfig
from hvd_adaptive.layers import Layer
from hvd_adaptive.wire import TooLargeError, frame
from tests.distributed.workloads import (
    assert_ranks_agree,
    assert_same,
    counted,
    make_model,
    mean_of,
    ours,
    plain_step,
    residuals_of,
    set_gradients,
    snapshot,
    train,
)

SPECS = {
    "none": "none",
    "fp16": "fp16",
    "bf16": "bf16",
    "topk": "topk:density=0.05",
    "globaltopk": "globaltopk:density=0.05",
    "threshold": "threshold:threshold=0.5",
    "dgc": "dgc:density=0.05",
    "redsync": "redsync:density=0.05,values=sign",
    "randomk": "randomk:density=0.1",
    "powersgd": "powersgd:rank=2",
    "qsgd": "qsgd:bits=4",
    "qsgdinf": "qsgdinf:bits=3",
    "nuqsgd": "nuqsgd:bits=3",
    "natural": "natural:bits=4",
    "terngrad": "terngrad",
    "signsgd": "signsgd",
    "onebit": "onebit",
    # what they learn has a test of its own
    "alq": "alq:bits=3,updates=100",
    "amq": "amq:bits=3,updates=100",
    "correlated": "qsgd:bits=3,correlated=true",
    "rotated": "qsgdinf:bits=4,correlated=true,rotate=hadamard",
}
SHAPES = {"wide": (48, 64), "tall": (1500, 4), "conv": (16, 12, 3, 3), "bias": (100,)}
COMPRESSED = [n for n in SPECS if n not in ("none", "fp16", "bf16")]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


def gradients(step: int, rank: int | None = None) -> dict[str, Tensor]:
    """Gradients with a part that all ranks and steps share, one of low rank, and noise."""
    rank = hvd.rank() if rank is None else rank
    generator = torch.Generator().manual_seed(7919 * step + rank)
    common = torch.Generator().manual_seed(5)
    out = {}
    for name, shape in SHAPES.items():
        noise = torch.randn(shape, generator=generator)
        out[name] = torch.randn(shape, generator=common) + 0.5 * noise * noise.abs()
    return out


def test_every_registered_compressor_is_in_the_table() -> None:
    assert {spec.partition(":")[0] for spec in SPECS.values()} == set(REGISTRY)


def make(compression: str, **options: Any) -> tuple[nn.Module, Any]:
    model = make_model(Layers)
    optimizer = ours(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=model.named_parameters(),
        compression=compression,
        **options,
    )
    return model, optimizer


def one_step(model: nn.Module, optimizer: Any, mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reduce ``mine``; what all ranks then step with."""
    optimizer.zero_grad()
    set_gradients(model, mine)
    optimizer.synchronize()
    reduced = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with optimizer.skip_synchronize():
        optimizer.step()
    return reduced


# --- by hand --------------------------------------------------------------------------------------


@dataclass
class ByHand:
    """All ranks in one process, the rules written out."""

    spec: str
    rule: str
    ranks: int
    kept: dict[tuple[str, int, str], Tensor] = field(default_factory=dict)
    states: dict[Compressor, Any] = field(default_factory=dict)

    def at(self, slot: str, rank: int, layer: Layer) -> Tensor:
        zeros = torch.zeros(layer.numel, dtype=torch.float64)
        return self.kept.setdefault((slot, rank, layer.name), zeros)

    def step(self, step: int, everyone: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        choice = CompressionConfig.of(self.spec, None, None)
        layers = [Layer(i, name, shape) for i, (name, shape) in enumerate(SHAPES.items())]
        flat = [{name: grad.reshape(-1).double() for name, grad in grads.items()} for grads in everyone]
        groups: dict[Compressor, list[Layer]] = {}
        for layer in layers:
            groups.setdefault(choice.compressor_of(layer), []).append(layer)
        out: dict[str, Tensor] = {}
        for compressor, members in groups.items():
            if compressor.whole_model:
                out.update(self.whole(compressor, members, step, flat))
                continue
            for layer in members:
                out[layer.name] = self.layer(compressor, layer, step, [g[layer.name] for g in flat])
        return out

    def layer(self, compressor: Compressor, layer: Layer, step: int, grads: list[Tensor]) -> Tensor:
        inputs = [self.prepare(compressor, rank, layer, grad) for rank, grad in enumerate(grads)]
        sent, rests = self.send(compressor, layer, step, [x.float() for x in inputs])
        mean = torch.stack([each.double() for each in sent]).mean(0)
        for rank, (grad, c, rest) in enumerate(zip(grads, sent, rests, strict=True)):
            self.keep(compressor, rank, layer, grad, c.double(), rest.double())
        if self.rule.startswith("ef21") and compressor.name != "none":
            return self.at("H", 0, layer).add_(mean).clone()
        return mean

    def prepare(self, compressor: Compressor, rank: int, layer: Layer, grad: Tensor) -> Tensor:
        """What is compressed."""
        dense = compressor.name == "none"
        if self.rule == "dgc":
            u, v = self.at("u", rank, layer), self.at("v", rank, layer)
            u.mul_(0.9).add_(grad)
            return v.add_(u)
        if self.rule == "ef21-sgdm":
            grad = self.at("u", rank, layer).mul_(0.9).add_(grad).clone()
        if dense or self.rule == "none":
            return grad
        if self.rule.startswith("ef21"):
            return grad - self.at("h", rank, layer)
        return self.at("e", rank, layer) + grad

    def keep(
        self, compressor: Compressor, rank: int, layer: Layer, grad: Tensor, c: Tensor, rest: Tensor
    ) -> None:
        """What is left for the next step."""
        if self.rule == "dgc":
            self.at("v", rank, layer).copy_(rest)
            if compressor.name != "none":
                self.at("u", rank, layer)[c != 0] = 0.0
        elif self.rule.startswith("ef21"):
            self.at("h", rank, layer).add_(c)
        elif self.rule == "ef":
            self.at("e", rank, layer).copy_(rest)
        del grad

    def send(
        self, compressor: Compressor, layer: Layer, step: int, xs: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What each rank's payload decodes to, and what stays."""
        state = self.states.setdefault(compressor, compressor.new_state())
        if isinstance(compressor, LinearCompressor) and not isinstance(compressor, CastCompressor):
            return self.lockstep(compressor, layer, step, xs, state)
        sent, rests = [], []
        for rank, x in enumerate(xs):
            rest, out = x.clone(), torch.zeros_like(x)
            correlated = isinstance(compressor, GatheredCompressor) and compressor.correlated
            keys = rng.layer_keys(0, rng.SHARED if correlated else rank, step, [layer.index])
            dither = int(rng.dithers(keys, rank, len(xs))[0]) if correlated else 0
            context = LayerContext(int(keys[0]), None, state, dither, rng.rotation_key(0, step))
            payload = compressor.compress_(rest, compressor.level, context)
            compressor.decompress_add_(payload, out)
            sent.append(out)
            rests.append(rest)
        return sent, rests

    def lockstep(
        self, compressor: LinearCompressor, layer: Layer, step: int, xs: list[Tensor], state: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Rounds of all ranks side by side; each ends with the mean of what was sent."""
        key = rng.layer_keys(0, rng.SHARED, step, [layer.index])
        rests, outs = [x.clone() for x in xs], [torch.zeros_like(x) for x in xs]
        rounds = [
            compressor.rounds(LinearBatch([rest], [out], [layer], [compressor.level], key, state))
            for rest, out in zip(rests, outs, strict=True)
        ]
        sent = [next(each) for each in rounds]
        while True:
            means = [torch.stack(column).mean(0) for column in zip(*sent, strict=True)]
            try:
                sent = [each.send([mean.clone() for mean in means]) for each in rounds]
            except StopIteration:
                break
        for each in rounds[1:]:
            with pytest.raises(StopIteration):
                each.send([mean.clone() for mean in means])
        # what a rank sent is what it no longer has; together they are what was reduced
        return [x - rest for x, rest in zip(xs, rests, strict=True)], rests

    def whole(
        self, compressor: Compressor, layers: list[Layer], step: int, grads: list[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """One vector of all layers, in the order in which gradients become ready."""
        ready = list(reversed(layers))
        joined = Layer(0, "+".join(layer.name for layer in ready), (sum(x.numel for x in ready),))
        flat = [torch.cat([g[layer.name] for layer in ready]) for g in grads]
        mean = self.layer(compressor, joined, step, flat)
        return dict(zip((x.name for x in ready), mean.split([x.numel for x in ready]), strict=True))


def rules_of(name: str) -> list[str]:
    compressor = parse(SPECS[name])
    rules = ["ef", "ef21", "ef21-sgdm"] if compressor.biased else ["ef", "none"]
    return [*rules, "dgc"] if compressor.selects else rules


CASES = [(name, rule) for name in COMPRESSED for rule in rules_of(name)]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(("name", "rule"), CASES)
def test_ranks_compute_what_the_algorithm_says(name: str, rule: str) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank sends nothing")
    model, optimizer = make(SPECS[name], feedback=rule, bucket_cap_mb=0.02)
    hand = ByHand(SPECS[name], rule, hvd.size())
    for step in range(4):
        everyone = [gradients(step, rank) for rank in range(hvd.size())]
        reduced = one_step(model, optimizer, everyone[hvd.rank()])
        expected = hand.step(step, everyone)
        for layer, grad in reduced.items():
            mine, theirs = grad.reshape(-1).double(), expected[layer].double()
            # a value at the edge of a threshold or of a random rounding may fall to the other side
            # for a rounding error of the sums: few may, and training must not notice
            off = (mine - theirs).abs() > 1e-4 * (1 + theirs.abs())
            assert off.double().mean() <= 2e-3, f"{layer} in step {step}: {int(off.sum())} differ"
    assert_ranks_agree(model)


# --- mass -----------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", COMPRESSED)
def test_with_error_feedback_no_gradient_is_lost(name: str) -> None:
    model, optimizer = make(SPECS[name], feedback="ef")
    applied = {layer: torch.zeros(shape, dtype=torch.float64) for layer, shape in SHAPES.items()}
    wanted = {layer: torch.zeros(shape, dtype=torch.float64) for layer, shape in SHAPES.items()}
    for step in range(6):
        mine = gradients(step)
        for layer, grad in one_step(model, optimizer, mine).items():
            applied[layer] += grad.double()
            wanted[layer] += mean_of(mine[layer].double(), f"wanted.{layer}")
    for layer, residual in residuals_of(optimizer).items():
        kept = mean_of(residual.double(), f"kept.{layer}").view(SHAPES[layer])
        torch.testing.assert_close(applied[layer] + kept, wanted[layer], rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "rule"), CASES)
def test_a_nan_on_one_rank_is_seen_by_all_and_leaves_the_last_good_state(name: str, rule: str) -> None:
    model, optimizer = make(SPECS[name], feedback=rule)
    for step in range(3):
        one_step(model, optimizer, gradients(step))
    before = optimizer.compression_state_dict()["kept"]
    mine = gradients(3)
    if hvd.rank() == hvd.size() - 1:
        mine["wide"][3, 5] = float("nan")
        mine["tall"][0, 0] = float("inf")
    optimizer.zero_grad()
    set_gradients(model, mine)
    optimizer.synchronize()
    whole = parse(SPECS[name]).whole_model
    for layer, parameter in model.named_parameters():
        good = layer == "bias" or (layer == "conv" and not whole)
        assert bool(parameter.grad.isfinite().all()) == good, layer
    after = optimizer.compression_state_dict()["kept"]
    for layer in ("wide", "tall"):
        for slot in before.get(layer, {}):
            torch.testing.assert_close(
                after[layer][slot], before[layer][slot], rtol=1e-4, atol=1e-4, msg=f"{layer} {slot}"
            )
    optimizer.zero_grad()  # the step is skipped, as a gradient scaler does; then training continues
    reduced = one_step(model, optimizer, gradients(4))
    assert all(bool(grad.isfinite().all()) for grad in reduced.values())
    assert_ranks_agree(model)


# --- feedback -------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 4)
def test_ef21_starts_from_the_last_dense_gradient() -> None:
    model, optimizer = make("topk:density=0.01,values=fp32", feedback="ef21", dense_steps=2)
    for step in range(2):
        dense = one_step(model, optimizer, gradients(step))
        for layer, grad in dense.items():
            torch.testing.assert_close(grad, mean_of(gradients(step)[layer], f"dense.{layer}"))
    kept = optimizer.compression_state_dict()["kept"]
    for layer in ("wide", "tall", "conv"):
        torch.testing.assert_close(kept[layer]["estimate"], -gradients(1)[layer].view(-1))
        torch.testing.assert_close(kept[layer]["mean"], dense[layer].view(-1))
    # where nothing is sent, all continue stepping with what they know
    known = one_step(model, optimizer, gradients(2))["wide"]
    unchanged = known == dense["wide"]
    assert 0.9 < unchanged.double().mean() < 1.0


@pytest.mark.ranks(2, 4)
def test_dgc_clips_the_norm_of_the_whole_gradient_by_the_number_of_ranks() -> None:
    clip = 3.0
    model, optimizer = make("topk:density=1.0,values=fp32", feedback=f"dgc:clip={clip}")
    mine = gradients(0)
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in mine.values()))
    reduced = one_step(model, optimizer, mine)
    for layer, grad in mine.items():
        expected = mean_of(grad * clip / math.sqrt(hvd.size()) / norm, f"clipped.{layer}")
        torch.testing.assert_close(reduced[layer], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("rule", ["dgc", "ef21-sgdm"])
def test_without_compression_momentum_before_it_is_momentum(rule: str) -> None:
    options: dict[str, Any] = {"compression": "none", "steps": 5}
    plain = train(ours, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), **options)
    local = train(
        ours, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), feedback=f"{rule}:momentum=0.9", **options
    )
    for name, value in plain[-1].items():
        if not name.endswith(".grad"):
            torch.testing.assert_close(local[-1][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(2, 4)
def test_a_bf16_residual_takes_half_the_memory_and_loses_nothing_in_expectation() -> None:
    spec = "randomk:density=0.02"
    _, full = make(spec, feedback="ef")
    model, half = make(spec, feedback="ef:dtype=bf16")
    value = 1.0 / 512  # beside a residual of 1 a bfloat16 cannot hold it
    for _ in range(2):
        one_step(model, half, {name: torch.ones(shape) for name, shape in SHAPES.items()})
    start = residuals_of(half)["wide"].double().mean()
    for _ in range(40):
        one_step(model, half, {name: torch.full(shape, value) for name, shape in SHAPES.items()})
    applied = -float(model.get_parameter("wide").detach().double().mean())
    kept = float(residuals_of(half)["wide"].double().mean())
    assert residuals_of(half)["wide"].dtype == torch.bfloat16
    assert applied + kept == pytest.approx(2 + 40 * value, rel=2e-3)
    assert start > 1.5
    optimizer_step = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    set_gradients(model, optimizer_step)
    full.synchronize()
    assert 0 < half.feedback_bytes == full.feedback_bytes / 2


@pytest.mark.ranks(2, 4)
def test_decay_forgets_and_a_lower_learning_rate_raises_the_residual() -> None:
    ones = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    spec = "topk:density=0.0001,values=fp32"
    model, optimizer = make(spec, feedback="ef:decay=0.5")
    one_step(model, optimizer, ones)
    one_step(model, optimizer, zeros)
    assert residuals_of(optimizer)["wide"].median() == 0.5
    model, optimizer = make(spec, feedback="ef:lr_correction=true")
    one_step(model, optimizer, ones)
    optimizer.param_groups[0]["lr"] = 0.25
    one_step(model, optimizer, zeros)
    assert residuals_of(optimizer)["wide"].median() == 4.0
    one_step(model, optimizer, zeros)
    assert residuals_of(optimizer)["wide"].median() == 4.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "rule"), CASES)
def test_a_resumed_run_of_every_member_equals_an_uninterrupted_one(
    name: str, rule: str, tmp_path: Any
) -> None:
    options: dict[str, Any] = {"compression": SPECS[name], "feedback": rule, "dense_steps": 1}

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    whole = train(ours, optimizer=plain, steps=5, **options)
    model = make_model()
    first = ours(plain(model.parameters()), named_parameters=model.named_parameters(), **options)
    for step in range(3):
        plain_step(model, first, step)
    path = tmp_path / f"state{hvd.rank()}"
    torch.save([model.state_dict(), first.compression_state_dict()], path)
    weights, state = torch.load(path)
    again = make_model()
    again.load_state_dict(weights)
    resumed = ours(plain(again.parameters()), named_parameters=again.named_parameters(), **options)
    resumed.load_compression_state_dict(state)
    for step in range(3, 5):
        plain_step(again, resumed, step)
    assert_same([whole[0], whole[-1]], [whole[0], snapshot(again)])


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("rule", ["ef", "ef:dtype=bf16", "ef21", "ef21-sgdm", "dgc"])
def test_a_state_of_other_ranks_keeps_the_mean_over_ranks(rule: str) -> None:
    model, optimizer = make("topk:density=0.05", feedback=rule)
    for step in range(3):
        one_step(model, optimizer, gradients(step, hvd.rank()))
    saved = hvd.allgather_object(optimizer.compression_state_dict())
    saved.append(saved[0])  # one rank more than there are now
    _, resumed = make("topk:density=0.05", feedback=rule)
    resumed.load_compression_state_dict(hva.merge_compression_states(saved))
    now = hvd.allgather_object(resumed.compression_state_dict())
    for name, slots in saved[0]["kept"].items():
        for slot in slots:
            before, after = (
                torch.stack([state["kept"][name][slot].double() for state in states]).mean(0)
                for states in (saved, now)
            )
            close = {"rtol": 0.01, "atol": 1e-6} if "bf16" in rule else {"rtol": 1e-6, "atol": 1e-7}
            torch.testing.assert_close(after, before, **close)


# --- changes during training ----------------------------------------------------------------------


@pytest.mark.ranks(2, 4)
def test_a_rank_can_change_during_training_without_a_cold_start() -> None:
    model, optimizer = make("powersgd:rank=4", feedback="none")
    mine = gradients(0, rank=0)
    for _ in range(20):
        one_step(model, optimizer, mine)
    optimizer.set_compression("powersgd:rank=2")
    warm = one_step(model, optimizer, mine)["wide"]
    optimizer.set_compression("powersgd:rank=4")
    risen = one_step(model, optimizer, mine)["wide"]
    error_of = parse("powersgd").errors
    best = error_of(mine["wide"].view(-1), [2, 4], LayerContext(shape=SHAPES["wide"]))
    for reduced, expected in zip((warm, risen), best, strict=True):
        error = float((reduced - mine["wide"]).double().square().sum())
        assert error == pytest.approx(expected, rel=0.05)
    fresh_model, fresh = make("powersgd:rank=2", feedback="none")
    cold = one_step(fresh_model, fresh, mine)["wide"]
    assert float((cold - mine["wide"]).double().square().sum()) > 1.01 * best[0]


@pytest.mark.ranks(2, 4)
def test_compression_can_change_during_training_and_nothing_is_lost() -> None:
    model, optimizer = make("topk:density=0.01", feedback="ef")
    total = {layer: torch.zeros(shape, dtype=torch.float64) for layer, shape in SHAPES.items()}
    specs = ["powersgd:rank=1", "qsgd:bits=2", "randomk:density=0.1", "none", "none"]
    for step, spec in enumerate(specs):
        mine = gradients(step)
        for layer, grad in one_step(model, optimizer, mine).items():
            total[layer] += grad.double() - mean_of(mine[layer].double(), f"wanted.{layer}")
        optimizer.set_compression(spec, overrides={"conv": "topk:density=0.5"} if step == 0 else None)
    for layer, left in total.items():
        torch.testing.assert_close(left, torch.zeros_like(left), rtol=0, atol=1e-4, msg=layer)


@pytest.mark.ranks(2, 4)
def test_a_change_on_one_rank_alone_is_an_error_on_every_rank() -> None:
    model, optimizer = make("topk:density=0.01")
    one_step(model, optimizer, gradients(0))
    spec = "topk:density=0.5" if hvd.rank() == 0 else "topk:density=0.1"
    with pytest.raises(ValueError, match=r"set_compression: compression is .* on rank"):
        optimizer.set_compression(spec)
    one_step(model, optimizer, gradients(1))
    assert optimizer.plan.layers[0].level == 0.01


@pytest.mark.ranks(2, 4)
def test_the_density_of_dgc_falls_in_stages() -> None:
    model, optimizer = make("dgc:density=0.001,ramp=2", dense_steps=1)
    seen = []
    for step in range(11):
        one_step(model, optimizer, gradients(step))
        seen.append(optimizer.plan.layers[0].level)  # of the next step
    stages = [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.00390625, 0.00390625, 0.001]
    assert seen[:9] == pytest.approx(stages, rel=0.03)
    assert seen[-1] == 0.001


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["alq", "amq"])
def test_learned_levels_are_the_same_on_all_ranks_and_fit_better(name: str) -> None:
    spec = f"{name}:bits=3,updates=2/6"
    model, optimizer = make(spec)
    for step in range(4):
        one_step(model, optimizer, gradients(step))
    (state,) = optimizer.compression_state_dict()["codecs"].values()
    learner = parse(spec).new_state()
    assert isinstance(learner, Learner)
    learner.load_state_dict(state)
    x = gradients(9)["wide"].view(-1)
    compressor = parse(spec)
    learned, initial = (
        compressor.errors(x, [3], LayerContext(state=each))[0] for each in (learner, None)
    )
    assert learned < 0.95 * initial
    table = torch.from_numpy(learner.table(3))  # type: ignore[attr-defined]
    everyone = hvd.allgather(table[None], name="table")
    assert torch.equal(everyone, everyone[:1].expand_as(everyone))
    optimizer.param_groups[0]["lr"] = 0.1  # a fall: levels are learned again two steps on
    before = learner.table(3).copy()  # type: ignore[attr-defined]
    for step in range(10, 13):
        one_step(model, optimizer, {k: v.sign() * 0.1 + 0.01 * v for k, v in gradients(step).items()})
    (state,) = optimizer.compression_state_dict()["codecs"].values()
    learner.load_state_dict(state)
    assert (learner.table(3) != before).any()  # type: ignore[attr-defined]


# --- hybrids --------------------------------------------------------------------------------------

HYBRID = {"wide": "topk:density=0.05", "tall": "qsgd:bits=4", "conv": "powersgd:rank=2", "bias": "none"}


@pytest.mark.ranks(2, 4)
def test_a_hybrid_bucket_costs_one_allgather_and_one_allreduce_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = make("none", overrides=HYBRID)
    one_step(model, optimizer, gradients(0))
    with counted(monkeypatch) as counts:
        one_step(model, optimizer, gradients(1))
    # P with the bias, Q, and the vote
    assert (counts["allgather_async"], counts["allreduce_async_"]) == (1, 3)
    assert [row.compressor.partition(":")[0] for row in optimizer.plan] == [
        "topk",
        "qsgd",
        "powersgd",
        "none",
    ]


@pytest.mark.ranks(2, 4)
def test_a_hybrid_does_to_each_layer_what_its_compressor_does_alone() -> None:
    model, optimizer = make("none", overrides=HYBRID, feedback="ef")
    alone = {layer: make(spec, feedback="ef") for layer, spec in HYBRID.items()}
    for step in range(3):
        mixed = one_step(model, optimizer, gradients(step))
        for layer, (other, its) in alone.items():
            expected = one_step(other, its, gradients(step))[layer]
            torch.testing.assert_close(mixed[layer], expected, rtol=1e-5, atol=1e-6, msg=layer)


@pytest.mark.smoke
@pytest.mark.ranks(2, 4, 16)
@pytest.mark.parametrize("name", ["qsgd", "powersgd", "redsync", "randomk"])
def test_ranks_agree_when_one_has_no_gradient_or_only_zeros(name: str) -> None:
    model, optimizer = make(SPECS[name])
    for step in range(3):
        mine = gradients(step)
        if hvd.rank() == 0:
            del mine["wide"]
            mine["tall"].zero_()
        reduced = one_step(model, optimizer, mine)
        assert all(bool(grad.isfinite().all()) for grad in reduced.values())
    assert_ranks_agree(model)


@pytest.mark.ranks(2)
def test_more_than_mpi_can_gather_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(Layers)
    optimizer = ours(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression="threshold:threshold=0.5",
    )
    monkeypatch.setattr(frame, "MAX_GATHERED_BYTES", 2 * 5000)
    # rank 0 sends nothing, and the other all
    set_gradients(model, {name: torch.full(shape, hvd.rank()) for name, shape in SHAPES.items()})
    with pytest.raises(TooLargeError, match=r"rank 1 has .* at most 5000"):
        optimizer.step()
    monkeypatch.setattr(process_set_control, "MAX_GATHERED_BYTES", 2 * 100)
    control = process_set_control.ProcessSetControl
    assert control("small").allgather(hvd.rank()) == [0, 1]
    with pytest.raises(RuntimeError, match="rank 0 has 202 bytes to tell"):
        control("large").allgather("x" * 200 if hvd.rank() == 0 else "")
