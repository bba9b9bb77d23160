"""The hierarchical scheme among real ranks, whose nodes are named by HVA_NODE."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

from hvd_adaptive import VirtualRanks
from hvd_adaptive.comm import node_groups
from hvd_adaptive.comm.topology import NODE_VARIABLE
from tests.distributed.workloads import (
    LAYERS,
    bits,
    layer_gradients,
    make_layers,
    ours,
    set_gradients,
)

SPEC = "topk:density=0.05"
OPTIONS: dict[str, dict[str, Any]] = {
    "topk": {"compression": SPEC},
    "quantized": {"compression": "qsgd:bits=4", "feedback": "ef", "op": hvd.Sum},
    "correlated": {"compression": "qsgd:bits=4,correlated=true"},
    "sign": {"compression": "onebit"},
    "learned levels": {"compression": "alq:bits=3"},
    "whole model": {"compression": "globaltopk:density=0.05"},
    "other level": {"compression": SPEC, "scheme": "hierarchical:level=0.1"},
    "ef21": {"compression": SPEC, "feedback": "ef21", "dense_steps": 1},
    "momentum correction": {"compression": SPEC, "feedback": "dgc:momentum=0.9", "dense_steps": 1},
    "mixed schemes": {"compression": SPEC, "scheme": {"wide": "hierarchical", "tall": "two_shot"}},
    "lgreco": {"compression": SPEC, "planner": "lgreco:period=4"},
}


@pytest.fixture(scope="module", autouse=True)
def sets_of_their_own() -> Iterator[None]:
    """Other tests of these ranks make process sets of the same ranks, of which there can be but one."""
    yield
    node_groups.remove_node_groups()


def optimizer_of(model: nn.Module, **options: Any) -> Any:
    return ours(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        **options,
    )


def reduced(optimizer: Any, model: nn.Module, step: int) -> dict[str, Tensor]:
    optimizer.zero_grad()
    set_gradients(model, layer_gradients(hvd.rank(), step))
    optimizer.synchronize()
    return {name: getattr(model, name).grad.clone() for name in LAYERS}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", OPTIONS)
def test_real_ranks_on_two_nodes_reduce_as_virtual_ones_do(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE_VARIABLE, f"node{hvd.rank() // 2}")
    options = {"scheme": "hierarchical", **OPTIONS[name]}
    model, twin = make_layers(), make_layers()
    optimizer = optimizer_of(model, **options)
    virtual = VirtualRanks(hvd.size(), twin.named_parameters(), ranks_per_node=2, **options)
    for step in range(14 if name == "lgreco" else 4):
        found = reduced(optimizer, model, step)
        virtual.reduce([layer_gradients(rank, step) for rank in range(hvd.size())])
        for layer in LAYERS:
            assert bits(found[layer]) == bits(getattr(twin, layer).grad), f"{layer} at step {step}"
    mine, other = optimizer.compression_state_dict(), virtual.compression_state_dicts()[hvd.rank()]
    for layer, slots in mine["kept"].items():
        assert all(bits(slots[slot]) == bits(other["kept"][layer][slot]) for slot in slots), layer
    assert mine["owned"].keys() == other["owned"].keys()


@pytest.mark.ranks(4)
def test_a_run_that_is_resumed_continues_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_VARIABLE, f"node{hvd.rank() % 2}")  # neighbors are not consecutive
    options = {"compression": SPEC, "scheme": "hierarchical"}
    model, twin = make_layers(), make_layers()
    optimizer = optimizer_of(model, **options)
    for step in range(3):
        reduced(optimizer, model, step)
    resumed = optimizer_of(twin, **options)
    resumed.load_compression_state_dict(optimizer.compression_state_dict())
    for step in range(3, 6):
        one, other = reduced(optimizer, model, step), reduced(resumed, twin, step)
        assert all(bits(one[layer]) == bits(other[layer]) for layer in LAYERS), step


@pytest.mark.ranks(4)
def test_the_meter_counts_what_leaves_the_node_and_what_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(NODE_VARIABLE, f"node{hvd.rank() // 2}")
    found = {}
    for scheme in ("two_shot", "hierarchical"):
        model = make_layers()
        optimizer = optimizer_of(
            model, compression="qsgd:bits=4", scheme=scheme, overrides={"bias": "qsgd:bits=4"}
        )
        for step in range(13):
            reduced(optimizer, model, step)
            optimizer.meter.end_step(step)
        found[scheme] = optimizer.meter.summary()
    assert found["two_shot"].node_bytes == 0
    # 2 (m - 1) / m halves of a payload between m = 2 nodes, against 2 (n - 1) / n among n = 4 ranks
    ratio = found["hierarchical"].traffic_bytes / found["two_shot"].traffic_bytes
    assert ratio == pytest.approx(1 / 3, rel=0.05)
    dense = 4 * sum(torch.Size(shape).numel() for shape in LAYERS.values())
    # once there and once back; chunks of one size need padding
    assert dense <= found["hierarchical"].node_bytes <= 1.1 * dense


@pytest.mark.ranks(4)
@pytest.mark.parametrize("nodes", ["aaab", "aaaa", "abcd"])
def test_where_there_is_no_hierarchy_rank_0_says_so_and_it_is_two_shot(
    nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE_VARIABLE, nodes[hvd.rank()])
    model, twin = make_layers(), make_layers()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = optimizer_of(model, compression=SPEC, scheme="hierarchical")
    said = [str(each.message) for each in caught if "'hierarchical' reduces as" in str(each.message)]
    assert len(said) == (hvd.rank() == 0)
    flat = optimizer_of(twin, compression=SPEC, scheme="two_shot")
    for step in range(2):
        one, other = reduced(optimizer, model, step), reduced(flat, twin, step)
        assert all(bits(one[layer]) == bits(other[layer]) for layer in LAYERS)


@pytest.mark.ranks(4)
def test_a_process_set_of_its_own_reduces_in_two_shots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_VARIABLE, f"node{hvd.rank() // 2}")
    process_set = hvd.add_process_set([0, 3])
    try:
        model, twin = make_layers(), make_layers()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = optimizer_of(
                model, compression=SPEC, scheme="hierarchical", process_set=process_set
            )
        assert any("a process set of its own" in str(w.message) for w in caught) == (hvd.rank() == 0)
        if hvd.rank() in (0, 3):
            virtual = VirtualRanks(2, twin.named_parameters(), SPEC, scheme="two_shot")
            for step in range(2):
                found = reduced(optimizer, model, step)
                virtual.reduce([layer_gradients(rank, step) for rank in (0, 3)])
                for layer in LAYERS:
                    assert bits(found[layer]) == bits(getattr(twin, layer).grad), layer
        hvd.barrier()
    finally:
        hvd.remove_process_set(process_set)


@pytest.mark.ranks(4)
def test_without_process_sets_all_ranks_say_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_VARIABLE, f"node{hvd.rank() // 2}")

    def refuse(process_set: hvd.ProcessSet) -> None:
        raise ValueError("Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding process sets")

    monkeypatch.setattr(node_groups, "_made", {})
    monkeypatch.setattr(hvd, "add_process_set", refuse)
    with pytest.raises(ValueError, match=r"ranks \[0, 1\].*hvd_adaptive\.init\(hierarchical=True\)"):
        optimizer_of(make_layers(), compression=SPEC, scheme="hierarchical")
