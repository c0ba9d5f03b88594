"""Planning: pure functions from lengths and a pool to a verified plan.

`plan_iteration` is the way in: a policy places the sequences, an independent verifier checks the plan, and its time
is predicted. Nothing here does I/O or waits.
"""

from scheduler_service.planning.explain import explain
from scheduler_service.planning.feasibility import memory_degree, memory_degrees, require_fit
from scheduler_service.planning.iteration import DEFAULT_POLICY, POLICIES, find_policy, plan_iteration, warm_up
from scheduler_service.planning.policy import PlanningConfig, Policy, new_plan
from scheduler_service.planning.statistics import PlanStatistics, plan_statistics
from scheduler_service.planning.verify import InvalidPlanError, verify_plan

__all__ = [
    "plan_iteration",
    "POLICIES",
    "DEFAULT_POLICY",
    "find_policy",
    "warm_up",
    "verify_plan",
    "InvalidPlanError",
    "plan_statistics",
    "PlanStatistics",
    "explain",
    "memory_degree",
    "memory_degrees",
    "require_fit",
    "Policy",
    "PlanningConfig",
    "new_plan",
]
