"""ByteScale: hybrid data parallelism, in its balanced version.

Follows: a sequence over the budget runs on the fewest ranks that hold it; short ones are packed best-fit, longest
first, to the budget of one rank. These units, by falling cost T = Σ(a·s² + b·s) + g, are cut into buckets of about
equal cost. Again and again, the ranks that are more than δ below the fullest are served with one unit each, or all
ranks where none is: *DP-balance* takes them from the first bucket until that is empty; *PP-balance*, for pipelines,
from each bucket in turn, so that the ranks see the same mixture. Ranks may end with different numbers of microbatches;
the missing ones are empty. Source: the project's description of that system (design of planning, section 5), written
anew from it.

Departs: the paper gives a sequence ⌈s/B⌉ ranks, any number and any set of ranks. Such groups are not offered: no valid
plan of ours has them (the verifier wants aligned powers of two, or the full pool), and each would be a communicator of
its own. This is the variant with degrees rounded up to ours; a group runs in the first microbatch that is free on all
of its ranks, which may leave holes before it. Padding counts as tokens. The description leaves δ, the number of buckets
and the choice among the ranks to be served open: δ is 5 % of the fullest rank's time, there are as many buckets as
pipeline stages, and a unit goes to the aligned ranks whose fullest has least to do. A unit that finds no such ranks
among those to be served ends the round; if it finds none in the next one either, all ranks are served. Of the two
balances, the one with the shorter forecast is used. It takes no degree cap.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, CostModel, Plan, Pool
from scheduler_service.domain.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR
from scheduler_service.planning.feasibility import memory_degrees, require_fit
from scheduler_service.planning.packs import best_fit
from scheduler_service.planning.policy import PlanningConfig, new_plan
from scheduler_service.simulation import forecast

BALANCED = 0.05
"""δ: how far below the fullest rank's time a rank counts as balanced, as a share of that time."""


class Unit(NamedTuple):
    """What runs together in one microbatch: a long sequence on its ranks, or a pack of short ones on one rank."""

    degree: int
    members: list[int]
    seconds: float
    """Of one stage, forward and backward, on each of its ranks."""


def plan(batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
    """The plan by DP-balance or, with pipelines, by PP-balance: the one with the shorter forecast.

    Raises `InfeasibleError` where no degree holds the longest sequence. Cost: O(N log N + U·G) for U units.
    """
    require_fit(batch, pool)
    units = _units(batch, pool, config.cost)
    plans = [_serve(_in_turn(_buckets(units, count)), batch, pool, config) for count in sorted({1, pool.stages})]
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda candidate: forecast(candidate, batch).iteration_s)


def _serve(units: list[Unit], batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
    """Serve the ranks round by round until no unit is left."""
    columns = np.zeros((3, len(batch)), np.int32)
    ranks = _Ranks(pool.ranks)
    for unit in units:
        slot, start = ranks.serve(unit)
        columns[:, unit.members] = [[slot], [start], [unit.degree]]
    microbatch, start_column, degree = columns
    return new_plan("bytescale", batch, pool, config, (microbatch, start_column, degree))


def _units(batch: Batch, pool: Pool, cost: CostModel) -> list[Unit]:
    """By falling cost over all ranks of the unit, its first sequence deciding a tie."""
    degrees = memory_degrees(batch.lengths, pool).tolist()
    lengths = batch.lengths.tolist()
    order = np.argsort(-batch.lengths, kind="stable").tolist()
    short = ((i, lengths[i]) for i in order if degrees[i] == 1)
    attention, linear = (1 + BACKWARD_ATTENTION) * cost.theta, (1 + BACKWARD_LINEAR) * cost.tau

    def unit(members: list[int]) -> Unit:
        degree = degrees[members[0]]
        squares = sum(lengths[i] ** 2 for i in members)
        tokens = sum(pool.padded(lengths[i], degree) for i in members)
        return Unit(degree, members, (attention * squares + linear * tokens) / degree + 2 * cost.overhead)

    found = [unit([i]) for i in order if degrees[i] > 1]
    found += [unit(members) for members in best_fit(short, pool.capacity(1))]
    return sorted(found, key=lambda u: (-u.seconds * u.degree, u.members[0]))


def _buckets(units: list[Unit], count: int) -> list[list[Unit]]:
    """Cut the units, in their order, into at most `count` buckets of about equal cost."""
    cost = np.array([unit.seconds * unit.degree for unit in units])
    middle = np.cumsum(cost) - cost / 2
    edges = np.searchsorted(middle, cost.sum() * np.arange(1, count) / count, side="right").tolist()
    cuts = zip([0, *edges], [*edges, len(units)], strict=True)
    return [units[first:last] for first, last in cuts if first < last]


def _in_turn(buckets: list[list[Unit]]) -> list[Unit]:
    """One unit from each bucket, again and again; with a single bucket that is DP-balance."""
    return [unit for row in zip_longest(*buckets) for unit in row if unit is not None]


class _Ranks:
    """What each rank has to do so far."""

    def __init__(self, ranks: int) -> None:
        self._seconds = np.zeros(ranks)
        self._microbatches = np.zeros(ranks, np.int64)
        self._targets = np.ones(ranks, bool)

    def serve(self, unit: Unit) -> tuple[int, int]:
        """Give the unit to targets of this round, or else open the next; its microbatch and first rank."""
        blocks = self._blocks(unit.degree)
        if np.isinf(blocks).all():
            behind = self._seconds < (1 - BALANCED) * self._seconds.max()
            self._targets = behind if behind.any() else np.ones_like(behind)
            blocks = self._blocks(unit.degree)
        if np.isinf(blocks).all():  # targets, but no aligned ranks that are all of them
            self._targets[:] = True
            blocks = self._blocks(unit.degree)
        start = int(blocks.argmin()) * unit.degree
        mine = slice(start, start + unit.degree)
        slot = int(self._microbatches[mine].max())
        self._microbatches[mine] = slot + 1
        self._seconds[mine] += unit.seconds
        self._targets[mine] = False
        return slot, start

    def _blocks(self, degree: int) -> npt.NDArray[np.float64]:
        """Time of the fullest rank of each aligned block of ranks; infinite where one of them is no target."""
        seconds = np.where(self._targets, self._seconds, np.inf)
        return seconds[: len(seconds) // degree * degree].reshape(-1, degree).max(axis=1)
