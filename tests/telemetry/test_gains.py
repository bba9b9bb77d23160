"""Gains and residuals of every compressor and planner, as they are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hvd_adaptive import VirtualRanks, rng
from hvd_adaptive.compressors import REGISTRY, parse
from hvd_adaptive.compressors.base import LayerContext
from hvd_adaptive.engine import virtual_ranks
from hvd_adaptive.layers import Layer
from hvd_adaptive.planning import REGISTRY as PLANNERS
from hvd_adaptive.telemetry import Meter, Telemetry
from tests.collectives.helpers import Layers, gradients
from tests.telemetry.helpers import Clock, Recorder

SHAPES = {"wide": (64, 64), "tall": (800, 4), "bias": (64,)}
EVERY = 2


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What rank 0 writes."""
    sink, made = Recorder(), list[Meter]()

    def meter(clock: object) -> Meter:
        del clock  # the real one
        sinks: Sequence[Any] = [sink] if not made else []
        made.append(Meter(Telemetry(every=EVERY), clock=Clock(), sinks=sinks))
        return made[-1]

    monkeypatch.setattr(virtual_ranks, "Meter", meter)
    sink.meters = made  # type: ignore[attr-defined]
    return sink


def records(recorder: Recorder, ranks: int, steps: int, **options: Any) -> list[dict[str, float]]:
    """One for each window."""
    model = Layers(SHAPES)
    virtual = VirtualRanks(ranks, model.named_parameters(), **options)
    for step in range(steps):
        virtual.reduce([gradients(rank, step, SHAPES) for rank in range(ranks)])
        for meter in recorder.meters:  # type: ignore[attr-defined]
            meter.end_step(step)
    return [record for _, record in recorder.records if "time/step_ms" in record]


GAINS = {"compression/gain", "residual/norm", *(f"gain/{name}" for name in SHAPES)}


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("scheme", ["allgather", "two_shot"])
def test_every_compressor_tells_its_gains_by_layer(name: str, scheme: str, recorder: Recorder) -> None:
    if scheme == "two_shot" and parse(name).payload_kind.value != "encoded":
        scheme = "hierarchical"  # what is summed has one scheme
    found = records(recorder, 2, 1 + 2 * EVERY, compression=name, scheme=scheme)
    assert len(found) == 2
    for record in found:
        assert set(record) >= GAINS
        assert all(np.isfinite(record[each]) and record[each] >= 0 for each in GAINS)
        assert record["gain/bias"] == pytest.approx(1.0, abs=1e-2)
        assert record["gain/wide"] > 0


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_has_gains_by_layer(name: str, recorder: Recorder) -> None:
    spec = name + (":seconds=1" if "kimad" in name else "")
    found = records(
        recorder, 2, 1 + 2 * EVERY, compression="topk:density=0.05", planner=spec, dense_steps=2
    )
    assert set(found[0]) >= GAINS  # still dense in part
    assert set(found[-1]) >= GAINS
    assert 0 < found[-1]["gain/wide"] < 1


@pytest.mark.parametrize(
    "spec", ["randomk:density=0.1", "randomk:density=0.1,unbiased=true", "powersgd:rank=2"]
)
def test_the_gain_of_what_is_summed_is_that_of_its_payload(spec: str, recorder: Recorder) -> None:
    """One sampled step per window, which counts for all of it: step 2 of steps 1 and 2."""
    compressor = parse(spec)
    (record,) = records(recorder, 1, 1 + EVERY, compression=spec, feedback="none")
    energy = sent = 0.0
    state = compressor.new_state()
    for index, (name, shape) in enumerate(SHAPES.items()):
        if name == "bias":
            continue
        for step in range(3):  # PowerSGD's start is that of the step before
            x = gradients(0, step, SHAPES)[name].reshape(-1)
            whole, decoded = x.clone(), torch.zeros_like(x)
            key = int(rng.layer_keys(0, rng.SHARED, step, [index])[0])
            context = LayerContext(key, shape, state)
            if state is not None:  # one state knows one layer here
                state = state if step else compressor.new_state()
                context = LayerContext(key, shape, state)
            compressor.decompress_add_(compressor.compress_(x, compressor.level, context), decoded)
        share = float(decoded @ decoded) / float(whole @ whole)
        assert record[f"gain/{name}"] == pytest.approx(share, rel=1e-4)
        energy += float(whole @ whole)
        sent += float(decoded @ decoded)
    bias = gradients(0, 2, SHAPES)["bias"]
    energy, sent = energy + float(bias @ bias), sent + float(bias @ bias)
    assert record["compression/gain"] == pytest.approx(sent / energy, rel=1e-4)
    left = np.sqrt(max(0.0, energy - sent))
    assert record["residual/norm"] == pytest.approx(left, rel=1e-3)


def test_a_dense_model_gains_all_and_leaves_nothing(recorder: Recorder) -> None:
    (record,) = records(recorder, 2, 1 + EVERY, compression="none")
    assert record["compression/gain"] == 1.0
    assert record["residual/norm"] == 0.0
    assert {record[f"gain/{name}"] for name in SHAPES} == {1.0}


def test_gains_of_layers_are_of_the_window_and_of_the_layers_that_there_are() -> None:
    sink = Recorder()
    meter = Meter(Telemetry(every=2), clock=Clock(), sinks=[sink])
    first = (Layer(0, "a", (4,)), Layer(1, "b", (4,)))
    second = (Layer(1, "b", (4,)),)
    meter.end_step(0)
    for step, (energy, sent) in enumerate([([4.0, 0.0], [1.0, 0.0]), ([4.0, 0.0], [3.0, 0.0])]):
        meter.layers(0, first, np.array(energy), np.array(sent))
        meter.end_step(1 + step)
    for step in range(2):
        meter.layers(0, second, np.array([8.0]), np.array([2.0]))
        meter.end_step(3 + step)
    gains = [
        {tag: value for tag, value in record.items() if tag.startswith("gain/")}
        for _, record in sink.records
    ]
    assert gains == [{"gain/a": 0.5}, {"gain/b": 0.25}]  # nothing is known of a layer of zeros


def test_the_summary_counts_what_the_whole_run_sent_and_saved() -> None:
    meter = Meter(Telemetry(every=3))
    for step in range(20):
        meter.bucket(0, payload=100, dense=4000)
        meter.bucket(1, payload=60, dense=40)
        meter.end_step(step)
    summary = meter.summary()
    # all steps count, those of the warm-up and the one ahead of the clock, too
    assert summary.sent_bytes == 20 * 160
    assert summary.floats_sent == 20 * 40
    assert summary.saved_bytes == 20 * (4040 - 160)
    assert summary.payload_bytes == 160
    assert "saved in the whole run" in summary.table()
