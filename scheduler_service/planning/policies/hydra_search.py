"""HyDra and beyond: balance cost, not attention load alone, in microbatches that ramp up and down.

The plan of `hydra` is one candidate. The others follow profiles (`ramps`): for each of a fixed list of microbatch
counts the best profile is found on a replay of the mean pipeline, and the most promising counts are packed
(`profile_packing`) with a little slack, largest microbatch first. Each microbatch then takes the place of its size in
the profile, a few are exchanged (`microbatch_order`), and all pipelines are replayed. The fastest by the objective
wins, the first of equals; so it is never slower than `hydra`, by that objective: the simple cost model, or one of
operators where there is one. It follows no other system; source: design of planning, section 4.

The candidates depend on the input alone, never on the clock: the same input gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, CostModel, Plan, Pool
from scheduler_service.domain.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR
from scheduler_service.planning.feasibility import pools_to_plan_for
from scheduler_service.planning.load_target import choose_target
from scheduler_service.planning.microbatch_order import improved_order
from scheduler_service.planning.packing import Queue, queue_of
from scheduler_service.planning.policy import PlanningConfig, new_plan
from scheduler_service.planning.profile_packing import Packed, cost_weight, pack_to_profile, pack_to_target
from scheduler_service.planning.ramps import Profile, Shape, best_profile, profile
from scheduler_service.simulation import Objective, SimpleObjective

Seconds = npt.NDArray[np.float64]

COUNTS = 20
"""How many microbatch counts are screened by one pipeline."""

MOST_SCREENED = 4096
"""Microbatches of all screened counts together."""

PACKED = (
    (0, 0.01, 0.1), (1, 0.01, 0.1), (0, 0.01, 0.2), (0, 0.01, 0.0), (1, 0.01, 0.2), (0, 0.01, 0.3), (1, 0.01, 0.0),
    (0, 0.0, 0.05), (2, 0.01, 0.1), (2, 0.01, 0.2), (0, 0.03, 0.1), (3, 0.01, 0.1), (2, 0.01, 0.0), (0, 0.01, 0.5),
)  # fmt: skip
"""What is packed: rank of the count in the screening, slack of the sizes, share of the cost before the split."""

ALWAYS_PACKED = 8
"""So many of them for any batch; the smaller the batch, the more. By an objective that is given, all: no job waits."""

DOUBLING = 0.001
"""By the simple cost model, doubling all degrees counts as so much of the iteration: it charges neither exchanges nor
short shards, and would take a sequence of 500 tokens on 512 ranks for a gain of a thousandth."""

_SEQUENCES_FOR_MORE = 60_000

_LONGEST = 256
"""So many of the longest sequences are looked at for what the largest microbatches must hold."""


class Candidate(NamedTuple):
    """A packing, and where its microbatches run."""

    span_s: float
    packed: Packed
    place: npt.NDArray[np.int32]
    """Microbatch of the plan for each one that was packed."""
    cap: int
    """Largest degree that was allowed; 0 where any was."""
    load: float = 0.0
    """The load target, where all microbatches have one."""

    @property
    def doublings(self) -> float:
        """Mean of ⌊log₂ degree⌋, weighted by tokens: sums of integers, the same on every machine."""
        groups = self.packed.groups
        doublings, tokens = np.frexp(groups.degree)[1] - 1, groups.tokens * groups.degree
        return int((doublings * tokens).sum()) / int(tokens.sum())


def plan(batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
    """Plan `batch`: the fastest of a fixed list of candidates, by the configured objective.

    By the simple cost model, in which wide groups cost nothing: of nearly equals, the one with the narrower groups.
    """
    queue, objective = queue_of(batch), config.objective or SimpleObjective(pool, config.cost)
    pools = pools_to_plan_for(batch, pool, config.cap)
    base = min((_hydra(batch, queue, each, config, objective) for each in pools), key=lambda found: found.span_s)
    searched = (found for each in pools for found in _searched(batch, queue, each, config, objective))
    candidates = chain([base], (found for found in searched if found.span_s <= base.span_s))
    doubling = 0.0 if config.objective else DOUBLING
    best = min(candidates, key=lambda found: found.span_s * (1 + doubling * found.doublings))
    microbatch, start, degree = best.packed.columns
    columns = (best.place[microbatch], start, degree)
    return new_plan("hydra_search", batch, pool, config, columns, target=best.load, cap=best.cap)


def _hydra(batch: Batch, queue: Queue, pool: Pool, config: PlanningConfig, objective: Objective) -> Candidate:
    """What `hydra` packs for this pool."""
    target = choose_target(batch, pool, config.cost, config.cap)
    return _candidate(pack_to_target(queue, pool, target), pool, objective, target.cap, load=target.load)


def _searched(
    batch: Batch, queue: Queue, pool: Pool, config: PlanningConfig, objective: Objective
) -> Iterator[Candidate]:
    """The packings of `PACKED` for this pool, one at a time: each holds as much memory as a plan."""
    cost = config.cost
    cap = choose_target(batch, pool, cost, config.cap).cap if config.cap else None
    shape = _shape(batch, pool, cost)
    if shape.work_s == 0:
        return
    weight = cost_weight(cost, batch)
    needs = _needs(queue, pool, cost, cap)
    profiles = [best_profile(shape, count, needs) for count in _counts(batch, pool, shape)]
    profiles.sort(key=lambda found: found.span_s)
    most = len(PACKED) if config.objective else ALWAYS_PACKED + _SEQUENCES_FOR_MORE // len(batch)
    for rank, slack, early_share in PACKED[:most]:
        if rank < len(profiles):
            sizes = np.sort(profiles[rank].sizes)[::-1].copy()
            packed = pack_to_profile(queue, pool, weight, sizes, slack=slack, early_share=early_share, cap=cap)
            if packed is not None:
                # The packing may have needed a few more microbatches, or fewer.
                wanted = profile(shape, len(packed.limit), needs, profiles[rank].ends)
                yield _candidate(packed, pool, objective, cap or 0, wanted)


def _shape(batch: Batch, pool: Pool, cost: CostModel) -> Shape:
    attention = cost.theta * batch.sum_of_squares / pool.total_speed
    linear = cost.tau * batch.tokens / pool.total_speed
    work = (1 + BACKWARD_ATTENTION) * attention + (1 + BACKWARD_LINEAR) * linear
    return Shape(pool.stages, work, (attention + linear) / work if work > 0 else 0.5, cost.overhead)


def _needs(queue: Queue, pool: Pool, cost: CostModel, cap: int | None) -> Seconds:
    """Seconds of the longest sequences alone in a microbatch, on the group that is fastest for them."""
    pace = max(pool.pace(degree) for degree in pool.degrees if degree <= (cap or pool.ranks))
    longest = queue.length[:_LONGEST].astype(np.float64)
    attention, linear = (1 + BACKWARD_ATTENTION) * cost.theta, (1 + BACKWARD_LINEAR) * cost.tau
    return (attention * longest + linear) * longest / pace


def _counts(batch: Batch, pool: Pool, shape: Shape) -> list[int]:
    """Numbers of microbatches to try: from what the tokens need to well past what balances bubble and overhead."""
    fewest = -(-batch.tokens // ((pool.ranks - len(pool.excluded)) * pool.token_budget))
    most = 8 * fewest + 8 * pool.stages
    if shape.overhead_s > 0:
        most = min(most, max(fewest + 2, round(1.5 * math.sqrt(shape.stages * shape.work_s / (2 * shape.overhead_s)))))
    most = min(most, max(fewest, len(batch)))
    multiple = pool.microbatch_multiple
    # In integers: a power would differ in its last bit between machines. Close together where there are few.
    counts = (fewest + (most - fewest) * step**2 // (COUNTS - 1) ** 2 for step in range(COUNTS))
    aligned = sorted({-(-count // multiple) * multiple for count in counts})
    # Screening costs as much as there are microbatches, and where there are thousands, hardly any bubble is left.
    return [
        count for count, total in zip(aligned, accumulate(aligned), strict=True) if total <= MOST_SCREENED
    ] or aligned[:1]


def _candidate(
    packed: Packed, pool: Pool, objective: Objective, cap: int, wanted: Profile | None = None, load: float = 0.0
) -> Candidate:
    """Replay a packing: its microbatches in the places of their sizes in the profile, and improved, or unmoved."""
    count = len(packed.limit)
    empty = -count % pool.microbatch_multiple  # they fill up the multiple and come last
    times = objective.times(packed.groups, count + empty)
    order = np.arange(count + empty)
    if wanted is not None:
        forward, backward = times.mean()
        taken = forward[:count] + backward[:count]
        order[np.argsort(-wanted.sizes, kind="stable")] = np.argsort(-taken, kind="stable")
        order[:count] = improved_order(forward, backward, pool.stages, order[:count])
    return Candidate(times.iteration_s(order), packed, np.argsort(order).astype(np.int32), cap, load)
