"""Compressed gradients for Horovod: a drop-in ``DistributedOptimizer``.

``import hvd_adaptive.compressors`` and ``hvd_adaptive.planning`` need neither Horovod nor MPI, so what
does is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from hvd_adaptive.checkpoint import merge_compression_states
from hvd_adaptive.compressors import Compression
from hvd_adaptive.telemetry import Telemetry

if TYPE_CHECKING:
    from hvd_adaptive.comm.startup import init
    from hvd_adaptive.engine.virtual_ranks import VirtualRanks
    from hvd_adaptive.optimizer import DistributedOptimizer

__version__ = "0.1.0"

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "Telemetry",
    "VirtualRanks",
    "__version__",
    "init",
    "merge_compression_states",
]


# What needs Horovod, and where it is.
_WITH_HOROVOD = {
    "DistributedOptimizer": "hvd_adaptive.optimizer",
    "VirtualRanks": "hvd_adaptive.engine.virtual_ranks",
    "init": "hvd_adaptive.comm.startup",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_HOROVOD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_WITH_HOROVOD[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "horovod":
            raise
        raise ModuleNotFoundError(
            f"hvd_adaptive.{name} needs Horovod, which this Python ({sys.executable}) does not have. "
            "In the repository, launch/setup.sh builds it; 'pip install horovod' alone fails, because "
            "its last release, 0.28.1, must be patched for PyTorch 2.1 and newer. conda-forge has a "
            "package, too: horovod.",
            name="horovod",
        ) from error
