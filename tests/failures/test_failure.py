"""A rank that dies, freezes, raises, stalls or leaves ends all the others, soon, and is named."""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.harness.rank_launcher import ENVIRONMENT, ROOT, lives, warm_kernels

pytest.importorskip("horovod.torch", reason="Horovod is not installed")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RANKS = 3
STALL_SECONDS = 10
WITHIN_SECONDS = 20
"""Beyond the time after which a silent or stalled rank counts as lost: what README promises."""

LAUNCHERS = {
    "horovodrun": ["horovodrun", "-np"],
    "mpirun": ["mpirun", "--oversubscribe", "--bind-to", "none", "-np"],
    "gloo": ["horovodrun", "--gloo", "-np"],
}
SAID = {
    "kill": r"rank {rank} .*exited on signal 9",
    "freeze": r"hvd_adaptive: rank {rank} has not answered for \d+ s \(process {process} on \S+\): ",
    "raise": r"hvd_adaptive: rank {rank} failed, and the others end with it: ValueError: bad data",
    "stall": r"Missing ranks:\s+(\S*<std...>:)?{rank}: \[",
    "leave 0": r"rank \d ends because rank {rank} ended by itself, before the others",
    "leave 3": r"rank \d ends because rank {rank} ended by itself, before the others",
}
# Launched side by side: while one waits for its time to pass, another computes.
TOGETHER = [
    (("horovodrun", "kill"), ("horovodrun", "raise"), ("mpirun", "leave 0")),
    (("horovodrun", "leave 0"), ("horovodrun", "leave 3"), ("mpirun", "leave 3")),
    (("horovodrun", "stall"), ("horovodrun", "freeze"), ("gloo", "freeze")),
    (("mpirun", "stall"), ("mpirun", "freeze"), ("mpirun", "kill"), ("mpirun", "raise")),
]
CASES = [case for cases in TOGETHER for case in cases]

Case = TypeVar("Case")


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    text: str
    status: int
    processes: list[int]
    seconds: float
    """From the failure until no rank was left."""

    @property
    def tracebacks(self) -> int:
        return self.text.count("Traceback (most recent call last)")


class Launch:
    """One that was started, with ranks that fail as tests/failures/failing_rank.py says."""

    def __init__(self, launcher: str, how: str, *more: object, ranks: int = RANKS) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hva-failure-"))
        self._ranks = ranks
        self._output = (self._folder / "output").open("w+")
        script = str(ROOT / "tests/failures/failing_rank.py")
        arguments = [how, *(str(each) for each in more)]
        arguments.insert(2, str(self._folder))
        self._job = subprocess.Popen(
            [*LAUNCHERS[launcher], str(ranks), sys.executable, script, *arguments],
            env=environment(), stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def end(self) -> Outcome:
        """Waits until no rank is left."""
        status = self._job.wait(300)
        processes = [int((self._folder / f"rank-{rank}").read_text()) for rank in range(self._ranks)]
        last = time.time() + 60
        while any(map(lives, processes)) and time.time() < last:
            time.sleep(0.05)
        seconds = time.time() - float((self._folder / "failed").read_text())
        self._output.seek(0)
        text = self._output.read()
        self._output.close()
        shutil.rmtree(self._folder)
        return Outcome(text, status, processes, seconds)


def ended(launches: dict[Case, Launch]) -> dict[Case, Outcome]:
    """How each of them ended, all watched at once."""
    with ThreadPoolExecutor(len(launches)) as pool:
        return dict(zip(launches, pool.map(Launch.end, launches.values()), strict=True))


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_kernels()


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ,
        **ENVIRONMENT,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(STALL_SECONDS // 2),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_SECONDS),
        # With it, Horovod waits for a frozen rank while it holds a lock that every rank's main thread
        # wants, which then waits with Python's own lock: a healthy rank looks frozen, too.
        "HOROVOD_DYNAMIC_PROCESS_SETS": "0",
    }


def failing_rank(launcher: str) -> int:
    """Rank 0 watches the others; its own failure must be seen, too."""
    return 0 if launcher == "mpirun" else 1


@functools.cache
def outcomes(cases: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], Outcome]:
    launches = {
        (launcher, how): Launch(launcher, how, failing_rank(launcher)) for launcher, how in cases
    }
    return ended(launches)


