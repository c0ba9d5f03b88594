"""Piggyback packing by plain linear scans: what `packing` must reproduce, column for column.

Written to be obviously right, not fast: tests hold the two equal. Nothing else calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from scheduler_service.domain import Batch, Pool
from scheduler_service.planning.load_target import LoadTarget
from scheduler_service.planning.packing import Columns


@dataclass
class _Group:
    start: int
    degree: int
    speed: float
    handicap: int
    tokens: int = 0
    load: int = 0


@dataclass(frozen=True)
class _Rules:
    """What a group of one microbatch may hold."""

    pool: Pool
    starts: dict[int, list[tuple[int, float]]]
    """Start and speed of all groups of a degree, the fastest first."""
    limit: Callable[[int, int], int]
    """Most load of a group of this degree with a sequence of this length."""
    weight: Callable[[int], int]

    def group(self, degree: int, start: int, speed: float) -> _Group:
        """It without a sequence."""
        most = self.limit(degree, 0)
        return _Group(start, degree, speed, most - int(speed * most))

    def feasible(self, length: int, group: _Group) -> bool:
        tokens = group.tokens + self.pool.padded(length, group.degree)
        return self.loadable(length, group) and tokens <= group.speed * self.pool.capacity(group.degree)

    def loadable(self, length: int, group: _Group) -> bool:
        return group.handicap + group.load + self.weight(length) <= self.limit(group.degree, length)

    def degree(self, length: int) -> int:
        """The smallest that holds the sequence and whose fastest group is fast enough."""
        held = (k for k in self.pool.degrees if self.pool.padded(length, k) <= self.pool.capacity(k))
        return next(k for k in held if self.loadable(length, self.group(k, *self.starts[k][0])))


def pack_linearly(batch: Batch, pool: Pool, target: LoadTarget) -> Columns:
    """Microbatch, start and degree of every sequence, by the rules of piggyback packing."""
    return pack_to_limits_linearly(batch, pool, lambda _, degree, __: target.limit(degree), lambda length: length**2)


def pack_to_limits_linearly(
    batch: Batch, pool: Pool, limit: Callable[[int, int, int], int], weight: Callable[[int], int]
) -> Columns:
    """The same where s tokens weigh weight(s) and fill a group of microbatch k up to limit(k, degree, s).

    limit(k, degree, 0) is the largest; handicaps are shares of that.
    """
    microbatch, start, degree = (np.zeros(len(batch), np.int32) for _ in range(3))
    starts = {k: _starts(pool, k) for k in pool.degrees}
    waiting = sorted(range(len(batch)), key=lambda i: (-batch.lengths[i], i))
    current = 0
    while waiting:
        rules = _Rules(pool, starts, partial(limit, current), weight)
        groups: list[_Group] = []
        later = []
        for i in waiting:
            group = _place(int(batch.lengths[i]), groups, rules)
            if group is None:
                later.append(i)
            else:
                microbatch[i], start[i], degree[i] = current, group.start, group.degree
        waiting = later
        current += 1
    return Columns(microbatch, start, degree)


def _starts(pool: Pool, degree: int) -> list[tuple[int, float]]:
    speeds = [dict(pool.speeds).get(rank, 1.0) for rank in range(pool.ranks)]
    starts = [(start, min(speeds[start : start + degree])) for start in range(0, pool.ranks - degree + 1, degree)]
    return sorted(((start, speed) for start, speed in starts if speed > 0), key=lambda row: -row[1])


def _place(length: int, groups: list[_Group], rules: _Rules) -> _Group | None:
    """Step 1: a group of its own. Step 2: the least loaded feasible group of the smallest degree. Step 3: wait."""
    own = rules.degree(length)
    taken = {rank for group in groups for rank in range(group.start, group.start + group.degree)}
    free = (place for place in rules.starts[own] if taken.isdisjoint(range(place[0], place[0] + own)))
    chosen = next((rules.group(own, *place) for place in free), None)
    fastest = rules.starts[own][0][1]
    if chosen is not None and (not groups or chosen.speed == fastest or rules.feasible(length, chosen)):
        groups.append(chosen)
    else:
        feasible = [g for g in groups if g.degree >= own and rules.feasible(length, g)]
        if not feasible:
            return None
        chosen = min(feasible, key=lambda g: (g.degree, g.handicap + g.load))  # the first of equals
    chosen.tokens += rules.pool.padded(length, chosen.degree)
    chosen.load += rules.weight(length)
    return chosen
