from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import Batch, CostModel, InfeasibleError, Pool
from scheduler_service.planning import PlanningConfig, new_plan, verify_plan
from scheduler_service.planning.load_target import LoadTarget, choose_target
from scheduler_service.planning.packing import Columns, pack
from scheduler_service.planning.reference import pack_linearly
from tests.support.problems import Problem, problem, problems
from tests.support.strategies import slowed


def packed(lengths: list[int], pool: Pool, cap: int) -> Columns:
    batch = Batch(lengths)
    columns = pack(batch, pool, LoadTarget(batch.longest, cap))
    assert_equal(columns, pack_linearly(batch, pool, LoadTarget(batch.longest, cap)))
    return columns


def assert_equal(columns: Columns, reference: Columns) -> None:
    for name in Columns._fields:
        np.testing.assert_array_equal(getattr(columns, name), getattr(reference, name), name)


def check(posed: Problem) -> bool:
    """Both packings agree and the verifier accepts them; False if the pool cannot hold the batch."""
    batch, pool, cost, cap = posed
    try:
        target = choose_target(batch, pool, cost, cap)
    except InfeasibleError:
        assert all(pool.padded(batch.longest, degree) > pool.capacity(degree) for degree in pool.degrees)
        return False
    columns = pack(batch, pool, target)
    assert_equal(columns, pack_linearly(batch, pool, target))
    verify_plan(new_plan("hydra", batch, pool, PlanningConfig(cost), columns), batch)
    _, group = np.unique(np.stack(columns[:2]), axis=1, return_inverse=True)
    squares = np.zeros(len(batch), np.int64)
    np.add.at(squares, group, batch.lengths**2)
    speeds = {degree: pool.group_speeds(degree) for degree in pool.degrees}
    for filled, start, degree in zip(squares[group].tolist(), columns.start, columns.degree.tolist(), strict=True):
        assert filled <= speeds[degree][start // degree] * target.limit(degree)
    return True


def with_slow_ranks(posed: Problem, random: Random) -> Problem:
    pool = slowed(posed.pool, random)
    return posed._replace(pool=pool, cap=posed.cap if posed.cap in pool.degrees else None)


@pytest.mark.parametrize("seed", range(6))
def test_equals_the_linear_reference_on_random_and_adversarial_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert sum(check(problem(rng)) for _ in range(850)) >= 800


@settings(max_examples=300, deadline=None)
@given(problems())
def test_equals_the_linear_reference_on_batches_that_hypothesis_finds(posed: Problem) -> None:
    check(posed)


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_linear_reference_on_pools_with_slow_and_excluded_ranks(seed: int) -> None:
    rng, random = np.random.default_rng(100 + seed), Random(seed)
    assert sum(check(with_slow_ranks(problem(rng), random)) for _ in range(500)) >= 250


@settings(max_examples=300, deadline=None)
@given(problems(), st.integers(0, 1 << 32))
def test_equals_the_linear_reference_on_slow_pools_that_hypothesis_finds(posed: Problem, seed: int) -> None:
    check(with_slow_ranks(posed, Random(seed)))


def test_equals_the_linear_reference_on_larger_batches() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1.7, 800), 1, 30_000).astype(int)
    for pool in (Pool(64, 1024, stages=6), Pool(48, 1000, stages=3, heads=8, max_ulysses=4)):
        batch = Batch(lengths)
        target = choose_target(batch, pool, CostModel(theta=1e-8))
        assert_equal(pack(batch, pool, target), pack_linearly(batch, pool, target))


def test_a_closed_class_opens_again_with_a_new_group() -> None:
    columns = packed([10, 9, 1], Pool(ranks=2, token_budget=10), cap=1)
    assert columns.start.tolist() == [0, 1, 1]  # the 1 joins the 9
    assert columns.microbatch.tolist() == [0, 0, 0]


def test_a_jump_stops_at_the_first_sequence_whose_degree_fits_the_free_ranks() -> None:
    columns = packed([40, 40, 3], Pool(ranks=6, token_budget=10), cap=4)
    assert columns.start.tolist() == [0, 0, 4]  # the 3 opens on rank 4
    assert columns.microbatch.tolist() == [0, 1, 0]


def test_a_sequence_that_fits_exactly_is_not_skipped() -> None:
    # 8² + 6² = 10²: the load target is met to the last unit.
    columns = packed([10, 8, 6], Pool(ranks=2, token_budget=100), cap=1)
    assert columns.start.tolist() == [0, 1, 1]
    assert columns.microbatch.tolist() == [0, 0, 0]


def test_the_least_loaded_group_is_filled_and_on_a_tie_the_lowest_start() -> None:
    columns = packed([100, 50, 50, 1, 1, 1], Pool(ranks=3, token_budget=1000), cap=1)
    assert columns.start.tolist() == [0, 1, 2, 1, 2, 1]


def test_a_group_without_tokens_left_comes_back_for_a_short_sequence() -> None:
    # After 60 + 39, rank 1 has one token left; rank 0 is at the load target from the start.
    columns = packed([100, 60, 39, 2, 1], Pool(ranks=2, token_budget=100), cap=1)
    assert columns.microbatch.tolist() == [0, 0, 0, 1, 0]
    assert columns.start.tolist() == [0, 1, 1, 0, 1]


def test_a_short_sequence_joins_a_larger_group_when_its_own_class_has_none() -> None:
    columns = packed([40, 1], Pool(ranks=4, token_budget=11), cap=4)
    assert columns.degree.tolist() == [4, 1] or columns.microbatch.tolist() == [0, 1]
    columns = packed([40, 39, 1], Pool(ranks=4, token_budget=11), cap=4)
    assert columns.degree.tolist() == [4, 4, 4]
    assert columns.microbatch.tolist() == [0, 1, 1]  # beside the 39, whose load leaves room


def test_the_full_pool_is_the_last_class_of_a_pool_that_is_no_power_of_two() -> None:
    columns = packed([60, 30, 5], Pool(ranks=6, token_budget=10), cap=6)
    assert columns.degree.tolist() == [6, 4, 1]
    assert columns.start.tolist() == [0, 0, 4]
    assert columns.microbatch.tolist() == [0, 1, 1]


def test_padding_counts_against_the_budget() -> None:
    ring_of_two = Pool(ranks=2, token_budget=10, heads=1)  # 4 chunks a sequence
    columns = packed([17, 1, 1, 1], ring_of_two, cap=2)
    assert columns.degree[0] == 2
    assert (columns.microbatch[columns.degree == 2] == 0).sum() <= 1  # 17 pads to 20: no room beside it


def test_ids_break_ties_between_equal_lengths() -> None:
    columns = packed([5] * 7, Pool(ranks=4, token_budget=5), cap=1)
    assert columns.microbatch.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert columns.start.tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_the_longest_length_and_the_largest_pool_stay_inside_64_bits() -> None:
    longest = 1 << 24
    lengths = [longest] * 3 + [longest - 1] * 5 + [1] * 5
    pool = Pool(ranks=1 << 16, token_budget=1 << 30, stages=2)
    for cap in (1, 2, 1 << 16):
        packed(lengths, pool, cap)
