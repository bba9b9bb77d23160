"""Horovod's own threads give way to computing; everything else keeps its priority."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.eager import PYTHONPATH
from tests.harness.rank_launcher import ENVIRONMENT

pytest.importorskip("horovod.torch", reason="Horovod is not installed")

import hvd_adaptive as hva
from benchmarks.network import priority
from hvd_adaptive.comm.startup import NICENESS
from launch.training import options

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own")

STARTS = """
import contextlib, json, os, sys, warnings
import horovod.torch as hvd
import torch
import hvd_adaptive as hva

def priorities():
    found = {}
    for task in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # a thread that ends meanwhile
            found[task] = os.getpriority(os.PRIO_PROCESS, task)
    return found

before = priorities()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    exec(sys.argv[1])
of_horovod = {task: value for task, value in priorities().items() if task not in before}
torch.ones(1 << 20).sum()
hvd.allreduce(torch.ones(3))
dynamic = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS")
print(json.dumps({
    "before": sorted(set(before.values())),
    "main": os.getpriority(os.PRIO_PROCESS, os.getpid()),
    "horovod": sorted(set(of_horovod.values())),
    "warned": [str(each.message) for each in caught if each.category is RuntimeWarning],
    "dynamic": dynamic,
}))
hvd.shutdown()
"""


def start(code: str) -> dict[str, object]:
    """What a process of its own finds after it has run ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", STARTS, code],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": PYTHONPATH},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@on_linux
def test_only_horovods_threads_give_way() -> None:
    found = start("hva.init()")
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert (found["before"], found["main"]) == ([own], own)
    assert found["horovod"] == [min(own + 10, 19)]
    assert found["warned"] == []


@on_linux
@pytest.mark.parametrize("niceness", [0, 19])
def test_by_how_much_is_the_users_choice_and_other_arguments_are_horovods(niceness: int) -> None:
    found = start(f"hva.init(process_sets='dynamic', niceness={niceness})")
    assert found["horovod"] == [min(os.getpriority(os.PRIO_PROCESS, 0) + niceness, 19)]
    assert found["dynamic"] == "1"


@on_linux
def test_too_late_is_said_and_changes_nothing() -> None:
    found = start("hvd.init(); hva.init()")
    assert found["horovod"] == [os.getpriority(os.PRIO_PROCESS, 0)]
    [warning] = found["warned"]  # type: ignore[misc]
    assert "in the place of hvd.init()" in warning


def test_the_example_and_the_benchmark_start_as_the_library_does() -> None:
    """They name the number themselves, because their options and tables are read without Horovod."""
    assert options.make_parser().get_default("niceness") == NICENESS
    assert priority.NICENESS["hva.init()"] == NICENESS


def test_the_documented_example_runs() -> None:
    found = start(
        "import doctest, hvd_adaptive.comm.startup\n"
        "outcome = doctest.testmod(hvd_adaptive.comm.startup)\n"
        "assert (outcome.attempted, outcome.failed) == (3, 0), outcome"
    )
    assert found["warned"] == []


def test_what_horovod_refuses_reaches_the_caller() -> None:
    found = start(
        "try: hva.init(comm=1)\nexcept ValueError as error: assert 'argument comm' in str(error)\n"
        "else: raise SystemExit('accepted')\nhvd.init()"
    )
    assert found["warned"] == []


@pytest.mark.parametrize("wrong", [-1, 20])
def test_a_niceness_out_of_range_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="must be 0 to 19"):
        hva.init(niceness=wrong)


@pytest.mark.parametrize("wrong", [1.0, "10", True, None])
def test_a_niceness_that_is_no_integer_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="must be an integer"):
        hva.init(niceness=wrong)  # type: ignore[arg-type]


def test_without_horovod_ranks_that_were_started_for_it_say_how_to_get_it(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in map(Path, site.getsitepackages()):
        for each in path.glob("*"):  # Debian's Python names folders that need not exist
            if not each.name.startswith(("horovod", "__editable__")) and each.suffix != ".pth":
                (packages / each.name).symlink_to(each)
    code = """
import hvd_adaptive
hvd_adaptive.compressors.parse("topk:density=0.1")
hvd_adaptive.init()
"""
    done = subprocess.run(
        [sys.executable, "-S", "-s", "-c", code],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{packages}{os.pathsep}{PYTHONPATH}",
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "2",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith(
        "ModuleNotFoundError: mpirun has started 2 ranks, which needs Horovod, which this Python ("
    )
    assert "launch/setup.sh builds it" in last
    assert "'pip install horovod' alone fails, because" in last


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"process_sets": 3}, TypeError, r"process_sets must be .*hvd\.ProcessSet.*got 3"),
        ({"process_sets": [3]}, TypeError, r"process_sets must be .*hvd\.ProcessSet.*got \[3\]"),
        ({"process_sets": "dynamik"}, ValueError, "process_sets must be .*'dynamic'.*got 'dynamik'"),
        ({"comm": "world"}, TypeError, "comm must be .*got 'world'"),
        ({"comm": [0.5]}, TypeError, r"comm must be .*got \[0.5\]"),
    ],
    ids=str,
)
def test_a_wrong_argument_of_init_is_named_before_horovod_starts(
    given: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        hva.init(**given)  # type: ignore[arg-type]
