"""Packing to a profile against the linear reference, and what its sizes do."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import Batch, CostModel, Pool
from scheduler_service.planning import PlanningConfig, memory_degree, new_plan, verify_plan
from scheduler_service.planning.degrees import MOST_LOAD
from scheduler_service.planning.packing import queue_of
from scheduler_service.planning.profile_packing import cost_weight, pack_to_profile
from scheduler_service.planning.reference import pack_to_limits_linearly
from scheduler_service.simulation import group_loads
from tests.support.problems import Problem, problem, problems
from tests.support.strategies import slowed


def check(posed: Problem, sizes: list[float], slack: float, early_share: float) -> bool:
    """Whether it packed; if so, equal to the reference with the same limits, verified, and its loads the plan's."""
    batch, pool, cost, _ = posed
    if memory_degree(batch.longest, pool) is None:
        return False
    weight = cost_weight(cost, batch)
    packed = pack_to_profile(queue_of(batch), pool, weight, np.array(sizes), slack=slack, early_share=early_share)
    if packed is None:
        return False

    def weigh(length: int) -> int:
        return (weight.quadratic * length + weight.linear) * length >> weight.shift

    assert sum(map(weigh, batch.lengths.tolist())) <= MOST_LOAD

    def limit(microbatch: int, degree: int, length: int) -> int:
        rows = packed.limit if length <= packed.split else packed.early
        return int(rows[microbatch, pool.degrees.index(degree)])

    reference = pack_to_limits_linearly(batch, pool, limit, weigh)
    for name in reference._fields:
        np.testing.assert_array_equal(getattr(packed.columns, name), getattr(reference, name), name)

    plan = new_plan("by profile", batch, pool, PlanningConfig(cost), packed.columns)
    verify_plan(plan, batch)
    order = np.lexsort((packed.groups.start, packed.groups.microbatch))
    expected = group_loads(plan, batch)
    np.testing.assert_array_equal(packed.groups.tokens[order], expected.tokens)
    np.testing.assert_allclose(packed.groups.load[order], expected.load, rtol=1e-12)
    return True


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_linear_reference_on_random_and_adversarial_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    packed = 0
    for _ in range(400):
        posed = problem(rng)
        fewest = -(-posed.batch.tokens // (posed.pool.ranks * posed.pool.token_budget))
        sizes = np.sort(rng.random(int(rng.integers(1, 4)) * fewest + 3) + 0.01)[::-1]
        packed += check(posed, sizes.tolist(), float(rng.choice([0, 0.02, 0.5])), float(rng.choice([0, 0.3, 0.6])))
    assert packed >= 250


@settings(max_examples=150, deadline=None)
@given(
    problems(),
    st.lists(st.floats(1e-3, 1), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.02, 1.0]),
    st.sampled_from([0.0, 0.5]),
)
def test_equals_the_linear_reference_on_batches_that_hypothesis_finds(
    posed: Problem, sizes: list[float], slack: float, early_share: float
) -> None:
    check(posed, sorted(sizes, reverse=True), slack, early_share)


@settings(max_examples=200, deadline=None)
@given(
    problems(), st.integers(0, 1 << 32), st.lists(st.floats(1e-3, 1), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.02, 1.0]), st.sampled_from([0.0, 0.5]),
)  # fmt: skip
def test_equals_the_linear_reference_on_pools_with_slow_and_excluded_ranks(
    posed: Problem, seed: int, sizes: list[float], slack: float, early_share: float
) -> None:
    slow = posed._replace(pool=slowed(posed.pool, Random(seed)))
    check(slow, sorted(sizes, reverse=True), slack, early_share)


def test_microbatches_take_the_sizes_that_are_asked_for() -> None:
    batch = Batch(np.clip(np.random.default_rng(0).lognormal(5, 1.2, 20_000), 1, 4000).astype(int))
    pool, cost = Pool(16, 1_000_000), CostModel(theta=1e-8, tau=1e-5)
    sizes = np.array([8.0, 4.0, 2.0, 1.0])
    packed = pack_to_profile(queue_of(batch), pool, cost_weight(cost, batch), sizes, slack=0.0)
    assert packed is not None
    seconds = 3.5 * cost.theta * packed.groups.load + 3 * cost.tau * packed.groups.tokens
    taken = np.bincount(packed.groups.microbatch, seconds * packed.groups.degree)[:4] / pool.ranks
    np.testing.assert_allclose(taken / taken.sum(), sizes / sizes.sum(), rtol=0.05)


