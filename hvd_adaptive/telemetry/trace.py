"""When everything in a window of steps ran: a file per rank in Chrome's format, and how to merge files.

The format is that of Horovod's timeline: a JSON array of events whose ``ts`` and ``dur`` are
microseconds since a start that the first event gives, as ``start_time_since_epoch_in_micros``. Both
clocks are ``CLOCK_MONOTONIC``, so within one host they differ by nothing but that start, to which
:func:`merged` shifts files. Open the result in Perfetto (ui.perfetto.dev) or ``chrome://tracing``.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["Trace", "TraceWindow", "merged", "read_events"]

_START: Final = "start_time_since_epoch_in_micros"
_TRAINING, _FLIGHTS, _PLANS = 0, 1, 2
_THREADS: Final = {_TRAINING: "training", _FLIGHTS: "collectives in flight", _PLANS: "plan switches"}
_PIDS_PER_FILE: Final = 100_000
"""Horovod numbers tensors as if they were processes: files get numbers of their own."""


class Trace:
    """One rank's events, in memory until they are written.

    A trace has three rows per rank. *training*: what the thread that trains did, nested: steps; in them
    hooks (with the layer), `synchronize`; in these `compress`, `wait` (exposed communication) and
    `decompress`, with the bucket. *collectives in flight*: from launch to completion, several at once.
    *plan switches*: with the bytes of the plan.

    Cost: a tuple per event; nothing is formatted before :meth:`write`.

    Args:
        path: of the file.
        rank: of this process; rows are named by it.

    Example:
        >>> import tempfile
        >>> trace = Trace(Path(tempfile.mkdtemp()) / "trace.rank0.json", rank=0)
        >>> trace.span("compress", 10.0, 10.5, bucket=3)
        >>> trace.write()
        >>> [event["dur"] for event in read_events(trace.path) if event["name"] == "compress"]
        [500000.0]
    """

    __slots__ = ("_events", "_rank", "_started", "_step_began", "path")

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self._rank = rank
        self._events: list[tuple[str, str, float, float, int, dict[str, Any]]] = []
        self._started = time.perf_counter()
        self._step_began = self._started

    def span(self, name: str, start: float, end: float, **args: Any) -> None:
        """The training thread did something, by ``time.perf_counter()``."""
        self._events.append(("X", name, start, end, _TRAINING, args))

    def flight(self, name: str, launched: float, done: float, **args: Any) -> None:
        """A collective was under way."""
        self._events.append(("b", name, launched, done, _FLIGHTS, args))

    def switch(self, step: int, wire_bytes: int, dense_bytes: int) -> None:
        """Another plan counts from now on."""
        now = time.perf_counter()
        args = {"step": step, "wire_bytes": wire_bytes, "dense_bytes": dense_bytes}
        self._events.append(("i", "plan", now, now, _PLANS, args))

    def step(self, number: int) -> None:
        """A step has ended."""
        now = time.perf_counter()
        self.span(f"step {number}", self._step_began, now)
        self._step_began = now

    def write(self) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # the wall clock at the start of the monotonic one: read together, so that hosts can be compared
        start = round((time.time() - time.perf_counter()) * 1e6)
        lines = [json.dumps(event) for event in self._written(start)]
        part = self.path.with_suffix(".part")
        part.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
        os.replace(part, self.path)

    def _written(self, start: int) -> Iterable[dict[str, Any]]:
        offset = self._started
        first = start + round(offset * 1e6)
        yield {"name": "clock", "ph": "M", "pid": self._rank, "args": {_START: first}}
        name = {"name": f"rank {self._rank}"}
        yield {"name": "process_name", "ph": "M", "pid": self._rank, "args": name}
        for thread, label in _THREADS.items():
            name = {"name": label}
            yield {"name": "thread_name", "ph": "M", "pid": self._rank, "tid": thread, "args": name}
        for number, (phase, label, begin, end, thread, args) in enumerate(self._events):
            event = {"name": label, "ph": phase, "ts": _micros(begin - offset), "pid": self._rank}
            event |= {"tid": thread, "args": args}
            if phase == "X":
                yield event | {"dur": _micros(end - begin)}
            elif phase == "b":
                pair = {"cat": "collective", "id": f"{self._rank}.{number}"}
                yield event | pair
                yield event | pair | {"ph": "e", "ts": _micros(end - offset)}
            else:
                yield event | {"s": "p"}


class TraceWindow:
    """The steps that are traced.

    Args:
        steps: the first, and the first after it that is not; None traces nothing.
        logdir: the folder of the file.
        rank: of this process.
    """

    def __init__(self, steps: tuple[int, int] | None, logdir: str | None, rank: int) -> None:
        self.steps: tuple[int, ...] = steps or ()
        """Steps at which :meth:`follow` has something to do."""
        self.rank = rank
        self._folder = Path(logdir or ".")
        self._trace: Trace | None = None

    def follow(self, step: int) -> Trace | None:
        """What records the step that begins now; None outside of the window."""
        if not self.steps:
            return None
        if self._trace is None and self.steps[0] <= step < self.steps[1]:
            self._trace = Trace(self._folder / f"trace.rank{self.rank}.json", self.rank)
        elif step >= self.steps[1]:
            self.end()
        return self._trace

    def end(self) -> None:
        """Write what was recorded.

        Warns:
            RuntimeWarning: the file cannot be written.
        """
        trace, self._trace = self._trace, None
        if trace is None:
            return
        try:
            trace.write()
        except OSError as error:
            warnings.warn(
                f"telemetry: {trace.path} cannot be written ({error}); training continues",
                RuntimeWarning,
                stacklevel=5,
            )


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a file: one of ours, of Horovod's timeline, or of torch's profiler.

    Horovod's lacks its end where a rank was killed; what is there is read.

    Raises:
        ValueError: it is no trace.
        OSError: it cannot be read.
    """
    text = path.read_text(encoding="utf-8").strip()
    if text.startswith("[") and not text.endswith("]"):
        text = text[: text.rfind("}") + 1] + "]"
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no trace: {error}") from error
    if isinstance(found, dict) and "traceEvents" in found:
        # torch's profiler: the base is in nanoseconds
        base = round(found.get("baseTimeNanoseconds", 0) / 1e3)
        return [{"name": "clock", "ph": "M", "pid": 0, "args": {_START: base}}, *found["traceEvents"]]
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"{path} is no trace: it holds no array of events")
    return found


