"""Bandwidth traces for a lab's links: read or made, and replayed on time."""

from __future__ import annotations

import argparse
import contextlib
import csv
import fcntl
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import count
from typing import TextIO

from .base import SLOWEST, Lab, LabError, UsageError, find, load, parse_rate, shape, signals_held
from .jobs import Interrupted


@dataclass(frozen=True)
class Change:
    """From so many seconds after the start, the rate of a host's link (None: of all links)."""

    seconds: float
    rate: int
    host: str | None


@dataclass(frozen=True)
class Trace:
    """Changes by rising time, and when they end."""

    changes: Callable[[], Iterator[Change]]
    hosts: frozenset[str]
    seconds: float
    log: str | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # argparse: never returns
        raise UsageError(message, "See netlab.sh --help.")


def parse_trace(words: Sequence[str]) -> Trace:
    """The arguments of netlab.sh trace.

    Raises:
        UsageError: they are wrong, or the file is.
    """
    parser = _Parser("netlab.sh trace", add_help=False, allow_abbrev=False)
    parser.add_argument("what", metavar="FILE|sin2")
    for name in ("low", "high", "host", "log"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--period", type=float, default=20.0)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--loop", action="store_true")
    asked = parser.parse_args(words)
    if not asked.seconds > 0:
        raise UsageError("--seconds must be positive")
    hosts = frozenset([asked.host] if asked.host else [])
    if asked.what == "sin2":
        return Trace(sin2(asked), hosts, asked.seconds, asked.log)
    rows = read_rows(asked.what, asked.host)
    hosts |= {row.host for row in rows if row.host is not None}
    # The last row lasts as long as the one before; alone, until the trace is stopped.
    length = 2 * rows[-1].seconds - rows[-2].seconds if len(rows) > 1 else math.inf
    if not asked.loop:
        return Trace(lambda: iter(rows), hosts, min(asked.seconds, length), asked.log)
    if not 0 < length < math.inf:
        raise UsageError(
            f"{asked.what} cannot be looped", "It takes two rows or more, with different seconds."
        )
    return Trace(lambda: looped(rows, length), hosts, asked.seconds, asked.log)


def sin2(asked: argparse.Namespace) -> Callable[[], Iterator[Change]]:
    """The pattern on which Kimad was tried: a squared sine between two rates, with noise."""
    if asked.low is None or asked.high is None:
        raise UsageError("sin2 needs --low RATE and --high RATE")
    low, high = parse_rate(asked.low), parse_rate(asked.high)
    if low > high:
        raise UsageError(f"--low {asked.low} is above --high {asked.high}")
    if not asked.period > 0 or not asked.every >= 0.05 or not 0 <= asked.noise <= 1:
        raise UsageError("--period must be positive, --every at least 0.05, --noise between 0 and 1")

    def changes() -> Iterator[Change]:
        noise = random.Random(asked.seed)
        for step in count():
            seconds = step * asked.every
            rate = low + (high - low) * math.sin(math.pi * seconds / asked.period) ** 2
            rate *= 1 + asked.noise * noise.gauss(0, 1)
            # A normal variate has no bounds, and a link that stands still helps nobody.
            yield Change(seconds, max(round(rate), low // 10, SLOWEST), asked.host)

    return changes


def read_rows(file: str, host: str | None) -> list[Change]:
    """A CSV file's rows; those that name no host are for this one."""
    try:
        with open(file, newline="") as lines:
            table = [(number, row) for number, row in enumerate(csv.reader(lines), start=1) if row]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the trace {file}: {error}") from None
    if table and table[0][1][0].strip().lower() == "seconds":
        del table[0]
    if not table:
        raise UsageError(
            f"{file} has no rows", "Each is seconds,rate or seconds,rate,host: 2.5,100mbit"
        )
    rows: list[Change] = []
    for number, row in table:
        try:
            seconds, rate = float(row[0]), parse_rate(row[1])
        except (IndexError, ValueError, UsageError):
            raise UsageError(
                f"{file}, line {number}: '{','.join(row)}' is not seconds,rate[,host]"
            ) from None
        if not (rows[-1].seconds if rows else 0.0) <= seconds < math.inf:
            raise UsageError(f"{file}, line {number}: the seconds must rise from 0")
        rows.append(Change(seconds, rate, (row[2].strip() if len(row) > 2 else "") or host))
    return rows


def looped(rows: Sequence[Change], length: float) -> Iterator[Change]:
    for turn in count():
        for row in rows:
            yield Change(turn * length + row.seconds, row.rate, row.host)


# ---------------------------------------------------------------- replaying


def replay(name: str, trace: Trace) -> None:
    """Sets each rate at its time until the end or a signal, and then those that were there before."""
    lab = find(name)
    lab.require_hosts(trace.hosts)
    with sole_trace(lab), open_log(trace.log) as log:
        log.write("unix_time,seconds,lag,host,bit_per_second\n")
        try:
            follow(lab, trace, log)
        except Interrupted:
            pass  # the usual end of a trace that has none of its own
        finally:
            with signals_held():
                restore(name)


def follow(lab: Lab, trace: Trace, log: TextIO) -> None:
    started = time.monotonic()
    changes = trace.changes()
    upcoming = next(changes, None)
    while upcoming is not None and upcoming.seconds < trace.seconds:
        # All times count from the start: delays do not add up.
        time.sleep(max(0.0, started + upcoming.seconds - time.monotonic()))
        now = time.monotonic() - started
        due: dict[str, Change] = {}
        # After a stall these may be several, of which only the last still matters.
        while upcoming is not None and upcoming.seconds <= min(now, trace.seconds):
            due.update(dict.fromkeys([upcoming.host] if upcoming.host else lab.rates, upcoming))
            upcoming = next(changes, None)
        with signals_held():
            shape(lab, {host: change.rate for host, change in due.items()})
        wall, applied = time.time(), time.monotonic() - started
        for host, change in due.items():
            lag = applied - change.seconds
            log.write(f"{wall:.3f},{change.seconds:.3f},{lag:.3f},{host},{change.rate}\n")
    if trace.seconds == math.inf:
        signal.pause()
    time.sleep(max(0.0, started + trace.seconds - time.monotonic()))


def restore(name: str) -> None:
    # Read again: rate may have changed it meanwhile, or down removed it.
    lab = load(name)
    if lab is not None and lab.complete:
        with contextlib.suppress(LabError):
            shape(lab, lab.rates)


@contextlib.contextmanager
def sole_trace(lab: Lab) -> Iterator[None]:
    """The file says which process it is, and its lock, that this still lives."""
    with (lab.folder / "trace").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LabError(
                f"a trace is replayed on the lab '{lab.name}' already",
                "Stop it first. One trace can change several hosts: see the host column of a FILE.",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextlib.contextmanager
def open_log(path: str | None) -> Iterator[TextIO]:
    """Every line is written at once: whoever measures reads along."""
    if path is None:
        assert isinstance(sys.stdout, TextIOWrapper)
        sys.stdout.reconfigure(line_buffering=True)
        yield sys.stdout
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "w", buffering=1))
        except OSError as error:
            raise UsageError(f"cannot write the log {path}: {error.strerror}") from None
        yield file
