"""Ranks leave together, where none has failed, and have their last results before."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.harness.lab import horovodrun
from tests.harness.rank_launcher import ENVIRONMENT, ROOT

horovod_exit = pytest.importorskip(
    "hvd_adaptive.comm.horovod_exit", reason="Horovod is not installed", exc_type=ImportError
)

ENDS = """
import sys
import horovod.torch as hvd
from hvd_adaptive.comm import horovod_exit

submit = hvd.allreduce_async
hvd.allreduce_async = lambda *given, **more: print("waits", flush=True) or submit(*given, **more)
hvd.init()
horovod_exit.leave_together()
horovod_exit.leave_together()
"""


LAST_RESULT = """
import sys, time
import horovod.torch as hvd, numpy as np
import hvd_adaptive as hva
from hvd_adaptive.comm.horovod_channel import open_channel
from hvd_adaptive.comm.process_set_control import ProcessSetControl

hva.init()
control = ProcessSetControl("last result", hvd.global_process_set)
channel = open_channel("last result", control)
mean = channel.mean(np.arange(3.0))
if hvd.rank() == 0:
    time.sleep(0.3)  # held up while the other one ends
assert mean().tolist() == [0, 1, 2]
print(channel.name, flush=True)
"""


class Horovod:
    """Horovod, in which nobody else is there to take part."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        self.error = error
        self.polls = 0

    def is_initialized(self) -> bool:
        return True

    def allreduce_async(self, tensor: Any, name: str) -> int:
        if self.error is not None:
            raise self.error("Horovod has been shut down.")
        return 7

    def poll(self, handle: int) -> bool:
        self.polls += 1
        return False


@pytest.mark.parametrize(
    ("last_words", "waits", "status"),
    [
        ("", 1, 0),
        ("sys.exit(3)", 1, 3),
        ("hvd.shutdown()", 0, 0),
        ("raise ValueError('bad data')", 0, 1),
    ],
)
def test_a_process_waits_once_where_it_ends_by_itself(last_words: str, waits: int, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS + last_words],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert done.stdout.count("waits") == waits, done.stderr
    assert ("ValueError: bad data" in done.stderr) == ("raise" in last_words)
    assert done.stderr.count("Traceback") == ("raise" in last_words)


@pytest.mark.parametrize("last_words", ["", "hvd.shutdown()"])
def test_a_rank_that_is_held_up_has_its_last_result_from_one_that_has_ended(last_words: str) -> None:
    command = [*horovodrun(2), sys.executable, "-c", LAST_RESULT + last_words]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mpi4py") == 2


def test_a_rank_that_trains_on_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Horovod()
    monkeypatch.setattr(horovod_exit, "hvd", alone)
    monkeypatch.setattr(horovod_exit, "SECONDS", 0.05)
    horovod_exit.wait_for_all(os.getpid())
    assert alone.polls > 1


def test_horovods_end_meanwhile_is_no_failure_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.common.exceptions import HorovodInternalError

    ended = Horovod(HorovodInternalError)
    monkeypatch.setattr(horovod_exit, "hvd", ended)
    horovod_exit.wait_for_all(os.getpid())
    assert ended.polls == 0


def test_a_forked_process_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Horovod()
    monkeypatch.setattr(horovod_exit, "hvd", alone)
    horovod_exit.wait_for_all(os.getpid() + 1)
    assert alone.polls == 0
