"""Packing to a profile: every microbatch has a size of its own, and cost is balanced, not attention load alone.

A sequence weighs what it costs, forward and backward, on all its ranks together: w(s) ∝ 3.5·θ·s² + 3·τ·s, as an
integer. A microbatch of size z seconds gives a group of g ranks of full speed the limit z·g; the token budget holds as
always. The longest waiting sequence must fit: where z is less than it costs on the fastest group that holds it, the
microbatch is as large as that.
What fits is placed by the rules of `packing`.

Long sequences cost attention, short ones tokens. Taken strictly by length, the first microbatches would be all
attention and the last all tokens, and differ in how much of their time is forward; or the token budget would make the
last ones small, whatever their size should be. So the sequences are split in two: those before the split fill each
microbatch to their share of what still waits, and those behind it fill the rest.

Sizes are scaled to what still waits, so that a microbatch that stays below its size leaves the rest to the next ones,
not to one more at the end.

A small microbatch is a few sequences for each rank, and whole sequences do not fill it evenly. What an expert-parallel
group waits for is its fullest rank; so where a rank would get less than some sequences, they run on a few ranks
together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.compiled import compiled
from scheduler_service.domain import Batch, CostModel, Pool
from scheduler_service.domain.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR
from scheduler_service.planning.degrees import MOST_LOAD, DegreeClasses, degree_classes
from scheduler_service.planning.load_target import LoadTarget
from scheduler_service.planning.packing import (
    Columns,
    Packing,
    Placement,
    Queue,
    Weight,
    columns_of,
    fill_microbatch,
    new_packing,
    next_waiting,
    pack_all,
    set_begins,
    weight_of,
)
from scheduler_service.simulation import GroupLoads

LongColumn = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


SEQUENCES_OF_A_GROUP = 8
"""Degrees whose groups would hold fewer sequences of typical length are left out, up to the size of an EP group."""

ROOM_OF_THE_LAST = 2.0
"""The last microbatch is to take all that is left. Its limit does not shape it: the least loaded group is filled."""


class Packed(NamedTuple):
    """A finished packing."""

    packing: Packing
    groups: GroupLoads
    limit: LongColumn
    """Most Σ w(s) of a group in each microbatch, (microbatches, degrees)."""
    early: LongColumn
    """The same for sequences before the split."""
    split: int
    """Tokens of the longest sequence behind the split."""

    @property
    def columns(self) -> Columns:
        """The plan's columns."""
        return columns_of(self.packing)


def cost_weight(cost: CostModel, batch: Batch) -> Weight:
    """w(s) that is proportional to the cost of a sequence, up to rounding; that of the whole batch fits the heaps."""
    attention, linear = (1 + BACKWARD_ATTENTION) * cost.theta, (1 + BACKWARD_LINEAR) * cost.tau
    if attention == 0 or linear / attention > 1 << 38:
        return Weight(0, 1, 0)
    # Sixteen more bits where there is room, or a small τ would round to nothing.
    quadratic = 1 << 16
    per_token = round(linear / attention * quadratic)
    if per_token > 1 << 38 or batch.longest > 1 << 20:
        quadratic, per_token = 1, round(linear / attention)
    most = quadratic * int(batch.sum_of_squares) + per_token * batch.tokens
    return Weight(quadratic, per_token, max(0, most.bit_length() - MOST_LOAD.bit_length() + 1))


def pack_to_target(queue: Queue, pool: Pool, target: LoadTarget) -> Packed:
    """What `packing.pack` does, with what the forecast needs."""
    classes = degree_classes(pool, target)
    packing = new_packing(queue, pool, classes)
    groups = _group_loads(packing, pool, pack_all(packing))
    limit = np.broadcast_to(classes.limit, (int(groups.microbatch[-1]) + 1, len(classes.limit)))
    return Packed(packing, groups, limit, limit, int(queue.length[0]))


