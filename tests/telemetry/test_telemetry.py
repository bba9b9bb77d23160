"""The meter's arithmetic by hand, the files by their own readers, and the price of metering."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.planning.plan import LayerPlan, Plan
from hvd_adaptive.telemetry import Meter, Telemetry
from hvd_adaptive.telemetry.plan_image import BAND, WIDTH, PlanPicture


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A sink that keeps what it gets, and fails on demand."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.texts: list[tuple[int, str, str]] = []
        self.plans: list[tuple[int, Plan]] = []
        self.closed = 0
        self.failure: Exception | None = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self.failure is not None:
            raise self.failure
        self.records.append((step, dict(values)))

    def text(self, tag: str, text: str, step: int) -> None:
        self.texts.append((step, tag, text))

    def plan(self, plan: Plan, step: int) -> None:
        self.plans.append((step, plan))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


def run_step(meter: Meter, clock: Clock, step: int, seconds: float, **bucket: Any) -> None:
    clock.now += seconds
    meter.bucket(0, **bucket)
    meter.end_step(step)


def tensorboard_scalars(logdir: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = tensorboard_events(logdir)
    tags = accumulator.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags}


def tensorboard_events(logdir: Path) -> Any:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = module.EventAccumulator(str(logdir), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def json_lines(logdir: Path) -> list[dict[str, Any]]:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (logdir / "telemetry.jsonl").read_text()
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


# The configuration


def test_parse_accepts_nothing_a_folder_and_a_telemetry(tmp_path: Path) -> None:
    mine = Telemetry(logdir="a", every=3)
    assert Telemetry.parse(None) == Telemetry()
    assert Telemetry.parse("a") == Telemetry(logdir="a")
    assert Telemetry.parse(tmp_path) == Telemetry(logdir=str(tmp_path))
    assert Telemetry.parse(mine) is mine


@pytest.mark.parametrize(
    ("value", "error", "advice"),
    [
        (7, TypeError, "write the name of a folder"),
        (True, TypeError, "write the name of a folder"),
        (b"runs", TypeError, "write the name of a folder"),
        ({"logdir": "a"}, TypeError, r"Telemetry\(logdir="),
        ("", ValueError, "write the name of a folder"),
        ("  ", ValueError, "write the name of a folder"),
    ],
)
def test_parse_rejects_anything_else_and_says_what_to_write(
    value: Any, error: type[Exception], advice: str
) -> None:
    with pytest.raises(error, match=advice):
        Telemetry.parse(value)


@pytest.mark.parametrize(
    ("fields", "error", "advice"),
    [
        ({"logdir": 3}, TypeError, "as a str or a Path"),
        ({"tensorboard": "yes"}, TypeError, "tensorboard=True or tensorboard=False"),
        ({"jsonl": 1}, TypeError, "jsonl=True or jsonl=False"),
        ({"every": 0}, ValueError, "an int of at least 1"),
        ({"every": 2.5}, TypeError, "an int of at least 1"),
        ({"every": True}, TypeError, "an int of at least 1"),
        ({"samples_per_step": -4}, ValueError, "batch size x number of ranks"),
        ({"samples_per_step": "64"}, TypeError, "batch size x number of ranks"),
        ({"samples_per_step": 10**400}, ValueError, r"an int below 2\*\*63"),
        ({"logdir": "a\0b"}, ValueError, r"'a\\x00b' holds a NUL"),
        ({"logdir": "a", "tensorboard": False, "jsonl": False}, ValueError, "write nothing"),
    ],
)
def test_a_wrong_field_is_an_error_that_says_what_to_write(
    fields: dict[str, Any], error: type[Exception], advice: str
) -> None:
    with pytest.raises(error, match=advice):
        Telemetry(**fields)


# The meter's arithmetic


def test_a_step_splits_into_compute_compress_communicate_and_decompress() -> None:
    clock, sink = Clock(), Recorder()
    meter = Meter(Telemetry(every=1, samples_per_step=32), clock=clock, sinks=[sink])
    run_step(meter, clock, 0, 9.0, compress=5.0, payload=999, energy=7.0)
    clock.now += 0.5
    meter.bucket(0, compress=0.05, payload=100, traffic=300, dense=4000, energy=10.0, sent=7.0)
    meter.bucket(0, communicate=0.2, exposed=0.08)
    meter.bucket(0, decompress=0.01)
    meter.bucket(1, compress=0.02, communicate=0.1, exposed=0.02, decompress=0.02)
    meter.bucket(1, payload=60, traffic=20, dense=4000, energy=6.0, sent=5.0)
    meter.end_step(1)

    (step, record) = sink.records[0]
    assert step == 1
    expected = {
        "step_time/total": 0.5,
        "step_time/compute": 0.5 - 0.07 - 0.10 - 0.03,
        "step_time/compress": 0.07,
        "step_time/communicate": 0.10,
        "step_time/decompress": 0.03,
        "throughput/samples_per_sec": 64.0,
        "compression/bytes_per_step": 160.0,
        "compression/ratio_payload": 50.0,
        "compression/ratio_traffic": 25.0,
        "compression/gain": 0.75,
        "residual/norm": 2.0,
        "bucket/0/communicate_ms": 200.0,
        "bucket/0/compress_ms": 50.0,
        "bucket/0/payload_bytes": 100.0,
        "bucket/1/communicate_ms": 100.0,
        "bucket/1/compress_ms": 20.0,
        "bucket/1/payload_bytes": 60.0,
    }
    assert record == pytest.approx(expected)

    summary = meter.summary()
    assert summary.steps == 1
    assert summary.samples_per_sec == pytest.approx(64.0)
    assert summary.total == pytest.approx(0.5)
    assert summary.compute == pytest.approx(0.3)
    assert (summary.payload_bytes, summary.traffic_bytes, summary.dense_bytes) == (160, 320, 8000)
    assert (summary.ratio_payload, summary.ratio_traffic) == (50.0, 25.0)
    assert summary.gain == pytest.approx(0.75)


def test_a_record_is_the_mean_of_its_window_and_carries_its_last_step() -> None:
    clock, sink = Clock(), Recorder()
    meter = Meter(Telemetry(every=4), clock=clock, sinks=[sink])
    for step in range(9):
        run_step(meter, clock, step, float(step), exposed=step / 4, payload=100 * step)
    assert [step for step, _ in sink.records] == [4, 8]
    totals = [record["step_time/total"] for _, record in sink.records]
    assert totals == pytest.approx([(1 + 2 + 3 + 4) / 4, (5 + 6 + 7 + 8) / 4])
    waits = [record["step_time/communicate"] for _, record in sink.records]
    assert waits == pytest.approx([2.5 / 4, 6.5 / 4])
    payloads = [record["compression/bytes_per_step"] for _, record in sink.records]
    assert payloads == pytest.approx([250, 650])


@pytest.mark.parametrize("every", [1, 3, 5, 7, 1000])
def test_the_summary_leaves_out_five_steps_when_five_more_remain(every: int) -> None:
    clock = Clock()
    meter = Meter(Telemetry(every=every), clock=clock)
    run_step(meter, clock, 0, 50.0, payload=10_000)
    for step in range(1, 10):
        run_step(meter, clock, step, 100.0 if step <= 5 else 1.0, payload=step)
        assert meter.summary().steps == step
        assert meter.summary().payload_bytes == pytest.approx((step + 1) / 2)
    for step in range(10, 30):
        run_step(meter, clock, step, 1.0, payload=step)
        assert meter.summary().steps == step - 5
        assert meter.summary().total == pytest.approx(1.0)
        assert meter.summary().payload_bytes == pytest.approx((6 + step) / 2)


def test_before_the_first_complete_step_the_summary_is_unknown_and_can_be_printed() -> None:
    meter = Meter(clock=Clock())
    for _ in range(2):
        summary = meter.summary()
        assert summary.steps == 0
        assert math.isnan(summary.total)
        assert math.isnan(summary.gain)
        assert "steps measured" in summary.table()
        meter.end_step(0)


def test_the_table_shows_times_with_their_share_and_a_dash_for_the_unknown() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    meter.end_step(0)
    run_step(meter, clock, 1, 0.2, exposed=0.05, payload=1000, dense=123_000)
    table = meter.summary().table()
    assert "200.000 ms" in table
    assert "25.0 %" in table
    assert "123,000 bytes" in table
    assert "123.00" in table
    assert re.search(r"^samples per second +-$", table, re.MULTILINE)


def test_quantities_without_meaning_are_left_out_of_the_records() -> None:
    clock, sink = Clock(), Recorder()
    meter = Meter(Telemetry(every=1), clock=clock, sinks=[sink])
    meter.end_step(0)
    run_step(meter, clock, 1, 1.0)
    (_, record) = sink.records[0]
    absent = {"throughput/samples_per_sec", "compression/gain", "residual/norm"}
    absent |= {"compression/ratio_payload", "compression/ratio_traffic"}
    assert absent.isdisjoint(record)
    assert record["step_time/compute"] == 1.0


def test_rounding_that_leaves_more_sent_than_there_was_is_a_residual_of_zero() -> None:
    clock, sink = Clock(), Recorder()
    meter = Meter(Telemetry(every=1), clock=clock, sinks=[sink])
    meter.end_step(0)
    run_step(meter, clock, 1, 1.0, energy=1.0, sent=1.0 + 1e-12)
    assert sink.records[0][1]["residual/norm"] == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_overflowed_step_shows_in_its_record_and_not_in_the_summary(bad: float) -> None:
    clock, sink = Clock(), Recorder()
    meter = Meter(Telemetry(every=1), clock=clock, sinks=[sink])
    meter.end_step(0)
    run_step(meter, clock, 1, 1.0, energy=4.0, sent=1.0)
    run_step(meter, clock, 2, 1.0, energy=bad, sent=bad)
    run_step(meter, clock, 3, 1.0, energy=4.0, sent=3.0)
    gains = [record["compression/gain"] for _, record in sink.records]
    assert gains[0] == 0.25
    assert math.isnan(gains[1])
    assert math.isnan(sink.records[1][1]["residual/norm"])
    assert gains[2] == 0.75
    assert meter.summary().gain == 0.5


def test_buckets_may_appear_later_and_out_of_order() -> None:
    clock, sink = Clock(), Recorder()
    meter = Meter(Telemetry(every=1), clock=clock, sinks=[sink])
    meter.end_step(0)
    meter.bucket(2, payload=7)
    clock.now += 1
    meter.end_step(1)
    assert sink.records[0][1]["bucket/2/payload_bytes"] == 7
    assert sink.records[0][1]["bucket/0/payload_bytes"] == 0
    assert sink.records[0][1]["compression/bytes_per_step"] == 7


# Sinks


def test_tensorboard_reads_back_what_was_metered(tmp_path: Path) -> None:
    clock, sink = Clock(), Recorder()
    telemetry = Telemetry(logdir=str(tmp_path), every=2, samples_per_step=8)
    with (
        Meter(telemetry, clock=clock) as meter,
        Meter(Telemetry(every=2, samples_per_step=8), clock=clock, sinks=[sink]) as mirror,
    ):
        for step in range(6):
            clock.now += 0.25 + step / 16
            for each in (meter, mirror):
                each.bucket(0, compress=0.01, payload=10 + step, traffic=30, dense=400)
                each.bucket(1, energy=5.0, sent=4.0, communicate=0.5, exposed=0.125)
                each.end_step(step)
        meter.scalar("loss", 0.75, 3)
    read = tensorboard_scalars(tmp_path)
    assert read.pop("loss") == [(3, 0.75)]
    expected: dict[str, list[tuple[int, float]]] = {}
    for step, record in sink.records:
        for tag, value in record.items():
            expected.setdefault(tag, []).append((step, value))
    assert read.keys() == expected.keys()
    for tag, pairs in expected.items():
        assert [step for step, _ in read[tag]] == [2, 4, 5]
        # TensorBoard keeps float32.
        assert [v for _, v in read[tag]] == pytest.approx([v for _, v in pairs], rel=1e-6)

    lines = [line for line in json_lines(tmp_path) if "step_time/total" in line["scalars"]]
    assert [(line["step"], line["scalars"]) for line in lines] == sink.records


def test_texts_and_the_configuration_reach_both_files(tmp_path: Path) -> None:
    with Meter(tmp_path) as meter:
        meter.text("note", "hello *world*")
        meter.configuration({"compression": "topk", "a|b": "x\ny"})
    table = "| setting | value |\n|---|---|\n| compression | topk |\n| a\\|b | x<br>y |"
    texts = [(line["step"], line["texts"]) for line in json_lines(tmp_path)]
    assert texts == [(0, {"note": "hello *world*"}), (0, {"configuration": table})]

    events = tensorboard_events(tmp_path)
    assert set(events.Tags()["tensors"]) == {"note", "configuration"}
    assert list(events.Tensors("note")[0].tensor_proto.string_val) == [b"hello *world*"]
    assert list(events.Tensors("configuration")[0].tensor_proto.string_val) == [table.encode()]
    assert events.SummaryMetadata("note").plugin_data.plugin_name == "text"


def test_nan_and_infinity_are_valid_json_and_survive_in_tensorboard(tmp_path: Path) -> None:
    with Meter(tmp_path) as meter:
        for step, value in enumerate([math.nan, math.inf, -math.inf, 1.5]):
            meter.scalar("x", value, step)
    assert [line["scalars"]["x"] for line in json_lines(tmp_path)] == [None, None, None, 1.5]
    values = [value for _, value in tensorboard_scalars(tmp_path)["x"]]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 1.5]


def test_json_lines_carry_the_wall_time_and_continue_an_existing_file(tmp_path: Path) -> None:
    before = time.time()
    for step in (1, 2):
        with Meter(Telemetry(logdir=str(tmp_path), tensorboard=False)) as meter:
            meter.scalar("x", 1.0, step)
    lines = json_lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2]
    assert before <= lines[0]["time"] <= lines[1]["time"] <= time.time()


def test_two_runs_in_one_second_do_not_share_an_event_file(tmp_path: Path) -> None:
    for step in (1, 2):
        with Meter(tmp_path) as meter:
            meter.scalar("x", 1.0, step)
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2
    assert [step for step, _ in tensorboard_scalars(tmp_path)["x"]] == [1, 2]


def test_only_rank_0_writes_and_only_with_a_logdir(tmp_path: Path) -> None:
    for rank, logdir in ((1, str(tmp_path / "no")), (0, None)):
        with Meter(Telemetry(logdir=logdir, every=1), rank=rank) as meter:
            for step in range(3):
                meter.bucket(0, payload=5)
                meter.end_step(step)
            meter.scalar("x", 1.0, 0)
            assert meter.summary().payload_bytes == 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("wanted", "other"), [("tensorboard", "jsonl"), ("jsonl", "tensorboard")])
def test_each_sink_can_be_turned_off(tmp_path: Path, wanted: str, other: str) -> None:
    switches = {wanted: True, other: False}
    with Meter(Telemetry(logdir=str(tmp_path), **switches)) as meter:
        meter.scalar("x", 1.0, 0)
    (file,) = tmp_path.iterdir()
    assert file.name.startswith({"tensorboard": "events.out.", "jsonl": "telemetry."}[wanted])


def test_a_logdir_that_is_a_file_is_an_error_at_construction(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OSError, match=r"cannot write to logdir '.*file'.*name a folder"):
        Meter(file)
    with pytest.raises(OSError, match="cannot write to logdir"):
        Meter(file / "below")


def test_tensorboard_that_is_not_installed_is_an_error_that_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install tensorboard.*tensorboard=False"):
        Meter(tmp_path)
    with Meter(Telemetry(logdir=str(tmp_path / "j"), tensorboard=False)) as meter:
        meter.scalar("x", 1.0, 0)
    assert len(json_lines(tmp_path / "j")) == 1


def test_importing_the_module_imports_neither_tensorboard_nor_horovod_nor_mpi() -> None:
    code = (
        "import sys, hvd_adaptive.telemetry as t; t.Meter().end_step(0); "
        "print([m for m in ('tensorboard', 'horovod', 'mpi4py') if m in sys.modules])"
    )
    # The package's own __init__ may import them; the module alone must not.
    code = (
        "import sys, types; p = types.ModuleType('hvd_adaptive'); "
        "p.__path__ = ['hvd_adaptive']; sys.modules['hvd_adaptive'] = p; " + code
    )
    root = Path(__file__).resolve().parents[2]
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"


def test_a_sink_that_fails_is_disabled_with_one_warning_and_the_others_go_on() -> None:
    clock, bad, good = Clock(), Recorder(), Recorder()
    meter = Meter(Telemetry(every=1), clock=clock, sinks=[bad, good])
    meter.end_step(0)
    run_step(meter, clock, 1, 1.0)
    bad.failure = OSError(28, "No space left on device")
    with pytest.warns(RuntimeWarning, match=r"Recorder failed .*No space left.*is disabled"):
        run_step(meter, clock, 2, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_step(meter, clock, 3, 1.0)
        meter.scalar("x", 1.0, 3)
        meter.close()
    assert [step for step, _ in bad.records] == [1]
    assert [step for step, _ in good.records] == [1, 2, 3, 3]
    assert meter.summary().steps == 3


# In a process of its own: the limit would also meet what pytest prints into a file.
FULL_DISK = """
import gc, resource, signal, sys, warnings
from hvd_adaptive.telemetry import JsonLinesSink, Meter, Telemetry, TensorBoardSink

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
kind = {"TensorBoardSink": TensorBoardSink, "JsonLinesSink": JsonLinesSink}[sys.argv[1]]
meter = Meter(Telemetry(every=1), sinks=[kind(sys.argv[2])])
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for step in range(100):
        meter.bucket(0, payload=1)
        meter.end_step(step)
    meter.close()
    gc.collect()
