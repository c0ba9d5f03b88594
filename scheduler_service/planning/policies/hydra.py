"""HyDra: one load target from the longest sequence at a degree cap in closed form, then piggyback packing.

Follows: the cap C from the closed form (`load_target`); for each sequence the smallest degree that keeps load target
and token budget (`degrees`); microbatch by microbatch, longest first, a group of its own or the least loaded open one
(`packing`). Source: Fan et al., *HyDra: Demystifying and Taming Dynamic Context Parallelism at Production Scale*, 2026,
as described publicly (design of planning, sections 1 to 3).

Departs: padding counts as tokens, and where only the full pool holds the longest sequence, that is the cap. Ties, which
the description leaves open, go to the smaller cap, the lower id and the lower rank. With slow ranks, which the paper
does not know, there are two packings, one that gives each rank its share and one that takes them for equal, and the
forecast decides: where hardly a rank has full speed, what only such can hold within its share would fill microbatch
after microbatch.
"""

from __future__ import annotations

from scheduler_service.domain import Batch, Plan, Pool
from scheduler_service.planning.feasibility import pools_to_plan_for
from scheduler_service.planning.load_target import choose_target
from scheduler_service.planning.packing import pack
from scheduler_service.planning.policy import PlanningConfig, new_plan
from scheduler_service.simulation import forecast


def plan(batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
    """Plan `batch`: every rank of every microbatch is filled up to the load target, within its token budget."""
    plans = []
    for packed_for in pools_to_plan_for(batch, pool, config.cap):
        target = choose_target(batch, packed_for, config.cost, config.cap)
        columns = pack(batch, packed_for, target)
        plans.append(new_plan("hydra", batch, pool, config, columns, target=target.load, cap=target.cap))
    return plans[0] if len(plans) == 1 else min(plans, key=lambda plan: forecast(plan, batch).iteration_s)
