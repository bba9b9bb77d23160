"""What each layer does, from which step on, and who decides it.

A planner is a budget (how much compression now?) times an allocator (how is it shared out over the
layers?). Nothing here needs torch, Horovod or MPI: numbers come in, one index a layer goes out.
"""

from __future__ import annotations

from hvd_adaptive.planning.allocators import DENSE, Table
from hvd_adaptive.planning.measurements import Measurement, StepMeasurements, Transfer
from hvd_adaptive.planning.plan import LayerPlan, Plan
from hvd_adaptive.planning.recipes import (
    CGX,
    REGISTRY,
    Accordion,
    AccordionLGreCo,
    Decision,
    GraVAC,
    GraVACLGreCo,
    Kimad,
    KimadPlus,
    LGreCo,
    LGreCoTime,
    Planner,
    PlanningInput,
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
    "GraVAC",
    "GraVACLGreCo",
    "Kimad",
    "KimadPlus",
    "LGreCo",
    "LGreCoTime",
    "LayerPlan",
    "Measurement",
    "Plan",
    "Planner",
    "PlanningInput",
    "Recipe",
    "StepMeasurements",
    "Table",
    "Transfer",
    "parse",
]