def merged(files: Sequence[tuple[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """The events of several files, by one clock.

    Args:
        files: a label for each file's processes ("" leaves their names as they are), and its events.

    Raises:
        ValueError: a file does not say when its clock started.
    """
    starts = [_start_of(label, events) for label, events in files]
    first = min(starts, default=0)
    together: list[dict[str, Any]] = []
    for number, (label, events) in enumerate(files):
        pids: dict[Any, int] = {}
        for event in events:
            if _clock_of(event) is not None:
                continue
            pid = pids.setdefault(event.get("pid"), number * _PIDS_PER_FILE + len(pids))
            moved = {**event, "pid": pid}
            if "ts" in event:
                moved["ts"] = event["ts"] + starts[number] - first
            if event.get("name") == "process_name" and label:
                moved["args"] = {"name": f"{label}: {event['args']['name']}"}
            together.append(moved)
    clock = {"name": "clock", "ph": "M", "pid": 0, "args": {_START: first}}
    return [clock, *together]


def _clock_of(event: dict[str, Any]) -> int | None:
    """The start that this event gives, if it does."""
    args = event.get("args")
    return int(args[_START]) if isinstance(args, dict) and _START in args else None


def _start_of(label: str, events: list[dict[str, Any]]) -> int:
    for event in events:
        start = _clock_of(event)
        if start is not None:
            return start
    raise ValueError(
        f"{label or 'the trace'} does not say when its clock started ({_START}): it is no trace of "
        "hvd_adaptive, of Horovod's timeline or of torch.profiler"
    )
