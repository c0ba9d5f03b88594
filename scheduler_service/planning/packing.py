"""Piggyback packing: which microbatch and which group each sequence runs in.

Sequences are tried from the longest to the shortest (lowest id first), one microbatch at a time over all ranks:
a sequence opens a group of its own degree k while k ranks are free; else it joins the least loaded feasible group
of degree k, else 2k, 4k, …; else it waits for a later microbatch. Degrees only fall along this order, so a cursor
keeps every start aligned, and every microbatch places at least its first sequence.

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

IntColumn = npt.NDArray[np.int32]
LongColumn = npt.NDArray[np.int64]

MOST_LOAD = 1 << 48
"""Largest limit of a group's Σ w(s), so that heap keys hold it."""

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
    """The groups of the current microbatch, in the order of their starts."""

    load: LongColumn
    """Σ w(s) so far."""
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


def pack(batch: Batch, pool: Pool, target: LoadTarget) -> Columns:
    """Microbatch, start and degree of every sequence of `batch`, which must fit the pool at the target's cap."""
    packing = new_packing(queue_of(batch), pool.ranks, degree_classes(pool, target))
    pack_all(packing, pool.ranks)
    return columns_of(packing)


def new_packing(queue: Queue, ranks: int, classes: DegreeClasses, weight: Weight = ATTENTION) -> Packing:
    """Nothing placed yet. One queue serves many packings, one after the other."""
    queue.waiting[:] = np.arange(len(queue.waiting), dtype=np.int32)
    most_groups = ranks // classes.degree
    group, *columns = (np.empty(len(queue.id), np.int32) for _ in range(4))
    return Packing(
        queue=queue,
        classes=classes,
        early=classes.limit.copy(),
        begin=np.empty(len(classes.degree), np.int64),
        wake=np.empty(len(classes.degree), np.int64),
        weight=weight,
        groups=OpenGroups(np.empty(ranks, np.int64), np.empty(ranks, np.int64)),
        ready=new_heaps(most_groups),
        parked=new_heaps(most_groups),
        placement=Placement(group, Columns(*columns)),
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
def pack_all(packing: Packing, ranks: int) -> int:
    """Microbatch after microbatch with the same limits: the number of groups."""
    set_begins(packing, 0)
    end = len(packing.queue.id)
    first, microbatch, before = 0, 0, 0
    while first < end:
        before += fill_microbatch(packing, ranks, microbatch, first, before, 0)
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
def fill_microbatch(packing: Packing, ranks: int, microbatch: int, first: int, before: int, split: int) -> int:
    """Place what fits in one microbatch, by the rules of the module's docstring: the number of groups it opened.

    `first` is the first waiting position; groups are counted from `before`. Sequences before position `split` fill
    groups up to the `early` limits only, which leaves room for those behind it.
    """
    queue, classes, early, begin, wake, weight, groups, ready, parked, placement = packing
    end = len(queue.id)
    ready.size[:] = 0
    parked.size[:] = 0
    wake[:] = end
    opened = 0
    free = ranks
    opens = first  # first position whose degree fits the free ranks
    own = len(begin) - 1  # class of the position at hand; only falls
    position = first
    while position < end:
        length = queue.length[position]
        while own > 0 and begin[own - 1] <= position:
            own -= 1
        chosen = own
        group = -1
        if position >= opens:
            group = opened
            placement.columns.microbatch[before + group] = microbatch
            placement.columns.start[before + group] = ranks - free
            placement.columns.degree[before + group] = classes.degree[chosen]
            _open(chosen, group, length, weight_of(weight, length), classes, groups, ready)
            opened += 1
            free -= classes.degree[chosen]
            wake[chosen] = 0
            opens = _first_of_degree(free, position + 1, end, begin, classes)
        while group < 0 and chosen < len(wake):
            if wake[chosen] <= position:
                limit = early[chosen] if position < split else classes.limit[chosen]
                group = _join(chosen, length, weight_of(weight, length), limit, classes, groups, ready, parked)
                if group < 0:
                    after = max(position + 1, begin[chosen])
                    wake[chosen] = _wake(chosen, after, split, packing)
            if group < 0:
                chosen += 1
        if group >= 0:
            placement.group[position] = before + group
            queue.waiting[position] = position + 1
            position += 1
        else:
            position = min(wake.min(), opens)
        position = next_waiting(queue.waiting, position)
    return opened


@compiled
def _open(
    chosen: int, group: int, length: int, load: int, classes: DegreeClasses, groups: OpenGroups, ready: Heaps
) -> None:
    """Open a group with its first sequence. A full one stays out of the heap: nothing can join it."""
    groups.left[group] = classes.capacity[chosen] - _padded(length, classes.chunks[chosen])
    groups.load[group] = load
    if load < classes.limit[chosen]:
        push(ready, chosen, load - LOAD_OFFSET, group)


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
def _wake(chosen: int, position: int, split: int, packing: Packing) -> int:
    """First position from `position` on that the class's best group admits, or that brings a parked group back.

    From `position` on, all sequences have the degree of the class or a smaller one.
    """
    queue, classes, weight, ready, parked = (
        packing.queue, packing.classes, packing.weight, packing.ready, packing.parked,
    )  # fmt: skip
    early_left = load_left = -1
    if ready.size[chosen] > 0:
        load = LOAD_OFFSET + top_key(ready, chosen)
        early_left, load_left = packing.early[chosen] - load, classes.limit[chosen] - load
    tokens_left = -1
    if parked.size[chosen] > 0:
        tokens_left = -top_key(parked, chosen)
    low, high = position, len(queue.id)
    while low < high:
        middle = (low + high) >> 1
        length = queue.length[middle]
        most = early_left if middle < split else load_left
        if weight_of(weight, length) <= most or _padded(length, classes.chunks[chosen]) <= tokens_left:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def _first_of_degree(free: int, position: int, end: int, begin: LongColumn, classes: DegreeClasses) -> int:
    """First position from `position` on whose degree is at most `free`."""
    row = len(begin) - 1
    while row >= 0 and classes.degree[row] > free:
        row -= 1
    return end if row < 0 else max(position, begin[row])


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
