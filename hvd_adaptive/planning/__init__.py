"""What each layer does, from which step on, and who decides it.

A planner is a budget (how much compression now?) times an allocator (how is it shared out over the
layers?). Nothing here needs torch, Horovod or MPI: numbers come in, one index a layer goes out.
"""

from __future__ import annotations

from hvd_adaptive.planning.allocators import DENSE, Table
from hvd_adaptive.planning.facts import Need, StepFacts, Transfer
from hvd_adaptive.planning.plan import LayerPlan, Plan
from hvd_adaptive.planning.planners import (
    CGX,
    REGISTRY,
    Accordion,
    AccordionLGreCo,
    Decision,
    Facts,
    GraVAC,
    GraVACLGreCo,
    Kimad,
    KimadPlus,
    LGreCo,
    LGreCoTime,
    Planner,
    Recipe,
    parse,
)

__all__ = [
    "CGX",
    "DENSE",
    "REGISTRY",
    "Accordion",
    "AccordionLGreCo",
    "Decision",
    "Facts",
    "GraVAC",
    "GraVACLGreCo",
    "Kimad",
    "KimadPlus",
    "LGreCo",
    "LGreCoTime",
    "LayerPlan",
    "Need",
    "Plan",
    "Planner",
    "Recipe",
    "StepFacts",
    "Table",
    "Transfer",
    "parse",
]
