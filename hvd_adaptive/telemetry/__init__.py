"""What a step costs and what it sends: a meter in the middle, sinks at the edge.

Every rank meters, because the planner and the final summary need the figures. Only rank 0 writes,
and only when a `logdir` is set. This module knows neither Horovod nor MPI: the rank is passed in.

The hot path (`Meter.bucket`, `Meter.end_step`) adds floats to lists that exist already. Everything
that costs more (names, dictionaries, files) happens once in `Telemetry.every` steps.
"""

from __future__ import annotations

import atexit
import importlib
import itertools
import json
import math
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

from hvd_adaptive.planning.plan import Plan
from hvd_adaptive.telemetry.plan_image import PlanPicture

__all__ = ["JsonLinesSink", "Meter", "Sink", "Summary", "Telemetry", "TensorBoardSink"]

# Columns of a bucket's row of sums. Plain integers: an enum's lookup would cost more than the sum.
_COMPRESS, _COMMUNICATE, _EXPOSED, _DECOMPRESS = 0, 1, 2, 3
_PAYLOAD, _TRAFFIC, _DENSE, _ENERGY, _SENT = 4, 5, 6, 7, 8
_COLUMNS: Final = 9

# Complete steps that the summary leaves out: kernels compile and buffers are allocated in them.
_WARMUP_STEPS: Final = 5

_PICTURE_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Telemetry:
    """What the user asks to be recorded.

    Args:
        logdir: folder for the files of rank 0, created where missing; None writes nothing (the
            meter still counts, so that a summary can be had).
        tensorboard: write TensorBoard event files.
        jsonl: write `telemetry.jsonl`, one JSON object a line.
        every: write every this many steps; what is written is the mean over them.
        samples_per_step: training samples that all ranks together consume in one step; without it
            no throughput is reported.

    Raises:
        TypeError, ValueError: for a field of a wrong type or value, saying what to write instead.

    Example:
        >>> Telemetry.parse("runs/first") == Telemetry(logdir="runs/first")
        True
    """

    logdir: str | None = None
    tensorboard: bool = True
    jsonl: bool = True
    every: int = 10
    samples_per_step: int | None = None

    def __post_init__(self) -> None:
        if self.logdir is not None:
            object.__setattr__(self, "logdir", _folder_name(self.logdir))
        for name in ("tensorboard", "jsonl"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"Telemetry.{name} is {value!r}: write {name}=True or {name}=False")
        _require_positive("every", self.every, "the number of steps between two records")
        if self.samples_per_step is not None:
            _require_positive(
                "samples_per_step", self.samples_per_step, "batch size x number of ranks, or None"
            )
        if self.logdir is not None and not (self.tensorboard or self.jsonl):
            raise ValueError(
                f"Telemetry(logdir={self.logdir!r}, tensorboard=False, jsonl=False) would write "
                "nothing: turn one of them on, or write logdir=None"
            )

    @classmethod
    def parse(cls, value: str | os.PathLike[str] | Telemetry | None) -> Telemetry:
        """Accepts what a user may pass as `telemetry=`: nothing, a folder, or a `Telemetry`."""
        if isinstance(value, Telemetry):
            return value
        if value is None:
            return cls()
        if isinstance(value, str | os.PathLike):
            return cls(logdir=_folder_name(value))
        raise TypeError(
            f"telemetry={value!r}: write the name of a folder, such as telemetry='runs/first', "
            "or telemetry=Telemetry(logdir='runs/first', every=10), or None"
        )


def _folder_name(value: object) -> str:
    name = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(name, str):
        raise TypeError(f"logdir={value!r}: write the folder's name as a str or a Path")
    if not name.strip():
        raise ValueError("logdir is empty: write the name of a folder ('.' for this one), or None")
    if "\0" in name:
        raise ValueError(f"logdir={name!r} holds a NUL: write the name of a folder, or None")
    return name


