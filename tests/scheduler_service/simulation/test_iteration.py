"""The simple cost model against examples worked by hand and against a loop over ranks."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import Batch, CostModel, Plan, Pool
from scheduler_service.planning import plan_iteration
from scheduler_service.planning.policy import PlanningConfig, new_plan
from scheduler_service.simulation import forecast, rank_loads, replay_pipeline
from tests.support.strategies import batches, costs, pools, random_plan, slowed

COST = PlanningConfig(CostModel(theta=1.0, tau=10.0, overhead=100.0))


def test_one_rank_one_microbatch() -> None:
    batch = Batch([3])
    found = forecast(new_plan("hand", batch, Pool(1, 8, stages=3), COST, ([0], [0], [1])), batch)
    assert found.forward_s.tolist() == [[9 + 30 + 100]]
    assert found.backward_s.tolist() == [[2.5 * 9 + 2 * 30 + 100]]
    assert found.iteration_s == 3 * (139 + 182.5)
    assert found.pp_bubble == pytest.approx(2 / 3)
    assert found.dp_bubble == 0


def test_an_ep_group_takes_the_largest_attention_and_the_largest_tokens_of_different_ranks() -> None:
    batch = Batch([4, 1, 1, 1, 1, 1])  # rank 0: load 16, 4 tokens; rank 1: load 5, 5 tokens; ranks 2, 3: nothing
    plan = new_plan("hand", batch, Pool(4, 8, ep=2), COST, ([0] * 6, [0, 1, 1, 1, 1, 1], [1] * 6))
    found = forecast(plan, batch)
    assert found.forward_s.tolist() == [[16 + 50 + 100], [100]]
    assert found.backward_s.tolist() == [[40 + 100 + 100], [100]]
    assert found.iteration_s == 166 + 240
    assert found.dp_bubble == pytest.approx((406 - 200) / 406 / 2)


def test_cp_groups_wider_than_ep_share_maxima_through_all_that_hang_together() -> None:
    # EP groups of 6 ranks: the CP groups on 4 … 7 and 16 … 19 tie groups 0 and 1, and groups 2 and 3.
    batch = Batch([8, 6, 5])
    pool = Pool(24, 8, ep=6)
    plan = new_plan("hand", batch, pool, COST, ([0, 0, 1], [4, 16, 0], [4, 4, 1]))
    found = forecast(plan, batch)
    assert found.forward_s[:, 0].tolist() == [16 + 20 + 100] * 2 + [9 + 20 + 100] * 2
    assert found.forward_s[:, 1].tolist() == [25 + 50 + 100, 100, 100, 100]


def test_a_cp_group_inside_an_ep_group_ties_nothing() -> None:
    # EP groups of 3 ranks; CP groups on 2 … 3, 4 … 5 (inside one) and 8 … 9: they tie 0 to 1, and 2 to 3.
    batch = Batch([2, 4, 6])
    pool = Pool(12, 8, ep=3)
    plan = new_plan("hand", batch, pool, COST, ([0, 0, 0], [2, 4, 8], [2, 2, 2]))
    assert forecast(plan, batch).forward_s[:, 0].tolist() == [8 + 20 + 100] * 2 + [18 + 30 + 100] * 2


def test_cp_groups_that_meet_in_ep_groups_tie_the_whole_chain() -> None:
    # EP groups of 3 ranks, CP groups on 0 … 3, 4 … 7 and 8 … 11: 0-1, 1-2 and 2-3.
    batch = Batch([8, 4, 12])
    plan = new_plan("hand", batch, Pool(12, 8, ep=3), COST, ([0, 0, 0], [0, 4, 8], [4, 4, 4]))
    assert forecast(plan, batch).forward_s[:, 0].tolist() == [36 + 30 + 100] * 4


def test_microbatches_without_a_sequence_cost_their_overhead() -> None:
    batch = Batch([3])
    plan = new_plan("hand", batch, Pool(1, 8, microbatch_multiple=4), COST, ([0], [0], [1]))
    found = forecast(plan, batch)
    assert found.forward_s.tolist() == [[139, 100, 100, 100]]
    assert found.iteration_s == 139 + 182.5 + 6 * 100


def test_padding_is_paid_for_in_linear_work_only() -> None:
    batch = Batch([5])
    ring = Pool(ranks=2, token_budget=8, heads=1, ep=2)  # 5 tokens padded to 8, 4 on each rank
    plan = new_plan("hand", batch, ring, COST, ([0], [0], [2]))
    assert forecast(plan, batch).forward_s.tolist() == [[12.5 + 40 + 100]]


def test_a_group_runs_at_the_pace_of_its_slowest_rank() -> None:
    batch = Batch([4, 3, 2])
    pool = Pool(8, 8, ep=2, speeds={1: 0.5, 3: 0.25, 6: 0, 7: 0})
    plan = new_plan("hand", batch, pool, COST, ([0, 0, 0], [0, 2, 4], [2, 1, 1]))
    assert forecast(plan, batch).forward_s[:, 0].tolist() == [
        (8 + 20) / 0.5 + 100, 9 + 30 + 100, 4 + 20 + 100, 100,
    ]  # fmt: skip


def loop_over_ranks(plan: Plan, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward seconds by the words of the model, rank by rank."""
    pool, cost = plan.header.pool, plan.header.cost
    pipelines, microbatches = pool.ranks // pool.ep, plan.header.microbatches
    loads = rank_loads(plan, batch)
    forward, backward = np.zeros((2, pipelines, microbatches))
    for microbatch in range(microbatches):
        team = list(range(pipelines))  # of each EP group: the smallest EP group that it hangs together with
        changed = True
        while changed:
            changed = False
            for i in np.flatnonzero(plan.microbatch == microbatch):
                ranks = range(plan.start[i], plan.start[i] + plan.degree[i])
                members = {rank // pool.ep for rank in ranks}
                smallest = min(team[e] for e in members)
                changed |= any(team[e] != smallest for e in members)
                for e in members:
                    team[e] = smallest
        for e in range(pipelines):
            ranks = [r for r in range(pool.ranks) if team[r // pool.ep] == team[e]]
            speeds = {r: _speed(plan, loads.start[r, microbatch], loads.degree[r, microbatch]) for r in ranks}
            attention = max(cost.theta * loads.load[r, microbatch] / speeds[r] for r in ranks)
            linear = max(cost.tau * loads.tokens[r, microbatch] / speeds[r] for r in ranks)
            forward[e, microbatch] = attention + linear + cost.overhead
            backward[e, microbatch] = 2.5 * attention + 2 * linear + cost.overhead
    return forward, backward


def _speed(plan: Plan, start: int, degree: int) -> float:
    """Of the slowest rank of a group; 1 for a rank without one."""
    return min((dict(plan.header.pool.speeds).get(rank, 1.0) for rank in range(start, start + degree)), default=1.0)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_equals_a_loop_over_ranks(data: st.DataObject) -> None:
    pool = data.draw(pools().filter(lambda pool: pool.capacity(1) > 0))
    if data.draw(st.booleans()):
        pool = slowed(pool, Random(data.draw(st.integers(0, 999))))
    batch = data.draw(batches(pool))
    config = PlanningConfig(data.draw(costs()))
    plan = random_plan(batch, pool, Random(data.draw(st.integers(0, 999))), config)
    found = forecast(plan, batch)
    forward, backward = loop_over_ranks(plan, batch)
    assert found.forward_s == pytest.approx(forward)
    assert found.backward_s == pytest.approx(backward)
    stages = np.ones((1, pool.stages, 1))
    replay = replay_pipeline(forward[:, None] * stages, backward[:, None] * stages)
    assert found.iteration_s == pytest.approx(float(replay.stage_end.max()))
    assert found.pp_bubble == pytest.approx(float(replay.pp_bubble.mean()))
    assert found.dp_bubble == pytest.approx(float(replay.dp_bubble.mean()))


def test_a_pool_of_16384_ranks_needs_memory_for_its_ep_groups_only() -> None:
    batch = Batch(np.full(16384, 100))
    plan = new_plan("hand", batch, Pool(16384, 8192, stages=9, ep=8), COST, ([0] * 16384, range(16384), [1] * 16384))
    found = forecast(plan, batch)
    assert found.forward_s.shape == (2048, 1)
    assert found.iteration_s == pytest.approx(9 * (3.5 * 1e4 + 3 * 1e3 + 200))


def test_without_a_pipeline_no_bubble_is_below_zero_by_rounding() -> None:
    batch = Batch(np.random.default_rng(0).integers(1, 4000, 300))
    for ranks in (1, 2, 4, 8):
        plan = plan_iteration(batch, Pool(ranks, 4096), policy="hydra")
        assert forecast(plan, batch).pp_bubble >= 0