print(len(seen), meter.summary().steps, seen[0].message, flush=True)
"""


@pytest.mark.parametrize("kind", ["TensorBoardSink", "JsonLinesSink"])
def test_a_disk_that_fills_up_disables_the_sink_and_training_goes_on(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", FULL_DISK, kind, str(tmp_path)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert re.match(rf"1 94\.0 telemetry: {kind} failed .*too large.*disabled", shown), shown


def test_close_writes_the_rest_once_and_may_be_called_again() -> None:
    clock, sink = Clock(), Recorder()
    with Meter(Telemetry(every=10), clock=clock, sinks=[sink]) as meter:
        for step in range(4):
            run_step(meter, clock, step, 1.0, payload=step)
    meter.close()
    assert sink.closed == 1
    assert [step for step, _ in sink.records] == [3]
    assert sink.records[0][1]["compression/bytes_per_step"] == 2.0
    run_step(meter, clock, 4, 1.0)
    meter.scalar("x", 1.0, 4)
    assert len(sink.records) == 1


def test_a_program_that_never_closes_its_meter_still_writes_the_last_window(tmp_path: Path) -> None:
    code = (
        "from hvd_adaptive.telemetry import Meter\n"
        f"meter = Meter({str(tmp_path)!r})\n"
        "for step in range(4):\n"
        "    meter.bucket(0, payload=6)\n"
        "    meter.end_step(step)\n"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
    (line,) = json_lines(tmp_path)
    assert line["step"] == 3
    assert line["scalars"]["compression/bytes_per_step"] == 6
    assert tensorboard_scalars(tmp_path)["compression/bytes_per_step"] == [(3, 6.0)]


# Cost


def best_of(repeats: int, calls: int, work: Any) -> float:
    """Seconds a call, the best of several runs: other processes only ever add time."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work(calls)
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def test_metering_a_bucket_and_a_step_costs_microseconds() -> None:
    meter = Meter(Telemetry(every=10))

    def buckets(calls: int) -> None:
        for _ in range(calls):
            meter.bucket(
                3,
                compress=1e-3,
                communicate=1e-3,
                exposed=1e-3,
                decompress=1e-3,
                payload=100,
                traffic=100,
                dense=1000,
                energy=1.0,
                sent=0.5,
            )

    def steps(calls: int) -> None:
        for step in range(calls):
            meter.end_step(step)

    per_bucket = best_of(5, 20_000, buckets)
    per_step = best_of(5, 20_000, steps)
    print(f"bucket {per_bucket * 1e9:.0f} ns, end_step {per_step * 1e9:.0f} ns")
    # Some 0.5 us each on an ordinary core; the bound allows for a busy and slow one.
    assert per_bucket < 5e-6
    assert per_step < 10e-6


