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
    tokens: int = 0
    load: int = 0


@dataclass(frozen=True)
class _Rules:
    """What a group of one microbatch may hold."""

    pool: Pool
    limit: Callable[[int, int], int]
    """Most load of a group of this degree with a sequence of this length."""
    weight: Callable[[int], int]

    def feasible(self, length: int, group: _Group) -> bool:
        tokens = group.tokens + self.pool.padded(length, group.degree)
        load = group.load + self.weight(length)
        return tokens <= self.pool.capacity(group.degree) and load <= self.limit(group.degree, length)

    def degree(self, length: int) -> int:
        return next(k for k in self.pool.degrees if self.feasible(length, _Group(0, k)))


def pack_linearly(batch: Batch, pool: Pool, target: LoadTarget) -> Columns:
    """Microbatch, start and degree of every sequence, by the rules of piggyback packing."""
    return pack_to_limits_linearly(batch, pool, lambda _, degree, __: target.limit(degree), lambda length: length**2)


def pack_to_limits_linearly(
    batch: Batch, pool: Pool, limit: Callable[[int, int, int], int], weight: Callable[[int], int]
) -> Columns:
    """The same where s tokens weigh weight(s) and fill a group of microbatch k up to limit(k, degree, s)."""
    microbatch, start, degree = (np.zeros(len(batch), np.int32) for _ in range(3))
    waiting = sorted(range(len(batch)), key=lambda i: (-batch.lengths[i], i))
    current = 0
    while waiting:
        rules = _Rules(pool, partial(limit, current), weight)
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


def _place(length: int, groups: list[_Group], rules: _Rules) -> _Group | None:
    """Step 1: a group of its own. Step 2: the least loaded feasible group of the smallest degree. Step 3: wait."""
    own = rules.degree(length)
    cursor = sum(group.degree for group in groups)
    if cursor + own <= rules.pool.ranks:
        groups.append(_Group(cursor, own))
        chosen = groups[-1]
    else:
        feasible = [g for g in groups if g.degree >= own and rules.feasible(length, g)]
        if not feasible:
            return None
        chosen = min(feasible, key=lambda g: (g.degree, g.load, g.start))
    chosen.tokens += rules.pool.padded(length, chosen.degree)
    chosen.load += rules.weight(length)
    return chosen