def pack_to_profile(
    queue: Queue,
    pool: Pool,
    weight: Weight,
    sizes: Seconds,
    *,
    slack: float,
    early_share: float = 0.0,
    cap: int | None = None,
) -> Packed | None:
    """Pack the queue, which must fit the pool, into microbatches of `sizes`, the largest first.

    `sizes`: (microbatches,); only their ratios count. Each is widened by `slack`, for no packing is perfect. Degrees
    go up to `cap`. Sequences before the split make up `early_share` of all cost. None where the work does not go
    into that many microbatches and a few more: the token budget leaves too much to the last ones.
    """
    degrees = [degree for degree in pool.degrees if degree <= (cap or pool.ranks)]
    capacity = np.array([pool.capacity(degree) for degree in degrees], np.int64)
    classes = DegreeClasses(
        degree=np.array(degrees, np.int64),
        limit=np.empty_like(capacity),
        capacity=capacity,
        chunks=np.array([pool.chunks(degree) for degree in degrees], np.int64),
        longest=np.empty_like(capacity),
    )
    packing = new_packing(queue, pool, classes, weight)
    limit, early = np.empty((2, len(sizes) + 2 + len(sizes) // 8, len(capacity)), np.int64)
    profile = _Profile(sizes, 1.0 + slack, pool.total_speed, pool.ep)
    microbatches, groups, split = _pack(packing, profile, early_share, limit, early)
    if microbatches < 0:
        return None
    behind = int(queue.length[split]) if split < len(queue.length) else 0
    loads = _group_loads(packing, pool, groups)
    return Packed(packing, loads, limit[:microbatches], early[:microbatches], behind)


class _Profile(NamedTuple):
    """What microbatches should hold."""

    sizes: Seconds
    margin: float
    total_speed: float
    ep: int


@compiled
def _pack(
    packing: Packing, profile: _Profile, early_share: float, limit: LongColumn, early: LongColumn
) -> tuple[int, int, int]:
    """Fills `limit` and `early`. The number of microbatches, −1 where the rows do not do; of groups; the split."""
    lengths, sizes = packing.queue.length, profile.sizes
    left = _total_weight(packing, 0, len(lengths))
    split = _split(packing, early_share * left)
    early_left = _total_weight(packing, 0, split)
    sizes_left = sizes.sum()

    microbatch, groups, first = 0, 0, 0
    while first < len(lengths):
        if microbatch == len(limit):
            return -1, groups, split
        size = left / profile.total_speed
        if microbatch < len(sizes) - 1:
            size *= sizes[microbatch] / sizes_left
            sizes_left -= sizes[microbatch]
        else:
            size *= ROOM_OF_THE_LAST
        share = min(1.0, early_left / left) if left > 0.0 else 1.0
        _set_limits(packing, first, size * profile.margin, share, split, profile.ep)
        limit[microbatch] = packing.classes.limit
        early[microbatch] = packing.early
        set_begins(packing, first)
        opened, placed_early = fill_microbatch(packing, microbatch, first, groups, split)
        for group in range(opened):
            left -= packing.groups.load[group] - packing.groups.handicap[group]
        left = max(left, 0.0)
        early_left = max(early_left - placed_early, 0.0)
        groups += opened
        microbatch += 1
        first = next_waiting(packing.queue.waiting, first)
    return microbatch, groups, split


@compiled
def _total_weight(packing: Packing, first: int, last: int) -> float:
    """Σ w(s) of the positions from `first` to before `last`, one added after the other: the same everywhere."""
    total = 0.0
    for position in range(first, last):
        total += weight_of(packing.weight, packing.queue.length[position])
    return total


@compiled
def _split(packing: Packing, early: float) -> int:
    """First position behind the longest sequences that weigh `early` together; equal lengths stay together."""
    lengths = packing.queue.length
    position = 0
    while position < len(lengths) and early > 0.0:
        early -= weight_of(packing.weight, lengths[position])
        position += 1
    while 0 < position < len(lengths) and lengths[position] == lengths[position - 1]:
        position += 1
    return position


@compiled
def _set_limits(packing: Packing, first: int, size: float, early_share: float, split: int, ep: int) -> None:
    """Set the limits and the longest sequences of all classes for a microbatch whose first sequence is at `first`."""
    classes, weight, lengths = packing.classes, packing.weight, packing.queue.length
    speeds = packing.openings.speed[packing.openings.first[: len(classes.degree)]]  # of the fastest groups
    longest = lengths[first]
    heaviest = weight_of(weight, longest)
    most = -1
    for row in range(len(classes.degree)):
        better = most < 0 or classes.degree[row] * speeds[row] >= classes.degree[most] * speeds[most]
        if better and classes.capacity[row] >= longest:
            most = row
    least = heaviest / (classes.degree[most] * speeds[most])
    size = max(size, least)
    early = max(size * early_share, least)
    behind = lengths[split] if split < len(lengths) else 0
    middle = min(next_waiting(packing.queue.waiting, (first + len(lengths)) // 2), len(lengths) - 1)
    least_of_group = SEQUENCES_OF_A_GROUP * weight_of(weight, lengths[middle])
    so_far = 0
    for row in range(len(classes.degree)):
        limit = int(min(float(MOST_LOAD), size * classes.degree[row]))
        if row == most:  # whatever rounding did
            limit = max(limit, int(min(float(MOST_LOAD), heaviest / speeds[row])) + (speeds[row] < 1.0))
        allowed = int(speeds[row] * limit)
        early_allowed = int(speeds[row] * min(float(MOST_LOAD), early * classes.degree[row]))
        if row == most:
            early_allowed = max(early_allowed, heaviest)
        elif classes.degree[row] < ep and limit < least_of_group:
            limit = allowed = early_allowed = 0
        classes.limit[row] = limit
        packing.early[row] = limit - allowed + early_allowed
        own = max(_longest_of(weight, early_allowed, longest), min(behind, _longest_of(weight, allowed, longest)))
        so_far = max(so_far, min(own, classes.capacity[row]))
        classes.longest[row] = so_far


@compiled
def _longest_of(weight: Weight, limit: int, most: int) -> int:
    """Largest s ≤ `most` with w(s) ≤ `limit`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) >> 1
        if weight_of(weight, middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def _group_loads(packing: Packing, pool: Pool, groups: int) -> GroupLoads:
    """What the forecast needs, from the placement itself: no sort."""
    microbatch, start, degree = (column[:groups] for column in packing.placement.columns)
    chunks, multiple = np.zeros((2, pool.ranks + 1), np.int64)
    for d in pool.degrees:
        chunks[d], multiple[d] = pool.chunks(d), pool.stream_multiple(d)
    squares, tokens = np.zeros(groups), np.zeros(groups, np.int64)
    _sum_groups(packing.queue.length, packing.placement, chunks, squares, tokens)
    multiple = multiple[degree]
    return GroupLoads(microbatch, start, degree, squares / degree, -(-tokens // multiple) * multiple // degree)


@compiled
def _sum_groups(
    lengths: LongColumn, placement: Placement, chunks: LongColumn, squares: Seconds, tokens: LongColumn
) -> None:
    for position in range(len(lengths)):
        length, group = lengths[position], placement.group[position]
        chunk = chunks[placement.columns.degree[group]]
        squares[group] += float(length) * length
        tokens[group] += length if chunk == 1 else (length + chunk - 1) // chunk * chunk
