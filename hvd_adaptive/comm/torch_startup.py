"""Start torch.distributed where Horovod is not what connects the ranks."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from hvd_adaptive.comm import launcher

_DIST: Any = dist
"""With what is defined in C++, which torch's types leave out."""
_MEETING: tuple[str, ...] = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets, by which ranks find each other."""


def is_wanted() -> bool:
    """Whether torch.distributed connects the ranks: under torchrun, or where there is no Horovod."""
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        return False
    return (
        (dist.is_available() and dist.is_initialized())
        or launcher.find().launcher == launcher.TORCHRUN
        or importlib.util.find_spec("horovod") is None
    )


def start(**arguments: Any) -> None:
    """Initialize torch.distributed, unless that has been done.

    Args:
        arguments: of ``torch.distributed.init_process_group()``. By default gloo connects the ranks,
            and NCCL their GPUs where there are some.

    Raises:
        ModuleNotFoundError: the ranks were started for Horovod, which is not installed.
    """
    if dist.is_initialized():
        return
    arguments.setdefault("backend", _backend())
    launch = launcher.find()
    if not {"store", "init_method"} & set(arguments) and any(
        name not in os.environ for name in _MEETING
    ):
        if launch.size > 1:
            raise ModuleNotFoundError(_NO_HOROVOD.format(launch=launch), name="horovod")
        # nobody to find
        arguments |= {"store": _DIST.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**arguments)


def _backend() -> str:
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if nccl else "gloo"


_NO_HOROVOD = (
    "{launch.launcher} has started {launch.size} ranks, which needs Horovod, which this Python "
    f"({sys.executable}) does not have. Start them with torchrun, or install Horovod: "
    "'hva install-horovod' builds it (in the repository, launch/setup.sh builds it); 'pip install "
    "horovod' alone fails, because its last release, 0.28.1, must be patched for PyTorch 2.1 and "
    "newer. conda-forge has a package, too: horovod."
)
