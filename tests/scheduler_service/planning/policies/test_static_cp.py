"""Static CP: examples worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from scheduler_service.domain import Batch, CostModel, InvalidInputError, Plan, Pool
from scheduler_service.planning.feasibility import memory_degree
from scheduler_service.planning.policies.static_cp import plan
from scheduler_service.planning.policy import PlanningConfig
from scheduler_service.simulation import forecast
from tests.support.problems import Problem, problems

ANY = PlanningConfig()


def groups_of(plan: Plan, batch: Batch) -> dict[tuple[int, int], list[int]]:
    """Lengths on each (microbatch, start), longest first."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i in np.argsort(-batch.lengths, kind="stable"):
        groups.setdefault((int(plan.microbatch[i]), int(plan.start[i])), []).append(int(batch.lengths[i]))
    return groups


def test_packs_best_fit_decreasing_into_nine_tenths_of_the_budget() -> None:
    # Degree 2 × budget 10: packs of 18. The 12 and the 9 open packs, the 8 goes beside the 9 (12 + 8 would be 20), the
    # 5 beside the 12, the 4 nowhere and opens a third, the 1 beside 12 + 5 and 9 + 8, equally full: the older.
    batch = Batch([5, 12, 4, 9, 1, 8])
    found = plan(batch, Pool(ranks=4, token_budget=10), PlanningConfig(cap=2))
    # Three packs and two groups: the fourth group takes the 8, the last of the nearest pack that has two.
    assert groups_of(found, batch) == {(0, 0): [12, 5, 1], (0, 2): [9], (1, 0): [4], (1, 2): [8]}
    assert set(found.degree.tolist()) == {2}
    assert found.header.cap == 2


def test_the_longest_sequence_raises_the_capacity() -> None:
    batch = Batch([20, 15, 5])  # nine tenths are 18; the longest sequence makes it 20
    found = plan(batch, Pool(ranks=2, token_budget=10), PlanningConfig(cap=2))
    assert groups_of(found, batch) == {(0, 0): [20], (1, 0): [15, 5]}


def test_a_group_that_no_sequence_is_left_for_stays_empty() -> None:
    batch = Batch([3, 3])
    found = plan(batch, Pool(ranks=4, token_budget=10), PlanningConfig(cap=1))
    assert groups_of(found, batch) == {(0, 0): [3], (0, 1): [3]}


def test_without_a_given_degree_it_takes_the_one_with_the_shortest_forecast() -> None:
    batch, pool = Batch(np.random.default_rng(1).integers(1, 60, 200)), Pool(8, 32, stages=4, ep=2)
    for cost in (CostModel(1.0, 1.0, 0.0), CostModel(0.0, 1.0, 100.0), CostModel(1e-3, 1.0, 10.0)):
        best = plan(batch, pool, PlanningConfig(cost))
        times = [
            forecast(plan(batch, pool, PlanningConfig(cost, cap=degree)), batch).iteration_s for degree in (2, 4, 8)
        ]
        assert forecast(best, batch).iteration_s == min(times)


def test_only_degrees_that_hold_the_longest_sequence_are_considered() -> None:
    batch = Batch([33] + [1] * 50)
    assert plan(batch, Pool(8, 10), PlanningConfig(CostModel(0.0, 0.0, 1.0))).header.cap == 4


def test_a_given_degree_that_is_too_small_is_raised() -> None:
    assert plan(Batch([33]), Pool(8, 10), PlanningConfig(cap=2)).header.cap == 4


def test_a_degree_that_does_not_divide_the_pool_leaves_ranks_idle() -> None:
    batch = Batch([30, 30, 30])
    found = plan(batch, Pool(6, 10), PlanningConfig(cap=4))
    assert groups_of(found, batch) == {(0, 0): [30], (1, 0): [30], (2, 0): [30]}


def test_a_degree_that_the_pool_has_not_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="cap 3 is no degree of this pool"):
        plan(Batch([1]), Pool(8, 10), PlanningConfig(cap=3))


@settings(max_examples=50, deadline=None)
@given(problems())
def test_all_sequences_run_at_one_degree(posed: Problem) -> None:
    batch, pool, cost, cap = posed
    if memory_degree(batch.longest, pool) is not None:
        assert len(set(plan(batch, pool, PlanningConfig(cost, cap)).degree.tolist())) == 1
