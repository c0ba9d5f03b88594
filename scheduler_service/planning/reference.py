"""Piggyback packing by plain linear scans: what `packing` must reproduce, column for column.

Written to be obviously right, not fast: tests hold the two equal. Nothing else calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler_service.domain import Batch, Pool
from scheduler_service.planning.load_target import LoadTarget
from scheduler_service.planning.packing import Columns


@dataclass
class _Group:
    start: int
    degree: int
    tokens: int = 0
    squares: int = 0


def pack_linearly(batch: Batch, pool: Pool, target: LoadTarget) -> Columns:
    """Microbatch, start and degree of every sequence, by the rules of piggyback packing."""
    microbatch, start, degree = (np.zeros(len(batch), np.int32) for _ in range(3))
    waiting = sorted(range(len(batch)), key=lambda i: (-batch.lengths[i], i))
    current = 0
    while waiting:
        groups: list[_Group] = []
        later = []
        for i in waiting:
            group = _place(int(batch.lengths[i]), groups, pool, target)
            if group is None:
                later.append(i)
            else:
                microbatch[i], start[i], degree[i] = current, group.start, group.degree
        waiting = later
        current += 1
    return Columns(microbatch, start, degree)


def _place(length: int, groups: list[_Group], pool: Pool, target: LoadTarget) -> _Group | None:
    """Step 1: a group of its own. Step 2: the least loaded feasible group of the smallest degree. Step 3: wait."""
    own = next(k for k in pool.degrees if _feasible(length, _Group(0, k), pool, target))
    cursor = sum(group.degree for group in groups)
    if cursor + own <= pool.ranks:
        groups.append(_Group(cursor, own))
        chosen = groups[-1]
    else:
        feasible = [g for g in groups if g.degree >= own and _feasible(length, g, pool, target)]
        if not feasible:
            return None
        chosen = min(feasible, key=lambda g: (g.degree, g.squares, g.start))
    chosen.tokens += pool.padded(length, chosen.degree)
    chosen.squares += length**2
    return chosen


def _feasible(length: int, group: _Group, pool: Pool, target: LoadTarget) -> bool:
    tokens = group.tokens + pool.padded(length, group.degree)
    load_fits = (group.squares + length**2) * target.cap <= target.longest**2 * group.degree
    return tokens <= pool.capacity(group.degree) and load_fits