def test_writing_a_record_of_twenty_buckets_costs_milliseconds(tmp_path: Path) -> None:
    meter = Meter(Telemetry(logdir=str(tmp_path), every=1))
    meter.bucket(19, payload=1)
    meter.end_step(0)

    def steps(calls: int) -> None:
        for step in range(calls):
            meter.end_step(step)

    per_record = best_of(5, 20, steps)
    meter.close()
    print(f"record {per_record * 1e6:.0f} us")
    assert per_record < 20e-3


def test_what_runs_while_paused_belongs_to_no_step() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    meter.end_step(0)
    for step in (1, 2):
        clock.now += 1.0
        meter.end_step(step)
        with meter.paused():
            clock.now += 100.0
    assert meter.summary().total == 1.0


def test_the_traffic_ratio_compares_with_what_dense_gradients_would_send() -> None:
    clock = Clock()
    meter = Meter(clock=clock, dense_traffic=1.5)
    meter.end_step(0)
    clock.now += 1.0
    meter.bucket(0, dense=100, payload=50, traffic=75)
    meter.end_step(1)
    assert meter.summary().ratio_traffic == 2.0


# --- plans ----------------------------------------------------------------------------------------


def plan_of(*wire_bytes: int, step: int = 0) -> Plan:
    rows = [
        LayerPlan(f"layer{index}", (8, 8), "topk", 0.1, nbytes, 256, error=1.0, energy=4.0)
        for index, nbytes in enumerate(wire_bytes)
    ]
    return Plan(tuple(rows), version=step, step=step)


