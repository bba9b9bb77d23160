"""Does a long run stay as it was: in memory, in agreement of its ranks, and in what it leaves behind?

4 ranks on hosts with slow links whose rates rise and fall (launch/netlab.sh), and a planner that
follows. Sampled every 5 seconds from /proc: memory, open files and threads of every rank.
Every 100 steps the ranks compare the bits of all their parameters.

    sudo -E python -m benchmarks.network.soak            # 20 minutes
    sudo -E python -m benchmarks.network.soak --minutes 60 --planner lgreco:period=50
    sudo -E python -m benchmarks.network.soak --quick    # seconds; no targets, no file
    python -m benchmarks.network.soak --check            # 1 if a stored target is missed

Ctrl-C ends the run and reports what there is; the file is written if that is enough to judge the
memory. Where others use the machine meanwhile, `--shared` leaves the files and interfaces that they
make out of the count of what was left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import command_line, lab
from benchmarks.report import report

SAMPLE_SECONDS = 5.0
BLOCK_SECONDS = 60.0
"""Samples are averaged over these before a line is drawn: neighbors are not independent."""

GROWTH_TARGET = 0.01
"""Of a rank's memory, an hour: more must not be told from none (two standard errors), ..."""
TOLD_TARGET = 0.05
"""... in a run that would have told so much."""
SHORTEST_MINUTES = 10.0
"""Of samples after the warm-up, for the target on memory."""
SWITCHES_A_MINUTE = 1.0
"""With fewer a run shows little."""


# --- what is left behind ------------------------------------------------------------------------------


def belongings() -> dict[str, set[str]]:
    """What a run may leave on this machine: names by kind."""
    links = subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout
    folders = {
        "namespaces": "/run/netns",
        "labs": "/run/hva_netlab",
        "hosts files": "/etc/netns",
        "shared memory": "/dev/shm",
        "temporary files": "/tmp",
    }
    found = {kind: _names(folder) for kind, folder in folders.items()}
    found["links"] = {line.split(":")[1].strip() for line in links.splitlines()}
    return found


def _names(folder: str) -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        return set(os.listdir(folder))
    return set()


