"""Kimad in two shots: what ranks send and what comes back have levels of their own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hvd_adaptive import VirtualRanks
from hvd_adaptive.adaptation import timing
from hvd_adaptive.adaptation.layer_samples import LayerSamples
from hvd_adaptive.adaptation.worker import PlannerWorker
from hvd_adaptive.comm.local_group import LocalTransport
from hvd_adaptive.comm.request import Request
from hvd_adaptive.planning import StepMeasurements, Transfer
from tests.collectives.helpers import Layers, gradients

SHAPES = {"wide": (64, 256), "tall": (6000, 4), "bias": (64,)}
RANKS = 3


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds of a byte in each direction, on ranks that compute for 0.1 s."""
    seconds = {"up": 1e-6, "down": 1e-6}

    def measured(
        facts: StepMeasurements, traffic: Sequence[int], _: Any, ways: Sequence[str] = ()
    ) -> StepMeasurements:
        sent = dict.fromkeys(ways, 0.0)
        for nbytes, way in zip(traffic, ways, strict=True):
            sent[way] += nbytes
        moved = [Transfer(nbytes, nbytes * seconds[way], way) for way, nbytes in sent.items()]
        return replace(facts, transfers=moved, compute_seconds=0.1, nbytes=float(sum(traffic)))

    monkeypatch.setattr(timing, "with_transfers", measured)
    votes = PlannerWorker.observe_backlog

    def observe_in_time(worker: PlannerWorker) -> None:
        worker.wait()
        votes(worker)

    monkeypatch.setattr(PlannerWorker, "observe_backlog", observe_in_time)
    return seconds


def taken(network: dict[str, float], up: float, down: float) -> float:
    """Seconds of one rank for bytes that all ranks have given to an alltoall and an allgather."""
    dense = 2 * 4 * SHAPES["bias"][0] * (RANKS - 1) / RANKS
    share = (RANKS - 1) / RANKS
    return network["up"] * (up / RANKS * share + dense) + network["down"] * down * share


def run(
    steps: int, compression: str = "topk:density=0.05", planner: str = "kimad+", **options: Any
) -> tuple[VirtualRanks, Layers]:
    model = Layers(SHAPES)
    ranks = VirtualRanks(
        RANKS,
        model.named_parameters(),
        compression,
        planner=f"{planner}:seconds=0.12,warmup=2,period=6,probe=0,share=0",
        **{"scheme": "two_shot", **options},
    )
    for step in range(steps):
        ranks.reduce([gradients(rank, step, SHAPES) for rank in range(RANKS)])
    return ranks, model


@pytest.mark.parametrize("planner", ["kimad", "kimad+"])
@pytest.mark.parametrize("slow", ["up", "down"])
def test_the_slow_direction_carries_fewer_bytes(
    planner: str, slow: str, network: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    network[slow] *= 8
    carried: dict[str, list[int]] = {"alltoall": [], "allgather": []}
    submit = LocalTransport.submit

    def counted(self: LocalTransport, request: Request, name: str, step: int) -> Any:
        if request.operation in carried:
            carried[request.operation].append(request.tensor.nbytes)
        return submit(self, request, name, step)

    monkeypatch.setattr(LocalTransport, "submit", counted)
    ranks, _ = run(14, planner=planner)
    rows = {row.layer: row for row in ranks.plan}
    faster = "down" if slow == "up" else "up"
    levels = {
        "up": [rows[name].level for name in ("wide", "tall")],
        "down": [rows[name].sum_level for name in ("wide", "tall")],
    }
    assert all(np.greater(levels[faster], levels[slow])), levels
    assert rows["bias"].sum_level == 0
    assert f"{rows['wide'].level:g} / {rows['wide'].sum_level:g}" in str(ranks.plan)
    # the last step's bytes, of the whole group: all payloads, and all sums
    up, down = (sum(carried[each][-RANKS:]) for each in ("alltoall", "allgather"))
    assert (up > 1.5 * RANKS * down) if slow == "down" else (RANKS * down > 1.5 * up)
    assert 0.5 * 0.02 < taken(network, up, down) <= 1.05 * 0.02


def test_levels_of_sums_survive_a_checkpoint(network: dict[str, float]) -> None:
    network["down"] *= 8
    ranks, _ = run(16)
    states = copy.deepcopy(ranks.compression_state_dicts())
    assert set(states[0]["sums"]) == {"wide", "tall"}
    other, twin = run(0)
    other.load_compression_state_dicts(states)
    for step in range(16, 20):
        ranks.reduce([gradients(rank, step, SHAPES) for rank in range(RANKS)])
        other.reduce([gradients(rank, step, SHAPES) for rank in range(RANKS)])
    assert {row.layer: (row.level, row.sum_level) for row in other.plan} == {
        row.layer: (row.level, row.sum_level) for row in ranks.plan
    }
    assert ranks.compression_state_dicts()[0]["sums"] == other.compression_state_dicts()[0]["sums"]
    assert all(p.grad is not None for p in twin.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "two_shot:level=0.1"},
        {"scheme": "allgather"},
        {"candidates": ["qsgd:bits=4"]},
        {"compression": "powersgd:rank=2"},
    ],
    ids=str,
)
def test_where_a_level_decides_on_both_directions_there_is_one(
    options: dict[str, Any], network: dict[str, float]
) -> None:
    network["down"] *= 8
    ranks, _ = run(14, **options)
    assert ranks.plan.version == 2  # something was planned
    assert all(row.sum_level == 0 for row in ranks.plan)


@pytest.mark.parametrize("feedback", ["ef21", "ef", "none"])
def test_kimad_prices_what_is_compressed(
    feedback: str, network: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of g - h under EF21, of g + e under error feedback, as the ranks' states hold them."""
    seen: list[tuple[str, Tensor]] = []
    sample = LayerSamples.sample

    def watched(self: LayerSamples, tensor: Tensor, *more: Any) -> None:
        seen.append((self.layer.name, tensor.clone()))
        sample(self, tensor, *more)

    ranks, _ = run(3, feedback=feedback)  # plans have not come yet; the next sampled step is 4
    held = [copy.deepcopy(state["kept"]) for state in ranks.compression_state_dicts()]
    monkeypatch.setattr(LayerSamples, "sample", watched)
    step = 3
    while not seen:
        held = [copy.deepcopy(state["kept"]) for state in ranks.compression_state_dicts()]
        ranks.reduce([gradients(rank, step, SHAPES) for rank in range(RANKS)])
        step += 1
    assert len(seen) == 2 * RANKS
    for name in ("wide", "tall"):
        rows = [row for row in seen if row[0] == name]
        for rank, (_, x) in enumerate(rows):
            expected = gradients(rank, step - 1, SHAPES)[name].reshape(-1)
            slot = {"ef21": "estimate", "ef": "residual", "none": None}[feedback]
            if slot is not None:
                expected = expected + held[rank][name][slot]  # an estimate is kept as -h
                assert float(held[rank][name][slot].abs().max()) > 0
            torch.testing.assert_close(x, expected)
