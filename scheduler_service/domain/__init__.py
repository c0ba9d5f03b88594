"""The nouns of the project: frozen dataclasses over numpy columns.

Everything that enters is validated here, once, into these types; the rest of the code trusts them. Nothing
here does I/O or imports another package of ours.
"""

from scheduler_service.domain.batch import MAX_LENGTH, Batch
from scheduler_service.domain.cost import CostModel
from scheduler_service.domain.errors import HydraCpError, InfeasibleError, InvalidInputError, Reason
from scheduler_service.domain.plan import PLAN_FORMAT, Plan, PlanHeader
from scheduler_service.domain.pool import MAX_RANKS, GroupShape, Pool
from scheduler_service.domain.slices import PlanSlice, slice_plan

__all__ = [
    "Batch",
    "Pool",
    "GroupShape",
    "CostModel",
    "Plan",
    "PlanHeader",
    "PlanSlice",
    "slice_plan",
    "HydraCpError",
    "InvalidInputError",
    "InfeasibleError",
    "Reason",
    "MAX_LENGTH",
    "MAX_RANKS",
    "PLAN_FORMAT",
]