@pytest.mark.parametrize(("launcher", "how"), CASES)
def test_a_rank_that_fails_ends_all_others_and_is_named(launcher: str, how: str) -> None:
    if shutil.which(LAUNCHERS[launcher][0], path=environment()["PATH"]) is None:
        pytest.skip(f"{launcher} is not installed")
    [cases] = [each for each in TOGETHER if (launcher, how) in each]
    outcome = outcomes(cases)[launcher, how]
    text, rank = outcome.text, failing_rank(launcher)
    assert outcome.status != 0, text
    assert not any(map(lives, outcome.processes)), text
    allowed = {"stall": STALL_SECONDS + STALL_SECONDS // 2, "freeze": STALL_SECONDS}.get(how, 0)
    assert outcome.seconds < WITHIN_SECONDS + allowed, text
    said = SAID[how].format(rank=rank, process=outcome.processes[rank])
    assert re.search(said, text, re.MULTILINE), text
    own = text.replace("Traceback", "", launcher == "gloo")  # which ends with one of its own
    assert own.count("Traceback (most recent call last)") == (how == "raise"), text
    if how == "freeze":
        assert outcome.seconds > STALL_SECONDS - 1, text
    if how == "raise":
        assert f"ends because rank {rank} failed: ValueError: bad data" in text


@functools.cache
def small_outcomes() -> dict[str, Outcome]:
    """Two ranks each, with the planners that talk most."""
    chance = random.Random(time.time())
    first, second = chance.randrange(5, 60), chance.randrange(5, 60)
    print(f"they raise at steps {first} and {second}")
    launches = {
        "lgreco": Launch("mpirun", "raise", 1, "lgreco:period=4", first, ranks=2),
        "kimad": Launch("mpirun", "raise", 0, "kimad:period=1,seconds=0.01", second, ranks=2),
        "channel": Launch("mpirun", "wait in a channel", 1, ranks=2),
        "planner": Launch("mpirun", "planner", 0, "lgreco:period=4", ranks=2),
        "all": Launch("mpirun", "all raise", 0, ranks=2),
        "argument": Launch("mpirun", "wrong argument", 0, ranks=2),
    }
    return ended(launches)


@pytest.mark.parametrize("case", ["lgreco", "kimad", "channel", "planner"])
def test_no_rank_crashes_in_mpi_when_another_fails_beside_a_planner(case: str) -> None:
    outcome = small_outcomes()[case]
    assert outcome.status == 1, outcome.text
    assert "signal" not in outcome.text.lower(), outcome.text
    assert "MPI_FINALIZE" not in outcome.text, outcome.text
    assert outcome.seconds < WITHIN_SECONDS, outcome.text
    assert outcome.tracebacks == 1 + (case == "planner"), outcome.text  # with the planner's own


def test_a_planner_that_fails_ends_all_ranks_with_its_reason() -> None:
    text = small_outcomes()["planner"].text
    planning = "rank 0 of the process set"
    reason = f"RuntimeError: the planner failed on {planning}: ZeroDivisionError: nothing to divide"
    assert f"hvd_adaptive: rank 0 failed, and the others end with it: {reason}" in text
    assert f"hvd_adaptive: rank 1 failed as well as {planning}, which says more: {reason}" in text
    assert 'raise ZeroDivisionError("nothing to divide")' in text


@pytest.mark.parametrize("case", ["all", "argument"])
def test_of_ranks_that_fail_alike_one_prints_a_traceback_and_the_others_a_line(case: str) -> None:
    text = small_outcomes()[case].text
    assert text.count("Traceback (most recent call last)") == 1, text
    assert len(re.findall(r"hvd_adaptive: rank \d failed, and the others end with it: ", text)) == 1, (
        text
    )
    assert len(re.findall(r"hvd_adaptive: rank \d failed as well as rank \d, which", text)) == 1, text
    if case == "argument":
        assert "hvd_adaptive: rank 0 failed, and the others" in text
