"""A rank that dies, freezes, raises, stalls or leaves ends all the others, soon, and is named."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.harness.eager import PYTHONPATH
from tests.harness.rank_launcher import ENVIRONMENT, ROOT, lives, warm_kernels
from tests.harness.side_by_side import selected, side_by_side

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
    "stall": r"Missing ranks:\s+(\S*<std...>:)?{rank}!?: \[",
    "leave 0": r"rank \d ends because rank {rank} ended by itself, before the others",
    # mpirun may end the others before they say so, but then says it.
    "leave 3": r"rank \d ends because rank {rank} ended by itself, before the others"
    r"|Process name: \[\[\d+,1\],{rank}\]\s+Exit code:\s+3",
}
# Those that wait come between others: while one waits for its time to pass, another computes.
CASES = [
    ("horovodrun", "stall"),
    ("mpirun", "freeze"),
    ("horovodrun", "kill"),
    ("horovodrun", "raise"),
    ("mpirun", "leave 0"),
    ("mpirun", "stall"),
    ("gloo", "freeze"),
    ("horovodrun", "leave 0"),
    ("mpirun", "kill"),
    ("horovodrun", "freeze"),
    ("horovodrun", "leave 3"),
    ("mpirun", "leave 3"),
    ("mpirun", "raise"),
]
SIDE_BY_SIDE = 4
"""Launches at any time."""


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
        print(*arguments, file=self._output, flush=True)  # chance decides on some
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
        now = time.time()
        self._output.seek(0)
        text = self._output.read()
        self._output.close()
        failed = self._folder / "failed"
        assert failed.exists(), f"ended before the failure:\n{text}"
        seconds = now - float(failed.read_text())
        shutil.rmtree(self._folder)
        return Outcome(text, status, processes, seconds)


@pytest.fixture(scope="module")
def warm() -> None:
    warm_kernels()


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ,
        **ENVIRONMENT,
        "PATH": path,
        "PYTHONPATH": PYTHONPATH,
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


def failing(launcher: str, how: str) -> Launch:
    return Launch(launcher, how, failing_rank(launcher))


def small(case: str) -> Launch:
    """Two ranks, with the planners that talk most; some raise at a step that chance decides."""
    step = random.Random(time.time()).randrange(5, 60)
    arguments: dict[str, tuple[object, ...]] = {
        "lgreco": ("raise", 1, "lgreco:period=4", step),
        "kimad": ("raise", 0, "kimad:period=1,seconds=0.01", step),
        "channel": ("wait in a channel", 1),
        "planner": ("planner", 0, "lgreco:period=4"),
        "all": ("all raise", 0),
        "argument": ("wrong argument", 0),
    }
    how, *more = arguments[case]
    return Launch("mpirun", str(how), *more, ranks=2)


Outcomes: TypeAlias = "Mapping[tuple[str, ...], Future[Outcome]]"


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, warm: None) -> Iterator[Outcomes]:
    def ended(key: tuple[str, ...]) -> Outcome:
        return (failing(*key) if len(key) == 2 else small(*key)).end()

    keys = selected(request, "launcher", "how") + selected(request, "case")
    with side_by_side(ended, keys, SIDE_BY_SIDE) as found:
        yield found


@pytest.mark.parametrize(("launcher", "how"), CASES)
def test_a_rank_that_fails_ends_all_others_and_is_named(
    outcomes: Outcomes, launcher: str, how: str
) -> None:
    if shutil.which(LAUNCHERS[launcher][0], path=environment()["PATH"]) is None:
        pytest.skip(f"{launcher} is not installed")
    outcome = outcomes[launcher, how].result()
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


@pytest.mark.parametrize("case", ["lgreco", "kimad", "channel", "planner"])
def test_no_rank_crashes_in_mpi_when_another_fails_beside_a_planner(
    outcomes: Outcomes, case: str
) -> None:
    outcome = outcomes[case,].result()
    assert outcome.status == 1, outcome.text
    assert "signal" not in outcome.text.lower(), outcome.text
    assert "MPI_FINALIZE" not in outcome.text, outcome.text
    assert outcome.seconds < WITHIN_SECONDS, outcome.text
    assert outcome.tracebacks == 1 + (case == "planner"), outcome.text  # with the planner's own


@pytest.mark.parametrize("case", ["planner"])
def test_a_planner_that_fails_ends_all_ranks_with_its_reason(outcomes: Outcomes, case: str) -> None:
    text = outcomes[case,].result().text
    planning = "rank 0 of the process set"
    reason = f"RuntimeError: the planner failed on {planning}: ZeroDivisionError: nothing to divide"
    assert f"hvd_adaptive: rank 0 failed, and the others end with it: {reason}" in text
    assert f"hvd_adaptive: rank 1 failed as well as {planning}, which says more: {reason}" in text
    assert 'raise ZeroDivisionError("nothing to divide")' in text


@pytest.mark.parametrize("case", ["all", "argument"])
def test_of_ranks_that_fail_alike_one_prints_a_traceback_and_the_others_a_line(
    outcomes: Outcomes, case: str
) -> None:
    text = outcomes[case,].result().text
    assert text.count("Traceback (most recent call last)") == 1, text
    assert len(re.findall(r"hvd_adaptive: rank \d failed, and the others end with it: ", text)) == 1, (
        text
    )
    assert len(re.findall(r"hvd_adaptive: rank \d failed as well as rank \d, which", text)) == 1, text
    if case == "argument":
        assert "hvd_adaptive: rank 0 failed, and the others" in text
