"""HyDra: one load target from the longest sequence at a degree cap in closed form, then piggyback packing."""

from __future__ import annotations

from scheduler_service.domain import Batch, Plan, Pool
from scheduler_service.planning.load_target import choose_target
from scheduler_service.planning.packing import pack
from scheduler_service.planning.policy import PlanningConfig, new_plan


def plan(batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
    """Plan `batch`: every rank of every microbatch is filled up to the load target, within its token budget."""
    target = choose_target(batch, pool, config.cost, config.cap)
    columns = pack(batch, pool, target)
    return new_plan("hydra", batch, pool, config, columns, target=target.load, cap=target.cap)
