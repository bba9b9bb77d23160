"""float16 and bfloat16 gradients that kernels read as they are: the same to the bit as widened ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from hvd_adaptive.collectives.base import readable, room_for_results  # noqa: E402
from hvd_adaptive.engine.virtual_ranks import VirtualRanks  # noqa: E402
from hvd_adaptive.kernels import base  # noqa: E402

SIZE = 4
SHAPES = {"first": (40, 30), "second": (700,)}
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


class Layers(nn.Module):
    """Parameters, all of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))


def gradients(dtype: torch.dtype, step: int) -> list[dict[str, Tensor]]:
    """Those of each rank; in the second step one rank has a layer that is not finite."""
    generator = torch.Generator().manual_seed(step)
    found = [
        {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
        for _ in range(SIZE)
    ]
    if step == 1:
        found[2]["second"][5] = torch.inf
    return found


def outcome(dtype: torch.dtype, spec: str, rule: str, scheme: str) -> list[Any]:
    """The gradients of three steps, and what all ranks keep after them."""
    model = Layers(dtype)
    ranks = VirtualRanks(
        *(SIZE, model.named_parameters(), spec),
        feedback=rule,
        scheme=scheme,
        ranks_per_node=2,
        overrides={"*": spec},
        op=hvd.Sum,
    )
    rows: list[Any] = []
    for step in range(3):
        ranks.reduce(gradients(dtype, step))
        # as text, because NaN is equal to itself there
        rows += [str(each.grad.view(-1).tolist()) for each in model.parameters()]
    for state in ranks.compression_state_dicts():
        slots = [slot for name in SHAPES for slot in state["kept"].get(name, {}).values()]
        rows += [slot.tolist() for slot in slots]
    return rows


@HALVES
@pytest.mark.parametrize(
    ("spec", "rule", "scheme"),
    [
        ("topk:density=0.1", "ef", "allgather"),
        ("topk:density=0.1", "dgc:momentum=0.5", "two_shot"),
        ("qsgd:bits=4", "ef21", "two_shot"),
        ("qsgd:bits=4", "ef21-sgdm:momentum=0.5", "two_shot"),
        ("qsgd:bits=4,rotate=hadamard", "none", "allgather"),
        ("qsgd:bits=3", "ef", "hierarchical"),
    ],
)
def test_a_step_is_the_same_to_the_bit_as_with_widened_gradients(
    dtype: torch.dtype, spec: str, rule: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(base.BACKENDS, "cpu", "reference")
    found = outcome(dtype, spec, rule, scheme)
    monkeypatch.setattr(base, "READS_HALVES", frozenset())
    assert found == outcome(dtype, spec, rule, scheme)


@HALVES
def test_only_a_backend_that_reads_halves_gets_them(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    grads = [torch.ones(3, dtype=dtype), torch.ones((2, 4), dtype=dtype).t()]
    assert {each.dtype for each in readable(grads)} == {torch.float32}
    monkeypatch.setitem(base.BACKENDS, "cpu", "reference")
    read = readable(grads)
    assert read[0] is grads[0]
    assert all(each.dtype == dtype and each.is_contiguous() for each in read)
    rooms = room_for_results(read)
    assert [room.shape for room in rooms] == [grad.shape for grad in grads]
    assert {room.dtype for room in rooms} == {torch.float32}
    mixed = [grads[0], torch.ones(2)]
    assert {each.dtype for each in readable(mixed)} == {torch.float32}


def test_float32_results_are_formed_in_the_gradients_own_memory() -> None:
    grads = [torch.ones(3), torch.ones(2)]
    read = readable(grads)
    assert room_for_results(read) is read
    assert read[1] is grads[1]
