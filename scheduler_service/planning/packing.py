"""Piggyback packing: which microbatch and which group each sequence runs in.

Sequences are tried from the longest to the shortest (lowest id first), one microbatch at a time over all ranks:
a sequence opens a group of its own degree k on the first free of the `openings` of that degree; else it joins the
least loaded feasible group of degree k, else 2k, 4k, …; else it waits for a later microbatch. Degrees only fall along
this order, so one cursor per degree finds what is free, and every microbatch places at least its first sequence.

A group runs at the pace of its slowest rank: one of speed v is filled up to v times its limit and v times its tokens.
It opens with the rest of the limit as a handicap, a load that nobody put there, so slow groups count as fuller. One
that is too slow for a sequence stays free for a shorter one; but the fastest of a degree take any sequence of that
degree, and so does the first that opens in a microbatch.

How this takes O(N log G) heap operations instead of scans (equal to `reference`, column for column):

    per degree class    ready  heap by load: the groups with tokens left for the sequence at hand; only its top is
                               ever filled, so no entry goes stale
                        parked heap by tokens left: a group at the top of `ready` that lacks tokens is parked, and
                               comes back when a sequence is short enough. Lengths fall along the order, so each
                               placement causes at most one parking and one return
                        wake   no waiting sequence before this position can join the class (or bring a parked
                               group back). Past the last position: the class is closed. A group that opens in the
                               class sets it to 0 again
    after a failure     jump to the nearest wake, or to the first sequence whose degree fits the free ranks.
                        Wakes are found by binary search on the predicate itself: what a group admits, it admits of
                        every shorter sequence too
    placed sequences    are skipped by union-find

What a sequence adds to its group's load is an integer weight that never falls with its length: s² here, its cost in
`profile_packing`, where each microbatch has its own limits.

No work is proportional to the number of ranks or of groups per sequence. The state is reused across microbatches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.compiled import compiled
from scheduler_service.domain import Batch, Pool
from scheduler_service.planning.degrees import DegreeClasses, degree_classes
from scheduler_service.planning.heaps import Heaps, new_heaps, pop, push, replace_top, top_item, top_key
from scheduler_service.planning.load_target import LoadTarget
from scheduler_service.planning.openings import Openings, openings

IntColumn = npt.NDArray[np.int32]
LongColumn = npt.NDArray[np.int64]

LOAD_OFFSET = 1 << 47
"""Taken off Σ w(s) in heap keys: a group that can still take a sequence has 0 ≤ Σ w(s) < limit ≤ 2⁴⁸."""


class Weight(NamedTuple):
    """What a sequence of s tokens adds to the load of its group: w(s) = ⌊(quadratic·s² + linear·s)/2^shift⌋.

    Integers, never falling with s. With s² alone, load is attention load.
    """

    quadratic: int
    linear: int
    shift: int


ATTENTION = Weight(1, 0, 0)


class Columns(NamedTuple):
    """The columns of a plan in the order of the ids, int32."""

    microbatch: IntColumn
    start: IntColumn
    degree: IntColumn


class Queue(NamedTuple):
    """The sequences in the order in which they are tried."""

    id: IntColumn
    length: LongColumn
    waiting: IntColumn
    """Union-find over positions: leads from a placed position to the next waiting one. One entry more: the end."""


class OpenGroups(NamedTuple):
    """The groups of the current microbatch, in the order in which they opened."""

    load: LongColumn
    """Handicap and Σ w(s) so far."""
    handicap: LongColumn
    left: LongColumn
    """Tokens that still fit."""


class Placement(NamedTuple):
    """What packing found. Columns of groups and of positions are written nearly in order, the plan's are not."""

    group: IntColumn
    """Group of each position of the queue, counted over all microbatches."""
    columns: Columns
    """Microbatch, start and degree of each group; as many rows as there are sequences, the last ones unused."""


