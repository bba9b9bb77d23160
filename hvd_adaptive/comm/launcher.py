"""What a launcher told this process, before any library has connected the ranks. Pure: needs none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

TORCHRUN = "torchrun"


@dataclass(frozen=True)
class Launch:
    """A process's place among those that were started with it.

    Args:
        launcher: ``"torchrun"``, ``"mpirun"`` (also under ``horovodrun``), ``"horovodrun --gloo"``,
            ``"srun"``, or empty where nobody started several processes.
        rank: of this process.
        size: number of ranks.
        local_size: number of ranks on this host; None where it is not known.
    """

    launcher: str
    rank: int
    size: int
    local_size: int | None


def find(environment: Mapping[str, str] | None = None) -> Launch:
    """The launcher's word on this process.

    Args:
        environment: None takes this process's.

    Example:
        >>> find({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NODEID": "1",
        ...     "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "4,2"})
        Launch(launcher='srun', rank=5, size=6, local_size=2)
    """
    variables = os.environ if environment is None else environment

    def number(name: str) -> int | None:
        text = variables.get(name, "")
        return int(text) if text.isdigit() else None

    rank, size = number("RANK"), number("WORLD_SIZE")
    # which mpirun or srun may have started, one per host
    if "TORCHELASTIC_RUN_ID" in variables and rank is not None and size is not None:
        return Launch(TORCHRUN, rank, size, number("LOCAL_WORLD_SIZE"))
    for launcher, prefix in (("mpirun", "OMPI_COMM_WORLD"), ("horovodrun --gloo", "HOROVOD")):
        rank, size = number(f"{prefix}_RANK"), number(f"{prefix}_SIZE")
        if rank is not None and size is not None:
            return Launch(launcher, rank, size, number(f"{prefix}_LOCAL_SIZE"))
    rank, size = number("SLURM_PROCID"), number("SLURM_STEP_NUM_TASKS")
    # a batch script has these, too, and is nobody's rank
    if rank is not None and size is not None and variables.get("SLURM_STEP_ID", "").isdigit():
        tasks = slurm_tasks(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
        node = number("SLURM_NODEID")
        known = node is not None and node < len(tasks)
        return Launch("srun", rank, size, tasks[node] if known and node is not None else None)
    return Launch("", 0, 1, 1)


def slurm_tasks(text: str) -> list[int]:
    """Tasks of each node, as Slurm writes them.

    Example:
        >>> slurm_tasks("4(x2),1")
        [4, 4, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def is_elastic() -> bool:
    """Whether Horovod lets ranks come and go."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
