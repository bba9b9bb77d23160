"""Multi-level compression in training: what is sent was compressed before it was known to be sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hvd_adaptive import VirtualRanks
from hvd_adaptive.buckets import Bucket
from hvd_adaptive.collectives.base import PreparedPayload, nothing_prepared
from hvd_adaptive.compressors import parse
from hvd_adaptive.engine.multi_level import MultiLevelPayloads
from hvd_adaptive.layers import Layer

LAYERS = (Layer(0, "wide", (64, 32)), Layer(1, "tall", (400, 8)), Layer(2, "bias", (8,)))
CHAIN = [(0.1,) * 3, (0.025,) * 3, (0.002,) * 3]


def draw(numel: int, seed: int) -> torch.Tensor:
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return noise * noise.abs()


@pytest.mark.parametrize("name", ["topk", "dgc", "redsync", "threshold"])
def test_energies_are_those_of_compressing_further_and_nothing_is_changed(name: str) -> None:
    own = parse(f"{name}:values=fp32")
    x = [draw(layer.numel, layer.index) for layer in LAYERS]
    kept = [each.clone() for each in x]
    chain = CHAIN if name != "threshold" else [(0.5,) * 3, (1.0,) * 3]
    sent = MultiLevelPayloads().compress(LAYERS, x, own, chain, {})
    assert sent is not None
    assert all(torch.equal(one, other) for one, other in zip(x, kept, strict=True))
    for position, tensor in enumerate(x):
        rest = tensor.clone()
        payload = own.compress_(rest, chain[0][position])
        for row, levels in enumerate(chain):
            if row:
                payload = own.recompress_(payload, rest, levels[position])
            energy = float((tensor - rest).double().square().sum())
            assert sent[row, position] == pytest.approx(energy, rel=1e-5)


def test_what_cannot_be_compressed_further_or_is_not_finite_is_left_to_its_turn() -> None:
    payloads = MultiLevelPayloads()
    x = [draw(layer.numel, 0) for layer in LAYERS]
    assert payloads.compress(LAYERS, x, parse("qsgd"), CHAIN, {}) is None
    x[1][5] = torch.nan
    assert payloads.compress(LAYERS, x, parse("topk"), CHAIN, {}) is None
    assert not payloads._made


def train(
    monkeypatch: pytest.MonkeyPatch, spec: str, feedback: str | None, prepared: bool
) -> tuple[list[torch.Tensor], list[dict[str, Any]], list[float], int]:
    """Gradients and states of a run, the bytes of each plan, and how many payloads were made before."""
    found = 0

    def take(payloads: MultiLevelPayloads, bucket: Bucket) -> PreparedPayload | None:
        nonlocal found
        made = TAKE(payloads, bucket)
        found += made is not None
        return made if prepared else nothing_prepared(bucket)

    monkeypatch.setattr(MultiLevelPayloads, "take", take)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    planner = "gravac:window=4,exact=true,epsilon=0.6"
    step = 0  # takes a second each, or two runs would search differently
    ranks = VirtualRanks(
        2,
        model.named_parameters(),
        spec,
        planner=planner,
        feedback=feedback,
        clock=lambda: float(step),
    )
    results, nbytes = [], []
    for step in range(16):
        gradients = [
            {name: draw(p.numel(), 10 * step + rank).view_as(p) for name, p in model.named_parameters()}
            for rank in range(2)
        ]
        ranks.reduce(gradients)
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        nbytes.append(ranks.plan.wire_bytes)
    return results, ranks.compression_state_dicts(), nbytes, found


TAKE = MultiLevelPayloads.take


@pytest.mark.parametrize("feedback", [None, "ef:dtype=bf16"])
def test_sending_one_of_the_payloads_gives_the_bits_of_compressing_in_its_turn(
    feedback: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = "topk:density=0.01,values=fp32"
    made, states, nbytes, count = train(monkeypatch, spec, feedback, True)
    direct, others, _, _ = train(monkeypatch, spec, feedback, False)
    assert count >= 2 * 12, "hardly any payload was made before its turn"
    assert len(set(nbytes)) > 1, "all steps were sent at one factor"
    for one, other in zip(made, direct, strict=True):
        assert torch.equal(one, other)
    for mine, theirs in zip(states, others, strict=True):
        assert mine["kept"].keys() == theirs["kept"].keys()
        for name, slots in mine["kept"].items():
            for slot, kept in slots.items():
                np.testing.assert_array_equal(kept.float(), theirs["kept"][name][slot].float())


def test_rules_that_add_more_than_the_residual_compress_in_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *_, count = train(monkeypatch, "topk:density=0.01,values=fp32", "ef:decay=0.9", True)
    assert count == 0
