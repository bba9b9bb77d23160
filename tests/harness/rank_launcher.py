"""Starts pytest in N ranks and merges what they report: one verdict for each test function.

A test has passed when every rank ran it and it passed on every rank. What the ranks do among
themselves is in tests/distributed/conftest.py.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.lab import horovodrun

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTED = ROOT / "tests" / "distributed"

# A launch that a hang cut short is continued with the tests it did not reach, so many times.
_MAX_LAUNCHES = 8
# A busy machine takes this long to start its ranks and to import torch in all of them. How long all the
# tests take is another matter: each has its own limit.
_SILENT_SECONDS = 300.0
MOST_SECONDS = 3600.0
"""That :func:`run` may take: whoever calls it must not be ended before, or all is launched again."""

ENVIRONMENT = {
    # More ranks than cores: a rank that waits must give its core away.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMP_NUM_THREADS": "1",
    # Containers run as root.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # Recursive doubling adds an element's summands in the same order wherever it lies in the
    # buffer. A ring starts each chunk at another rank: the order, and with it the rounding, depends
    # on the position, and two implementations that pack differently could not agree to the bit.
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "3",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    "HOROVOD_CYCLE_TIME": "0.5",
}

# They would make the ranks believe that they are part of another launch.
_FOREIGN_PREFIXES = ("OMPI_COMM_WORLD", "PMIX_", "HOROVOD_RANK", "HOROVOD_SIZE", "PYTEST_")


def without_launch() -> dict[str, str]:
    """This process's environment, without what Horovod or MPI have left there once they were begun."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_PREFIXES)}


@dataclass(frozen=True)
class Function:
    """A test function, found without importing its file."""

    file: Path
    name: str
    sizes: tuple[int, ...] | None
    smoke: bool

    @property
    def id(self) -> str:
        return f"{self.file.relative_to(ROOT).as_posix()}::{self.name}"

    @property
    def short_id(self) -> str:
        return f"{self.file.name}::{self.name}"

    def runs_at(self, size: int) -> bool:
        return self.sizes is None or size in self.sizes


def functions_in(file: Path) -> list[Function]:
    """The test functions of a file, read from its syntax: importing it takes seconds.

    Raises:
        ValueError: the file has test classes, whose methods this would miss.
    """
    found = []
    for node in ast.parse(file.read_text(), str(file)).body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            raise ValueError(f"{file}:{node.lineno}: write test functions, not classes")
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            markers = dict(_marker(decorator) for decorator in node.decorator_list)
            sizes = markers.get("pytest.mark.ranks")
            found.append(Function(file, node.name, sizes, "pytest.mark.smoke" in markers))
    return found


def _marker(decorator: ast.expr) -> tuple[str, tuple[int, ...]]:
    if isinstance(decorator, ast.Call):
        sizes = ()
        if ast.unparse(decorator.func) == "pytest.mark.ranks":
            sizes = tuple(ast.literal_eval(argument) for argument in decorator.args)
        return ast.unparse(decorator.func), sizes
    return ast.unparse(decorator), ()


@dataclass
class Verdict:
    """How one test function went over all ranks and parameters."""

    problems: list[str] = field(default_factory=list)
    skipped: str | None = None
    seconds: float = 0.0


@dataclass
class Launch:
    """One `horovodrun`: what each rank wrote, and what the launcher printed."""

    size: int
    returncode: int | None
    output: str
    seconds: float
    events: list[list[dict[str, Any]]]
    stacks: list[str]

    def reached(self, function: Function) -> bool:
        """Whether any rank came to this function."""
        return any(
            _belongs(event.get("nodeid", ""), function) for rank in self.events for event in rank
        )

    def trouble(self) -> str | None:
        """Why this launch did not come to its end, or None when it did."""
        for rank in self.events:
            for event in rank:
                if event["event"] == "diverged":
                    return f"the ranks collected different tests:\n{event['text']}"
        unfinished = [
            rank
            for rank, events in enumerate(self.events)
            if not events or events[-1]["event"] != "finished"
        ]
        if unfinished:
            ending = "was ended" if self.returncode is None else f"ended with {self.returncode}"
            tail = "\n".join(self.output.splitlines()[-40:])
            return (
                f"the launch {ending} after {self.seconds:.0f} s and rank(s) {unfinished} "
                f"did not finish; the end of its output:\n{tail}"
            )
        return None

    def verdict(self, function: Function) -> Verdict:
        verdict = Verdict()
        ranks = [_by_test(events, function) for events in self.events]
        ids = list(dict.fromkeys(nodeid for rank in ranks for nodeid in rank))
        if not ids:
            verdict.problems.append(f"no rank ran it; {self.trouble() or 'it was not collected'}")
        skips: list[str | None] = []
        for nodeid in ids:
            label = nodeid.partition("::")[2]
            outcomes = {}
            for rank, tests in enumerate(ranks):
                outcomes[rank], text = self._outcome(rank, tests.get(nodeid))
                if outcomes[rank] == "skipped":
                    skips.append(text)
                elif outcomes[rank] != "passed":
                    verdict.problems.append(f"{label} on rank {rank} {outcomes[rank]}\n{text}")
                for event in tests.get(nodeid, []):
                    verdict.seconds = max(verdict.seconds, event.get("seconds", 0.0))
            if len(set(outcomes.values())) > 1 and "skipped" in outcomes.values():
                who = [rank for rank, outcome in outcomes.items() if outcome == "skipped"]
                verdict.problems.append(f"{label} was skipped on rank(s) {who} only: {skips[-1]}")
        if skips and len(skips) == len(ids) * self.size:
            verdict.skipped = skips[0] or "skipped"
        return verdict

    def _outcome(self, rank: int, events: list[dict[str, Any]] | None) -> tuple[str, str]:
        if events is None:
            return "never ran", self.trouble() or ""
        reports = [event for event in events if event["event"] == "report"]
        for report in reports:
            if report["outcome"] == "failed":
                where = "" if report["when"] == "call" else f" in {report['when']}"
                return f"failed{where}:", report["text"]
        if events[-1]["event"] != "agreed":
            stack = self.stacks[rank] or f"it left no stack; {self.trouble()}"
            return "did not finish:", stack
        for report in reports:
            if report["outcome"] == "skipped":
                return "skipped", report["text"]
        return "passed", ""


