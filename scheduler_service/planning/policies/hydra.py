"""HyDra: one load target from the longest sequence at a degree cap in closed form, then piggyback packing.

Follows: the cap C from the closed form (`load_target`); for each sequence the smallest degree that keeps load target
and token budget (`degrees`); microbatch by microbatch, longest first, a group of its own or the least loaded open one
(`packing`). Source: Fan et al., *HyDra: Demystifying and Taming Dynamic Context Parallelism at Production Scale*, 2026,
as described publicly (design of planning, sections 1 to 3).

Departs: padding counts as tokens, and where only the full pool holds the longest sequence, that is the cap. Ties, which
the description leaves open, go to the smaller cap, the lower id and the lower rank.
"""

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
