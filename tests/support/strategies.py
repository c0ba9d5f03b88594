"""Hypothesis strategies for pools, batches and costs of any shape, and valid plans, good or bad."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import strategies as st

from scheduler_service.domain import Batch, CostModel, Plan, Pool
from scheduler_service.planning.policy import PlanningConfig, new_plan


@st.composite
def pools(draw: st.DrawFn, *, most_ranks: int = 24, most_budget: int = 64) -> Pool:
    """Pools of any size, power of two or not, with and without rings, padding, pipelines and degree limits."""
    ranks = draw(st.integers(1, most_ranks))
    tensor_parallel = draw(st.sampled_from((1, 1, 2)))
    heads = draw(st.sampled_from((None, 1, 4, 6)))
    return Pool(
        ranks=ranks,
        token_budget=tensor_parallel * draw(st.integers(1, most_budget // tensor_parallel)),
        stages=draw(st.integers(1, 9)),
        ep=draw(st.sampled_from([e for e in range(1, ranks + 1) if ranks % e == 0])),
        heads=heads,
        max_ulysses=draw(st.sampled_from((1, 2, 4))) if heads else None,
        max_degree=draw(st.none() | st.integers(1, ranks)),
        microbatch_multiple=draw(st.sampled_from((1, 1, 1, 2, 3))),
        sequence_parallel=tensor_parallel,
    )


@st.composite
def batches(draw: st.DrawFn, pool: Pool, *, most_sequences: int = 40) -> Batch:
    """Batches whose sequences each fit the pool, short ones more often than long ones."""
    longest = max(pool.capacity(degree) for degree in pool.degrees)
    if longest == 0:
        longest = 1  # such a pool holds nothing: the policy must say so
    scale = st.sampled_from(sorted({1, -(-longest // 16), -(-longest // 4), longest}))
    length = scale.flatmap(lambda most: st.integers(1, most))
    return Batch(draw(st.lists(length, min_size=1, max_size=most_sequences)))


def costs() -> st.SearchStrategy[CostModel]:
    """Cost models in which any of the three parts may dominate or vanish."""
    seconds = st.sampled_from((0.0, 1e-3, 0.1, 1.0, 7.0))
    return st.builds(CostModel, theta=seconds, tau=seconds, overhead=seconds)


def random_plan(batch: Batch, pool: Pool, random: Random, config: PlanningConfig) -> Plan:
    """A valid plan without any sense: sequences in random order on random groups of random degrees."""
    columns = np.zeros((3, len(batch)), np.int32)
    rooms: list[dict[tuple[int, int], int]] = []  # of each microbatch: (start, degree) → tokens left
    for sequence in random.sample(range(len(batch)), len(batch)):
        length = int(batch.lengths[sequence])
        degree = random.choice([d for d in pool.degrees if pool.padded(length, d) <= pool.capacity(d)])
        start = degree * int(random.choice(np.flatnonzero(pool.group_speeds(degree))))
        tokens = pool.padded(length, degree)
        fitting = [m for m, groups in enumerate(rooms) if _fits(groups, start, degree, tokens)]
        if not fitting or random.random() < 0.1:
            fitting = [len(rooms)]
            rooms.append({})
        microbatch = random.choice(fitting)
        room = rooms[microbatch].get((start, degree), pool.capacity(degree))
        rooms[microbatch][start, degree] = room - tokens
        columns[:, sequence] = microbatch, start, degree
    microbatches, starts, degrees = columns
    return new_plan("random", batch, pool, config, (microbatches, starts, degrees))


def _fits(groups: dict[tuple[int, int], int], start: int, degree: int, tokens: int) -> bool:
    if (start, degree) in groups:
        return groups[start, degree] >= tokens
    return all(start + degree <= other or start >= other + size for other, size in groups)


def slowed(pool: Pool, random: Random) -> Pool:
    """The same pool with some slow or excluded ranks: single ones, whole nodes, or all of them at random."""
    ranks = range(pool.ranks)
    match random.randrange(4):
        case 0:
            slow = random.sample(ranks, min(pool.ranks, random.randint(1, 3)))
        case 1:
            node = random.choice((1, 2, 4, 8))
            first = random.randrange(-(-pool.ranks // node)) * node
            slow = list(ranks[first : first + node])
        case _:
            slow = [rank for rank in ranks if random.random() < 0.5]
    speeds = {rank: random.choice((0, 0, 0.01, 0.3, 0.5, 0.9, random.uniform(0.1, 1))) for rank in slow}
    if len(speeds) == pool.ranks and not any(speeds.values()):
        speeds[random.choice(ranks)] = 1
    return replace(pool, speeds=speeds)
