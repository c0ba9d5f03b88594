"""Planning one iteration: policy, verification, prediction, certificate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from scheduler_service.domain import Batch, CostModel, InfeasibleError, InvalidInputError, Plan, Pool, Reason
from scheduler_service.planning.certificate import lower_bound_s
from scheduler_service.planning.policies import (
    bytescale,
    flexsp,
    hydra,
    hydra_search,
    megatron,
    megatron_hybrid,
    static_cp,
    wlb_llm,
)
from scheduler_service.planning.policy import PlanningConfig, Policy
from scheduler_service.planning.verify import verify_plan
from scheduler_service.simulation import Objective, forecast

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "hydra": hydra.plan,
        "hydra_search": hydra_search.plan,
        "static_cp": static_cp.plan,
        "megatron": megatron.plan,
        "megatron_hybrid": megatron_hybrid.plan,
        "bytescale": bytescale.plan,
        "wlb_llm": wlb_llm.plan,
        "flexsp": flexsp.plan,
    }
)
"""The scheduling systems by name."""

DEFAULT_POLICY = "hydra_search"

POLICIES_FOR_SLOW_RANKS = ("hydra", "hydra_search")
"""Those that know of rank speeds and excluded ranks."""


def plan_iteration(
    batch: Batch,
    pool: Pool,
    *,
    policy: str = DEFAULT_POLICY,
    cost: CostModel | None = None,
    cap: int | None = None,
    objective: Objective | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """A verified plan of `batch` on `pool`, the same to the byte for the same input.

    `cost` defaults to `CostModel()`; `cap` fixes the degree cap C where the policy has one; `objective` is what
    `hydra_search` minimises, instead of the iteration by the simple cost model. The header's
    `predicted_s` and `lower_bound_s` are seconds by the simple cost model; `plan_s` is what `clock` measured for
    planning and verification. These three are no part of the plan's digest.

    Raises what `find_policy` does, and `InfeasibleError` (SEQUENCE_TOO_LONG) if the pool cannot hold the longest
    sequence.
    """
    place = find_policy(policy, pool)
    began = clock()
    plan = place(batch, pool, PlanningConfig(cost or CostModel(), cap, objective))
    verify_plan(plan, batch)
    plan_s = clock() - began
    return plan.with_predictions(
        predicted_s=forecast(plan, batch).iteration_s,
        lower_bound_s=lower_bound_s(batch, pool, plan.header.cost),
        plan_s=plan_s,
    )


def find_policy(name: str, pool: Pool) -> Policy:
    """The policy of this name.

    Raises `InvalidInputError` (UNKNOWN_POLICY) where there is none, `InfeasibleError` for a pool with slow or excluded
    ranks if the policy takes all ranks for equal.
    """
    if name not in POLICIES:
        raise InvalidInputError(
            Reason.UNKNOWN_POLICY, f"policy {name!r} is unknown; choose one of {', '.join(POLICIES)}"
        )
    if pool.speeds and name not in POLICIES_FOR_SLOW_RANKS:
        raise InfeasibleError(
            Reason.INFEASIBLE,
            f"policy {name} takes all ranks for equally fast, and {len(pool.speeds)} of this pool are slow or "
            f"excluded; choose {' or '.join(POLICIES_FOR_SLOW_RANKS)}, or give no speeds",
        )
    return POLICIES[name]


def warm_up() -> None:
    """Compile the planner's loops, or load them from numba's cache, so that the first plan is not the slow one."""
    for policy in ("hydra", "hydra_search"):
        plan_iteration(Batch([3, 2, 1]), Pool(ranks=2, token_budget=4, stages=2), policy=policy)
