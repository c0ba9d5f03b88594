"""The lower bound against the forecasts of plans of every kind."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import Batch, CostModel, InfeasibleError, Pool
from scheduler_service.planning.certificate import lower_bound_s
from scheduler_service.planning.policies import hydra, hydra_search, megatron, static_cp
from scheduler_service.planning.policy import PlanningConfig, new_plan
from scheduler_service.planning.verify import verify_plan
from scheduler_service.simulation import forecast
from tests.support.strategies import batches, costs, pools, random_plan, slowed


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_valid_plan_is_faster(data: st.DataObject) -> None:
    pool = data.draw(pools().filter(lambda pool: pool.capacity(1) > 0))
    batch = data.draw(batches(pool))
    config = PlanningConfig(data.draw(costs()))
    plans = [random_plan(batch, pool, Random(seed), config) for seed in range(3)]
    for policy in (hydra, hydra_search, static_cp, megatron):
        try:
            plans.append(policy.plan(batch, pool, config))
        except InfeasibleError:
            assert policy is megatron  # which has no full pool that is no power of two
    bound = lower_bound_s(batch, pool, config.cost)
    for plan in plans:
        verify_plan(plan, batch)
        assert bound <= forecast(plan, batch).iteration_s


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(0, 1 << 32))
def test_no_valid_plan_is_faster_on_a_pool_with_slow_and_excluded_ranks(data: st.DataObject, seed: int) -> None:
    pool = slowed(data.draw(pools().filter(lambda pool: pool.capacity(1) > 0)), Random(seed))
    batch = data.draw(batches(pool))
    config = PlanningConfig(data.draw(costs()))
    bound = lower_bound_s(batch, pool, config.cost)
    plans = [random_plan(batch, pool, Random(seed), config) for seed in range(3)]
    for plan in (*plans, hydra.plan(batch, pool, config), hydra_search.plan(batch, pool, config)):
        verify_plan(plan, batch)
        assert bound <= forecast(plan, batch).iteration_s


def test_is_met_where_the_longest_sequence_is_all_there_is() -> None:
    """One sequence on the whole pool: p stages down and up."""
    batch, pool, cost = Batch([800]), Pool(8, 100, stages=5), CostModel(1e-3, 1e-2, 3.0)
    plan = static_cp.plan(batch, pool, PlanningConfig(cost))
    assert lower_bound_s(batch, pool, cost) == pytest.approx(forecast(plan, batch).iteration_s, rel=1e-8)


def test_is_met_by_a_perfect_balance_without_a_pipeline() -> None:
    batch, pool, cost = Batch([100] * 24), Pool(8, 100), CostModel(1e-3, 1e-2, 3.0)
    plan = static_cp.plan(batch, pool, PlanningConfig(cost, cap=1))
    assert lower_bound_s(batch, pool, cost) == pytest.approx(forecast(plan, batch).iteration_s, rel=1e-8)


def test_is_met_by_a_balance_of_slow_ranks_without_a_pipeline() -> None:
    """Σ speeds is 6: the slow ranks take half of what the others do, the excluded one nothing."""
    pool, cost = Pool(8, 200, speeds={1: 0.5, 2: 0.5, 7: 0.0}), CostModel(1e-3, 1e-2, 0.0)
    batch = Batch([100] * 12)
    plan = new_plan("hand", batch, pool, PlanningConfig(cost), ([0] * 12, [0, 0, 1, 2, *[3, 4, 5, 6] * 2], [1] * 12))
    assert lower_bound_s(batch, pool, cost) == pytest.approx(forecast(plan, batch).iteration_s, rel=1e-8)


def test_counts_the_overheads_of_the_microbatches_that_the_tokens_need() -> None:
    cost = CostModel(0.0, 0.0, 1.0)
    assert lower_bound_s(Batch([10] * 9), Pool(2, 10), cost) == pytest.approx(2 * 5)
    assert lower_bound_s(Batch([10] * 9), Pool(2, 10, stages=3), cost) == pytest.approx(2 * 5 + 2 * 2)
    assert lower_bound_s(Batch([10] * 9), Pool(2, 10, microbatch_multiple=4), cost) == pytest.approx(2 * 8)


@pytest.mark.parametrize("stages", [2, 4, 9])
def test_is_close_to_what_ramps_reach_where_no_single_sequence_dominates(stages: int) -> None:
    """With nothing but short sequences, any profile can be packed: the gap is the bound's own looseness."""
    batch, pool, cost = Batch([100] * 30_000), Pool(8, 8192, stages=stages), CostModel(2.6e-10, 4.1e-5, 8e-3)
    plan = hydra_search.plan(batch, pool, PlanningConfig(cost))
    bound = lower_bound_s(batch, pool, cost)
    assert bound <= forecast(plan, batch).iteration_s <= 1.02 * bound
    simple = (3.5 * cost.theta * 1e4 + 3 * cost.tau * 100) * 30_000 / 8
    assert bound >= simple * 1.01  # it knows of the pipeline
