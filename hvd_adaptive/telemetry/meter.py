"""What a step costs and what it sends: added up on every rank, and handed to sinks on rank 0.

Every rank meters, because the planner and the final summary need the figures. Only rank 0 writes,
and only when a `logdir` is set. This module knows neither Horovod nor MPI: the rank is passed in.

The hot path (`Meter.bucket`, `Meter.end_step`) adds floats to lists that exist already. Everything
that costs more (names, dictionaries, files) happens once in `Telemetry.every` steps.
"""

from __future__ import annotations

import atexit
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.layers import Layer
from hvd_adaptive.planning.plan import Plan
from hvd_adaptive.telemetry.config import Telemetry
from hvd_adaptive.telemetry.layer_gains import LayerGains
from hvd_adaptive.telemetry.outputs import Outputs, open_sinks
from hvd_adaptive.telemetry.sinks import Sink
from hvd_adaptive.telemetry.summary import Summary
from hvd_adaptive.telemetry.trace import Trace, TraceWindow
from hvd_adaptive.telemetry.verdict import Placement, verdict

__all__ = ["Meter"]

# Columns of a bucket's row of sums. Plain integers: an enum's lookup would cost more than the sum.
_COMPRESS, _COMMUNICATE, _EXPOSED, _DECOMPRESS = 0, 1, 2, 3
_PAYLOAD, _TRAFFIC, _DENSE, _ENERGY, _SENT, _NODE = 4, 5, 6, 7, 8, 9
_COLUMNS: Final = 10

# Complete steps that the summary leaves out: kernels compile and buffers are allocated in them.
_WARMUP_STEPS: Final = 5


class _Mean:
    """The mean of numbers since it was taken last."""

    __slots__ = ("_sum", "count")

    def __init__(self) -> None:
        self.count, self._sum = 0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self._sum += value

    def take(self) -> float:
        mean = _ratio(self._sum, self.count)
        self.count, self._sum = 0, 0.0
        return mean


