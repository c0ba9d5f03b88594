import numpy as np
from hypothesis import given, settings

from scheduler_service.domain import InfeasibleError, Pool
from scheduler_service.planning.degrees import own_degrees
from scheduler_service.planning.load_target import LoadTarget, choose_target
from tests.support.problems import Problem, problems


def test_a_degree_keeps_load_and_tokens() -> None:
    target, pool = LoadTarget(longest=80, cap=4), Pool(ranks=8, token_budget=25)
    # Load alone: 40² = 80²/4 at degree 1. Tokens alone: 25 per rank.
    assert own_degrees(np.array([80, 57, 56, 50, 40, 26, 25]), pool, target).tolist() == [4, 4, 4, 2, 2, 2, 1]


def test_no_square_root_rounds_a_degree() -> None:
    target, pool = LoadTarget(longest=1 << 24, cap=1 << 10), Pool(ranks=1 << 10, token_budget=1 << 20)
    edge = 1 << 19  # edge² is exactly the load target at degree 1
    assert own_degrees(np.array([edge - 1, edge, edge + 1]), pool, target).tolist() == [1, 1, 2]


@settings(max_examples=300, deadline=None)
@given(problems())
def test_no_smaller_degree_would_do(posed: Problem) -> None:
    batch, pool, cost, cap = posed
    try:
        target = choose_target(batch, pool, cost, cap)
    except InfeasibleError:
        return
    for length, degree in zip(batch.lengths.tolist(), own_degrees(batch.lengths, pool, target).tolist(), strict=True):
        keeps = [
            d
            for d in pool.degrees
            if length**2 * target.cap <= target.longest**2 * d and pool.padded(length, d) <= pool.capacity(d)
        ]
        assert degree == keeps[0]
