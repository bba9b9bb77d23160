"""Files, by their own readers, and what happens where they cannot be written."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from hvd_adaptive.telemetry import Meter, Telemetry
from hvd_adaptive.telemetry.tags import LAYOUT, PLAN_PICTURE, description, shown
from tests.telemetry.helpers import (
    Clock,
    Recorder,
    json_lines,
    plan_of,
    run_step,
    tensorboard_events,
    tensorboard_scalars,
)


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
            expected.setdefault(shown(tag), []).append((step, value))
    assert read.keys() == expected.keys()
    for tag, pairs in expected.items():
        assert [step for step, _ in read[tag]] == [2, 4, 5]
        # TensorBoard keeps float32.
        assert [v for _, v in read[tag]] == pytest.approx([v for _, v in pairs], rel=1e-6)

    scalars = [line for line in json_lines(tmp_path) if "scalars" in line]
    lines = [line for line in scalars if "time/step_ms" in line["scalars"]]
    assert [(line["step"], line["scalars"]) for line in lines] == sink.records


def test_texts_and_the_configuration_reach_both_files(tmp_path: Path) -> None:
    with Meter(tmp_path) as meter:
        meter.text("note", "hello *world*")
        meter.configuration({"compression": "topk", "a|b": "x\ny"})
    table = "| setting | value |\n|---|---|\n| compression | topk |\n| a\\|b | x<br>y |"
    texts = [(line["step"], line["texts"]) for line in json_lines(tmp_path)]
    assert texts == [(0, {"note": "hello *world*"}), (0, {"configuration": table})]

    events = tensorboard_events(tmp_path)
    texts = {"note", "configuration"}
    assert set(events.Tags()["tensors"]) == {*texts, "custom_scalars__config__"}
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


def test_tensorboard_that_is_not_installed_is_an_error_that_says_how_to_continue(
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


def test_a_sink_that_fails_is_disabled_with_one_warning_and_the_others_continue() -> None:
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
def test_a_full_disk_disables_the_sink_and_training_continues(tmp_path: Path, kind: str) -> None:
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
    assert sink.records[0][1]["bytes/payload"] == 2.0
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
    line, end = json_lines(tmp_path)
    assert end["texts"].keys() == {"verdict"}
    assert line["step"] == 3
    assert line["scalars"]["bytes/payload"] == 6
    assert tensorboard_scalars(tmp_path)[shown("bytes/payload")] == [(3, 6.0)]


def test_a_plan_reaches_tensorboard_as_table_picture_and_gains(tmp_path: Path) -> None:
    with Meter(str(tmp_path)) as meter:
        meter.plan(plan_of(256, 8), 0)
        meter.plan(plan_of(8, 256, step=30), 30)  # too soon for a picture: it is shown at the end
    events = tensorboard_events(tmp_path)
    images = events.Images(PLAN_PICTURE)
    assert [event.step for event in images] == [0, 30]
    assert images[-1].encoded_image_string.startswith(b"\x89PNG")
    assert images[-1].width >= 2 * images[-1].height
    gains = events.Scalars(shown("expected_gain/layer0"))
    assert [(e.step, e.value) for e in gains] == [(0, 0.75), (30, 0.75)]
    assert (
        b"layer1" in events.Tensors("plan/table/text_summary")[-1].tensor_proto.string_val[0]
        if ("plan/table/text_summary" in events.Tags()["tensors"])
        else b"layer1" in events.Tensors("plan/table")[-1].tensor_proto.string_val[0]
    )
    plans = [line for line in json_lines(tmp_path) if "plan" in line]
    assert [line["step"] for line in plans] == [0, 30]
    assert plans[0]["plan"]["layers"][1]["error_share"] == 0.5


def test_tensorboard_is_told_the_unit_of_every_number_once(tmp_path: Path) -> None:
    with Meter(Telemetry(str(tmp_path), every=1)) as meter:
        for step in range(4):
            meter.bucket(0, payload=8, compress=0.1)
            meter.end_step(step)
    events = tensorboard_events(tmp_path)
    for tag in ("time/exposed_ms", "bytes/payload", "bucket/0/compress_ms"):
        metadata = events.SummaryMetadata(shown(tag))
        assert metadata.summary_description == description(tag) != ""
        assert metadata.plugin_data.plugin_name == "scalars"
    (file,) = tmp_path.glob("events.out.*")
    assert file.read_bytes().count(description("time/exposed_ms").encode()) == 1


def test_tensorboard_has_a_layout_of_charts(tmp_path: Path) -> None:
    layout_pb2 = pytest.importorskip("tensorboard.plugins.custom_scalar.layout_pb2")
    with Meter(str(tmp_path)):
        pass
    event = tensorboard_events(tmp_path).Tensors("custom_scalars__config__")[0]
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    found = {
        category.title: {chart.title: tuple(chart.multiline.tag) for chart in category.chart}
        for category in layout.category
    }
    assert found == LAYOUT