class Meter:
    """Adds up what each step costs and, on rank 0, hands the means to the sinks.

    Cost: `bucket` and `end_step` allocate nothing but floats and take less than 1 us. Every
    `telemetry.every` steps one record is made and written.

    The time between two calls of `end_step` counts as one step, whatever happened in it: an
    evaluation between two training steps is part of the second one's `total` and `compute`.

    Args:
        telemetry: anything that `Telemetry.parse` accepts.
        rank: this process's rank; only rank 0 opens files.
        dense_traffic: bytes that dense gradients would put on this rank's link, for each of their
            bytes; 2 (N - 1) / N under a ring allreduce over N ranks. `ratio_traffic` compares with it.
        clock: seconds, monotonic.
        sinks: used in place of the sinks that `telemetry` describes, on any rank.
        placement: where the ranks run; by default this process is alone.

    Raises:
        OSError: rank 0 cannot write to `telemetry.logdir`.
        ModuleNotFoundError: TensorBoard, or a logger, is wanted and not installed.
    """

    __slots__ = (
        "_ahead",
        "_boundary",
        "_clock",
        "_closed",
        "_dense_traffic",
        "_idle",
        "_last",
        "_layers",
        "_loss",
        "_outputs",
        "_past",
        "_past_seconds",
        "_past_steps",
        "_placement",
        "_rows",
        "_samples",
        "_step",
        "_steps",
        "_telemetry",
        "_traced",
        "_warm",
        "_window_start",
        "every",
        "trace",
    )

    trace: Trace | None
    """Records what this rank does, in the steps that `Telemetry.trace` names; else None."""

    def __init__(
        self,
        telemetry: str | os.PathLike[str] | Telemetry | None = None,
        rank: int = 0,
        *,
        dense_traffic: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        sinks: Sequence[Sink] | None = None,
        placement: Placement | None = None,
    ) -> None:
        telemetry = Telemetry.parse(telemetry)
        self.every = telemetry.every
        self._samples = math.nan
        if telemetry.samples_per_step is not None:
            self._samples = float(telemetry.samples_per_step)
        self._clock = clock
        self._dense_traffic = dense_traffic
        self._closed = False
        self._rows: list[list[float]] = []
        self._layers = LayerGains()
        # Complete steps of the running window; -1 until the clock has started.
        self._steps = -1
        self._boundary = 0
        self._step = 0
        self._last = self._window_start = 0.0
        # seconds that belong to no step; the times kept here are the clock's without them
        self._idle = 0.0
        # sums of what ran before the first complete step
        self._ahead = [0.0] * _COLUMNS
        # Sums of the windows before the running one, and of the warm-up within them.
        self._past = [0.0] * _COLUMNS
        self._past_seconds = 0.0
        self._past_steps = 0
        self._warm: tuple[int, float, list[float]] | None = None
        self._loss = _Mean()
        self._placement = placement or Placement.alone()
        self._telemetry = telemetry
        self._outputs = Outputs(sinks or ())
        if sinks is None and rank == 0:
            self._outputs = Outputs(open_sinks(telemetry))
        self._close_at_exit()
        self._traced = TraceWindow(telemetry.traced_steps, telemetry.logdir, rank)
        self.trace = self._traced.follow(0)

    def _close_at_exit(self) -> None:
        """Horovod's optimizer has no close(), so a drop-in's user does not call one."""
        if self._outputs or self._telemetry.trace:
            atexit.register(self.close)

    def ranks_changed(
        self, before: int, rank: int, dense_traffic: float, placement: Placement | None = None
    ) -> None:
        """Continue in an elastic run whose ranks have changed: the new rank 0 writes.

        Args:
            before: this process's rank until now.
            rank: its rank from now on.
            dense_traffic: as for the meter, with the present ranks.
            placement: as for the meter; None leaves it.

        Warns:
            RuntimeWarning: this rank cannot write to the `logdir`.
        """
        self._dense_traffic = dense_traffic
        self._traced.rank = rank
        self._placement = placement or self._placement
        if before == 0 or rank != 0 or self._outputs:
            return
        try:
            self._outputs = Outputs(open_sinks(self._telemetry))
            self._close_at_exit()
        except (OSError, ModuleNotFoundError) as error:
            warnings.warn(
                f"{error}; nothing is written by this rank, training continues",
                RuntimeWarning,
                stacklevel=2,
            )

    def bucket(
        self,
        index: int,
        *,
        compress: float = 0.0,
        communicate: float = 0.0,
        exposed: float = 0.0,
        decompress: float = 0.0,
        payload: int = 0,
        traffic: int = 0,
        node: int = 0,
        dense: int = 0,
        energy: float = 0.0,
        sent: float = 0.0,
    ) -> None:
        """Adds to the running step what bucket `index` (from 0) did; several calls add up.

        Args:
            index: the bucket's number.
            compress: seconds in feedback and compression.
            communicate: seconds from launch to completion of its collectives, overlapped or not.
            exposed: seconds of exposed communication: those for which the training thread waited.
            decompress: seconds in decompression.
            payload: bytes that this rank handed to the collectives that leave its node.
            traffic: bytes that this rank sent or received for them, to and from any rank.
            node: the same of collectives among the ranks of a node, which are in no `traffic`.
            dense: bytes of the bucket's gradients without compression.
            energy: squared L2 norm before compression.
            sent: squared L2 norm of what was transmitted.
        """
        try:
            row = self._rows[index]
        except IndexError:
            row = self._grow(index)
        # A test is cheaper than a sum and a store, and most calls give two or three of the ten.
        if compress:
            row[_COMPRESS] += compress
        if communicate:
            row[_COMMUNICATE] += communicate
        if exposed:
            row[_EXPOSED] += exposed
        if decompress:
            row[_DECOMPRESS] += decompress
        if payload:
            row[_PAYLOAD] += payload
        if traffic:
            row[_TRAFFIC] += traffic
        if node:
            row[_NODE] += node
        if dense:
            row[_DENSE] += dense
        if energy:
            row[_ENERGY] += energy
        if sent:
            row[_SENT] += sent

    def layers(self, index: int, layers: Sequence[Layer], energy: Float64s, sent: Float64s) -> None:
        """Adds to the running window what bucket `index` sent of its layers: see `LayerGains.add`."""
        if self._outputs:
            self._layers.add(index, layers, energy, sent)

    def end_step(self, step: int) -> None:
        """Closes the running step, whose number in the records is `step`."""
        self._last = self.now()
        self._step = step
        self._steps += 1
        if self.trace is not None:
            self.trace.step(step)
        if self._steps == self._boundary:
            self._cross_boundary()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs within this context belongs to no step."""
        started = self._clock()
        try:
            yield
        finally:
            self._idle += self._clock() - started

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Writes one value at once, past the window."""
        self._outputs.write(lambda sink: sink.scalars(step, {tag: float(value)}))

    def text(self, tag: str, text: str, step: int = 0) -> None:
        """Writes a text (Markdown) at once."""
        self._outputs.write(lambda sink: sink.text(tag, text, step))

    def plan(self, plan: Plan, step: int) -> None:
        """Writes what every layer does from this step on."""
        if self.trace is not None:
            self.trace.switch(step, plan.wire_bytes, plan.dense_bytes)
        self._outputs.write(lambda sink: sink.plan(plan, step))

    def loss(self, value: float) -> None:
        """Takes the loss of the running step into the mean of the window."""
        self._loss.add(value)

    @property
    def writes(self) -> bool:
        """Whether anything is written by this rank."""
        return bool(self._outputs)

    @property
    def placement(self) -> Placement:
        """Where the ranks run."""
        return self._placement

    @property
    def samples_per_step(self) -> float:
        """Training samples that all ranks together consume in a step; NaN where that is not known."""
        return self._samples

    def now(self) -> float:
        """Seconds, without those that belong to no step."""
        return self._clock() - self._idle

    def configuration(self, mapping: Mapping[str, object]) -> None:
        """Writes the run's settings as a table, under the tag `configuration`."""
        rows = ["| setting | value |", "|---|---|"]
        rows.extend(f"| {_cell(key)} | {_cell(value)} |" for key, value in mapping.items())
        self.text("configuration", "\n".join(rows))

    def summary(self) -> Summary:
        """Means over the complete steps so far; call it between steps. See `Summary`."""
        steps, seconds, sums = self._totals()
        whole = [ahead + value for ahead, value in zip(self._ahead, sums, strict=True)]
        if self._warm is not None and steps >= 2 * self._warm[0]:
            warm_steps, warm_seconds, warm_sums = self._warm
            steps -= warm_steps
            seconds -= warm_seconds
            sums = [total - warm for total, warm in zip(sums, warm_sums, strict=True)]
        mean = [_ratio(value, steps) for value in sums]
        total = _ratio(seconds, steps)
        return Summary(
            steps=float(steps),
            samples_per_sec=_ratio(self._samples, total),
            total=total,
            compute=total - mean[_COMPRESS] - mean[_EXPOSED] - mean[_DECOMPRESS],
            compress=mean[_COMPRESS],
            communicate=mean[_EXPOSED],
            decompress=mean[_DECOMPRESS],
            payload_bytes=mean[_PAYLOAD],
            traffic_bytes=mean[_TRAFFIC],
            dense_bytes=mean[_DENSE],
            ratio_payload=_ratio(sums[_DENSE], sums[_PAYLOAD]),
            ratio_traffic=_ratio(self._dense_traffic * sums[_DENSE], sums[_TRAFFIC]),
            gain=_ratio(sums[_SENT], sums[_ENERGY]),
            node_bytes=mean[_NODE],
            verdict=verdict(
                total, mean[_EXPOSED], mean[_COMPRESS] + mean[_DECOMPRESS], self._placement
            ),
            sent_bytes=whole[_PAYLOAD],
            saved_bytes=whole[_DENSE] - whole[_PAYLOAD],
        )

    def close(self) -> None:
        """Writes what the last window holds and closes the sinks. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._steps > 0:
            self._close_window()
        self._traced.end()
        self.trace = None
        if self._outputs and (sentence := self.summary().verdict):
            self.text("verdict", sentence, self._step)
        self._outputs.close()

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _grow(self, index: int) -> list[float]:
        for _ in range(len(self._rows), index + 1):
            self._rows.append([0.0] * _COLUMNS)
        return self._rows[index]

    def _cross_boundary(self) -> None:
        if self._steps == 0:
            # The clock starts here; what ran before it belongs to no complete step.
            self._ahead = self._window()
            self._start_window()
        else:
            if self._warm is None and self._past_steps + self._steps == _WARMUP_STEPS:
                self._warm = self._totals()
            if self._steps >= self.every:
                self._close_window()
        self._boundary = self.every
        if self._warm is None:
            to_warm = _WARMUP_STEPS - self._past_steps
            self._boundary = min(self._boundary, to_warm)
        self._follow_trace()

    def _follow_trace(self) -> None:
        """Begin or end the trace where it is time to, and return at the next such step."""
        done = self._past_steps + self._steps + 1  # the first call only starts the clock: it is a step
        with self.paused():
            self.trace = self._traced.follow(done)
        for step in self._traced.steps:
            if step > done:
                self._boundary = min(self._boundary, self._steps + step - done)

    def _start_window(self) -> None:
        for row in self._rows:
            row[:] = [0.0] * _COLUMNS
        self._layers.clear()
        self._loss.take()
        self._steps = 0
        self._window_start = self._last

    def _close_window(self) -> None:
        sums = self._window()
        if self._outputs:
            record = self._record(sums)
            self._outputs.write(lambda sink: sink.scalars(self._step, record))
        self._past_steps, self._past_seconds, self._past = self._totals()
        self._start_window()

    def _window(self) -> list[float]:
        return [sum(column) for column in zip(*self._rows, strict=True)] or [0.0] * _COLUMNS

    def _totals(self) -> tuple[int, float, list[float]]:
        """Steps, seconds and sums of all steps that `end_step` has closed."""
        if self._steps <= 0:
            return self._past_steps, self._past_seconds, list(self._past)
        window = self._window()
        if not (math.isfinite(window[_ENERGY]) and math.isfinite(window[_SENT])):
            # One overflowed step, which a gradient scaler skips, must not make the run's gain NaN.
            window[_ENERGY] = window[_SENT] = 0.0
        return (
            self._past_steps + self._steps,
            self._past_seconds + self._last - self._window_start,
            [past + new for past, new in zip(self._past, window, strict=True)],
        )

    def _record(self, sums: list[float]) -> dict[str, float]:
        """The means of the running window by tag: see :mod:`hvd_adaptive.telemetry.tags`."""
        steps = self._steps
        total = (self._last - self._window_start) / steps
        compress, exposed, decompress = (
            sums[column] / steps for column in (_COMPRESS, _EXPOSED, _DECOMPRESS)
        )
        record = {
            "time/step_ms": total * 1e3,
            "time/compute_ms": (total - compress - exposed - decompress) * 1e3,
            "time/compress_ms": compress * 1e3,
            "time/exposed_ms": exposed * 1e3,
            "time/decompress_ms": decompress * 1e3,
            "bytes/payload": sums[_PAYLOAD] / steps,
            "bytes/traffic": sums[_TRAFFIC] / steps,
            "bytes/dense": sums[_DENSE] / steps,
        }
        # A quantity without meaning (nothing sent, no sample count) is left out, not written as 0.
        record |= _throughput(total, self._samples)
        if self._loss.count:
            record["loss/rank_0"] = self._loss.take()
        record |= _ratios(sums, steps, self._dense_traffic)
        record |= self._layers.record()
        record |= _of_buckets(self._rows, steps)
        return record


def _ratios(sums: Sequence[float], steps: int, dense_traffic: float) -> dict[str, float]:
    """What was sent of what there was; what has no meaning is left out."""
    record: dict[str, float] = {}
    if sums[_PAYLOAD]:
        record["compression/ratio_payload"] = sums[_DENSE] / sums[_PAYLOAD]
    if sums[_TRAFFIC]:
        record["compression/ratio_traffic"] = dense_traffic * sums[_DENSE] / sums[_TRAFFIC]
    if sums[_ENERGY]:
        record["compression/gain"] = sums[_SENT] / sums[_ENERGY]
        left = (sums[_ENERGY] - sums[_SENT]) / steps
        # Rounding may leave a little less than nothing; a NaN stays one.
        record["residual/norm"] = 0.0 if left < 0 else math.sqrt(left)
    return record


def _throughput(total: float, samples: float) -> dict[str, float]:
    """Per second, of steps that take `total` seconds; NaN samples are left out."""
    record = {"throughput/steps_per_sec": 1.0, "throughput/samples_per_sec": samples}
    known = {tag: count for tag, count in record.items() if not math.isnan(count)}
    return {tag: count / total for tag, count in known.items() if total > 0}


def _of_buckets(rows: Sequence[Sequence[float]], steps: int) -> dict[str, float]:
    """Means of each bucket."""
    record: dict[str, float] = {}
    for bucket, row in enumerate(rows):
        record[f"bucket/{bucket}/communicate_ms"] = row[_COMMUNICATE] / steps * 1e3
        record[f"bucket/{bucket}/compress_ms"] = row[_COMPRESS] / steps * 1e3
        record[f"bucket/{bucket}/payload_bytes"] = row[_PAYLOAD] / steps
    return record


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _cell(value: object) -> str:
    return str(value).replace("|", r"\|").replace("\n", "<br>")