class Packing(NamedTuple):
    """All state of a packing, made once and used for every microbatch."""

    queue: Queue
    classes: DegreeClasses
    """Limits and capacities of the microbatch at hand."""
    early: LongColumn
    """Limits of the classes for sequences before the split: at most their own."""
    begin: LongColumn
    """Of each class: the first position whose own degree is that of the class or a smaller one."""
    wake: LongColumn
    weight: Weight
    groups: OpenGroups
    ready: Heaps
    parked: Heaps
    placement: Placement
    openings: Openings
    cursor: LongColumn
    """Of each class: the openings before this one are taken."""
    taken: IntColumn
    """Of each rank: the last microbatch in which a group opened on it."""


def pack(batch: Batch, pool: Pool, target: LoadTarget) -> Columns:
    """Microbatch, start and degree of every sequence of `batch`, which must fit the pool at the target's cap."""
    packing = new_packing(queue_of(batch), pool, degree_classes(pool, target))
    pack_all(packing)
    return columns_of(packing)


def new_packing(queue: Queue, pool: Pool, classes: DegreeClasses, weight: Weight = ATTENTION) -> Packing:
    """Nothing placed yet; `classes` are the smallest degrees of the pool. One queue serves many packings in turn."""
    queue.waiting[:] = np.arange(len(queue.waiting), dtype=np.int32)
    most_groups = pool.ranks // classes.degree
    group, *columns = (np.empty(len(queue.id), np.int32) for _ in range(4))
    return Packing(
        queue=queue,
        classes=classes,
        early=classes.limit.copy(),
        begin=np.empty(len(classes.degree), np.int64),
        wake=np.empty(len(classes.degree), np.int64),
        weight=weight,
        groups=OpenGroups(*(np.empty(pool.ranks, np.int64) for _ in OpenGroups._fields)),
        ready=new_heaps(most_groups),
        parked=new_heaps(most_groups),
        placement=Placement(group, Columns(*columns)),
        openings=openings(pool),
        cursor=np.empty(len(classes.degree), np.int64),
        taken=np.full(pool.ranks, -1, np.int32),
    )


def columns_of(packing: Packing) -> Columns:
    """The columns of a finished packing, in the order of the ids."""
    placement = packing.placement
    group = np.empty(len(placement.group), np.int32)
    group[packing.queue.id] = placement.group
    return Columns(*(column[group] for column in placement.columns))


def queue_of(batch: Batch) -> Queue:
    """Sort by (length descending, id ascending): one integer key, 25 bits of length above 26 bits of id."""
    key = np.negative(batch.lengths)
    key <<= 26
    key += np.arange(len(batch))
    key.sort()
    ids = (key & ((1 << 26) - 1)).astype(np.int32)
    key >>= 26
    return Queue(ids, np.negative(key, out=key), np.empty(len(batch) + 1, np.int32))


@compiled
def pack_all(packing: Packing) -> int:
    """Microbatch after microbatch with the same limits: the number of groups."""
    set_begins(packing, 0)
    end = len(packing.queue.id)
    first, microbatch, before = 0, 0, 0
    while first < end:
        opened, _ = fill_microbatch(packing, microbatch, first, before, 0)
        before += opened
        microbatch += 1
        first = next_waiting(packing.queue.waiting, first)
    return before


@compiled
def set_begins(packing: Packing, first: int) -> None:
    """Set `begin` from the classes' longest sequences, none before `first`, the first position that waits."""
    lengths = packing.queue.length
    for row in range(len(packing.begin)):
        low, high = first, len(lengths)
        while low < high:
            middle = (low + high) >> 1
            if lengths[middle] <= packing.classes.longest[row]:
                high = middle
            else:
                low = middle + 1
        packing.begin[row] = low


