"""PowerSGD of many layers at once: those of equal shapes are batched, and nothing else changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from hvd_adaptive.compressors import lowrank
from hvd_adaptive.compressors.base import LayerContext
from hvd_adaptive.compressors.linear import LinearBatch
from hvd_adaptive.compressors.lowrank import PowerSGD, WarmStarts, orthonormal
from hvd_adaptive.layers import Layer

SHAPES = ((12, 30), (7,), (12, 30), (40, 9), (12, 5, 6), (2, 2))
"""Three of one matrix, one of another, and two that are sent dense."""
RANK, RANKS, STEPS = 2, 2, 3


@dataclass
class Step:
    """What all ranks are left with, and what they step with."""

    rests: list[list[Tensor]]
    outs: list[Tensor]


def layers_of(shapes: tuple[tuple[int, ...], ...]) -> list[Layer]:
    return [Layer(index, f"layer{index}", shape) for index, shape in enumerate(shapes)]


def gradients(step: int, spoil: float | None = None) -> list[list[Tensor]]:
    """Those of each rank; ``spoil`` is in a layer of the second one."""
    generator = torch.Generator().manual_seed(step)
    found = [
        [torch.randn(layer.numel, generator=generator) for layer in layers_of(SHAPES)]
        for _ in range(RANKS)
    ]
    if spoil is not None:
        found[1][2][5] = spoil
    return found


def reduced(states: list[WarmStarts], grads: list[list[Tensor]], positions: list[int]) -> Step:
    """One step of some of the layers, with a batch a rank, whose tensors are summed."""
    layers = [layers_of(SHAPES)[position] for position in positions]
    batches = [
        LinearBatch(
            [own[position].clone() for position in positions],
            [torch.empty(layer.numel) for layer in layers],
            layers,
            [RANK] * len(layers),
            np.array(positions, np.uint64),
            state,
        )
        for own, state in zip(grads, states, strict=True)
    ]
    running = [PowerSGD(RANK).rounds(batch) for batch in batches]
    sent = [next(each) for each in running]
    while sent:
        sums = [torch.stack(of_layer).sum(0) for of_layer in zip(*sent, strict=True)]
        sent = []
        for each in running:
            try:
                sent.append(each.send([total.clone() for total in sums]))
            except StopIteration:
                continue
    for one, two in zip(batches[0].outs, batches[1].outs, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    return Step([[*batch.x] for batch in batches], [*batches[0].outs])


def trained(together: bool, spoil: float | None = None) -> tuple[list[Step], WarmStarts]:
    """All steps, with all layers in a batch, or each in one of its own; and what rank 0 starts with."""
    everything = [*range(len(SHAPES))]
    states = [WarmStarts() for _ in range(RANKS)]
    steps = []
    for number in range(STEPS):
        grads = gradients(number, spoil if number == 1 else None)
        parts = [everything] if together else [[position] for position in everything]
        found = [reduced(states, grads, part) for part in parts]
        rests = [[rest for each in found for rest in each.rests[rank]] for rank in range(RANKS)]
        steps.append(Step(rests, [out for each in found for out in each.outs]))
    return steps, states[0]


@pytest.mark.parametrize("spoil", [None, torch.nan, torch.inf, 3e38])
def test_on_cpus_a_batch_gives_the_bits_of_its_layers_one_by_one(spoil: float | None) -> None:
    (steps, state), (expected, other) = trained(True, spoil), trained(False, spoil)
    assert state.q.keys() == other.q.keys() == {"layer0", "layer2", "layer3", "layer4"}
    assert all(torch.equal(state.q[name], other.q[name]) for name in state.q)
    for step, each in zip(steps, expected, strict=True):
        pairs = [(step.outs, each.outs), *zip(step.rests, each.rests, strict=True)]
        for found, wanted in pairs:
            for one, two in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("spoil", [None, torch.nan, 3e38])
def test_joined_products_are_those_of_the_layers_but_for_rounding(
    spoil: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, other = trained(True, spoil)
    joined: list[int] = []

    def joins(matrices: list[Tensor]) -> bool:
        joined.append(len(matrices))
        return len(matrices) > 1

    monkeypatch.setattr(lowrank, "_joins", joins)
    steps, state = trained(True, spoil)
    assert set(joined) == {1, 3}
    for name, q in other.q.items():
        torch.testing.assert_close(state.q[name], q, rtol=1e-3, atol=1e-4 * float(q.abs().max()))
    for step, each in zip(steps, expected, strict=True):
        pairs = [(step.outs, each.outs), *zip(step.rests, each.rests, strict=True)]
        for found, wanted in pairs:
            for one, two in zip(found, wanted, strict=True):
                largest = float(two.nan_to_num().abs().max())
                torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4 * largest, equal_nan=True)


@pytest.mark.parametrize("together", [True, False])
def test_what_is_sent_and_what_is_left_are_the_gradients(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowrank, "_joins", lambda matrices: together and len(matrices) > 1)
    steps, _ = trained(True)
    for number, step in enumerate(steps):
        grads = gradients(number)
        for position, out in enumerate(step.outs):
            total = out + torch.stack([rests[position] for rests in step.rests]).sum(0)
            wanted = torch.stack([own[position] for own in grads]).sum(0)
            torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4)


def test_only_small_matrices_of_other_devices_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [torch.empty(4, 4, device="meta")] * 2
    assert lowrank._joins(pair)
    assert not lowrank._joins(pair[:1])
    assert not lowrank._joins([torch.empty(4, 4)] * 2)
    monkeypatch.setattr(lowrank, "_LARGEST_JOINED", 15)
    assert not lowrank._joins(pair)


def test_a_batch_is_made_orthonormal_as_its_matrices_are() -> None:
    batch = torch.randn(5, 20, 3, generator=torch.Generator().manual_seed(1))
    batch[1] = 0.0
    batch[2, :, 1] = batch[2, :, 0]
    assert torch.equal(orthonormal(batch), torch.stack([orthonormal(each) for each in batch]))


# --- errors of large matrices ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(600, 300), (300, 600)])
@pytest.mark.parametrize("decay", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_errors_of_large_matrices_are_bounds_and_near_those_of_a_decomposition(
    shape: tuple[int, int], decay: float, scale: float
) -> None:
    """Singular values i**-decay, of which the first ones hold little or nearly all energy."""
    generator = torch.Generator().manual_seed(3)
    left, right = (
        torch.linalg.qr(torch.randn(rows, 300, generator=generator, dtype=torch.float64))[0]
        for rows in shape
    )
    values = torch.arange(1, 301, dtype=torch.float64) ** -decay
    x = (scale * (left * values) @ right.T).float()
    assert min(shape) > lowrank.SMALL * (8 + lowrank.SPARE), "else it is decomposed"
    exact = torch.linalg.svdvals(x.double()).square()
    ranks = [1, 4, 8]
    found = PowerSGD(rank=4).errors(x.view(-1), ranks, LayerContext(shape=shape))
    tails = np.array([float(exact[rank:].sum()) for rank in ranks])
    assert (found >= tails * (1 - 1e-4)).all()
    assert (found <= tails * 1.02).all()
    again = PowerSGD(rank=4).errors(x.view(-1), ranks, LayerContext(shape=shape))
    assert found.tolist() == again.tolist()


def test_errors_of_a_large_matrix_near_the_largest_float32_scale_with_it() -> None:
    x = torch.randn(600 * 300, generator=torch.Generator().manual_seed(3))
    x /= x.abs().max()
    small, large = (
        PowerSGD(rank=4).errors(factor * x, [1, 4], LayerContext(shape=(600, 300)))
        for factor in (1.0, 2.0**127)
    )
    assert large == pytest.approx(small * 2.0**254, rel=1e-9)


def test_a_large_matrix_of_zeros_has_no_error() -> None:
    x = torch.zeros(600 * 300)
    assert PowerSGD(rank=4).errors(x, [1, 4], LayerContext(shape=(600, 300))).tolist() == [0.0, 0.0]
