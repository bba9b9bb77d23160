"""Makes one pytest session out of many ranks.

The files in this folder run inside the ranks, many tests to one launch:

    horovodrun -np 4 python -m pytest tests/distributed

Without a launcher they run at size 1. `tests/test_distributed.py` starts the launches and merges
what the ranks report. Three things keep the ranks together:

* before the first test they compare what they collected, and stop if it differs;
* after each test they wait for each other and learn whether it failed anywhere; if it did, Horovod
  is restarted on all ranks, so that an operation left behind cannot disturb the next test;
* a test that takes longer than its limit ends the launch, with the stack of every rank in its log:
  a rank that waits in a collective which another never joins cannot be freed in any other way.

Markers: `ranks(2, 4)` restricts a test to these sizes; `smoke` marks the few that also run at 16.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import time
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.harness.eager import without_compiler

HERE = Path(__file__).resolve().parent

# Set by the launcher; without them reports go nowhere and stacks go to the terminal.
REPORTS = os.environ.get("HVD_ADAPTIVE_TEST_REPORTS")
TIMEOUT = float(os.environ.get("HVD_ADAPTIVE_TEST_TIMEOUT", "120"))

_PASSED, _SKIPPED, _FAILED = 0, 1, 2


class World:
    """This rank among the others: who runs what, and how it went."""

    def __init__(self) -> None:
        # mpi4py first: it asks for full thread support, and Horovod takes MPI as it finds it.
        import numpy as np
        from mpi4py import MPI

        without_compiler()

        self._np = np
        self._communicator = MPI.COMM_WORLD.Dup()
        self.rank = int(self._communicator.Get_rank())
        self.size = int(self._communicator.Get_size())
        self.restart_horovod()
        self._log: IO[str] | None = None
        self._stacks: IO[str] | None = None
        if REPORTS is not None:
            folder = Path(REPORTS)
            self._log = (folder / f"rank{self.rank}.jsonl").open("a")
            self._stacks = (folder / f"rank{self.rank}.stacks").open("a")
            # When one rank gives up, the launcher ends the others with this signal.
            faulthandler.register(signal.SIGTERM, file=self._stacks, chain=True)
        self.outcome = _PASSED
        self.failed_anywhere = False
        self.collected: list[str] = []

    def restart_horovod(self) -> None:
        import horovod.torch as hvd

        import hvd_adaptive as hva

        if hvd.is_initialized():
            hvd.shutdown()
        hva.init(process_sets="dynamic")

    def log(self, event: str, **fields: Any) -> None:
        if self._log is not None:
            clocks = {"at": time.time(), "cpu": time.process_time()}
            self._log.write(json.dumps({"event": event, **clocks, **fields}) + "\n")
            self._log.flush()

    def agree_on_collection(self, found: list[str], errors: list[str]) -> str | None:
        """What is wrong with what the ranks collected, the same text on every rank, or None."""
        everything: list[tuple[list[str], list[str]]] = self._communicator.allgather((found, errors))
        problems = []
        for rank, (ids, failures) in enumerate(everything):
            problems += [f"rank {rank} could not collect: {failure}" for failure in failures]
            missing = sorted(set(everything[0][0]) - set(ids))
            extra = sorted(set(ids) - set(everything[0][0]))
            if missing or extra:
                problems.append(f"rank {rank} misses {missing} and adds {extra}, against rank 0")
            elif ids != everything[0][0]:
                problems.append(f"rank {rank} has the tests of rank 0 in another order")
        return "\n".join(problems) or None

    def watch(self) -> None:
        """Ends this process, with its stacks, unless `unwatch` is called in time."""
        if self._stacks is not None:
            faulthandler.dump_traceback_later(TIMEOUT, exit=True, file=self._stacks)
        else:
            faulthandler.dump_traceback_later(TIMEOUT, exit=True)

    def unwatch(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def agree_on_outcome(self, nodeid: str) -> bool:
        """Waits for all ranks at the end of a test; True if it failed on any of them."""
        mine = self._np.array([zlib.crc32(nodeid.encode()), self.outcome], dtype=self._np.int64)
        everyone = self._np.empty((self.size, 2), dtype=self._np.int64)
        self._wait_for(self._communicator.Iallgather(mine, everyone))
        if (everyone[:, 0] != everyone[0, 0]).any():
            pytest.exit(f"the ranks are not in the same test; rank {self.rank}: {nodeid}", 3)
        return bool((everyone[:, 1] == _FAILED).any())

    def finish(self) -> None:
        self.watch()
        self._wait_for(self._communicator.Ibarrier())
        self.unwatch()
        self.log("finished")
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGTERM)
        # Or the interpreter looks for garbage among all that torch has: 0.6 s of a core per rank.
        gc.freeze()

    @staticmethod
    def _wait_for(request: Any) -> None:
        """Sleeps while it waits: a blocking wait spins, and takes the core from ranks that work."""
        pause = 50e-6
        while not request.Test():
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)


# Nothing but a holder: the ranks meet when there are tests to run, not when this file is imported.
_worlds: list[World] = []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sizes): run only with these numbers of ranks")
    config.addinivalue_line("markers", "smoke: also run with 16 ranks")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A plain `pytest` leaves this folder to tests/test_distributed.py; naming it runs it here."""
    if not collection_path.is_relative_to(HERE):
        return None
    base = config.invocation_params.dir
    for argument in config.args:
        if (base / argument.split("::")[0]).resolve().is_relative_to(HERE):
            return None
    return True


