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

from scheduler_service.domain import Batch, Plan, Pool
from scheduler_service.planning.feasibility import fits, power_of_two_degrees, powers_of_two
from scheduler_service.planning.policy import PlanningConfig, new_plan


class _Group(NamedTuple):
    size: int
    members: list[int]


def plan(batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
    """Plan microbatch by microbatch until no sequence waits.

    Raises `InfeasibleError` for a sequence that no power-of-two group of the pool holds, even where the full pool
    would: this system has no such groups. Cost: O(N·M·G) for N sequences, M microbatches, G ranks.
    """
    lengths = batch.lengths.tolist()
    needs = power_of_two_degrees(batch, pool, "megatron").tolist()
    waiting = np.argsort(-batch.lengths, kind="stable").tolist()
    columns = np.zeros((3, len(batch)), np.int32)
    current = 0
    while waiting:
        groups = _fill_empty_ranks(_microbatch(waiting, lengths, needs, pool), lengths, pool)
        first_rank = 0
        for size, members in sorted(groups, key=lambda group: -group.size):
            columns[:, members] = [[current], [first_rank], [size]]
            first_rank += size
        placed = {sequence for group in groups for sequence in group.members}
        waiting = [sequence for sequence in waiting if sequence not in placed]
        current += 1
    microbatch, start, degree = columns
    return new_plan("megatron", batch, pool, config, (microbatch, start, degree))


def _microbatch(waiting: list[int], lengths: list[int], needs: list[int], pool: Pool) -> list[_Group]:
    """Groups of one microbatch, in the order in which they were opened."""
    tallest, *others = waiting
    open_groups = _OpenGroups(pool)
    open_groups.open(tallest, lengths[tallest], needs[tallest])
    for sequence in others:
        open_groups.place(sequence, lengths[sequence], needs[sequence])
    return open_groups.groups


class _OpenGroups:
    """The groups of a microbatch that is being filled: one numpy column per quantity, one row per group."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.powers = powers_of_two(pool)
        self.groups: list[_Group] = []
        self.free = pool.ranks
        self.fullest = 0.0
        self.most_room = 0
        self._size, self._chunks, self._room = np.zeros((3, pool.ranks), np.int64)
        self._load = np.zeros(pool.ranks)

    def place(self, sequence: int, length: int, need: int) -> None:
        """Add the sequence where the largest rank load stays smallest; leave it waiting if it fits nowhere."""
        if length > self.most_room and need > self.free:
            return
        best = (np.inf, 0, False, 0)  # value, size, whether new, group
        for new_size in self.powers:
            if need <= new_size <= self.free and fits(length, new_size, self.pool):
                best = min(best, (max(self.fullest, length**2 / new_size), new_size, True, len(self.groups)))
        if length <= self.most_room:
            best = min(best, self._best_existing(length, need))
        value, size, is_new, group = best
        if value == np.inf:
            return
        if is_new:
            self.open(sequence, length, size)
        else:
            self._add(group, sequence, length)

    def _best_existing(self, length: int, need: int) -> tuple[float, int, bool, int]:
        count = len(self.groups)
        size, chunks = self._size[:count], self._chunks[:count]
        value = np.maximum(self._load[:count] + length**2 / size, self.fullest)
        value[(size < need) | (-(-length // chunks) * chunks > self._room[:count])] = np.inf
        ties = np.flatnonzero(value == value.min())
        group = int(ties[size[ties].argmin()])
        return float(value[group]), int(size[group]), False, group

    def open(self, sequence: int, length: int, size: int) -> None:
        """Open a group of `size` free ranks with this sequence."""
        group = len(self.groups)
        self.groups.append(_Group(size, []))
        self.free -= size
        self._size[group] = size
        self._chunks[group] = self.pool.chunks(size)
        self._room[group] = self.pool.capacity(size)
        self._add(group, sequence, length)

    def _add(self, group: int, sequence: int, length: int) -> None:
        size, members = self.groups[group]
        members.append(sequence)
        self._room[group] -= self.pool.padded(length, size)
        self._load[group] += length**2 / size
        self.fullest = max(self.fullest, float(self._load[group]))
        self.most_room = int(self._room[: len(self.groups)].max())


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
