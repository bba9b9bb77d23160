"""What the engine reports of its steps: traces, labels for torch's profiler, and the loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hvd_adaptive.comm.local_group import LocalGroup, LocalRank
from hvd_adaptive.config import CompressionConfig, ReducerOptions
from hvd_adaptive.engine.exchange import Exchange
from hvd_adaptive.engine.loss import running_loss
from hvd_adaptive.engine.reducer import Reducer
from hvd_adaptive.telemetry import Meter, Telemetry
from hvd_adaptive.telemetry.trace import read_events

RANKS, STEPS = 2, 5


def train(rank: LocalRank, telemetry: Telemetry) -> list[float]:
    """Some steps of a small model in two buckets; returns the losses."""
    torch.manual_seed(rank.rank)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    meter = Meter(telemetry, rank=rank.rank)
    exchange = Exchange(rank.transport(), meter, "test", 0, rank.rank)
    reducer = Reducer(
        model.named_parameters(),
        CompressionConfig.of("topk:density=0.05", None, None),
        ReducerOptions(bucket_cap_bytes=64 * 64 * 4),
        rank.control("control"),  # type: ignore[arg-type]
        exchange,
    )
    losses = []
    for step in range(STEPS):
        model.zero_grad()
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        reducer.synchronize()
        meter.end_step(step)
        losses.append(float(loss.detach()))
    meter.close()
    return losses


def spans(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == name]


def inside(inner: tuple[float, float], outer: list[tuple[float, float]]) -> bool:
    return any(begin <= inner[0] and inner[1] <= end for begin, end in outer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traced")
    telemetry = Telemetry(str(folder), tensorboard=False, every=1, trace=(2, 4))
    losses = LocalGroup(RANKS).run(lambda rank: train(rank, telemetry))
    (folder / "losses.json").write_text(json.dumps(losses))
    return folder


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_trace_shows_when_every_hook_collective_and_wait_ran(folder: Path, rank: int) -> None:
    events = read_events(folder / f"trace.rank{rank}.json")
    steps = [event["name"] for event in events if event["name"].startswith("step ")]
    assert steps == ["step 2", "step 3"]
    layers = [event["args"]["layer"] for event in events if event["name"] == "hook"]
    assert sorted(layers) == sorted(2 * ["0.weight", "0.bias", "2.weight", "2.bias"])
    buckets = {event["args"]["bucket"] for event in events if event["name"] == "compress"}
    assert len(buckets) > 1
    for kind in ("compress", "wait", "decompress"):
        assert len(spans(events, kind)) == 2 * len(buckets), kind
    whole, synchronize = (
        [span for name in names for span in spans(events, name)] for names in (steps, ["synchronize"])
    )
    assert all(inside(span, whole) for kind in ("hook", "synchronize") for span in spans(events, kind))
    assert all(inside(span, synchronize) for span in spans(events, "wait"))
    within = [*spans(events, "hook"), *synchronize]
    assert all(inside(span, within) for span in spans(events, "compress"))


def test_a_collective_is_in_flight_from_its_launch_to_the_end_of_the_wait(folder: Path) -> None:
    events = read_events(folder / "trace.rank0.json")
    flights: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "be":
            flights.setdefault(event["id"], []).append(event)
    waits = spans(events, "wait")
    assert len(flights) == len(waits)
    for begin, end in flights.values():
        assert (begin["ph"], end["ph"]) == ("b", "e")
        assert begin["ts"] <= end["ts"]
        assert any(abs(end["ts"] - done) < 1 for _, done in waits)
        assert begin["args"]["traffic_bytes"] > 0


def test_the_loss_is_recorded_without_being_asked_for(folder: Path) -> None:
    from hvd_adaptive.telemetry.recorded import load

    losses = json.loads((folder / "losses.json").read_text())[0]
    found = load(folder).series("loss/rank_0")
    assert [(point.step, point.value) for point in found] == [
        (step, pytest.approx(losses[step], rel=1e-6)) for step in range(1, STEPS)
    ]


def test_the_loss_is_that_of_the_backward_pass_that_runs() -> None:
    seen: list[float | None] = []
    weight = nn.Parameter(torch.ones(3))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(running_loss()))
    (weight * 2).sum().backward()
    torch.autograd.backward([(weight * 3).sum()])
    (weight * 2).backward(torch.ones(3))  # no number
    torch.autograd.backward([weight.sum(), (2 * weight).sum()])  # two
    assert seen == [6.0, 9.0, None, None]
    assert running_loss() is None


def test_torchs_profiler_shows_labels_of_the_parts(tmp_path: Path) -> None:
    def run(rank: LocalRank) -> set[str]:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            train(rank, Telemetry())
        return {event.key for event in profiled.key_averages()}

    (keys,) = LocalGroup(1).run(run)
    parts = ("compress", "wait", "decompress", "synchronize")
    assert {f"hvd_adaptive.{part}" for part in parts} <= keys
