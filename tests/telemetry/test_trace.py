"""Traces: the steps that they hold, Chrome's format, and clocks that are brought together."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.commands import trace as command
from hvd_adaptive.telemetry import Meter, Telemetry, Trace
from hvd_adaptive.telemetry.trace import merged, read_events
from tests.telemetry.helpers import Clock, plan_of


def steps_in(path: Path) -> list[str]:
    return [event["name"] for event in read_events(path) if event["name"].startswith("step ")]


def run(meter: Meter, steps: int) -> None:
    for step in range(steps):
        if meter.trace is not None:
            meter.trace.span("compress", time.perf_counter(), time.perf_counter(), bucket=0)
        meter.end_step(step)


@pytest.mark.parametrize("every", [1, 3, 10, 1000])
@pytest.mark.parametrize("window", [(0, 2), (1, 4), (7, 9), (4, 40)])
def test_a_trace_holds_the_steps_of_its_window(
    tmp_path: Path, every: int, window: tuple[int, int]
) -> None:
    telemetry = Telemetry(str(tmp_path), tensorboard=False, trace=window, every=every)
    with Meter(telemetry, rank=1) as meter:
        run(meter, 12)
        assert (meter.trace is None) == (window[1] <= 12)
    path = tmp_path / "trace.rank1.json"
    expected = range(window[0], min(window[1], 12))
    assert steps_in(path) == [f"step {step}" for step in expected]
    spans = [event for event in read_events(path) if event["name"] == "compress"]
    assert len(spans) == len(expected)


def test_every_rank_writes_its_trace_and_true_means_ten_steps(tmp_path: Path) -> None:
    for rank in (0, 1):
        with Meter(Telemetry(str(tmp_path), trace=True), rank=rank) as meter:
            run(meter, 30)
    for rank in (0, 1):
        path = tmp_path / f"trace.rank{rank}.json"
        assert steps_in(path) == [f"step {step}" for step in range(10, 20)]
        assert {event["pid"] for event in read_events(path)} == {rank}


def test_without_a_trace_nothing_is_recorded_or_written(tmp_path: Path) -> None:
    with Meter(Telemetry(str(tmp_path))) as meter:
        run(meter, 30)
        assert meter.trace is None
    assert not list(tmp_path.glob("trace*"))


def test_events_have_the_fields_of_chromes_format(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "new" / "trace.json", rank=3)
    now = time.perf_counter()
    trace.span("hook", now, now + 0.25, layer='a"b')
    trace.flight("bucket 0: allgather", now, now + 0.5, traffic_bytes=7)
    trace.switch(5, 10, 100)
    trace.write()
    events = json.loads(trace.path.read_text())
    assert events[0]["args"].keys() == {"start_time_since_epoch_in_micros"}
    by_phase = {event["ph"]: event for event in events}
    assert by_phase.keys() == {"M", "X", "b", "e", "i"}
    assert all({"ts", "tid", "pid"} <= event.keys() for event in events if event["ph"] != "M")
    assert by_phase["X"]["dur"] == 250_000
    assert by_phase["X"]["args"] == {"layer": 'a"b'}
    assert by_phase["b"]["id"] == by_phase["e"]["id"]
    assert by_phase["e"]["ts"] - by_phase["b"]["ts"] == pytest.approx(500_000, abs=0.01)
    assert by_phase["i"]["args"] == {"step": 5, "wire_bytes": 10, "dense_bytes": 100}


def test_a_plan_that_takes_effect_in_the_window_is_in_the_trace(tmp_path: Path) -> None:
    with Meter(Telemetry(str(tmp_path), tensorboard=False, trace=(1, 3))) as meter:
        meter.plan(plan_of(1), 0)
        run(meter, 2)
        meter.plan(plan_of(8, 8), 2)
        run(meter, 3)
    switches = [e for e in read_events(tmp_path / "trace.rank0.json") if e["name"] == "plan"]
    assert [event["args"]["step"] for event in switches] == [2]


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    meter = Meter(Telemetry(str(file), trace=(0, 2)), rank=1)
    meter.end_step(0)
    with pytest.warns(RuntimeWarning, match=r"trace\.rank1\.json cannot be written"):
        run(meter, 2)


def test_writing_a_trace_belongs_to_no_step(tmp_path: Path) -> None:
    clock = Clock()
    meter = Meter(Telemetry(str(tmp_path), tensorboard=False, trace=(0, 2)), clock=clock)
    write, written = Trace.write, []

    def slow(self: Trace) -> None:
        clock.now += 100
        written.append(self)
        write(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trace, "write", slow)
        for step in range(4):
            clock.now += 1
            meter.end_step(step)
    assert len(written) == 1
    assert meter.summary().total == 1.0


# Written by Horovod 0.28.1, shortened.
TIMELINE = """[
{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":1000000}},
{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.hva.0.vote"}},
{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 40, "pid": 1},{"ph": "E", "ts": 70, "pid": 1},
"""


def a_trace(start: int, rank: int) -> list[dict[str, Any]]:
    return [
        {"name": "clock", "ph": "M", "pid": rank, "args": {"start_time_since_epoch_in_micros": start}},
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"name": "wait", "ph": "X", "pid": rank, "tid": 0, "ts": 5.0, "dur": 2.0, "args": {}},
    ]


def test_traces_of_ranks_and_horovods_timeline_become_one_by_one_clock(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("trace.rank0.json", "trace.rank1.json", "timeline.json")]
    for rank, file in enumerate(files[:2]):
        file.write_text(json.dumps(a_trace(1_000_500 + 100 * rank, rank)))
    files[2].write_text(TIMELINE)  # its end is missing, as where a rank was killed
    out = tmp_path / "merged.json"
    assert command.write(out, files) == len(json.loads(out.read_text()))
    events = json.loads(out.read_text())
    waits = [event for event in events if event.get("name") == "wait"]
    assert [event["ts"] for event in waits] == [505.0, 605.0]
    assert [event["ts"] for event in events if event.get("ph") == "B"] == [40]
    names = {e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert names == {"rank 0", "rank 1", "timeline: allreduce.hva.0.vote"}
    assert len({event["pid"] for event in waits}) == 2
    starts = [e["args"] for e in events if "start_time_since_epoch_in_micros" in e.get("args", {})]
    assert starts == [{"start_time_since_epoch_in_micros": 1_000_000}]


def test_a_trace_of_torchs_profiler_is_shifted_too() -> None:
    profiled = {"baseTimeNanoseconds": 2_000_000_000, "traceEvents": [{"ts": 1, "pid": 9, "ph": "X"}]}
    path_events = [("torch", _read(profiled)), ("", a_trace(1_999_900, 0))]
    found = {event.get("name"): event["ts"] for event in merged(path_events) if "ts" in event}
    assert found == {None: 101, "wait": 5.0}


def _read(content: Any) -> list[dict[str, Any]]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(json.dumps(content))
        return read_events(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "no array of events"), ("nothing", "is no trace"), ("[1]", "no array of events")],
)
def test_what_is_no_trace_is_said(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_events(path)
    with pytest.raises(ValueError, match="does not say when its clock started"):
        merged([("x", [{"ph": "X", "ts": 1}])])