def _belongs(nodeid: str, function: Function) -> bool:
    return nodeid == function.id or nodeid.startswith(function.id + "[")


def _by_test(events: list[dict[str, Any]], function: Function) -> dict[str, list[dict[str, Any]]]:
    tests: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if _belongs(event.get("nodeid", ""), function):
            tests.setdefault(event["nodeid"], []).append(event)
    return tests


def launch(size: int, functions: Sequence[Function], folder: Path, timeout: float = 120.0) -> Launch:
    """Runs the functions in `size` ranks, once.

    Args:
        size: number of ranks.
        functions: what to run.
        folder: empty folder for the ranks' reports.
        timeout: seconds for one test on one rank.
    """
    (folder / "selected").write_text("\n".join(function.id for function in functions))
    files = dict.fromkeys(str(function.file.relative_to(ROOT)) for function in functions)
    command = [*horovodrun(size), sys.executable, "-m", "pytest", "-q"]
    # The ranks would write one cache file together; what they do not use takes seconds to import.
    for plugin in ("cacheprovider", "hypothesispytest", "xdist"):
        command += ["-p", f"no:{plugin}"]
    command += ["--tb=long", *files]
    environment = without_launch() | ENVIRONMENT
    environment["HVD_ADAPTIVE_TEST_REPORTS"] = str(folder)
    environment["HVD_ADAPTIVE_TEST_TIMEOUT"] = str(timeout)
    start = time.monotonic()
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        returncode = _wait(process, folder)
        output.seek(0)
        text = output.read()
    events, stacks = [], []
    for rank in range(size):
        log, stack = folder / f"rank{rank}.jsonl", folder / f"rank{rank}.stacks"
        lines = log.read_text().splitlines() if log.exists() else []
        events.append([json.loads(line) for line in lines])
        stacks.append(_without_pytest(stack.read_text()) if stack.exists() else "")
    return Launch(size, returncode, text, time.monotonic() - start, events, stacks)


def lives(process: int) -> bool:
    """Whether it runs; one that ended may wait for its parent to notice."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def warm_kernels() -> None:
    """Compile the kernels once, into Numba's cache, instead of in all ranks at the same time.

    Only saves time: where it fails the tests that need kernels fail too, and say it better.
    """
    command = [sys.executable, "-m", "hvd_adaptive.commands.precompile"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if shown.returncode:
        warnings.warn(f"the kernels could not be warmed:\n{shown.stderr}", stacklevel=2)


def _wait(process: subprocess.Popen[bytes], folder: Path) -> int | None:
    """The exit code, or None when no rank wrote for too long and all of them were ended."""
    written, since = 0, time.monotonic()
    try:
        while time.monotonic() < since + _SILENT_SECONDS:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(1)
            before, written = written, sum(file.stat().st_size for file in folder.iterdir())
            if written > before:
                since = time.monotonic()
        _end(process)
        return None
    except BaseException:  # Ctrl-C, or a test's own time limit: nothing must run on beside what follows
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launch with all its children."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _without_pytest(stacks: str) -> str:
    """Drops the frames below the test, which are pytest's own."""
    kept, below = [], False
    for line in stacks.splitlines():
        if not line.startswith("  "):
            below = False
        elif "/_pytest/" in line or "/pluggy/" in line:
            below = True
        if not below:
            kept.append(line)
    return "\n".join(kept)


def run(
    size: int, functions: Sequence[Function], folder: Path, timeout: float = 120.0
) -> tuple[dict[str, Verdict], list[Launch]]:
    """A verdict for each function's id. A hang costs the test that hangs, not those after it."""
    verdicts: dict[str, Verdict] = {}
    launches: list[Launch] = []
    left = list(functions)
    while left:
        place = folder / f"launch{len(launches)}"
        place.mkdir()
        launches.append(launch(size, left, place, timeout))
        reached = [function for function in left if launches[-1].reached(function)]
        if not reached or len(launches) == _MAX_LAUNCHES:
            reached = left
        for function in reached:
            verdicts[function.id] = launches[-1].verdict(function)
        left = [function for function in left if function not in reached]
    return verdicts, launches
