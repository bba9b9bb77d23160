"""Compressed gradients for Horovod: a drop-in ``DistributedOptimizer``.

Everything is imported when it is first asked for: ``hvd_adaptive.compressors`` and
``hvd_adaptive.planning`` need neither Horovod nor MPI, and the command ``hva`` starts in every rank
without importing torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_adaptive.checkpoint import merge_compression_states
    from hvd_adaptive.comm.startup import init
    from hvd_adaptive.compressors import Compression
    from hvd_adaptive.engine.virtual_ranks import VirtualRanks
    from hvd_adaptive.optimizer import DistributedOptimizer
    from hvd_adaptive.telemetry import Telemetry

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


# What needs Horovod, and what does not; where each is.
_WITH_HOROVOD = {
    "DistributedOptimizer": "hvd_adaptive.optimizer",
    "VirtualRanks": "hvd_adaptive.engine.virtual_ranks",
    "init": "hvd_adaptive.comm.startup",
}
_WITHOUT_HOROVOD = {
    "Compression": "hvd_adaptive.compressors",
    "Telemetry": "hvd_adaptive.telemetry",
    "merge_compression_states": "hvd_adaptive.checkpoint",
}
_PACKAGES = ("checkpoint", "compressors", "telemetry")
"""Reached as attributes without an import of their own."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _WITHOUT_HOROVOD:
        return getattr(importlib.import_module(_WITHOUT_HOROVOD[name]), name)
    if name not in _WITH_HOROVOD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_WITH_HOROVOD[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "horovod":
            raise
        raise ModuleNotFoundError(
            f"hvd_adaptive.{name} needs Horovod, which this Python ({sys.executable}) does not have. "
            "'hva install-horovod' builds it (in the repository, launch/setup.sh builds it); 'pip "
            "install horovod' alone fails, because its last release, 0.28.1, must be patched for "
            "PyTorch 2.1 and newer. conda-forge has a package, too: horovod.",
            name="horovod",
        ) from error
