"""Random valid placements, for tests of whatever carries plans out."""

from __future__ import annotations

import numpy as np

from scheduler_service.domain import Batch, Plan, Pool
from scheduler_service.planning import PlanningConfig, new_plan


def random_plan(generator: np.random.Generator, batch: Batch, pool: Pool, microbatches: int) -> Plan:
    """Each microbatch cuts the pool into random groups; each sequence goes to a random one. Budgets are not kept."""
    groups = [_random_groups(generator, pool) for _ in range(microbatches)]
    microbatch = generator.integers(0, microbatches, len(batch))
    chosen = [groups[m][generator.integers(len(groups[m]))] for m in microbatch]
    start, degree = np.array(chosen, np.int32).T
    return new_plan("random", batch, pool, PlanningConfig(), (microbatch, start, degree))


def random_shards(generator: np.random.Generator, sequences: int, shards: int) -> list[int]:
    """Sizes of `shards` shards, many of them empty, that add up to `sequences`."""
    cuts = np.sort(generator.integers(0, sequences + 1, shards - 1))
    return np.diff(np.concatenate(([0], cuts, [sequences]))).tolist()


def _random_groups(generator: np.random.Generator, pool: Pool) -> list[tuple[int, int]]:
    """(start, degree) of aligned groups that cover the pool."""
    if generator.random() < 0.2:
        return [(0, pool.ranks)]
    groups, start = [], 0
    while start < pool.ranks:
        fits = [degree for degree in pool.degrees if start % degree == 0 and start + degree <= pool.ranks]
        degree = int(generator.choice(fits))
        groups.append((start, degree))
        start += degree
    return groups
