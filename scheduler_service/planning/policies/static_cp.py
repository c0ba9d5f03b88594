"""Static context parallelism: one degree for every sequence of the iteration, as most training stacks run today.

Follows: sequences are packed best-fit-decreasing into packs of nine tenths of a group's budget (or of the longest
sequence, if that is more), the packs fill the groups microbatch by microbatch, and groups that stay empty in the
last one take a sequence from a group that has more than one. Source: the project's description of static CP with
sequence packing (design of planning, section 5).

Departs: the degree need not divide the pool (the ranks left over idle, and the forecast charges for it); padding
counts as tokens, so a pack never overfills its group; a given degree that cannot hold the longest sequence is
raised to the smallest that can. Without a given degree this is the *best* static configuration for this very
batch, which a real job, whose degree is fixed before it sees its data, rarely has.
"""

from __future__ import annotations

import numpy as np

from scheduler_service.domain import Batch, InvalidInputError, Plan, Pool, Reason
from scheduler_service.planning.feasibility import fits, require_fit
from scheduler_service.planning.packs import Packs, best_fit
from scheduler_service.planning.policy import PlanningConfig, new_plan
from scheduler_service.simulation import forecast


def plan(batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
    """The plan at degree `config.cap`, or else at the degree with the shortest forecast, the smaller on a tie.

    Raises `InfeasibleError` where no degree holds the longest sequence, and `InvalidInputError` where the pool has
    no groups of `config.cap` ranks. Cost: O(N log N) per degree and one forecast each.
    """
    plans = [_plan_at(degree, batch, pool, config) for degree in usable_degrees(batch, pool, config.cap)]
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda candidate: forecast(candidate, batch).iteration_s)


def usable_degrees(batch: Batch, pool: Pool, given: int | None) -> list[int]:
    """Degrees that hold the longest sequence, ascending; only the given one where it does."""
    if given is not None and given not in pool.degrees:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"cap {given} is no degree of this pool; choose one of {', '.join(map(str, pool.degrees))}",
        )
    smallest = require_fit(batch, pool)
    if given is not None:
        return [given if fits(batch.longest, given, pool) else smallest]
    return [degree for degree in pool.degrees if fits(batch.longest, degree, pool)]


def _plan_at(degree: int, batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
    groups = pool.ranks // degree
    packs = _fill_last_microbatch(_pack(batch, pool, degree), groups)
    pack = np.empty(len(batch), np.int32)
    pack[[sequence for members in packs for sequence in members]] = np.repeat(
        np.arange(len(packs)), [len(members) for members in packs]
    )
    columns = (pack // groups, pack % groups * degree, np.full(len(batch), degree))
    return new_plan("static_cp", batch, pool, config, columns, cap=degree)


def _pack(batch: Batch, pool: Pool, degree: int) -> Packs:
    """Best fit decreasing, the longest sequence of each pack first."""
    nine_tenths = 9 * degree * pool.token_budget // 10
    capacity = min(pool.capacity(degree), max(nine_tenths, pool.padded(batch.longest, degree)))
    order = np.argsort(-batch.lengths, kind="stable")
    chunks = pool.chunks(degree)
    padded = -(-batch.lengths[order] // chunks) * chunks
    return best_fit(zip(order.tolist(), padded.tolist(), strict=True), capacity)


def _fill_last_microbatch(packs: Packs, groups: int) -> Packs:
    """Open the missing packs of the last microbatch with the shortest sequences of the nearest packs that have two."""
    missing = -len(packs) % groups
    donor = len(packs) - 1
    while missing and donor >= 0:
        if len(packs[donor]) > 1:
            packs.append([packs[donor].pop()])
            missing -= 1
        else:
            donor -= 1
    return packs
