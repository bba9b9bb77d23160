"""What every feedback rule guarantees: no mass is lost, and a step that failed leaves no trace."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hvd_adaptive.buckets import Bucket, build_buckets
from hvd_adaptive.config import CompressionConfig
from hvd_adaptive.engine.routing import routes_of
from hvd_adaptive.feedback import (
    REGISTRY,
    RESIDUAL,
    FeedbackContext,
    FeedbackState,
    format_rule,
    parse,
)
from hvd_adaptive.layers import Layer


@dataclass(frozen=True)
class Member:
    """One rule.

    Args:
        spec: of the rule.
        tolerance: relative error of what it keeps.
    """

    spec: str
    tolerance: float = 1e-6


MEMBERS = {
    "none": Member("none"),
    "ef": Member("ef"),
    "ef in bf16": Member("ef:dtype=bf16", 2.0**-7),
    "ef21": Member("ef21"),
    "ef21-sgdm": Member("ef21-sgdm:momentum=0.9"),
    "dgc": Member("dgc:momentum=0.9"),
}
LAYERS = (Layer(0, "a", (40, 30)), Layer(1, "b", (1500,)))


def test_every_rule_has_a_row() -> None:
    assert {member.spec.partition(":")[0] for member in MEMBERS.values()} == set(REGISTRY)


@dataclass(frozen=True)
class Kept:
    """A rule's state, attached to one bucket."""

    bucket: Bucket
    state: FeedbackState

    def values(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: {slot: held.float().clone() for slot, held in slots.items()}
            for name, slots in self.state.kept().items()
        }


def make(name: str) -> Kept:
    spec = MEMBERS[name].spec
    config = CompressionConfig.of("topk:density=0.1,values=fp32", {"b": "topk:density=0.1"}, spec)
    (bucket,) = build_buckets(LAYERS, routes_of(config, LAYERS, frozenset()), 1 << 30)
    rule = parse(spec)
    assert rule is not None
    state = rule.new_state(FeedbackContext(lambda _: 0.1, lambda: 1))
    state.attach([bucket], {})
    return Kept(bucket, state)


def gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(layer.shape, generator=generator) for layer in LAYERS]


def send_the_largest(kept: Kept, grads: list[Tensor], step: int) -> list[Tensor]:
    """One step up to the commit; what was sent of each layer, 1-D."""
    x, adds = kept.state.begin(kept.bucket, grads, step)
    sent = []
    for view, add in zip(x.split([layer.numel for layer in LAYERS]), adds, strict=True):
        view.add_(add.reshape(-1))
        largest = view.abs() >= view.abs().topk(100).values[-1]
        sent.append(torch.where(largest, view, 0.0))
        view.sub_(sent[-1])
    kept.state.commit(kept.bucket, x, grads, [True] * len(grads), step)
    return sent


def after_steps(name: str, count: int) -> Kept:
    kept = make(name)
    for step in range(count):
        grads = gradients(step)
        sent = send_the_largest(kept, grads, step)
        outs = [each.view(grad.shape).clone() for each, grad in zip(sent, grads, strict=True)]
        kept.state.finish(kept.bucket, outs, [True] * len(outs))
    return kept


@pytest.fixture(params=MEMBERS)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def close(name: str, found: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max()) + 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=scale * MEMBERS[name].tolerance * 4)


def test_the_text_of_a_rule_is_read_back(name: str) -> None:
    rule = parse(MEMBERS[name].spec)
    assert rule is not None
    assert parse(format_rule(rule)) == rule


def test_a_layer_that_was_not_finite_elsewhere_goes_back_to_where_it_was(name: str) -> None:
    kept = after_steps(name, 3)
    before = kept.values()
    grads = gradients(9)
    sent = send_the_largest(kept, grads, 3)
    for position, grad in enumerate(grads):
        kept.state.restore(kept.bucket, position, grad.reshape(-1), sent[position])
    after = kept.values()
    for layer, slots in before.items():
        for slot, held in slots.items():
            close(name, after[layer][slot], held)


def test_what_is_kept_follows_its_layer_into_another_bucket(name: str) -> None:
    kept = after_steps(name, 2)
    before = kept.values()
    config = CompressionConfig.of("topk:density=0.1", {"b": "topk:density=0.5"}, MEMBERS[name].spec)
    alone = build_buckets(LAYERS, routes_of(config, LAYERS, frozenset()), 1)
    assert len(alone) == 2
    kept.state.attach(alone, kept.state.kept())
    assert kept.values().keys() == before.keys()
    for layer, slots in kept.values().items():
        for slot, held in slots.items():
            assert torch.equal(held, before[layer][slot])


def test_a_preview_is_what_would_be_compressed_and_changes_nothing(name: str) -> None:
    kept = after_steps(name, 2)
    before = kept.values()
    grads = gradients(5)
    shown = kept.state.preview(kept.bucket, grads)
    after = kept.values()
    assert all(
        torch.equal(after[layer][slot], held)
        for layer, slots in before.items()
        for slot, held in slots.items()
    )
    x, adds = kept.state.begin(kept.bucket, grads, 2)
    views = x.split([layer.numel for layer in LAYERS])
    for view, add, expected in zip(views, adds, shown, strict=True):
        close(name, view + add.reshape(-1), expected)


def test_only_rules_with_a_residual_keep_what_a_result_cannot_hold(name: str) -> None:
    kept = after_steps(name, 1)
    before = kept.values()
    kept.state.postpone(kept.bucket, 0, torch.full((LAYERS[0].numel,), 8.0))
    for slot, held in kept.values()["a"].items():
        close(name, held, before["a"][slot] + (8.0 if slot == RESIDUAL else 0.0))


def test_memory_is_counted(name: str) -> None:
    kept = after_steps(name, 1)
    elements = sum(layer.numel for layer in LAYERS)
    if kept.state.slots:
        assert kept.state.nbytes == elements * kept.state.dtype.itemsize * len(kept.state.slots)
    else:
        assert kept.state.kept() == {layer.name: {} for layer in LAYERS}


def test_mass_that_is_not_sent_is_kept(name: str) -> None:
    kept = make(name)
    given, sent, momentum = (
        {layer.name: torch.zeros(layer.numel) for layer in LAYERS} for _ in range(3)
    )
    for step in range(4):
        grads = gradients(step)
        for layer, grad, each in zip(LAYERS, grads, send_the_largest(kept, grads, step), strict=True):
            decay = 0.9 if name == "dgc" else 0.0
            momentum[layer.name] = decay * momentum[layer.name] + grad.reshape(-1)
            given[layer.name] += momentum[layer.name]
            sent[layer.name] += each
    for layer, slots in kept.values().items():
        if "estimate" in slots:  # with the sign that a remainder has
            close(name, slots["estimate"], -sent[layer])
        elif slots:
            close(name, slots[RESIDUAL], given[layer] - sent[layer])