def test_gives_up_where_the_token_budget_needs_many_more_microbatches() -> None:
    batch, pool = Batch([10] * 400), Pool(4, 10)
    assert pack_to_profile(queue_of(batch), pool, cost_weight(CostModel(), batch), np.ones(8), slack=0.0) is None


def test_a_weight_is_proportional_to_the_cost() -> None:
    cost = CostModel(theta=2.6e-10, tau=4.1e-5)
    weight = cost_weight(cost, Batch([262_144, 1000]))
    weigh = [((weight.quadratic * s + weight.linear) * s) >> weight.shift for s in (1000, 262_144)]
    seconds = [3.5 * cost.theta * s * s + 3 * cost.tau * s for s in (1000, 262_144)]
    assert weigh[1] / weigh[0] == pytest.approx(seconds[1] / seconds[0], rel=1e-4)
    assert cost_weight(CostModel(theta=0.0), Batch([100])).quadratic == 0
    assert cost_weight(CostModel(tau=0.0), Batch([100])).linear == 0


def test_sequences_before_the_split_leave_their_share_of_every_microbatch_to_those_behind() -> None:
    """One rank, two microbatches of 90 tokens each: 40, 40, 40, 10 × 6."""
    batch, pool = Batch([40, 40, 40, *[10] * 6]), Pool(1, 1000)
    queue, by_tokens = queue_of(batch), cost_weight(CostModel(theta=0.0), batch)
    by_length = pack_to_profile(queue, pool, by_tokens, np.ones(2), slack=0.0)
    assert by_length is not None
    assert by_length.columns.microbatch.tolist() == [0, 0, 1, *[0], *[1] * 5]
    mixed = pack_to_profile(queue, pool, by_tokens, np.ones(2), slack=0.0, early_share=0.6)
    assert mixed is not None
    # 0.6 of 90 holds one 40; five 10s fill the rest. The last microbatch takes all that is left.
    assert mixed.split == 10
    assert mixed.columns.microbatch.tolist() == [0, 1, 1, *[0] * 5, 1]


def test_every_microbatch_gets_its_share_of_the_sequences_before_the_split() -> None:
    batch = Batch([1000] * 40 + [10] * 20_000)
    pool, cost = Pool(8, 1_000_000), CostModel(theta=1e-8, tau=1e-5)
    weight = cost_weight(cost, batch)
    packed = pack_to_profile(queue_of(batch), pool, weight, np.ones(5), slack=0.01, early_share=0.25)
    assert packed is not None
    long = batch.lengths == 1000
    assert np.bincount(packed.columns.microbatch[long]).tolist() == [8] * 5


def test_a_group_of_the_whole_pool_is_filled_as_far_as_any_other() -> None:
    """The longest opens it; what the others weigh together is far above what one sequence can."""
    batch = Batch([262_144, *[200] * 40_000])
    pool, cost = Pool(2048, 8192), CostModel(theta=2.6e-10, tau=4.1e-5)
    packed = pack_to_profile(queue_of(batch), pool, cost_weight(cost, batch), np.ones(8), slack=0.0)
    assert packed is not None
    assert packed.columns.degree[0] == 2048
    tokens = np.bincount(packed.groups.microbatch, packed.groups.tokens * packed.groups.degree)
    long_s = 3.5 * cost.theta * 262_144**2 + 3 * cost.tau * 262_144
    rest_s = 3 * cost.tau * 200 * 40_000
    expected = 262_144 + ((long_s + rest_s) / 8 - long_s) / (3 * cost.tau)
    assert tokens[packed.columns.microbatch[0]] == pytest.approx(expected, rel=0.02)


def test_where_a_rank_gets_few_sequences_some_ranks_of_an_ep_group_share_more() -> None:
    """Sequences of 50 tokens; 240 for a rank in the first microbatch, 120 in the second: eight take 2 ranks, and 4."""
    batch, sizes = Batch([50] * 384), np.array([4.0, 1.0])
    weight = cost_weight(CostModel(theta=0.0), batch)
    for ep, degrees in ((1, {(0, 1), (1, 1)}), (2, {(0, 2), (1, 2)}), (8, {(0, 2), (1, 4)})):
        packed = pack_to_profile(queue_of(batch), Pool(64, 8192, ep=ep), weight, sizes, slack=0.0)
        assert packed is not None
        assert set(zip(packed.columns.microbatch.tolist(), packed.columns.degree.tolist(), strict=True)) == degrees
