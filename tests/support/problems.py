"""Random planning problems: pools of all kinds, and batches that strain them."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from scheduler_service.domain import Batch, CostModel, Pool
from tests.support.strategies import batches, costs, pools, slowed

POOL_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 31, 32, 48)
WIDE_POOL_SIZES = (*POOL_SIZES, 64, 96, 100, 128, 1000)
MOST_TOKENS = 10_000_000


class Problem(NamedTuple):
    """What `plan_iteration` is asked to do. Some pools hold nothing: no degree has room for one padded token."""

    batch: Batch
    pool: Pool
    cost: CostModel
    cap: int | None


def problem(rng: np.random.Generator, most_sequences: int = 40) -> Problem:
    """One random problem."""
    sequence_parallel = int(rng.choice([1, 1, 1, 2, 3, 4]))
    ranks = int(rng.choice(POOL_SIZES))
    pool = Pool(
        ranks=ranks,
        token_budget=int(rng.choice([1, 2, 3, 5, 8, 10, 31, 64, 100])) * sequence_parallel,
        stages=int(rng.integers(1, 10)),
        heads=_one_of(rng, None, None, 1, 2, 3, 4, 6, 8),
        max_ulysses=_one_of(rng, None, None, 1, 2, 4, 8),
        max_degree=_one_of(rng, None, None, None, 1, 2, 4, 6, 8, 64),
        sequence_parallel=sequence_parallel,
        microbatch_multiple=int(rng.choice([1, 1, 2, 3])),
    )
    most = max(pool.capacity(degree) for degree in pool.degrees)
    cost = CostModel(
        theta=float(rng.choice([0, 1e-12, 1e-8, 1e-4, 1])), tau=1e-5, overhead=float(rng.choice([0, 1e-6, 1e-3, 1]))
    )
    cap = None if rng.random() < 0.6 else int(rng.choice(pool.degrees))
    return Problem(Batch(_lengths(rng, max(most, 1), int(rng.integers(1, most_sequences + 1)))), pool, cost, cap)


def wide_problem(rng: np.random.Generator) -> Problem:
    """One with anything that a pool and a cost model can have, lengths up to ten million, and sometimes too long."""
    sequence_parallel = int(rng.choice([1, 1, 1, 2, 3, 8]))
    ranks = int(rng.choice(WIDE_POOL_SIZES))
    pool = Pool(
        ranks=ranks,
        token_budget=int(rng.choice([1, 2, 3, 7, 10, 64, 100, 1000, 4096, 8192, 131_072])) * sequence_parallel,
        stages=int(rng.integers(1, 10)),
        ep=int(rng.choice([e for e in range(1, ranks + 1) if ranks % e == 0])),
        heads=_one_of(rng, None, None, 1, 2, 3, 4, 6, 8, 64),
        max_ulysses=_one_of(rng, None, None, 1, 2, 4, 8, 64),
        node=_one_of(rng, None, 1, 4, 8),
        max_degree=_one_of(rng, None, None, None, int(rng.integers(1, ranks + 1))),
        sequence_parallel=sequence_parallel,
        microbatch_multiple=int(rng.choice([1, 1, 1, 2, 3, 9])),
    )
    if rng.random() < 0.15:
        pool = slowed(pool, Random(int(rng.integers(1 << 32))))
    seconds = (0.0, 1e-15, 2.6e-10, 4.1e-5, 8e-3, 1.0, 1e6)
    cost = CostModel(*(float(constant) for constant in rng.choice(seconds, 3))) if rng.random() < 0.7 else CostModel()
    cap = None if rng.random() < 0.7 else int(rng.choice(pool.degrees))
    capacities = [pool.capacity(degree) for degree in pool.degrees]
    most = min(MOST_TOKENS, max(1, *capacities))
    count = int(rng.integers(1, 1 + rng.choice([40, 200, 2000], p=[0.8, 0.19, 0.01])))
    lengths = _lengths(rng, most, count)
    if rng.random() < 0.2:  # at the edges of what each degree holds
        edges = np.array(capacities)[:, None] + [-1, 0, 1]
        lengths = np.clip(rng.choice(edges.ravel(), count), 1, most)
    if rng.random() < 0.05:
        lengths[rng.integers(count)] = min(MOST_TOKENS, most + int(rng.choice([1, 2, most, 9 * most])))
    return Problem(Batch(lengths), pool, cost, cap)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """The same for hypothesis, which shrinks what fails."""
    pool = draw(pools())
    return Problem(draw(batches(pool)), pool, draw(costs()), draw(st.none() | st.sampled_from(pool.degrees)))


def _lengths(rng: np.random.Generator, most: int, count: int) -> np.ndarray:
    """Uniform, all equal, powers of two ± 1, long-tailed, few values, all ones, or one giant among dwarfs."""
    match int(rng.integers(7)):
        case 0:
            lengths = rng.integers(1, most + 1, count)
        case 1:
            lengths = np.full(count, rng.integers(1, most + 1))
        case 2:
            lengths = 2 ** rng.integers(0, most.bit_length() + 1, count) + rng.integers(-1, 2, count)
        case 3:
            lengths = (rng.pareto(1.0, count) * most / 20).astype(np.int64)
        case 4:
            lengths = rng.choice(rng.integers(1, most + 1, 3), count)
        case 5:
            lengths = np.ones(count, np.int64)
        case _:
            lengths = np.append(rng.integers(1, 1 + max(1, most // 16), count - 1), most)
    return np.clip(lengths, 1, most)


def _one_of(rng: np.random.Generator, *choices: int | None) -> int | None:
    return choices[int(rng.integers(len(choices)))]
