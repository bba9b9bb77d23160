"""``hva doctor``: each check names its fault, and a report is what a user would see."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.commands.diagnosis import checks, text
from hvd_adaptive.commands.diagnosis.facts import Facts, Link, RankFacts, collect
from tests.harness.rank_launcher import ENVIRONMENT, ROOT

VERSIONS = {
    "hvd_adaptive": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu", "horovod": "0.28.1",
    "mpi4py": "4.1.2", "numpy": "2.4.6", "numba": "0.68.1",
}  # fmt: skip
RINGS = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "300",
}
HEALTHY = RankFacts(
    host="red", launcher="mpirun", launched_size=4, local_size=2, versions=VERSIONS, sources="abc",
    horovod_torch="2.13.0+cpu", builds={"MPI": True, "Gloo": True, "NCCL": False, "CUDA": False},
    size=4, mpi="Open MPI v4.1.4", mpi_files=("/usr/lib/libmpi.so.40",), mpi_size=4,
    mpirun="Open MPI 4.1.4", cores=4, torch_threads=2, memcpy=1e10, kernels="/cache",
    precompiled=True, shared_memory=1 << 30, variables=RINGS,
)  # fmt: skip


def rank(number: int, **changes: Any) -> RankFacts:
    host = "red" if number < 2 else "green"
    return dataclasses.replace(HEALTHY, **{"host": host, "launched_rank": number, **changes})


def facts(last: dict[str, Any] | None = None, **changes: Any) -> Facts:
    """Four healthy ranks on two hosts.

    Args:
        last: changes of the last rank only.
        changes: of all ranks.
    """
    ranks = [rank(number, **changes) for number in range(3)]
    link = Link(("red", "green"), 2e-4, 9e9)
    return Facts((*ranks, rank(3, **changes, **(last or {}))), "", 1e-3, (link,))


def variables(**set_: str) -> dict[str, str]:
    return {**RINGS, **set_}


PLANTED: dict[str, tuple[Callable[[], Facts], str, str, str]] = {
    "horovod": (
        lambda: facts({"horovod_error": "ImportError: undefined symbol: _ZN3c10"}),
        "failure", "rank 3 does not start: ImportError: undefined symbol", "hva install-horovod",
    ),
    "torch": (
        lambda: facts(horovod_torch="2.4.0"),
        "failure", "built with torch 2.4.0, and torch 2.13.0+cpu is installed", "torch==2.4.0",
    ),
    "versions": (
        lambda: facts(versions={**VERSIONS, "torch": "1.13.1"}, horovod_torch="1.13.1"),
        "failure", "rank 0 has torch 1.13.1", "torch 2.1 or newer",
    ),
    "ranks": (
        lambda: facts(size=1, mpi_size=1),
        "failure", "mpirun started 4 ranks, and Horovod sees 1", "srun --mpi=pmix",
    ),
    "distutils": (
        lambda: facts(distutils=False, launcher=""),
        "failure", "horovodrun imports distutils", "pip install setuptools",
    ),
    "mpi": (
        lambda: facts(builds={"MPI": False, "Gloo": True}, size=1),
        "failure", "built without MPI, and mpirun starts ranks", "libopenmpi-dev",
    ),
    "mpi4py": (
        lambda: facts({"mpi": "MPICH 4.2", "mpi_files": ("/a/libmpi.so.40", "/b/libmpich.so.12")}),
        "slow", "mpi4py of rank 3 uses MPICH 4.2", "--no-binary mpi4py mpi4py",
    ),
    "hosts": (
        lambda: facts({"versions": {**VERSIONS, "numba": "0.59.0"}}),
        "slow", "rank 0 (red) has numba 0.68.1, rank 3 (green) 0.59.0", "the same numba on all hosts",
    ),
    "yield": (
        lambda: facts(cores=1, torch_threads=1),
        "slow", "2 ranks share 1 core of red", "export OMPI_MCA_mpi_yield_when_idle=1",
    ),
    "threads": (
        lambda: facts(torch_threads=4),
        "slow", "2 ranks of 4 threads share 4 cores", "export OMP_NUM_THREADS=2 NUMBA_NUM_THREADS=2",
    ),
    "cycle": (
        lambda: facts(variables=variables(HOROVOD_CYCLE_TIME="50")),
        "slow", "HOROVOD_CYCLE_TIME=50: every operation waits", "export HOROVOD_CYCLE_TIME=1",
    ),
    "cache": (
        lambda: facts({"kernels": ""}),
        "slow", "rank 3 has no folder to keep compiled kernels in", "export NUMBA_CACHE_DIR=",
    ),
    "kernels": (
        lambda: facts({"precompiled": False}),
        "slow", "kernels are not compiled yet on green", "hva precompile",
    ),
    "link": (
        lambda: dataclasses.replace(facts(), links=(Link(("red", "green"), 1e-3, 2e8),)),
        "slow", "red and green are 200 Mbit/s and 1 ms apart: to send 100 MB of gradients takes 4.0 s",
        "--compression auto",
    ),
    "latency": (
        lambda: dataclasses.replace(facts(), latency=0.8),
        "slow", "a small allgather among all ranks takes 800 ms", "OMPI_MCA_mpi_yield_when_idle=1",
    ),
    "rings": (
        lambda: facts(variables={"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "300"}),
        "slow", "2 hosts, and Open MPI's default algorithms", "coll_tuned_allreduce_algorithm=4",
    ),
    "nice": (
        lambda: facts({"nice": 10}),
        "slow", "rank 3 runs at nice 10: whatever else runs on green goes first", "without nice",
    ),
    "collector": (
        lambda: facts({"collection": 0.2}),
        "note", "garbage collector takes 200 ms, for which all ranks wait", "gc.freeze()",
    ),
    "stall": (
        lambda: facts(variables={"OMPI_MCA_coll_tuned_use_dynamic_rules": "1"}),
        "note", "a rank that hangs", "export HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=300",
    ),
    "shm": (
        lambda: facts(shared_memory=60 << 20),
        "slow", "/dev/shm of red has 60 MiB for 2 ranks", "--shm-size",
    ),
    "nccl": (
        lambda: facts(gpus=4),
        "slow", "rank 0 has 4 GPUs, and Horovod was built without NCCL", "HOROVOD_GPU_OPERATIONS=NCCL",
    ),
    "memory": (
        lambda: facts({"memcpy": 4e8}),
        "slow", "a thread on green copies 0.40 GB/s", "memory limit",
    ),
}  # fmt: skip


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert checks.examine(facts()) == {}


def test_every_check_has_a_planted_fault() -> None:
    assert {*PLANTED} == {*checks.CHECKS}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_with_its_remedy_and_nothing_else_is(name: str) -> None:
    plant, severity, what, remedy = PLANTED[name]
    planted = plant()
    found = checks.examine(planted)
    assert list(found) == [name]
    assert found[name].severity == severity
    assert what in found[name].what
    assert remedy in found[name].remedy
    assert checks.fails(found.values()) == (severity == "failure")
    report = text.as_text(planted, found)
    assert f"{text.MARKS[found[name].severity]} {name:<10} {found[name].what}" in report
    assert report.endswith(
        "Training would fail." if severity == "failure" else "Training would work; 1 finding."
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"versions": {**VERSIONS, "horovod": "none"}, "horovod_error": "no module"}, "horovod"),
        ({"mpi": "", "mpi_error": "ImportError: cannot load MPI library"}, "mpi4py"),
        ({"mpi": "Open MPI v5.0.3"}, "mpi4py"),
        ({"mpi_size": 1}, "mpi4py"),
        ({"variables": variables(HOROVOD_CYCLE_TIME="soon")}, "cycle"),
        ({"variables": variables(HOROVOD_CYCLE_TIME="0"), "cores": 2, "torch_threads": 1}, "cycle"),
        ({"sources": "abd"}, None),
    ],
)
def test_other_forms_of_a_fault_are_found(changes: dict[str, Any], name: str | None) -> None:
    assert list(checks.examine(facts(**changes))) == ([name] if name else [])


def test_other_sources_on_one_rank_are_a_fault() -> None:
    [(name, finding)] = checks.examine(facts({"sources": "abd"})).items()
    assert (name, "kernels' sources" in finding.what) == ("hosts", True)


def test_what_mpirun_sets_itself_is_as_good_as_yielding() -> None:
    """``mpirun --oversubscribe`` tells Open MPI; horovodrun says that each rank has a slot."""
    crowded = {"cores": 1, "torch_threads": 1}
    said = {**crowded, "variables": variables(OMPI_MCA_mpi_oversubscribe="1")}
    assert checks.examine(facts(**said)) == {}
    forbidden = variables(OMPI_MCA_mpi_oversubscribe="1", OMPI_MCA_mpi_yield_when_idle="0")
    assert list(checks.examine(facts(**crowded, variables=forbidden))) == ["yield"]


def test_ranks_that_mpirun_binds_to_a_core_each_do_not_share_one() -> None:
    def bound(*cores: int) -> Facts:
        one_core = {"cores": 1, "torch_threads": 1}
        ranks = (rank(each, **one_core, bound_to=(core,)) for each, core in enumerate(cores))
        return Facts(tuple(ranks))

    assert "yield" in checks.examine(bound(0, 0))
    assert "yield" not in checks.examine(bound(0, 1))
    assert "2 cores (1 per rank)" in text.as_text(bound(0, 1), {})


def test_torchs_version_is_compared_with_its_build_as_horovod_writes_it() -> None:
    import torch

    assert collect().versions["torch"] == torch.__version__


# ------------------------------------------------------------------------------- as a user calls it


def package(folder: Path, name: str, version: str) -> None:
    """What makes Python's metadata say that a package has another version."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def doctor(launcher: list[str], *options: str, path: str = "", **changes: str) -> tuple[int, str]:
    """(exit status, output)."""
    unwanted = {"HOROVOD_CYCLE_TIME", "OMPI_MCA_mpi_yield_when_idle", "OMP_NUM_THREADS"}
    kept = {
        name: value for name, value in {**os.environ, **ENVIRONMENT}.items() if name not in unwanted
    }
    done = subprocess.run(
        [*launcher, sys.executable, "-m", "hvd_adaptive", "doctor", *options],
        env={**kept, "PYTHONPATH": f"{path}{os.pathsep if path else ''}{ROOT}", **changes},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_without_horovod_it_says_so_and_fails(tmp_path: Path) -> None:
    torch = tmp_path / "horovod" / "torch"
    torch.mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    (torch / "__init__.py").write_text("raise ImportError('libtorch.so: undefined symbol')\n")
    status, said = doctor([], path=str(tmp_path))
    assert status == 1
    assert "FAIL horovod    Horovod of rank 0 does not start: ImportError: libtorch.so" in said
    assert said.endswith("Training would fail.\n")


@pytest.mark.distributed
def test_ranks_on_two_hosts_are_examined_together_and_planted_faults_are_named(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    package(tmp_path, "numba", "0.59.0")
    package(tmp_path, "torch", "9.9.9")
    plant = f"""
        export HVA_NODE=host$OMPI_COMM_WORLD_RANK
        if [ $OMPI_COMM_WORLD_RANK = 1 ]; then export PYTHONPATH={tmp_path}:$PYTHONPATH; fi
        exec "$0" "$@"
    """
    mpirun = ["mpirun", "--oversubscribe", "-np", "2", "sh", "-c", plant]
    status, said = doctor(
        mpirun, "--json", "--slow-link", "1e12",
        HOROVOD_CYCLE_TIME="30", OMP_NUM_THREADS="64", OMPI_MCA_coll_tuned_use_dynamic_rules="1",
        NUMBA_CACHE_DIR=str(tmp_path / "kernels"),
    )  # fmt: skip
    assert status == 1
    report = json.loads(said)
    assert {"cycle", "threads", "hosts", "link", "kernels"} <= {*report["findings"]}
    assert "rank 1: Horovod was built with torch" in report["findings"]["torch"]["what"]
    assert not {"rings", "ranks", "mpi", "mpi4py"} & {*report["findings"]}
    assert "rank 1 (host1) 9.9.9" in report["findings"]["hosts"]["what"]
    [link] = report["facts"]["links"]
    assert link["hosts"] == ["host0", "host1"]
    assert 0 < link["latency"] < 5
    assert link["rate"] > 1e6
    assert [rank["size"] for rank in report["facts"]["ranks"]] == [2, 2]


def test_a_wrong_option_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvd_adaptive", "doctor", "--jsn"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "unrecognized arguments: --jsn" in done.stderr