def _is_ours(item: pytest.Item) -> bool:
    return item.path.is_relative_to(HERE)


_collection_errors: list[str] = []


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _collection_errors.append(f"{report.nodeid}: {report.longreprtext}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if _is_ours(item)]
    if not ours and not _collection_errors:
        return
    world = World()
    _worlds.append(world)
    world.collected = [item.nodeid for item in ours]
    selected = _selected()
    unfit = []
    for item in ours:
        marker = item.get_closest_marker("ranks")
        wrong_size = marker is not None and world.size not in marker.args
        if wrong_size or (selected is not None and item.nodeid.split("[")[0] not in selected):
            unfit.append(item)
    if unfit:
        config.hook.pytest_deselected(items=unfit)
        items[:] = [item for item in items if item not in unfit]


def _selected() -> set[str] | None:
    """The functions that the launcher wants; it names whole files on the command line.

    Naming each function there would turn a file that cannot be imported into a usage error, which
    ends this rank before it could tell the others.
    """
    if REPORTS is None:
        return None
    return set((Path(REPORTS) / "selected").read_text().splitlines())


def pytest_collection_finish(session: pytest.Session) -> None:
    if not _worlds:
        return
    world = _worlds[0]
    world.watch()
    problem = world.agree_on_collection(world.collected, _collection_errors)
    world.unwatch()
    if problem is not None:
        world.log("diverged", text=problem)
        pytest.exit(problem, 3)
    world.log("collected", tests=[item.nodeid for item in session.items])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, None, None]:
    if not _worlds or not _is_ours(item):
        yield
        return
    world = _worlds[0]
    world.outcome = _PASSED
    world.log("started", nodeid=item.nodeid)
    world.watch()
    yield
    failed = world.agree_on_outcome(item.nodeid)
    if failed:
        world.failed_anywhere = True
        world.restart_horovod()
    world.unwatch()
    world.log("agreed", nodeid=item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not _worlds:
        return
    world = _worlds[0]
    if report.failed:
        world.outcome = _FAILED
    elif report.skipped and not hasattr(report, "wasxfail"):
        world.outcome = max(world.outcome, _SKIPPED)
    sections = [f"--- {name} ---\n{text}" for name, text in report.sections if report.failed]
    world.log(
        "report",
        nodeid=report.nodeid,
        when=report.when,
        outcome="passed" if hasattr(report, "wasxfail") and report.skipped else report.outcome,
        text="\n".join([_text_of(report), *sections]),
        seconds=report.duration,
    )


def _text_of(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return str(report.longrepr[2])
    return report.longreprtext


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _worlds:
        return
    world = _worlds[0]
    world.finish()
    if world.failed_anywhere and session.exitstatus == pytest.ExitCode.OK:
        # This rank's tests passed, but the launch as a whole did not.
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def world() -> World:
    """This rank among the others."""
    return _worlds[0]


@pytest.fixture
def shared_tmp_path(world: World, tmp_path: Path) -> Path:
    """One folder for all ranks: that of rank 0."""
    path: Path = world._communicator.bcast(tmp_path, root=0)
    return path