@compiled
def fill_microbatch(packing: Packing, microbatch: int, first: int, before: int, split: int) -> tuple[int, float]:
    """Place what fits in one microbatch, by the rules of the module's docstring.

    `first` is the first waiting position; groups are counted from `before`. Sequences before position `split` fill
    groups up to the `early` limits only, which leaves room for those behind it. Returns the number of groups that it
    opened, and what it placed from before the split, Σ w(s).
    """
    queue, classes, early, begin, wake, weight, groups, ready, parked, placement, openings, cursor, taken = packing
    end = len(queue.id)
    ready.size[:] = 0
    parked.size[:] = 0
    wake[:] = end
    cursor[:] = openings.first[: len(cursor)]
    opened = 0
    placed_early = 0.0
    opens = first  # first position that can open a group
    own = len(begin) - 1  # class of the position at hand; only falls
    position = first
    while position < end:
        length = queue.length[position]
        while own > 0 and begin[own - 1] <= position:
            own -= 1
        chosen = own
        group = -1
        if position >= opens:
            opening = _free_opening(own, microbatch, openings, cursor, taken)
            limit = early[own] if position < split else classes.limit[own]
            fast = opening < openings.fast[own]  # asked here: what follows is for slow ranks, and takes longer
            if opened == 0 or fast or _takes(own, opening, length, limit, weight, classes, openings):
                group = opened
                opened += 1
                start = openings.start[opening]
                for rank in range(start, start + classes.degree[own]):
                    taken[rank] = microbatch
                placement.columns.microbatch[before + group] = microbatch
                placement.columns.start[before + group] = start
                placement.columns.degree[before + group] = classes.degree[own]
                _open(own, group, length, weight_of(weight, length), openings.speed[opening], classes, groups, ready)
                wake[own] = 0
            else:
                opens = _next_opening(position + 1, own, microbatch, split, packing)
        while group < 0 and chosen < len(wake):
            if wake[chosen] <= position:
                limit = early[chosen] if position < split else classes.limit[chosen]
                group = _join(chosen, length, weight_of(weight, length), limit, classes, groups, ready, parked)
                if group < 0:
                    after = max(position + 1, begin[chosen])
                    wake[chosen] = _wake(chosen, after, split, queue.length, early, weight, classes, ready, parked)
            if group < 0:
                chosen += 1
        if group >= 0:
            placement.group[position] = before + group
            if position < split:
                placed_early += weight_of(weight, length)
            queue.waiting[position] = position + 1
            position += 1
        else:
            position = min(wake.min(), opens)
        position = next_waiting(queue.waiting, position)
    return opened, placed_early


@compiled
def _open(
    own: int,
    group: int,
    length: int,
    load: int,
    speed: float,
    classes: DegreeClasses,
    groups: OpenGroups,
    ready: Heaps,
) -> None:
    """Open a group with its first sequence. A full one stays out of the heap: nothing can join it."""
    groups.handicap[group] = handicap_of(classes.limit[own], speed)
    load += groups.handicap[group]
    groups.load[group] = load
    groups.left[group] = int(speed * classes.capacity[own]) - _padded(length, classes.chunks[own])
    if load < classes.limit[own]:
        push(ready, own, load - LOAD_OFFSET, group)


@compiled
def _join(
    chosen: int,
    length: int,
    load: int,
    limit: int,
    classes: DegreeClasses,
    groups: OpenGroups,
    ready: Heaps,
    parked: Heaps,
) -> int:
    """Put the sequence into the least loaded group of the class with enough tokens left: the group, or −1."""
    tokens = _padded(length, classes.chunks[chosen])
    while parked.size[chosen] > 0 and -top_key(parked, chosen) >= tokens:
        group = pop(parked, chosen)
        push(ready, chosen, groups.load[group] - LOAD_OFFSET, group)
    while ready.size[chosen] > 0 and groups.left[top_item(ready, chosen)] < tokens:
        group = pop(ready, chosen)
        push(parked, chosen, -groups.left[group], group)
    if ready.size[chosen] == 0:
        return -1
    group = top_item(ready, chosen)
    load += top_key(ready, chosen) + LOAD_OFFSET
    if load > limit:
        return -1
    groups.left[group] -= tokens
    groups.load[group] = load
    if load < classes.limit[chosen]:
        replace_top(ready, chosen, load - LOAD_OFFSET, group)
    else:
        pop(ready, chosen)
    return group


