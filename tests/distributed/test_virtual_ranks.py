"""Virtual ranks in one process do what real ones do, to the bit."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from hvd_adaptive import VirtualRanks
from hvd_adaptive.compressors import REGISTRY
from hvd_adaptive.compressors.base import GatheredCompressor
from tests.distributed.workloads import (
    LAYERS,
    bits,
    layer_gradients,
    make_layers,
    ours,
    set_gradients,
)

OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"compression": name} for name in REGISTRY},
    "momentum correction": {"compression": "topk:density=0.05", "feedback": "dgc:momentum=0.9"},
    "ef21": {"compression": "topk:density=0.05", "feedback": "ef21", "dense_steps": 1},
    **{
        f"{name} in two shots": {"compression": name, "scheme": "two_shot"}
        for name, member in REGISTRY.items()
        if issubclass(member, GatheredCompressor)
    },
    "ef21-sgdm": {"compression": "topk:density=0.05", "feedback": "ef21-sgdm", "dense_steps": 1},
    "ef21 in two shots": {
        "compression": "topk:density=0.05",
        "feedback": "ef21",
        "scheme": "two_shot:level=0.1",
    },
    "sum": {"compression": "qsgd:bits=4", "op": hvd.Sum},
    "hybrid": {"compression": "none", "overrides": {"wide": "topk:density=0.05", "tall": "powersgd"}},
    "lgreco": {"compression": "topk:density=0.05", "planner": "lgreco:period=4"},
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", OPTIONS)
def test_virtual_ranks_reduce_as_real_ones_do(name: str) -> None:
    options = OPTIONS[name]
    model, twin = make_layers(), make_layers()
    optimizer = ours(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        **options,
    )
    virtual = VirtualRanks(hvd.size(), twin.named_parameters(), **options)
    steps = 4 if name != "lgreco" else 14
    for step in range(steps):
        optimizer.zero_grad()
        set_gradients(model, layer_gradients(hvd.rank(), step))
        optimizer.synchronize()
        if "planner" in options:
            # as in a step that computes: on a busy machine the planner's thread would be late
            time.sleep(0.1)
        virtual.reduce([layer_gradients(rank, step) for rank in range(hvd.size())])
        for layer in LAYERS:
            real, other = getattr(model, layer).grad, getattr(twin, layer).grad
            assert bits(real) == bits(other), f"{layer} at step {step}"
    state, twin_state = (
        optimizer.compression_state_dict(),
        virtual.compression_state_dicts()[hvd.rank()],
    )
    owned, twin_owned = state["owned"], twin_state["owned"]
    assert owned.keys() == twin_owned.keys()
    for layer, pieces in owned.items():
        assert [(start, bits(piece)) for start, piece in pieces] == [
            (start, bits(piece)) for start, piece in twin_owned[layer]
        ], layer
    mine, other = state["kept"], twin_state["kept"]
    assert mine.keys() == other.keys()
    for layer, slots in mine.items():
        assert all(bits(slots[slot]) == bits(other[layer][slot]) for slot in slots), layer