def _require_positive(name: str, value: object, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Telemetry.{name} is {value!r}: write an int of at least 1 ({meaning})")
    if not 1 <= value < 1 << 63:
        bound = "of at least 1" if value < 1 else "below 2**63"
        raise ValueError(f"Telemetry.{name} is {value}: write an int {bound} ({meaning})")


class Sink(Protocol):
    """Where records go. A sink that raises is disabled by the meter, with a warning."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, tag: str, text: str, step: int) -> None: ...

    def plan(self, plan: Plan, step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class JsonLinesSink:
    """One JSON object a line: `{"step": 20, "time": 1.7e9, "scalars": {...}}`, or "texts", or "plan".

    NaN and the infinities become null: JSON has no word for them. An existing file is continued,
    so a resumed job keeps one file. Each line is flushed, so that the file can be followed.
    """

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        path = _make_folder(logdir) / "telemetry.jsonl"
        self._file = path.open("a", encoding="utf-8")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        finite = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        self._write(step, "scalars", finite)

    def text(self, tag: str, text: str, step: int) -> None:
        self._write(step, "texts", {tag: text})

    def plan(self, plan: Plan, step: int) -> None:
        self._write(step, "plan", plan.record())

    def _write(self, step: int, key: str, values: Mapping[str, Any]) -> None:
        line = json.dumps({"step": step, "time": time.time(), key: values}, allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """TensorBoard event files, written in the calling thread.

    Of a plan: the text `plan/table`, the image `plan/levels`, and `gain/LAYER` where it was measured.

    TensorBoard's own `EventFileWriter` writes in a thread whose errors surface at some later call;
    here a full disk is reported by the call that met it. All scalars of a step travel in one event.
    """

    _counter = itertools.count()

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        # Imported here: TensorBoard is optional, and its import takes a noticeable time.
        proto = "tensorboard.compat.proto"
        try:
            event_pb2 = importlib.import_module(f"{proto}.event_pb2")
            summary_pb2 = importlib.import_module(f"{proto}.summary_pb2")
            tensor_pb2 = importlib.import_module(f"{proto}.tensor_pb2")
            tensor_shape_pb2 = importlib.import_module(f"{proto}.tensor_shape_pb2")
            record_writer = importlib.import_module("tensorboard.summary.writer.record_writer")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"telemetry to TensorBoard needs the package tensorboard ({error}): "
                "pip install tensorboard, or write Telemetry(..., tensorboard=False)"
            ) from error
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2
        self._tensor: Any = tensor_pb2.TensorProto
        self._shape: Any = tensor_shape_pb2.TensorShapeProto
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}."
            f"{os.getpid()}.{next(self._counter)}"
        )
        self._picture = PlanPicture()
        # a plan that is not shown yet, and when the last one was
        self._unshown: tuple[Plan, int] | None = None
        self._shown = -math.inf
        self._file = (_make_folder(logdir) / name).open("xb")
        self._records: Any = record_writer.RecordWriter(self._file)
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        value = self._summary.Summary.Value
        self._write_summary(step, [value(tag=tag, simple_value=v) for tag, v in values.items()])

    def text(self, tag: str, text: str, step: int) -> None:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        value = self._summary.Summary.Value(
            tag=tag,
            metadata=self._summary.SummaryMetadata(plugin_data=plugin),
            tensor=self._tensor(
                dtype="DT_STRING",
                string_val=[text.encode()],
                tensor_shape=self._shape(dim=[self._shape.Dim(size=1)]),
            ),
        )
        self._write_summary(step, [value])

    def plan(self, plan: Plan, step: int) -> None:
        """The plan as a table, as a picture of all plans so far, and what it expects of each layer.

        At most twice a minute: some planners change their mind every few steps.
        """
        self._picture.add(plan, step)
        self._unshown = plan, step
        if time.monotonic() >= self._shown + _PICTURE_SECONDS:
            self._show_plan()

    def _show_plan(self) -> None:
        if self._unshown is None:
            return
        (plan, step), self._unshown = self._unshown, None
        self._shown = time.monotonic()
        self.text("plan/table", f"```\n{plan}\n```", step)
        gains = {f"gain/{row.layer}": row.gain for row in plan if row.gain is not None}
        if gains:
            self.scalars(step, gains)
        png, width, height = self._picture.png()
        image = self._summary.Summary.Image(
            encoded_image_string=png, width=width, height=height, colorspace=3
        )
        self._write_summary(step, [self._summary.Summary.Value(tag="plan/levels", image=image)])

    def _write_summary(self, step: int, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        try:
            self._show_plan()
        finally:
            self._file.close()


def _make_folder(logdir: str | os.PathLike[str]) -> Path:
    folder = Path(logdir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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


@dataclass(frozen=True)
class Summary:
    """Means a step over the complete steps of a run; seconds, bytes.

    The first call of `Meter.end_step` only starts the clock. Of the complete steps after it the
    first five are left out as warm-up, provided that at least as many remain. NaN means "unknown":
    no step is complete, `samples_per_step` was not given, or a ratio's denominator is zero.

    `compute` is what remains of `total` without `compress`, `communicate` and `decompress`;
    `communicate` is the time for which the training thread waited, so the four add up to `total`.
    `gain` is the share of the gradients' energy that was sent.
    """

    steps: float
    samples_per_sec: float
    total: float
    compute: float
    compress: float
    communicate: float
    decompress: float
    payload_bytes: float
    traffic_bytes: float
    dense_bytes: float
    ratio_payload: float
    ratio_traffic: float
    gain: float

    def table(self) -> str:
        """The summary as aligned lines of text."""
        lines = [("steps measured", f"{self.steps:.0f}")]
        lines.append(("samples per second", _number(self.samples_per_sec, "{:,.1f}")))
        for name in ("total", "compute", "compress", "communicate", "decompress"):
            seconds = getattr(self, name)
            share = _number(seconds / self.total * 100 if self.total else math.nan, "{:5.1f} %")
            lines.append((f"{name} per step", f"{_number(seconds * 1e3, '{:10.3f} ms')}  {share}"))
        for name in ("payload", "traffic", "dense"):
            count = getattr(self, f"{name}_bytes")
            lines.append((f"{name} per step", _number(count, "{:,.0f} bytes")))
        lines.append(("dense / payload", _number(self.ratio_payload, "{:,.2f}")))
        lines.append(("dense traffic / traffic", _number(self.ratio_traffic, "{:,.2f}")))
        lines.append(("gain", _number(self.gain, "{:.4f}")))
        width = max(len(label) for label, _ in lines)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in lines)


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else form.format(value)


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
        """Goes on in an elastic run whose ranks have changed: whoever is rank 0 now writes.

        Args:
            before: this process's rank until now.
            rank: its rank from now on.
            dense_traffic: as of the meter, for the ranks that there are now.

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
                f"{error}; nothing is written by this rank, training goes on",
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
        dense: int = 0,
        energy: float = 0.0,
        sent: float = 0.0,
    ) -> None:
        """Adds to the running step what bucket `index` (from 0) did; several calls add up.

        Args:
            index: the bucket's number.
            compress: seconds in feedback and compression.
            communicate: seconds from launch to completion of its collectives, overlapped or not.
            exposed: seconds for which the training thread waited for them.
            decompress: seconds in decompression.
            payload: bytes that this rank handed to the collectives.
            traffic: bytes that this rank sent or received for them.
            dense: bytes of the bucket's gradients without compression.
            energy: squared L2 norm before compression.
            sent: squared L2 norm of what was transmitted.
        """
        try:
            row = self._rows[index]
        except IndexError:
            row = self._grow(index)
        # A test is cheaper than a sum and a store, and most calls give two or three of the nine.
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
        """Training samples that all ranks together consume in a step; NaN where nobody said."""
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
        """Training goes on without this log; which log and why is said once."""
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
            "nothing more is written to it, training goes on",
            RuntimeWarning,
            stacklevel=4,
        )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _cell(value: object) -> str:
    return str(value).replace("|", r"\|").replace("\n", "<br>")
