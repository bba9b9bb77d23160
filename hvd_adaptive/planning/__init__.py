"""What each layer does, from which step on, and who decides it.

A planner is a budget (how much compression now?) times an allocator (how is it shared out over the
layers?). Nothing here needs torch, Horovod or MPI: numbers come in, one index per layer goes out.
"""

from __future__ import annotations

from hvd_adaptive.deprecation import renamed
from hvd_adaptive.planning import recipes
from hvd_adaptive.planning.measurements import Measurement as Measurement
from hvd_adaptive.planning.measurements import PlanningInput as PlanningInput
from hvd_adaptive.planning.measurements import StepMeasurements as StepMeasurements
from hvd_adaptive.planning.measurements import Transfer as Transfer
from hvd_adaptive.planning.plan import LayerPlan as LayerPlan
from hvd_adaptive.planning.plan import Plan as Plan
from hvd_adaptive.planning.planner import Decision as Decision
from hvd_adaptive.planning.planner import Planner as Planner
from hvd_adaptive.planning.recipes import *  # noqa: F403 - the recipes that its registry has
from hvd_adaptive.planning.table import DENSE as DENSE
from hvd_adaptive.planning.table import CandidateTable as CandidateTable

# In the place of a list, for the reason that hvd_adaptive/planning/recipes.py gives.
globals()["__all__"] = [
    "DENSE",
    "CandidateTable",
    "Decision",
    "LayerPlan",
    "Measurement",
    "Plan",
    "Planner",
    "PlanningInput",
    "StepMeasurements",
    "Transfer",
    *vars(recipes)["__all__"],
]


__getattr__ = renamed(
    __name__,
    {
        "Facts": "hvd_adaptive.planning.PlanningInput",
        "Need": "hvd_adaptive.planning.Measurement",
        "StepFacts": "hvd_adaptive.planning.StepMeasurements",
        "Table": "hvd_adaptive.planning.CandidateTable",
    },
)
