"""The meter's arithmetic by hand, and the price of metering."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.telemetry import Meter, Telemetry
from tests.telemetry.helpers import (
    Clock,
    Recorder,
    run_step,
)


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
        "time/step_ms": 500.0,
        "time/compute_ms": 500.0 - 70.0 - 100.0 - 30.0,
        "time/compress_ms": 70.0,
        "time/exposed_ms": 100.0,
        "time/decompress_ms": 30.0,
        "throughput/steps_per_sec": 2.0,
        "throughput/samples_per_sec": 64.0,
        "bytes/payload": 160.0,
        "bytes/traffic": 320.0,
        "bytes/dense": 8000.0,
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
    totals = [record["time/step_ms"] for _, record in sink.records]
    assert totals == pytest.approx([250 * (1 + 2 + 3 + 4), 250 * (5 + 6 + 7 + 8)])
    waits = [record["time/exposed_ms"] for _, record in sink.records]
    assert waits == pytest.approx([2500 / 4, 6500 / 4])
    payloads = [record["bytes/payload"] for _, record in sink.records]
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
    assert record["time/compute_ms"] == 1000.0


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
    assert sink.records[0][1]["bytes/payload"] == 7


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


def test_seconds_that_belong_to_no_step_are_not_counted() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    before = meter.now()
    with meter.paused():
        clock.now += 5
    clock.now += 1
    assert meter.now() - before == 1
