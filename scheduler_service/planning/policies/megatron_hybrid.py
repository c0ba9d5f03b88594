"""Hybrid context parallelism as released in Megatron-Core 0.16: its `BalancedCPScheduler`.

Follows: a sequence runs on need(s) ranks, the smallest power of two whose budget holds it, and loads each with
s²/need. Its microbatch is formed from buckets: the waiting sequences, longest first, cut where a bucket would pass
1.1 × the mean work of as many buckets as there are distinct needs. The first bucket whose head fits goes next: on
free ranks while there are enough, else onto the least loaded group of exactly its need. From the first fall in need
on, the microbatch is complete when all ranks are taken and max − min ≤ 5 % of the largest rank load. Then the last
sequence of the fullest group is taken back while that lowers max − min, and goes to the end of those that wait; and
ranks that stay empty are filled by doubling the first of the smallest groups.

The original has no token cap: each group runs the list of its sequences one by one, without packing, and all groups
meet at a barrier when the last has ended. Only one sequence at a time is in memory, so its *micro-steps* are what a
budget holds for and what a pipeline would carry: micro-step k, the k-th sequence of every group, is one microbatch
of our plan, and one pipeline slot of the forecast. The budget is then kept by need(s) alone and verified like any
other. That the original lets groups run freely between barriers, where a pipeline with expert parallelism cannot, is
not in this form; `microbatches` gives the lists between the barriers.

Source: the project's description of that scheduler (design of planning, section 5), written anew from it. Where the
description leaves room, behaviour was matched to what the released package returns for random batches: a bucket is
also closed when the sequences left, this one included, are no more than needs − 2 × closed buckets; nothing is taken
back once max − min ≤ 5 %; a group keeps its last sequence (`tests/benchmarks/megatron_core.py` compares the two).

Departs: padding counts in need(s), and a group that could not hold one of its sequences at twice the size is not
doubled, nor one beyond the limit on the degree or the ranks that are there; such ranks stay empty. It takes no
degree cap.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler_service.domain import Batch, Plan, Pool
from scheduler_service.planning.feasibility import fits, power_of_two_degrees
from scheduler_service.planning.policy import PlanningConfig, new_plan

BUCKET_SLACK = 1.1
"""Work that a bucket may hold, over the mean."""

BALANCED = 0.05
"""Difference of rank loads, over the largest, at which a microbatch counts as balanced."""


@dataclass
class Group:
    """Ranks that run the sequences `members` one after the other."""

    size: int
    members: list[int] = field(default_factory=list)
    load: float = 0.0
    """Σ s²/need of its members."""


def plan(batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
    """One microbatch of the plan for each micro-step of the original.

    Raises `InfeasibleError` for a sequence that no power-of-two group of the pool holds, even where the full pool
    would: this system has no such groups. Cost: O(K·N) for K of the original's microbatches.
    """
    columns = np.zeros((3, len(batch)), np.int32)
    step = 0
    for groups in microbatches(batch, pool):
        first_rank = 0
        for group in groups:
            columns[0, group.members] = np.arange(step, step + len(group.members))
            columns[1:, group.members] = [[first_rank], [group.size]]
            first_rank += group.size
        step += max(len(group.members) for group in groups)
    microbatch, start, degree = columns
    return new_plan("megatron_hybrid", batch, pool, config, (microbatch, start, degree))


def microbatches(batch: Batch, pool: Pool) -> Iterator[list[Group]]:
    """The original's microbatches: groups by falling size, between two barriers. Raises as `plan` does."""
    needs = power_of_two_degrees(batch, pool, "megatron_hybrid").tolist()
    lengths = batch.lengths.tolist()
    loads = [length * length / need for length, need in zip(lengths, needs, strict=True)]
    waiting = np.argsort(-batch.lengths, kind="stable").tolist()
    while waiting:
        forming = _Microbatch(pool.ranks, needs, loads)
        buckets = _buckets(waiting, needs, loads)
        forming.fill(buckets)
        taken_back = forming.take_back()
        yield _fill_empty_ranks(forming.groups, lengths, pool)
        waiting = [sequence for bucket in buckets for sequence in bucket] + taken_back


