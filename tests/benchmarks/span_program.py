"""A tighter bound than the certificate that plans carry, from a linear program that takes seconds.

Variables: attention and linear seconds A_k and T_k of every microbatch's forward on a stage, and when each operation of
1F1B starts. Minimise the span, where ΣA and ΣT are the means over the pool and T_k is at most what the token budget
holds. The span of 1F1B is monotone and convex in the times, so no plan of M microbatches is faster. The certificate is
a bound for this program's optimum, in closed form; that the longest sequence needs a place is left out here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from scheduler_service.domain import Batch, CostModel, Pool
from scheduler_service.domain.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR

Term = tuple[int, float]


def least_span_s(batch: Batch, pool: Pool, cost: CostModel) -> float:
    """The optimum over all numbers of microbatches, found by trisection: it falls to one least value and rises."""
    attention = cost.theta * batch.sum_of_squares / pool.ranks
    linear = cost.tau * batch.tokens / pool.ranks
    fewest = -(-batch.tokens // (pool.ranks * pool.token_budget))

    def span(microbatches: int) -> float:
        return span_of_means(attention, linear, cost.tau * pool.token_budget, cost.overhead, microbatches, pool.stages)

    return _least(span, fewest, 8 * fewest + 8 * pool.stages)


def _least(value: Callable[[int], float], low: int, high: int) -> float:
    at = cache(value)
    while high - low > 2:
        third = (high - low) // 3
        if at(low + third) <= at(high - third):
            high -= third
        else:
            low += third
    return min(at(point) for point in range(low, high + 1))


def span_of_means(
    attention: float, linear: float, most_linear: float, overhead: float, microbatches: int, stages: int
) -> float:
    """Least span of one pipeline over all ways to split the work into so many microbatches; ∞ where it does not fit."""
    shares = {"F": (1.0, 1.0), "B": (BACKWARD_ATTENTION, BACKWARD_LINEAR)}
    seconds = {
        operation: [[(k, of_attention), (microbatches + k, of_linear)] for k in range(microbatches)]
        for operation, (of_attention, of_linear) in shares.items()
    }
    starts = {"F": 2 * microbatches, "B": (2 + stages) * microbatches}
    end = 2 * (1 + stages) * microbatches

    def start(operation: str, stage: int, k: int) -> int:
        return starts[operation] + stage * microbatches + k

    def row(operation: str, stage: int, k: int, after: int) -> list[Term]:
        return [(start(operation, stage, k), 1.0), *seconds[operation][k], (after, -1.0)]

    rows = []
    for stage in range(stages):
        order = one_forward_one_backward(stage, stages, microbatches)
        following = [*(start(operation, stage, k) for operation, k in order[1:]), end]
        rows += [row(operation, stage, k, after) for (operation, k), after in zip(order, following, strict=True)]
    for stage in range(stages - 1):
        for k in range(microbatches):
            rows.append(row("F", stage, k, start("F", stage + 1, k)))
            rows.append(row("B", stage + 1, k, start("B", stage, k)))
    return _solve(rows, end + 1, microbatches, overhead, (attention, linear), most_linear)


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Operations of a stage in order: F or B, and the microbatch."""
    warm_up = min(microbatches, stages - stage - 1)
    steady = [each for k in range(microbatches - warm_up) for each in (("F", warm_up + k), ("B", k))]
    return [
        *(("F", k) for k in range(warm_up)), *steady,
        *(("B", k) for k in range(microbatches - warm_up, microbatches)),
    ]  # fmt: skip


def _solve(
    rows: list[list[Term]], variables: int, microbatches: int, overhead: float, sums: tuple[float, float], most: float
) -> float:
    """Every row: its terms and an overhead are at most 0."""
    number = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    column, factor = zip(*(term for row in rows for term in row), strict=True)
    later = coo_matrix((factor, (number, column)), shape=(len(rows), variables))
    shares = np.repeat([0, 1], microbatches)
    totals = coo_matrix((np.ones(2 * microbatches), (shares, np.arange(2 * microbatches))), shape=(2, variables))
    upper = np.full(variables, np.inf)
    upper[microbatches : 2 * microbatches] = most
    found = linprog(
        np.eye(1, variables, variables - 1)[0], A_ub=later.tocsr(), b_ub=np.full(len(rows), -overhead),
        A_eq=totals.tocsr(), b_eq=sums, bounds=np.column_stack([np.zeros(variables), upper]), method="highs",
    )  # fmt: skip
    return float(found.fun) if found.status == 0 else float("inf")
