"""Dynamic context parallelism as in Megatron-Core's development branch: the packing-aware scheduler.

Follows: a sequence needs the smallest power of two of ranks whose budget holds it. Each microbatch starts from the
longest sequence that waits. Every other waiting sequence, longest first, tries groups of its need, twice its need,
… : each existing group of that size with tokens left, then a new one; the placement that leaves the smallest largest
rank load wins, the first found on a tie. Ranks that stay empty are filled by doubling the first of the smallest
groups, again and again; where that does not come out even, the whole pool becomes one group with what fits. The
original also keeps rank loads below 1.05 × s₁·B, s₁ being the microbatch's longest sequence; that never binds, since
Σs²/g ≤ s₁·Σs/g ≤ s₁·B in any group within the budget, and is left out. Source: the project's description of that
scheduler (design of planning, section 5), written anew from it.

Departs: padding counts as tokens, so a group that would overflow by padding is not chosen and not doubled; ranks that
only such a group, or one beyond the limit on the degree, could take stay empty. Groups are numbered by falling size
at the end, so that each starts at a multiple of its size (the original shifts groups behind a doubled one). It takes
no degree cap.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.compiled import compiled
from scheduler_service.domain import Batch, Plan, Pool
from scheduler_service.planning.feasibility import power_of_two_degrees, powers_of_two
from scheduler_service.planning.policy import PlanningConfig, new_plan

Column = npt.NDArray[np.int64]
Loads = npt.NDArray[np.float64]


class _Group(NamedTuple):
    size: int
    members: list[int]


def plan(batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
    """Plan microbatch by microbatch until no sequence waits.

    Raises `InfeasibleError` for a sequence that no power-of-two group of the pool holds, even where the full pool
    would: this system has no such groups. Cost: O(N·M·G) for N sequences, M microbatches, G ranks.
    """
    lengths = batch.lengths.tolist()
    waiting = np.argsort(-batch.lengths, kind="stable")
    length, need = batch.lengths[waiting], power_of_two_degrees(batch, pool, "megatron")[waiting].astype(np.int64)
    sizes = _sizes(pool)
    columns = np.zeros((3, len(batch)), np.int32)
    current = 0
    while len(waiting):
        group_sizes, chosen = _fill(length, need, sizes, pool.ranks)
        groups = _fill_empty_ranks(_groups(group_sizes, chosen, waiting), lengths, pool)
        first_rank = 0
        for size, members in sorted(groups, key=lambda group: -group.size):
            columns[:, members] = [[current], [first_rank], [size]]
            first_rank += size
        placed = np.zeros(len(batch), bool)
        placed[[sequence for group in groups for sequence in group.members]] = True
        later = ~placed[waiting]
        waiting, length, need = waiting[later], length[later], need[later]
        current += 1
    microbatch, start, degree = columns
    return new_plan("megatron", batch, pool, config, (microbatch, start, degree))


class _Sizes(NamedTuple):
    """The sizes that a group can have, rising."""

    size: Column
    chunks: Column
    capacity: Column


def _sizes(pool: Pool) -> _Sizes:
    sizes = powers_of_two(pool)
    return _Sizes(*(np.array(list(map(of, sizes)), np.int64) for of in (int, pool.chunks, pool.capacity)))


@compiled
def _fill(length: Column, need: Column, sizes: _Sizes, ranks: int) -> tuple[Column, Column]:
    """Fill one microbatch with the sequences that wait, longest first.

    Returns the size of each group, in the order in which they were opened, and the group of each sequence: −1 where it
    waits for the next microbatch.
    """
    row, room = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    load = np.zeros(ranks)
    chosen = np.full(len(length), -1, np.int64)
    count, free, fullest = 0, ranks, 0.0
    for position in range(len(length)):
        s = length[position]
        if count == 0:
            group, new_row = 0, int(np.searchsorted(sizes.size, need[position]))
        else:
            if need[position] > free and s > room[:count].max():
                continue
            group, new_row = _best_place(
                s, need[position], free, fullest, sizes, row[:count], room[:count], load[:count]
            )
        if group < 0:
            continue
        if group == count:
            row[count], room[count] = new_row, sizes.capacity[new_row]
            free -= sizes.size[new_row]
            count += 1
        room[group] -= _padded(s, sizes.chunks[row[group]])
        load[group] += s**2 / sizes.size[row[group]]
        fullest = max(fullest, load[group])
        chosen[position] = group
    return sizes.size[row[:count]], chosen


@compiled
def _best_place(
    s: int, need: int, free: int, fullest: float, sizes: _Sizes, row: Column, room: Column, load: Loads
) -> tuple[int, int]:
    """Where the largest rank load stays smallest: an open group, or one more and its row of `sizes`; −1 for nowhere.

    Of equals, the smallest group; of these an open one, and the first.
    """
    best, best_size, group, new_row = np.inf, 0, -1, -1
    for open_group in range(len(row)):
        size = sizes.size[row[open_group]]
        if size < need or _padded(s, sizes.chunks[row[open_group]]) > room[open_group]:
            continue
        value = max(load[open_group] + s**2 / size, fullest)
        if value < best or (value == best and size < best_size):
            best, best_size, group = value, size, open_group
    for candidate in range(len(sizes.size)):
        size = sizes.size[candidate]
        if size < need or size > free or _padded(s, sizes.chunks[candidate]) > sizes.capacity[candidate]:
            continue
        value = max(s**2 / size, fullest)
        if value < best or (value == best and size < best_size):
            best, best_size, group, new_row = value, size, len(row), candidate
    return group, new_row


@compiled
def _padded(length: int, chunks: int) -> int:
    return (length + chunks - 1) // chunks * chunks


def _groups(sizes: Column, chosen: Column, waiting: Column) -> list[_Group]:
    """The groups of a microbatch with their sequences, the longest first."""
    order = np.argsort(chosen, kind="stable")[np.count_nonzero(chosen < 0) :]
    members = np.split(waiting[order], np.cumsum(np.bincount(chosen[order]))[:-1])
    return [_Group(size, each.tolist()) for size, each in zip(sizes.tolist(), members, strict=True)]


def _fill_empty_ranks(groups: list[_Group], lengths: list[int], pool: Pool) -> list[_Group]:
    """Double the first of the smallest groups until no rank is empty, or else make the pool one group."""

    def holds(size: int, members: list[int]) -> bool:
        return sum(pool.padded(lengths[i], size) for i in members) <= pool.capacity(size)

    empty, overfull = pool.ranks - sum(group.size for group in groups), False
    filled = list(groups)
    heap = [(group.size, index) for index, group in enumerate(groups)]
    heapq.heapify(heap)
    while empty and heap:
        size, index = heapq.heappop(heap)
        members = groups[index].members
        if size > empty or 2 * size not in pool.degrees:
            continue
        if not holds(2 * size, members):
            overfull = True
            continue
        filled[index] = _Group(2 * size, members)
        heapq.heappush(heap, (2 * size, index))
        empty -= size
    if not empty or overfull or pool.ranks not in pool.degrees or not holds(pool.ranks, groups[0].members[:1]):
        return filled

    fitting: list[int] = []
    for sequence in sorted((i for group in groups for i in group.members), key=lambda i: (-lengths[i], i)):
        if holds(pool.ranks, [*fitting, sequence]):
            fitting.append(sequence)
    return [_Group(pool.ranks, fitting)]
