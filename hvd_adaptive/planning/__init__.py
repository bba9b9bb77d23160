"""What each layer does, and from which step on.

Nothing here needs torch, Horovod or MPI.
"""

from __future__ import annotations

from hvd_adaptive.planning.plan import LayerPlan, Plan

__all__ = ["LayerPlan", "Plan"]
