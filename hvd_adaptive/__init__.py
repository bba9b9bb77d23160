"""Compressed gradients for Horovod: a drop-in ``DistributedOptimizer``.

``import hvd_adaptive.compressors`` and ``hvd_adaptive.planning`` need neither Horovod nor MPI, so what
does is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_adaptive.compressors import Compression
from hvd_adaptive.states import merge_compression_states
from hvd_adaptive.telemetry import Telemetry

if TYPE_CHECKING:
    from hvd_adaptive.optimizer import DistributedOptimizer
    from hvd_adaptive.start import init

__version__ = "0.1.0"

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "Telemetry",
    "__version__",
    "init",
    "merge_compression_states",
]


def __getattr__(name: str) -> Any:
    if name == "DistributedOptimizer":
        from hvd_adaptive.optimizer import DistributedOptimizer

        return DistributedOptimizer
    if name == "init":
        from hvd_adaptive.start import init

        return init
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
