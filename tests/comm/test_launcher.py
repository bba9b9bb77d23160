"""What launchers tell a process, and what follows from it before MPI starts."""

from __future__ import annotations

import os

import pytest

from hvd_adaptive.comm import launcher
from hvd_adaptive.comm.launcher import Launch

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
GLOO = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "7", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "7"}
SRUN = {
    **BATCH, "SLURM_PROCID": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2,1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch("", 0, 1, 1)),
        (MPIRUN, Launch("mpirun", 3, 4, 2)),
        ({**BATCH, **MPIRUN}, Launch("mpirun", 3, 4, 2)),
        (TORCHRUN, Launch("torchrun", 1, 4, 2)),
        ({**SRUN, **TORCHRUN}, Launch("torchrun", 1, 4, 2)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Launch("", 0, 1, 1)),
        (GLOO, Launch("horovodrun --gloo", 1, 2, 2)),
        (BATCH, Launch("", 0, 1, 1)),
        (SRUN, Launch("srun", 2, 3, 1)),
        ({**SRUN, "SLURM_NODEID": "5"}, Launch("srun", 2, 3, None)),
    ],
)
def test_a_process_knows_its_place(environment: dict[str, str], expected: Launch) -> None:
    assert launcher.find(environment) == expected


@pytest.mark.parametrize(
    ("local_ranks", "set_by_user", "expected"),
    [(5, None, "1"), (4, None, None), (5, "0", "0"), (1, None, None)],
)
def test_ranks_that_outnumber_cores_yield_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, local_ranks: int, set_by_user: str | None, expected: str | None
) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    from hvd_adaptive.comm import startup

    monkeypatch.setenv(startup.YIELD, set_by_user or "")
    if set_by_user is None:
        monkeypatch.delenv(startup.YIELD)
    for name, value in {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_ranks)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launcher, "cores", lambda: 4)
    told = startup.yield_where_crowded()
    assert os.environ.get(startup.YIELD) == expected
    assert told == (expected == "1")
