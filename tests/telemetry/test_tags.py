"""Tags: every one that is written has a description with its unit, and a place in TensorBoard."""

from __future__ import annotations

import pytest

from hvd_adaptive.telemetry import Meter, Telemetry
from hvd_adaptive.telemetry.tags import LAYOUT, OVERVIEW, description, in_milliseconds, modern, shown
from tests.telemetry.helpers import Clock, Recorder


def recorded_tags() -> list[str]:
    clock, sink = Clock(), Recorder()
    meter = Meter(Telemetry(every=1, samples_per_step=4), clock=clock, sinks=[sink])
    meter.end_step(0)
    meter.bucket(11, compress=0.1, payload=8, traffic=8, dense=64, energy=2.0, sent=1.0)
    meter.loss(0.5)
    clock.now += 1
    meter.end_step(1)
    return list(sink.records[0][1])


def test_every_recorded_quantity_says_its_unit() -> None:
    units = ("Milliseconds", "Bytes", "bytes", "per second", "Share", "L2 norm", "Loss")
    for tag in recorded_tags():
        assert any(unit in description(tag) for unit in units), tag
        if tag.endswith("_ms"):
            assert description(tag).startswith("Milliseconds"), tag
    assert description("my/own") == ""


def test_the_first_group_says_where_the_time_goes_and_buckets_come_last() -> None:
    groups = sorted({shown(tag).split("/")[0] for tag in [*recorded_tags(), "train/loss"]})
    assert groups[0] == OVERVIEW
    assert groups[-1] == "z_bucket"
    first = {shown(tag) for tag in recorded_tags() if shown(tag).startswith(OVERVIEW)}
    words = ("samples_per_sec", "exposed_ms", "compute_ms", "compression_ratio", "gain", "loss")
    for word in words:
        assert any(word in tag for tag in first), word
    assert not any(tag.startswith("bucket") for tag in map(shown, recorded_tags()))


def test_charts_of_the_layout_show_tags_that_exist() -> None:
    charts = {tag for category in LAYOUT.values() for tags in category.values() for tag in tags}
    exist = {shown(tag) for tag in recorded_tags()}
    mine = {tag for tag in charts if tag.startswith((OVERVIEW, "2_bytes"))}
    assert mine <= exist
    assert list(LAYOUT) == ["Time", "Bytes", "Plan", "Forecast"]


def test_seconds_become_milliseconds_and_say_so() -> None:
    found = in_milliseconds({"seconds": 0.5, "planner_seconds": 2.0, "bytes": 3.0, "theta": 20.0})
    assert found == {"ms": 500.0, "planner_ms": 2000.0, "bytes": 3.0, "theta": 20.0}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("step_time/total", 0.5), ("time/step_ms", 500.0)),
        (("step_time/communicate", 0.5), ("time/exposed_ms", 500.0)),
        (("step_time/compress", 0.5), ("time/compress_ms", 500.0)),
        (("compression/bytes_per_step", 7.0), ("bytes/payload", 7.0)),
        (("forecast/predicted_sync_seconds", 0.5), ("forecast/predicted_sync_ms", 500.0)),
        (("forecast/measured_seconds", 0.5), ("forecast/measured_ms", 500.0)),
        (("plan/planner_seconds", 0.5), ("plan/planner_ms", 500.0)),
        (("time/step_ms", 0.5), ("time/step_ms", 0.5)),
        (("my/seconds", 0.5), ("my/seconds", 0.5)),
    ],
)
def test_tags_of_earlier_versions_are_read_as_todays(
    old: tuple[str, float], new: tuple[str, float]
) -> None:
    assert modern(*old) == new
