"""Compressed gradients for Horovod and torch.distributed: a drop-in ``DistributedOptimizer``.

Everything is imported when it is first asked for. Nothing needs Horovod or MPI but runs that Horovod
connects, and the command ``hva`` starts in every rank without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_adaptive.checkpoint import merge_compression_states
    from hvd_adaptive.comm.startup import init
    from hvd_adaptive.compressors import Compression
    from hvd_adaptive.ddp_hook import ddp_comm_hook
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
    "ddp_comm_hook",
    "init",
    "merge_compression_states",
]


_PLACES = {
    "Compression": "hvd_adaptive.compressors",
    "DistributedOptimizer": "hvd_adaptive.optimizer",
    "Telemetry": "hvd_adaptive.telemetry",
    "VirtualRanks": "hvd_adaptive.engine.virtual_ranks",
    "ddp_comm_hook": "hvd_adaptive.ddp_hook",
    "init": "hvd_adaptive.comm.startup",
    "merge_compression_states": "hvd_adaptive.checkpoint",
}
"""Where each public name is."""
_PACKAGES = ("checkpoint", "compressors", "resume", "telemetry")
"""Reached as attributes without an import of their own."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
