"""HyDra and beyond: balance cost, not attention load alone, in microbatches that ramp up and down.

The plan of `hydra` is one candidate. The others follow profiles (`ramps`): for each of a fixed list of microbatch
counts the best profile is found on a replay of the mean pipeline, and the most promising counts are packed
(`profile_packing`) with a little slack, largest microbatch first. Each microbatch then takes the place of its size in
the profile, and all pipelines are replayed. The fastest by the simple cost model wins, the first of equals; so it is
never slower than `hydra`, by the model.

The candidates depend on the input alone, never on the clock: the same input gives the same bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, CostModel, Plan, Pool
from scheduler_service.domain.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR
from scheduler_service.planning.load_target import choose_target
from scheduler_service.planning.packing import Queue, queue_of
from scheduler_service.planning.policy import PlanningConfig, new_plan
from scheduler_service.planning.profile_packing import Packed, cost_weight, pack_to_profile, pack_to_target
from scheduler_service.planning.ramps import Profile, Shape, best_profile, profile
from scheduler_service.simulation import microbatch_times, pipeline_spans

Seconds = npt.NDArray[np.float64]

COUNTS = 12
"""How many microbatch counts are screened by one pipeline."""

PACKED = (
    (0, 0.01, 0.0), (1, 0.01, 0.0), (2, 0.01, 0.0), (0, 0.01, 0.5), (3, 0.01, 0.0), (1, 0.01, 0.5),
    (2, 0.01, 0.5), (3, 0.01, 0.5), (2, 0.01, 0.7), (0, 0.03, 0.0), (1, 0.01, 0.7), (0, 0.03, 0.5),
)  # fmt: skip
"""What is packed: rank of the count in the screening, slack of the sizes, share of the cost before the split."""

ALWAYS_PACKED = 5
"""So many of them for any batch; the smaller the batch, the more."""

_SEQUENCES_FOR_MORE = 60_000

_LONGEST = 256
"""So many of the longest sequences are looked at for what the largest microbatches must hold."""


class Candidate(NamedTuple):
    """A packing, and where its microbatches run."""

    span_s: float
    packed: Packed
    place: npt.NDArray[np.int32]
    """Microbatch of the plan for each one that was packed."""
    target: float
    cap: int


def plan(batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
    """Plan `batch`: the fastest of a fixed list of candidates, by the simple cost model."""
    target = choose_target(batch, pool, config.cost, config.cap)
    queue = queue_of(batch)
    packed = pack_to_target(queue, pool, target)
    unmoved = np.arange(len(packed.limit), dtype=np.int32)
    best = Candidate(_span(packed, unmoved, pool, config.cost), packed, unmoved, target.load, target.cap)

    shape = _shape(batch, pool, config.cost)
    if shape.work_s > 0:
        cap = target.cap if config.cap else None
        weight = cost_weight(config.cost, batch.longest)
        needs = _needs(queue, pool, config.cost, cap)
        profiles = sorted(
            (best_profile(shape, count, needs) for count in _counts(batch, pool, shape)), key=lambda found: found.span_s
        )
        for rank, slack, early_share in PACKED[: ALWAYS_PACKED + _SEQUENCES_FOR_MORE // len(batch)]:
            if rank >= len(profiles):
                continue
            sizes = np.sort(profiles[rank].sizes)[::-1].copy()
            found = pack_to_profile(queue, pool, weight, sizes, slack=slack, early_share=early_share, cap=cap)
            if found is None:
                continue
            place = _places(found, profiles[rank], shape, needs, pool, config.cost)
            span = _span(found, place, pool, config.cost)
            if span < best.span_s:
                best = Candidate(span, found, place, 0.0, cap or 0)

    microbatch, start, degree = best.packed.columns
    columns = (best.place[microbatch], start, degree)
    return new_plan("hydra_search", batch, pool, config, columns, target=best.target, cap=best.cap)


def _shape(batch: Batch, pool: Pool, cost: CostModel) -> Shape:
    attention = cost.theta * batch.sum_of_squares / pool.ranks
    linear = cost.tau * batch.tokens / pool.ranks
    work = (1 + BACKWARD_ATTENTION) * attention + (1 + BACKWARD_LINEAR) * linear
    return Shape(pool.stages, work, (attention + linear) / work if work > 0 else 0.5, cost.overhead)


def _needs(queue: Queue, pool: Pool, cost: CostModel, cap: int | None) -> Seconds:
    """Seconds of the longest sequences alone in a microbatch, at the largest degree."""
    degree = max(d for d in pool.degrees if d <= (cap or pool.ranks))
    longest = queue.length[:_LONGEST].astype(np.float64)
    attention, linear = (1 + BACKWARD_ATTENTION) * cost.theta, (1 + BACKWARD_LINEAR) * cost.tau
    return (attention * longest + linear) * longest / degree


def _counts(batch: Batch, pool: Pool, shape: Shape) -> list[int]:
    """Numbers of microbatches to try: from what the tokens need to well past what balances bubble and overhead."""
    fewest = -(-batch.tokens // (pool.ranks * pool.token_budget))
    most = 8 * fewest + 8 * pool.stages
    if shape.overhead_s > 0:
        most = min(most, max(fewest + 2, round(1.5 * math.sqrt(shape.stages * shape.work_s / (2 * shape.overhead_s)))))
    most = min(most, max(fewest, len(batch)))
    multiple = pool.microbatch_multiple
    # In integers: a power would differ in its last bit between machines. Close together where there are few.
    counts = (fewest + (most - fewest) * step**2 // (COUNTS - 1) ** 2 for step in range(COUNTS))
    return sorted({-(-count // multiple) * multiple for count in counts})


def _places(
    packed: Packed, wanted: Profile, shape: Shape, needs: Seconds, pool: Pool, cost: CostModel
) -> npt.NDArray[np.int32]:
    """The largest microbatch goes where the profile is largest, and so on."""
    count = len(packed.limit)
    forward, backward = microbatch_times(packed.groups, pool, cost, count)
    taken = forward.mean(axis=0) + backward.mean(axis=0)
    if count != len(wanted.sizes):
        wanted = profile(shape, count, needs, wanted.ends)
    place = np.empty(count, np.int32)
    place[np.argsort(-taken, kind="stable")] = np.argsort(-wanted.sizes, kind="stable")
    return place


def _span(packed: Packed, place: npt.NDArray[np.int32], pool: Pool, cost: CostModel) -> float:
    """Seconds of the slowest pipeline. Empty microbatches that fill up the pool's multiple come last."""
    count = -(-len(place) // pool.microbatch_multiple) * pool.microbatch_multiple
    order = np.arange(count)
    order[place] = np.arange(len(place))
    forward, backward = microbatch_times(packed.groups, pool, cost, count)
    return float(pipeline_spans(forward[:, order], backward[:, order], pool.stages).max())
