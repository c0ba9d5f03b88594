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

LOAD_OFFSET = 1 << 47
"""Taken off Σ s² in heap keys: a group that can still take a sequence has 0 ≤ Σ s² < limit ≤ s_max² ≤ 2⁴⁸."""


class Columns(NamedTuple):
    """The columns of a plan in the order of the ids, int32."""

    microbatch: IntColumn
    start: IntColumn
    degree: IntColumn


class Queue(NamedTuple):
    """The sequences in the order in which they are tried."""

    id: IntColumn
    length: LongColumn
    degree_class: npt.NDArray[np.int8]
    """Row of `DegreeClasses`; never rises along the order."""
    waiting: IntColumn
    """Union-find over positions: leads from a placed position to the next waiting one. One entry more: the end."""


class OpenGroups(NamedTuple):
    """The groups of the current microbatch, in the order of their starts."""

    squares: LongColumn
    """Σ s² so far; up to date only while the group is parked, else it is the key of its entry in `ready`."""
    left: LongColumn
    """Tokens that still fit."""


class Placement(NamedTuple):
    """What packing found. Columns of groups and of positions are written nearly in order, the plan's are not."""

    group: IntColumn
    """Group of each position of the queue, counted over all microbatches."""
    columns: Columns
    """Microbatch, start and degree of each group; as many rows as there are sequences, the last ones unused."""


def pack(batch: Batch, pool: Pool, target: LoadTarget) -> Columns:
    """Microbatch, start and degree of every sequence of `batch`, which must fit the pool at the target's cap."""
    classes = degree_classes(pool, target)
    queue = _queue(batch, classes)
    most_groups = pool.ranks // classes.degree
    groups = OpenGroups(np.empty(pool.ranks, np.int64), np.empty(pool.ranks, np.int64))
    group, *columns = (np.empty(len(batch), np.int32) for _ in range(4))
    placement = Placement(group, Columns(*columns))
    _pack(queue, classes, pool.ranks, groups, new_heaps(most_groups), new_heaps(most_groups), placement)

    group = np.empty(len(batch), np.int32)
    group[queue.id] = placement.group
    del queue  # the largest of all
    return Columns(*(column[group] for column in placement.columns))


def _queue(batch: Batch, classes: DegreeClasses) -> Queue:
    """Sort by (length descending, id ascending): one integer key, 25 bits of length above 26 bits of id."""
    key = np.negative(batch.lengths)
    key <<= 26
    key += np.arange(len(batch))
    key.sort()
    ids = (key & ((1 << 26) - 1)).astype(np.int32)
    key >>= 26
    lengths = np.negative(key, out=key)
    # Positions where the classes begin, the largest degree first.
    begins = len(batch) - np.searchsorted(lengths[::-1], classes.longest[::-1], side="right")
    degree_class = np.repeat(np.arange(len(begins), dtype=np.int8)[::-1], np.diff(begins, append=len(batch)))
    return Queue(ids, lengths, degree_class, np.arange(len(batch) + 1, dtype=np.int32))


@compiled
def _pack(
    queue: Queue,
    classes: DegreeClasses,
    ranks: int,
    groups: OpenGroups,
    ready: Heaps,
    parked: Heaps,
    placement: Placement,
) -> None:
    """The algorithm of the module's docstring; fills `placement`."""
    end = len(queue.id)
    wake = np.empty(len(classes.degree), np.int64)
    microbatch = 0
    before = 0  # groups of earlier microbatches
    first = 0
    while first < end:
        ready.size[:] = 0
        parked.size[:] = 0
        wake[:] = end
        opened = 0
        free = ranks
        opens = first  # first position whose degree fits the free ranks
        position = first
        while position < end:
            length = queue.length[position]
            chosen = int(queue.degree_class[position])
            group = -1
            if position >= opens:
                group = opened
                placement.columns.microbatch[before + group] = microbatch
                placement.columns.start[before + group] = ranks - free
                placement.columns.degree[before + group] = classes.degree[chosen]
                _open(chosen, group, length, classes, groups, ready)
                opened += 1
                free -= classes.degree[chosen]
                wake[chosen] = 0
                opens = _first_of_degree(free, position + 1, queue, classes)
            while group < 0 and chosen < len(wake):
                if wake[chosen] <= position:
                    group = _join(chosen, length, classes, groups, ready, parked)
                    if group < 0:
                        wake[chosen] = _wake(chosen, position + 1, queue, classes, ready, parked)
                if group < 0:
                    chosen += 1
            if group >= 0:
                placement.group[position] = before + group
                queue.waiting[position] = position + 1
                position += 1
            else:
                position = min(wake.min(), opens)
            position = _next_waiting(queue.waiting, position)
        microbatch += 1
        before += opened
        first = _next_waiting(queue.waiting, first)


