"""Seconds of a step: played through by hand, and fitted to what steps have taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hvd_adaptive.planning.step_time import StepCosts, StepModel, calibrated, spread, timeline
from tests.planning.helpers import costs_of

NUMEL = np.array([1_000_000, 4_000_000, 2_000_000])
FP16, TOPK = np.zeros(3, np.int64), np.ones(3, np.int64)


def model(mbit: float = 1000.0, compute: float = 0.1, **changed: float) -> StepModel:
    return StepModel(
        costs_of(mbit, cap_bytes=10e6, **changed),
        compute,
        spread(compute, NUMEL, np.array([2, 1, 0])),
        np.array([2, 1, 0]),
        NUMEL,
        (("fp16", "topk"),) * 3,
        tuple(np.array([2.0 * numel, 0.03 * numel]) for numel in NUMEL),
    )


def test_buckets_wait_for_their_gradients_and_for_the_network() -> None:
    ready = np.array([-0.6, -0.1, 0.0])
    found = timeline(1.0, ready, np.zeros(3), np.array([0.3, 0.5, 0.1]), np.zeros(3))
    # the first is done at 0.7, the second runs from 0.9 to 1.4, the third until 1.5
    assert found.exposed == pytest.approx(0.5)
    assert found.total == pytest.approx(1.5)
    compressed = timeline(1.0, ready, np.full(3, 0.1), np.array([0.3, 0.5, 0.1]), np.full(3, 0.05))
    # launches are at 0.5, 1.1 and 1.3; the backward pass ends at 1.3, and 0.15 of decompressing follow
    assert compressed.total == pytest.approx(1.3 + 0.05 + 0.25 + 0.05 + 0.05 + 0.05)


def test_a_slow_network_makes_compression_worth_it_and_a_fast_one_does_not() -> None:
    slow, fast = model(50.0), model(1e5)
    assert slow.seconds(TOPK).total < 0.5 * slow.seconds(FP16).total
    assert fast.seconds(TOPK).total > fast.seconds(FP16).total
    assert fast.seconds(FP16).exposed < 0.02 * fast.seconds(FP16).total


def test_gathered_payloads_take_the_scheme_that_is_faster_for_these_ranks() -> None:
    few, many = model(50.0), model(50.0, ranks=64)
    # with many ranks two shots carry as much as with few, an allgather 21 times as much
    assert many.seconds(TOPK).network < 2 * few.seconds(TOPK).network
    one_scheme = {
        name: StepCosts(
            {
                spec: (row if row.dense else type(row)(row.kind, row.compress, row.schemes[:1]))
                for spec, row in many.costs.compressors.items()
            },
            64,
            10e6,
        )
        for name in ("allgather",)
    }
    gathered = StepModel(
        one_scheme["allgather"], 0.1, many.ready, many.order, NUMEL, many.specs, many.payloads
    )
    assert gathered.seconds(TOPK).network > 10 * many.seconds(TOPK).network


def test_prices_of_layers_add_up_to_the_seconds_of_a_step_that_hardly_overlaps() -> None:
    exposed = model(50.0, compute=0.0)
    for choice in (FP16, TOPK):
        parts = exposed.seconds(choice)
        added = sum(row[index] for row, index in zip(exposed.prices(), choice, strict=True))
        # but for the latency of buckets, and for working on one while another is sent
        assert added - parts.compress - parts.decompress <= parts.total <= added + 2e-3


def test_writing_a_larger_payload_takes_longer() -> None:
    without = model()
    rows = without.costs.compressors
    bytewise = {**rows, "topk": replace(rows["topk"], compress_byte=1e-8)}
    found = replace(without, costs=replace(without.costs, compressors=bytewise))
    more = 1e-8 * 0.03 * NUMEL
    assert found.seconds(TOPK).compress - without.seconds(TOPK).compress == pytest.approx(more.sum())
    assert found.seconds(FP16) == without.seconds(FP16)
    for row, old, seconds in zip(found.prices(), without.prices(), more, strict=True):
        assert row - old == pytest.approx([0.0, seconds])


def test_a_calibrated_model_foresees_what_steps_have_taken() -> None:
    fitted = calibrated(model(), FP16, seconds=0.5, computing=0.2)
    assert fitted.seconds(FP16).total == pytest.approx(0.5, rel=1e-3)
    assert fitted.seconds(FP16).exposed == pytest.approx(0.3, rel=1e-3)
    # where all is hidden, any factor explains it: the nearest to 1 is taken
    quick = model(1e5)
    assert calibrated(quick, FP16, seconds=quick.seconds(FP16).total, computing=0.1).network == 1.0
    hidden = calibrated(model(), FP16, seconds=0.2, computing=0.2)
    assert hidden.seconds(FP16).exposed < 0.02


def test_costs_survive_json() -> None:
    costs = costs_of()
    assert StepCosts.from_dict(costs.to_dict()) == costs