def processes_of(token: str) -> list[int]:
    """Those that have inherited a token in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if token.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def left_behind(
    before: dict[str, set[str]], token: str, private: Path, shared: bool
) -> dict[str, list[str]]:
    """What is there now and was not before: the run's own, and, unless shared, all that is new."""
    deadline = time.monotonic() + 5
    while (running := processes_of(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = {
        "processes": [str(each) for each in running],
        "its files": sorted(_names(str(private / "tmp"))),
    }
    for kind, names in belongings().items():
        new = sorted(names - before[kind] - {private.name})
        left[kind] = [name for name in new if not shared or token in name]
    return {kind: names for kind, names in left.items() if names}


# --- samples ------------------------------------------------------------------------------------------


@dataclass
class Samples:
    """Of one process, over time."""

    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def take(self, process: int, now: float) -> None:
        """One sample; none if the process has ended."""
        folder = Path(f"/proc/{process}")
        with contextlib.suppress(OSError):
            resident = int((folder / "statm").read_text().split()[1])
            files, threads = (len(os.listdir(folder / kind)) for kind in ("fd", "task"))
            self.seconds.append(round(now, 1))
            self.megabytes.append(round(resident * os.sysconf("SC_PAGE_SIZE") / 1e6, 2))
            self.files.append(files)
            self.threads.append(threads)

    def after(self, start: float) -> Samples:
        """Without what comes before ``start``."""
        kept = [index for index, second in enumerate(self.seconds) if second >= start]
        columns = (self.seconds, self.megabytes, self.files, self.threads)
        return Samples(*([column[index] for index in kept] for column in columns))  # type: ignore[arg-type]


def trend(seconds: Sequence[float], values: Sequence[float], block: float) -> tuple[float, float]:
    """Slope per hour, and its standard error, of the least-squares line through means of blocks.

    Example:
        >>> [round(each, 6) for each in trend([0, 10, 20, 30, 40, 50], [1, 3, 2, 4, 3, 5], 20)]
        [180.0, 0.0]
    """
    number = ((np.asarray(seconds) - seconds[0]) // block).astype(int)
    groups = [number == each for each in range(number.max() + 1) if (number == each).any()]
    x = np.array([np.asarray(seconds)[group].mean() for group in groups]) / 3600
    y = np.array([np.asarray(values)[group].mean() for group in groups])
    if len(x) < 3:
        return math.nan, math.inf
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    rest = y - y.mean() - slope * centred
    return slope, math.sqrt(float(rest @ rest) / (len(x) - 2) / float(centred @ centred))


def rises(counts: Sequence[int]) -> bool:
    """Whether all of the last third is above all of the first."""
    third = max(1, len(counts) // 3)
    return min(counts[-third:]) > max(counts[:third])


def summary(samples: Samples, warm_up: float) -> dict[str, Any]:
    """One rank's figures after the warm-up."""
    kept = samples.after(warm_up)
    if len(kept.seconds) < 3:
        return {"minutes": 0.0}
    slope, error = trend(kept.seconds, kept.megabytes, BLOCK_SECONDS)
    return {
        "minutes": (kept.seconds[-1] - kept.seconds[0]) / 60,
        "mean MB": float(np.mean(kept.megabytes)),
        "first MB": kept.megabytes[0],
        "last MB": kept.megabytes[-1],
        "MB an hour": slope,
        "standard error": error,
        "open files": [kept.files[0], kept.files[-1], rises(kept.files)],
        "threads": [kept.threads[0], kept.threads[-1], rises(kept.threads)],
    }


def grows(row: dict[str, Any]) -> bool:
    """Whether a rank's memory misses the target."""
    slope, error, mean = row["MB an hour"], row["standard error"], row["mean MB"]
    if slope <= GROWTH_TARGET * mean:
        return False
    return bool(slope > 2 * error or 2 * error > TOLD_TARGET * mean)


# --- the run ------------------------------------------------------------------------------------------


@dataclass
class SoakRun:
    """What a run reported, and what was seen of it."""

    samples: dict[int, Samples] = field(default_factory=dict)
    """By process, in the order of ranks."""
    started: float = 0.0
    ended: bool = False
    """Whether the ranks have trained their last step: what they give back from then on is no trend."""
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    status: int | None = None
    interrupted: bool = False


def run(options: argparse.Namespace, token: str, private: Path) -> SoakRun:
    """Start the ranks, watch them until they end."""
    trace = f"sin2 --low {options.low} --high {options.high} --period {options.period} --noise 0.05"
    command = [str(lab.LAUNCH / "netlab.sh"), "--name", f"soak-{token}"]
    command += ["run", str(options.ranks), options.high, "--trace", trace, "--"]
    command += [*lab.module("workers.soak_rank"), "--seconds", str(60 * options.minutes)]
    command += ["--every", str(options.every), "--preset", options.preset, "--planner", options.planner]
    command += [
        "--compression",
        options.compression,
        "--threads",
        "1",
        "--logdir",
        str(private / "logs"),
    ]
    command += ["--steps", "1000000000", "--lr-warmup-steps", "100", "--lr-schedule", "constant"]
    (private / "tmp").mkdir()
    settings = {
        "HVA_SOAK": token,
        "OMP_NUM_THREADS": "1",
        **lab.RING,
        # Every step allocates and frees gradients as large as layers. Where such blocks come from the
        # heap, one more or fewer of them stays resident from minute to minute, and hides a leak.
        "MALLOC_MMAP_THRESHOLD_": "1048576",
        # so that ranks that are stopped have time to agree on it
        "OMPI_MCA_odls_base_sigkill_timeout": "10",
        "TMPDIR": str(private / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(private / "torch"),  # torch's own, which outlives every run
    }
    job = subprocess.Popen(
        command,
        cwd=lab.ROOT,
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that Ctrl-C reaches it once, from here
    )
    seen = SoakRun()
    lines = _lines(job)
    try:
        watch(seen, lines)
    except KeyboardInterrupt:
        seen.interrupted = True
        print("\nstopping", flush=True)
        job.send_signal(signal.SIGINT)
        watch(seen, lines)
    seen.status = job.wait()
    return seen


def _lines(job: subprocess.Popen[str]) -> queue.Queue[str | None]:
    """What the job prints, and None at its end."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert job.stdout is not None
        for line in job.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def watch(seen: SoakRun, lines: queue.Queue[str | None]) -> None:
    """Read and sample until the job ends; a line a minute says how it goes."""
    seen.started = seen.started or time.monotonic()
    shown = time.monotonic()
    for line in _ticking(lines):
        now = time.monotonic()
        if line is None:
            for process, samples in seen.samples.items() if not seen.ended else ():
                samples.take(process, now - seen.started)
        elif not line.startswith("{"):
            print(line, end="", flush=True)
        else:
            # What ranks and mpirun say at their end may follow on the same line.
            record, length = json.JSONDecoder().raw_decode(line)
            print(line[length:].strip("\n"), end="", flush=True)
            if "processes" in record:
                seen.samples = {process: Samples() for process in record["processes"]}
                seen.started = now
            elif "ended" in record:
                seen.ended = True
            else:
                seen.comparisons.append(record)
        if now - shown >= 60 and seen.samples:
            shown += 60
            print(_progress(seen, now - seen.started), flush=True)


def _ticking(lines: queue.Queue[str | None]) -> Iterator[str | None]:
    """The lines of a job, and None every few seconds."""
    due = time.monotonic() + SAMPLE_SECONDS
    while True:
        try:
            line = lines.get(timeout=max(0.0, due - time.monotonic()))
        except queue.Empty:
            due += SAMPLE_SECONDS
            yield None
            continue
        if line is None:
            return
        yield line


def _progress(seen: SoakRun, seconds: float) -> str:
    memory = ", ".join(f"{each.megabytes[-1]:.1f}" for each in seen.samples.values() if each.megabytes)
    last = seen.comparisons[-1] if seen.comparisons else {"step": 0, "switches": 0, "loss": math.nan}
    return (
        f"{seconds / 60:5.1f} min: step {last['step']}, loss {last['loss']:.3f}, "
        f"{last['switches']} switches, {memory} MB"
    )


# --- the report ---------------------------------------------------------------------------------------


def figures_of(
    seen: SoakRun, options: argparse.Namespace, left: dict[str, list[str]]
) -> dict[str, Any]:
    """Everything that a run showed."""
    warm_up = 60 * min(4.0, 0.2 * options.minutes)
    samples = list(seen.samples.values())
    settings = (
        "ranks",
        "preset",
        "compression",
        "planner",
        "low",
        "high",
        "period",
        "minutes",
        "every",
    )
    last = seen.comparisons[-1] if seen.comparisons else {}
    differing = [
        each["step"]
        for each in seen.comparisons
        if len(set(each["parameters"])) > 1 or len(set(each["plans"])) > 1
    ]
    return {
        "settings": {name: getattr(options, name) for name in settings},
        "warm-up seconds": warm_up,
        "ranks": [summary(each, warm_up) for each in samples],
        "megabytes a minute": [each.megabytes[:: int(60 / SAMPLE_SECONDS)] for each in samples],
        "steps": last.get("step", 0),
        "seconds": last.get("seconds", 0.0),
        "comparisons": len(seen.comparisons),
        "differing at": differing,
        "switches": last.get("switches", 0),
        "loss": [each["loss"] for each in seen.comparisons],
        "payload ratio": last.get("payload_ratio", 0.0),
        "left behind": left,
        "status": seen.status,
        "interrupted": seen.interrupted,
    }


def show(figures: dict[str, Any]) -> None:
    """Print the table."""
    rows: list[list[object]] = [
        ["rank", "minutes", "mean MB", "MB an hour", "standard error", "open files", "threads"]
    ]
    for rank, row in enumerate(figures["ranks"]):
        if not row["minutes"]:
            rows.append([str(rank), *["-"] * 6])
            continue
        numbers = [f"{row[key]:.2f}" for key in ("minutes", "mean MB", "MB an hour", "standard error")]
        counts = [f"{row[key][0]} to {row[key][1]}" for key in ("open files", "threads")]
        rows.append([str(rank), *numbers, *counts])
    print("\n" + report.table(rows))
    equal = figures["comparisons"] - len(figures["differing at"])
    print(
        f"\n{figures['steps']} steps in {figures['seconds'] / 60:.1f} minutes; parameters and plans "
        f"equal on all ranks in {equal} of {figures['comparisons']} comparisons; "
        f"{figures['switches']} switches; left behind: {figures['left behind'] or 'nothing'}"
    )


def missed(figures: dict[str, Any]) -> list[str]:
    """The targets that were not met."""
    found = []
    for rank, row in enumerate(figures["ranks"]):
        if row["minutes"] < SHORTEST_MINUTES:
            found.append(f"rank {rank}: {row['minutes']:.1f} minutes are too few to judge its memory")
        elif grows(row):
            found.append(
                f"rank {rank}: memory grows by {row['MB an hour']:.1f} MB per hour "
                f"(standard error {row['standard error']:.1f}), target {GROWTH_TARGET:.0%} of "
                f"{row['mean MB']:.0f} MB"
            )
        found += [
            f"rank {rank}: {key} rise" for key in ("open files", "threads") if row.get(key, [0])[-1]
        ]
    if not figures["comparisons"] or figures["differing at"]:
        found.append(
            f"parameters or plans differ at steps {figures['differing at'] or '(never compared)'}"
        )
    if not all(math.isfinite(loss) for loss in figures["loss"]):
        found.append("the loss is not finite")
    if figures["switches"] < SWITCHES_A_MINUTE * figures["seconds"] / 60:
        found.append(f"only {figures['switches']} switches in {figures['seconds'] / 60:.0f} minutes")
    found += [
        f"left behind: {kind}: {', '.join(names)}" for kind, names in figures["left behind"].items()
    ]
    if figures["status"]:
        found.append(f"the job ended with status {figures['status']}")
    return found


def main() -> int:
    """Run, print, write; with --check only compare what was written with the targets."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=20.0)
    add("--ranks", type=int, default=4)
    add("--preset", default="lstm-sotu", help="of launch/train.py (%(default)s)")
    add("--compression", default="topk:density=0.01", help="(%(default)s)")
    add("--planner", default="kimad+:seconds=0.6,period=20", help="(%(default)s)")
    add("--low", default="20mbit", help="least rate of the links (%(default)s)")
    add("--high", default="200mbit", help="highest (%(default)s)")
    add("--period", type=float, default=60.0, help="seconds from the least to the least (%(default)s)")
    add("--every", type=int, default=100, help="steps between two comparisons (%(default)s)")
    command_line.quick_or_check(parser, "seconds, on a small model; no targets, no file")
    add("--shared", action="store_true", help="others work on this machine meanwhile")
    add("--out", type=Path, default=report.RESULTS, help="folder of the results")
    options = parser.parse_args()
    if options.check:
        return command_line.check("soak", missed, options.out)
    if options.quick:
        quick = {"minutes": 0.15, "ranks": 2, "preset": "mlp-digits", "every": 20, "period": 2.0}
        vars(options).update(quick, planner="lgreco:period=20")
    token = secrets.token_hex(4)
    before = belongings()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        private = Path(folder)
        seen = run(options, token, private)
        left = left_behind(before, token, private, options.shared)
    figures = figures_of(seen, options, left)
    show(figures)
    if options.quick:
        return int(bool(seen.status or left or figures["differing at"] or not figures["comparisons"]))
    bad = missed(figures)
    command_line.tell(bad)
    shortest = min((row["minutes"] for row in figures["ranks"]), default=0.0)
    if seen.interrupted and shortest < SHORTEST_MINUTES:
        print("stopped early: no file has changed")
    else:
        print(f"written: {report.write('soak', {**figures, 'missed': bad}, options.out)}")
    return 130 if seen.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