@compiled
def _open(chosen: int, group: int, length: int, classes: DegreeClasses, groups: OpenGroups, ready: Heaps) -> None:
    """Open a group with its first sequence. A full one stays out of the heap: nothing can join it."""
    groups.left[group] = classes.capacity[chosen] - _padded(length, classes.chunks[chosen])
    if length * length < classes.limit[chosen]:
        push(ready, chosen, length * length - LOAD_OFFSET, group)


@compiled
def _join(chosen: int, length: int, classes: DegreeClasses, groups: OpenGroups, ready: Heaps, parked: Heaps) -> int:
    """Put the sequence into the least loaded group of the class with enough tokens left: the group, or −1."""
    tokens = _padded(length, classes.chunks[chosen])
    while parked.size[chosen] > 0 and -top_key(parked, chosen) >= tokens:
        group = pop(parked, chosen)
        push(ready, chosen, groups.squares[group] - LOAD_OFFSET, group)
    while ready.size[chosen] > 0 and groups.left[top_item(ready, chosen)] < tokens:
        squares = top_key(ready, chosen) + LOAD_OFFSET
        group = pop(ready, chosen)
        groups.squares[group] = squares
        push(parked, chosen, -groups.left[group], group)
    if ready.size[chosen] == 0:
        return -1
    group = top_item(ready, chosen)
    squares = top_key(ready, chosen) + LOAD_OFFSET + length * length
    if squares > classes.limit[chosen]:
        return -1
    groups.left[group] -= tokens
    if squares < classes.limit[chosen]:
        replace_top(ready, chosen, squares - LOAD_OFFSET, group)
    else:
        pop(ready, chosen)
    return group


@compiled
def _wake(chosen: int, position: int, queue: Queue, classes: DegreeClasses, ready: Heaps, parked: Heaps) -> int:
    """First position from `position` on that the class's best group admits, or that brings a parked group back."""
    load_left = -1
    if ready.size[chosen] > 0:
        load_left = classes.limit[chosen] - LOAD_OFFSET - top_key(ready, chosen)
    tokens_left = -1
    if parked.size[chosen] > 0:
        tokens_left = -top_key(parked, chosen)
    low, high = position, len(queue.id)
    while low < high:
        middle = (low + high) >> 1
        length = queue.length[middle]
        if queue.degree_class[middle] <= chosen and (
            length * length <= load_left or _padded(length, classes.chunks[chosen]) <= tokens_left
        ):
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def _first_of_degree(free: int, position: int, queue: Queue, classes: DegreeClasses) -> int:
    """First position from `position` on whose degree is at most `free`."""
    low, high = position, len(queue.id)
    while low < high:
        middle = (low + high) >> 1
        if classes.degree[queue.degree_class[middle]] <= free:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def _padded(length: int, chunks: int) -> int:
    # Mostly there is no ring; a division costs more than the rest of a step.
    return length if chunks == 1 else (length + chunks - 1) // chunks * chunks


@compiled
def _next_waiting(waiting: IntColumn, position: int) -> int:
    """Find with path halving."""
    while waiting[position] != position:
        waiting[position] = waiting[waiting[position]]
        position = int(waiting[position])
    return position