def test_a_plan_reaches_tensorboard_as_table_picture_and_gains(tmp_path: Path) -> None:
    with Meter(str(tmp_path)) as meter:
        meter.plan(plan_of(256, 8), 0)
        meter.plan(plan_of(8, 256, step=30), 30)  # too soon for a picture: it is shown at the end
    events = tensorboard_events(tmp_path)
    images = events.Images("plan/levels")
    assert [event.step for event in images] == [0, 30]
    assert images[-1].encoded_image_string.startswith(b"\x89PNG")
    assert (images[-1].width, images[-1].height) == (230 + WIDTH, 4 * BAND)
    assert [(e.step, e.value) for e in events.Scalars("gain/layer0")] == [(0, 0.75), (30, 0.75)]
    assert (
        b"layer1" in events.Tensors("plan/table/text_summary")[-1].tensor_proto.string_val[0]
        if ("plan/table/text_summary" in events.Tags()["tensors"])
        else b"layer1" in events.Tensors("plan/table")[-1].tensor_proto.string_val[0]
    )
    plans = [line for line in json_lines(tmp_path) if "plan" in line]
    assert [line["step"] for line in plans] == [0, 30]
    assert plans[0]["plan"]["layers"][1]["error_share"] == 0.5


def test_a_picture_has_a_band_a_layer_and_each_plan_its_share_of_the_time() -> None:
    picture = PlanPicture()
    picture.add(plan_of(256, 8), 0)
    picture.add(plan_of(8, 8), 300)
    picture.add(Plan((LayerPlan("late", (2,), "none", 32, 8, 8),)), 400)
    pixels = picture.pixels()
    assert pixels.shape == (3 * BAND, WIDTH, 3)
    first, second, late = pixels[0], pixels[BAND], pixels[2 * BAND]
    changes = [column for column in range(1, WIDTH) if (first[column] != first[column - 1]).any()]
    assert changes == [pytest.approx(300 / 408 * WIDTH, abs=1), pytest.approx(400 / 408 * WIDTH, abs=1)]
    assert first[0].sum() > first[changes[0]].sum()  # dense is light
    assert (second[0] == first[changes[0]]).all()
    assert (late[0] == 200).all()
    assert (late[-1] == first[0]).all()


def test_a_picture_of_very_many_plans_keeps_those_that_show() -> None:
    picture = PlanPicture()
    for step in range(6 * WIDTH):
        picture.add(plan_of(256 if step < 3 * WIDTH else 8), step)
    pixels = picture.pixels()
    assert (pixels[0, : WIDTH // 3] == pixels[0, 0]).all()
    assert (pixels[0, -WIDTH // 3 :] == pixels[0, -1]).all()
    assert (pixels[0, 0] != pixels[0, -1]).any()


def test_seconds_that_belong_to_no_step_are_not_counted() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    before = meter.now()
    with meter.paused():
        clock.now += 5
    clock.now += 1
    assert meter.now() - before == 1