def _buckets(waiting: list[int], needs: list[int], loads: list[float]) -> list[deque[int]]:
    """Cut the waiting sequences, in their order, into buckets of about equal work."""
    wanted = len({needs[sequence] for sequence in waiting})
    most = BUCKET_SLACK * sum(loads[sequence] for sequence in waiting) / wanted
    buckets: list[deque[int]] = [deque()]
    work = 0.0
    for row, sequence in enumerate(waiting):
        few_left = len(waiting) - row <= wanted - 2 * (len(buckets) - 1)
        if buckets[-1] and (work + loads[sequence] > most or few_left):
            buckets.append(deque())
            work = 0.0
        buckets[-1].append(sequence)
        work += loads[sequence]
    return buckets


class _Microbatch:
    """Groups that are being filled."""

    def __init__(self, ranks: int, needs: Sequence[int], loads: Sequence[float]) -> None:
        self.groups: list[Group] = []
        self._free = ranks
        self._needs = needs
        self._loads = loads
        self._least: dict[int, list[tuple[float, int]]] = {}  # of each size: a heap of (load, group)

    def fill(self, buckets: list[deque[int]]) -> None:
        """Place heads of buckets until none fits or the ranks are balanced."""
        first_need = self._needs[buckets[0][0]]
        need_fell = False
        while not (need_fell and self._balanced()):
            bucket = next((b for b in buckets if b and self._fits(self._needs[b[0]])), None)
            if bucket is None:
                return
            sequence = bucket.popleft()
            self._place(sequence)
            need_fell = need_fell or self._needs[sequence] < first_need

    def _fits(self, need: int) -> bool:
        return need <= self._free or need in self._least

    def _place(self, sequence: int) -> None:
        """A new group while there are ranks for it: its load of 0 is less than any other's."""
        need, load = self._needs[sequence], self._loads[sequence]
        heap = self._least.setdefault(need, [])
        if need <= self._free:
            self._free -= need
            index = len(self.groups)
            self.groups.append(Group(need))
            heapq.heappush(heap, (load, index))
        else:
            least, index = heap[0]
            heapq.heapreplace(heap, (least + load, index))
        self.groups[index].members.append(sequence)
        self.groups[index].load += load

    def _balanced(self) -> bool:
        return self._free == 0 and _balanced([group.load for group in self.groups])

    def take_back(self) -> list[int]:
        """Give up the last sequence of the fullest group while that brings the ranks closer together; in that order."""
        taken: list[int] = []
        loads = [group.load for group in self.groups]
        while self._free == 0 and not _balanced(loads):
            fullest = loads.index(max(loads))
            group = self.groups[fullest]
            if len(group.members) == 1:
                break
            without = loads.copy()
            without[fullest] -= self._loads[group.members[-1]]
            if max(without) - min(without) >= max(loads) - min(loads):
                break
            taken.append(group.members.pop())
            group.load = without[fullest]
            loads = without
        return taken


def _balanced(loads: list[float]) -> bool:
    return max(loads) - min(loads) <= BALANCED * max(loads)


def _fill_empty_ranks(groups: list[Group], lengths: list[int], pool: Pool) -> list[Group]:
    """Double the first of the smallest groups until no rank is empty; then groups by falling size, so aligned."""
    empty = pool.ranks - sum(group.size for group in groups)
    heap = [(group.size, index) for index, group in enumerate(groups)]
    heapq.heapify(heap)
    while empty and heap:
        size, index = heapq.heappop(heap)
        twice = 2 * size
        if size > empty or twice not in pool.degrees:
            continue
        if all(fits(lengths[sequence], twice, pool) for sequence in groups[index].members):
            groups[index].size = twice
            heapq.heappush(heap, (twice, index))
            empty -= size
    return sorted(groups, key=lambda group: -group.size)
