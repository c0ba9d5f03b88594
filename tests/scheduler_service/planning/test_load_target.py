import math

import numpy as np
import pytest
from hypothesis import given, settings

from scheduler_service.domain import Batch, CostModel, InfeasibleError, InvalidInputError, Pool, Reason
from scheduler_service.planning.feasibility import fits
from scheduler_service.planning.load_target import LoadTarget, choose_target, squared_best_cap
from tests.support.problems import Problem, problems

COST = CostModel(theta=2.6e-10, tau=4.1e-5, overhead=8e-3)


def bubble_and_overhead(cap: int, batch: Batch, pool: Pool, cost: CostModel) -> float:
    """β/C + γC, the part of T(C) that C changes, divided by c."""
    beta = (pool.stages - 1) * cost.theta_over_c * batch.longest**2
    gamma = batch.sum_of_squares / (pool.ranks * batch.longest**2)
    return beta / cap + gamma * cap


@settings(max_examples=300, deadline=None)
@given(problems())
def test_the_cap_minimises_the_closed_form_over_all_powers_of_two(posed: Problem) -> None:
    batch, pool, cost, _ = posed
    powers = [d for d in pool.degrees if d & (d - 1) == 0 and fits(batch.longest, d, pool)]
    if not powers or math.isinf(cost.theta_over_c):
        return
    chosen = choose_target(batch, pool, cost).cap
    best = min(bubble_and_overhead(cap, batch, pool, cost) for cap in powers)
    assert chosen in powers
    assert bubble_and_overhead(chosen, batch, pool, cost) <= best * (1 + 1e-12)


def test_a_tie_takes_the_smaller_cap() -> None:
    # β/C + γC is equal at 1 and 2 when C*² = 2: one sequence of 2 tokens, G = 2, p = 2, θ/c = 1/4.
    batch, pool, cost = Batch([2]), Pool(ranks=2, token_budget=2, stages=2), CostModel(theta=1 / 7, overhead=1.0)
    assert squared_best_cap(batch, pool, cost) == 2.0
    assert choose_target(batch, pool, cost).cap == 1


def test_without_a_pipeline_the_cap_is_what_memory_asks_for() -> None:
    batch = Batch([20_000, 300])
    assert choose_target(batch, Pool(ranks=64, token_budget=8192), COST).cap == 4
    assert choose_target(batch, Pool(ranks=64, token_budget=8192, stages=9), COST).cap > 4


def test_free_microbatches_take_the_largest_cap_and_free_attention_the_smallest() -> None:
    batch, pool = Batch([20_000, 300]), Pool(ranks=64, token_budget=8192, stages=9)
    assert choose_target(batch, pool, CostModel(theta=1e-10, overhead=0)).cap == 64
    assert choose_target(batch, pool, CostModel(theta=0, overhead=0)).cap == 4


def test_a_limit_on_the_degree_limits_the_cap() -> None:
    pool = Pool(ranks=64, token_budget=8192, stages=9, max_degree=12)
    assert choose_target(Batch([20_000]), pool, CostModel(theta=1.0)).cap == 8


@pytest.mark.parametrize(("ranks", "budget", "length"), [(24, 8192, 150_000), (6, 4096, 20_000)])
def test_the_full_pool_is_the_cap_where_no_power_of_two_holds_the_longest(ranks: int, budget: int, length: int) -> None:
    target = choose_target(Batch([length, 10]), Pool(ranks=ranks, token_budget=budget, stages=4), COST)
    assert target.cap == ranks
    assert target.load == length**2 / ranks


def test_a_pool_that_is_no_power_of_two_uses_the_largest_power_that_fits() -> None:
    pool = Pool(ranks=24, token_budget=8192, stages=9)
    assert choose_target(Batch([100_000]), pool, CostModel(theta=1.0)).cap == 16


def test_a_fixed_cap_is_kept_unless_memory_asks_for_more() -> None:
    batch, pool = Batch([20_000]), Pool(ranks=64, token_budget=8192, stages=9)
    assert choose_target(batch, pool, COST, cap=32).cap == 32
    assert choose_target(batch, pool, COST, cap=1).cap == 4


@pytest.mark.parametrize("cap", [3, 0, -1, 128])
def test_a_cap_that_is_no_degree_of_the_pool_is_refused(cap: int) -> None:
    with pytest.raises(InvalidInputError, match=f"cap {cap} is no degree of this pool; choose one of 1, 2, 4"):
        choose_target(Batch([10]), Pool(ranks=64, token_budget=8192), COST, cap=cap)


def test_limits_are_exact_at_lengths_of_ten_million() -> None:
    target = LoadTarget(longest=9_999_999, cap=4096)
    assert target.limit(4096) == 9_999_999**2
    assert target.limit(3) == 9_999_999**2 * 3 // 4096


def test_a_sequence_that_no_degree_holds_is_named_with_the_smallest_budget_and_pool_that_would() -> None:
    lengths = np.full(5000, 100)
    lengths[4711] = 5_000_000
    with pytest.raises(InfeasibleError) as caught:
        choose_target(Batch(lengths), Pool(ranks=512, token_budget=8192), COST)
    assert caught.value.reason == Reason.SEQUENCE_TOO_LONG
    assert caught.value.sequence == 4711
    assert str(caught.value) == (
        "sequence 4711 has 5,000,000 tokens; pool 512 × budget 8192 holds 4,194,304: "
        "raise the budget to 9,766 tokens or the pool to 611 ranks, or drop the sequence"
    )