@compiled
def _wake(
    chosen: int,
    position: int,
    split: int,
    lengths: LongColumn,
    early: LongColumn,
    weight: Weight,
    classes: DegreeClasses,
    ready: Heaps,
    parked: Heaps,
) -> int:
    """First position from `position` on that the class's best group admits, or that brings a parked group back.

    From `position` on, all sequences have the degree of the class or a smaller one. Called too often to be handed the
    whole `Packing`: that would take a tenth of all time.
    """
    early_left = load_left = -1
    if ready.size[chosen] > 0:
        load = LOAD_OFFSET + top_key(ready, chosen)
        early_left, load_left = early[chosen] - load, classes.limit[chosen] - load
    tokens_left = -1
    if parked.size[chosen] > 0:
        tokens_left = -top_key(parked, chosen)
    low, high = position, len(lengths)
    while low < high:
        middle = (low + high) >> 1
        length = lengths[middle]
        most = early_left if middle < split else load_left
        if weight_of(weight, length) <= most or _padded(length, classes.chunks[chosen]) <= tokens_left:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def _next_opening(position: int, own: int, microbatch: int, split: int, packing: Packing) -> int:
    """First position from `position` on, of class `own` or a smaller one, for which a group of its degree is free."""
    queue, classes, openings = packing.queue, packing.classes, packing.openings
    end = len(queue.id)
    for row in range(own, -1, -1):
        low = max(position, packing.begin[row])
        last = high = packing.begin[row - 1] if row > 0 else end
        if low >= high:
            continue
        opening = _free_opening(row, microbatch, openings, packing.cursor, packing.taken)
        while low < high:
            middle = (low + high) >> 1
            limit = packing.early[row] if middle < split else classes.limit[row]
            if _takes(row, opening, queue.length[middle], limit, packing.weight, classes, openings):
                high = middle
            else:
                low = middle + 1
        if low < last:
            return low
    return end


@compiled
def _free_opening(row: int, microbatch: int, openings: Openings, cursor: LongColumn, taken: IntColumn) -> int:
    """First opening of the class whose ranks are all free, or the end of the class."""
    # Groups are aligned, and none is smaller than this: where the first rank is free, all are.
    opening, end = cursor[row], openings.first[row + 1]
    while opening < end and taken[openings.start[opening]] == microbatch:
        opening += 1
    cursor[row] = opening
    return opening


@compiled
def _takes(
    row: int, opening: int, length: int, limit: int, weight: Weight, classes: DegreeClasses, openings: Openings
) -> bool:
    """Whether a sequence of this class can open the group: the fastest take any, the end of the class none."""
    end = openings.first[row + 1]
    speed = openings.speed[min(opening, end - 1)]
    within = (
        weight_of(weight, length) <= limit - handicap_of(classes.limit[row], speed)
        and _padded(length, classes.chunks[row]) <= speed * classes.capacity[row]
    )
    return opening < openings.fast[row] or (opening < end and within)


@compiled
def handicap_of(limit: int, speed: float) -> int:
    """Load that a group of this speed starts with, so that at its limit it holds ⌊speed·limit⌋."""
    return limit - int(speed * limit)


@compiled
def weight_of(weight: Weight, length: int) -> int:
    """w(s)."""
    return (weight.quadratic * length + weight.linear) * length >> weight.shift


@compiled
def _padded(length: int, chunks: int) -> int:
    # Mostly there is no ring; a division costs more than the rest of a step.
    return length if chunks == 1 else (length + chunks - 1) // chunks * chunks


@compiled
def next_waiting(waiting: IntColumn, position: int) -> int:
    """Find with path halving."""
    while waiting[position] != position:
        waiting[position] = waiting[waiting[position]]
        position = int(waiting[position])
    return position
