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

from hvd_adaptive.planning.plan import Plan
from hvd_adaptive.telemetry.config import Telemetry
from hvd_adaptive.telemetry.sinks import JsonLinesSink, Sink
from hvd_adaptive.telemetry.summary import Summary
from hvd_adaptive.telemetry.tensorboard import TensorBoardSink

__all__ = ["Meter"]

# Columns of a bucket's row of sums. Plain integers: an enum's lookup would cost more than the sum.
_COMPRESS, _COMMUNICATE, _EXPOSED, _DECOMPRESS = 0, 1, 2, 3
_PAYLOAD, _TRAFFIC, _DENSE, _ENERGY, _SENT, _NODE = 4, 5, 6, 7, 8, 9
_COLUMNS: Final = 10

# Complete steps that the summary leaves out: kernels compile and buffers are allocated in them.
_WARMUP_STEPS: Final = 5


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

    Raises:
        OSError: rank 0 cannot write to `telemetry.logdir`.
        ModuleNotFoundError: TensorBoard is wanted and not installed.
    """

    __slots__ = (
        "_boundary",
        "_clock",
        "_closed",
        "_dense_traffic",
        "_every",
        "_idle",
        "_last",
        "_names",
        "_past",
        "_past_seconds",
        "_past_steps",
        "_rows",
        "_samples",
        "_sinks",
        "_step",
        "_steps",
        "_telemetry",
        "_warm",
        "_window_start",
    )

    def __init__(
        self,
        telemetry: str | os.PathLike[str] | Telemetry | None = None,
        rank: int = 0,
        *,
        dense_traffic: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        sinks: Sequence[Sink] | None = None,
    ) -> None:
        telemetry = Telemetry.parse(telemetry)
        self._every = telemetry.every
        self._samples = math.nan
        if telemetry.samples_per_step is not None:
            self._samples = float(telemetry.samples_per_step)
        self._clock = clock
        self._dense_traffic = dense_traffic
        self._closed = False
        self._rows: list[list[float]] = []
        self._names: list[tuple[str, str, str]] = []
        # Complete steps of the running window; -1 until the clock has started.
        self._steps = -1
        self._boundary = 0
        self._step = 0
        self._last = self._window_start = 0.0
        # seconds that belong to no step; the times kept here are the clock's without them
        self._idle = 0.0
        # Sums of the windows before the running one, and of the warm-up within them.
        self._past = [0.0] * _COLUMNS
        self._past_seconds = 0.0
        self._past_steps = 0
        self._warm: tuple[int, float, list[float]] | None = None
        self._telemetry = telemetry
        self._sinks = list(sinks or ())
        if sinks is None and rank == 0:
            self._open()
        elif self._sinks:
            atexit.register(self.close)

    def _open(self) -> None:
        self._sinks = _open_sinks(self._telemetry)
        if self._sinks:
            # Horovod's optimizer has no close(), so a drop-in's user does not call one.
            atexit.register(self.close)

    def ranks_changed(self, before: int, rank: int, dense_traffic: float) -> None:
        """Continue in an elastic run whose ranks have changed: the new rank 0 writes.

        Args:
            before: this process's rank until now.
            rank: its rank from now on.
            dense_traffic: as for the meter, with the present ranks.

        Warns:
            RuntimeWarning: this rank cannot write to the `logdir`.
        """
        self._dense_traffic = dense_traffic
        if before == 0 or rank != 0 or self._sinks:
            return
        try:
            self._open()
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

    def end_step(self, step: int) -> None:
        """Closes the running step, whose number in the records is `step`."""
        self._last = self.now()
        self._step = step
        self._steps += 1
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
        self._to_sinks(lambda sink: sink.scalars(step, {tag: float(value)}))

    def text(self, tag: str, text: str, step: int = 0) -> None:
        """Writes a text (Markdown) at once."""
        self._to_sinks(lambda sink: sink.text(tag, text, step))

    def plan(self, plan: Plan, step: int) -> None:
        """Writes what every layer does from this step on."""
        self._to_sinks(lambda sink: sink.plan(plan, step))

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
        )

    def close(self) -> None:
        """Writes what the last window holds and closes the sinks. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._steps > 0:
            self._close_window()
        self._to_sinks(lambda sink: sink.flush())
        self._to_sinks(lambda sink: sink.close())
        self._sinks.clear()

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
        for new in range(len(self._rows), index + 1):
            self._rows.append([0.0] * _COLUMNS)
            kinds = ("communicate_ms", "compress_ms", "payload_bytes")
            first, second, third = (f"bucket/{new}/{kind}" for kind in kinds)
            self._names.append((first, second, third))
        return self._rows[index]

    def _cross_boundary(self) -> None:
        if self._steps == 0:
            # The clock starts here; what ran before it belongs to no complete step.
            self._start_window()
        else:
            if self._warm is None and self._past_steps + self._steps == _WARMUP_STEPS:
                self._warm = self._totals()
            if self._steps >= self._every:
                self._close_window()
        self._boundary = self._every
        if self._warm is None:
            to_warm = _WARMUP_STEPS - self._past_steps
            self._boundary = min(self._boundary, to_warm)

    def _start_window(self) -> None:
        for row in self._rows:
            row[:] = [0.0] * _COLUMNS
        self._steps = 0
        self._window_start = self._last

    def _close_window(self) -> None:
        sums = self._window()
        if self._sinks:
            record = self._record(sums)
            self._to_sinks(lambda sink: sink.scalars(self._step, record))
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
        steps = self._steps
        total = (self._last - self._window_start) / steps
        compress, exposed, decompress = (
            sums[column] / steps for column in (_COMPRESS, _EXPOSED, _DECOMPRESS)
        )
        record = {
            "step_time/total": total,
            "step_time/compute": total - compress - exposed - decompress,
            "step_time/compress": compress,
            "step_time/communicate": exposed,
            "step_time/decompress": decompress,
            "compression/bytes_per_step": sums[_PAYLOAD] / steps,
        }
        # A quantity without meaning (nothing sent, no sample count) is left out, not written as 0.
        if total > 0 and not math.isnan(self._samples):
            record["throughput/samples_per_sec"] = self._samples / total
        if sums[_PAYLOAD]:
            record["compression/ratio_payload"] = sums[_DENSE] / sums[_PAYLOAD]
        if sums[_TRAFFIC]:
            dense_traffic = self._dense_traffic * sums[_DENSE]
            record["compression/ratio_traffic"] = dense_traffic / sums[_TRAFFIC]
        if sums[_ENERGY]:
            record["compression/gain"] = sums[_SENT] / sums[_ENERGY]
            left = (sums[_ENERGY] - sums[_SENT]) / steps
            # Rounding may leave a little less than nothing; a NaN stays one.
            record["residual/norm"] = 0.0 if left < 0 else math.sqrt(left)
        for row, (communicate_ms, compress_ms, payload_bytes) in zip(
            self._rows, self._names, strict=True
        ):
            record[communicate_ms] = row[_COMMUNICATE] / steps * 1e3
            record[compress_ms] = row[_COMPRESS] / steps * 1e3
            record[payload_bytes] = row[_PAYLOAD] / steps
        return record

    def _to_sinks(self, write: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                write(sink)
            except Exception as error:
                self._disable(sink, error)

    def _disable(self, sink: Sink, error: Exception) -> None:
        """Training continues without this log; one warning names the log and the reason."""
        self._sinks.remove(sink)
        reason = f"{type(error).__name__}: {error}"
        try:
            sink.close()
        except Exception as again:
            # Closing tries to write the rest, so it fails in the same way; another way is news.
            if str(again) != str(error):
                reason += f"; then closing it {type(again).__name__}: {again}"
        warnings.warn(
            f"telemetry: {type(sink).__name__} failed ({reason}) and is disabled; "
            "nothing more is written to it, training continues",
            RuntimeWarning,
            stacklevel=4,
        )


def _open_sinks(telemetry: Telemetry) -> list[Sink]:
    if telemetry.logdir is None:
        return []
    sinks: list[Sink] = []
    wanted = ((telemetry.tensorboard, TensorBoardSink), (telemetry.jsonl, JsonLinesSink))
    try:
        for wants, kind in wanted:
            if wants:
                sinks.append(kind(telemetry.logdir))
    except OSError as error:
        for sink in sinks:
            sink.close()
        raise OSError(
            error.errno,
            f"telemetry cannot write to logdir {telemetry.logdir!r} ({error.strerror}): "
            "name a folder that rank 0 may create and write to, or write telemetry=None",
        ) from error
    return sinks


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _cell(value: object) -> str:
    return str(value).replace("|", r"\|").replace("\n", "<br>")
