"""WLB-LLM without deferral: examples worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from scheduler_service.domain import Batch, CostModel, InvalidInputError, Plan, Pool
from scheduler_service.planning.feasibility import memory_degree
from scheduler_service.planning.policies import static_cp
from scheduler_service.planning.policies.wlb_llm import pack, plan
from scheduler_service.planning.policy import PlanningConfig
from scheduler_service.simulation import forecast, rank_loads
from tests.support.problems import Problem, problems

ATTENTION = CostModel(theta=1.0, tau=0.0, overhead=0.0)


def groups_of(plan: Plan, batch: Batch) -> dict[tuple[int, int], list[int]]:
    """Lengths on each (microbatch, start), longest first."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i in np.argsort(-batch.lengths, kind="stable"):
        groups.setdefault((int(plan.microbatch[i]), int(plan.start[i])), []).append(int(batch.lengths[i]))
    return groups


def test_documents_go_to_the_pack_with_the_smallest_workload() -> None:
    # Σs = 26 of 2 × 20. Squares: 12 opens pack 0 (144); 5, 4, 3 and 2 all go to pack 1 (54), by tokens 14.
    batch = Batch([5, 12, 4, 2, 3])
    found = plan(batch, Pool(2, 20), PlanningConfig(ATTENTION, cap=1))
    assert groups_of(found, batch) == {(0, 0): [12], (0, 1): [5, 4, 3, 2]}
    assert found.header.cap == 1


def test_else_to_the_pack_with_the_fewest_tokens() -> None:
    # Workloads 10, 4 and 3 and tokens 5, 6 and 8: the lightest pack has no room for 3 of 10, the shortest has.
    documents = [(0, 5, 10.0), (1, 6, 4.0), (2, 8, 3.0), (3, 3, 1.0)]
    assert pack(documents, 3, 10) == ([[0, 3], [1], [2]], [])


def test_what_fits_in_neither_is_left() -> None:
    # The lightest pack lacks tokens, and so does the shortest.
    assert pack([(0, 8, 2.0), (1, 7, 2.0), (2, 4, 1.0), (3, 3, 1.0)], 2, 10) == ([[0], [1, 3]], [2])


def test_nothing_is_deferred_to_another_iteration() -> None:
    # 24 tokens are three packs of 10, but no two sixes fit into one: one more microbatch, and all have their pack.
    batch = Batch([6, 6, 6, 6])
    found = plan(batch, Pool(1, 10), PlanningConfig(ATTENTION))
    assert found.microbatch.tolist() == [0, 1, 2, 3]


def test_without_a_given_degree_it_takes_the_one_with_the_shortest_forecast() -> None:
    batch, pool = Batch(np.random.default_rng(1).integers(1, 60, 200)), Pool(8, 32, stages=4, ep=2)
    cost = CostModel(1e-3, 1.0, 10.0)
    times = [forecast(plan(batch, pool, PlanningConfig(cost, degree)), batch).iteration_s for degree in (2, 4, 8)]
    assert forecast(plan(batch, pool, PlanningConfig(cost)), batch).iteration_s == min(times)


def test_a_given_degree_that_is_too_small_is_raised_and_an_unknown_one_refused() -> None:
    assert plan(Batch([33]), Pool(8, 10), PlanningConfig(cap=2)).header.cap == 4
    with pytest.raises(InvalidInputError, match="cap 3 is no degree of this pool"):
        plan(Batch([1]), Pool(8, 10), PlanningConfig(cap=3))


def test_loads_are_closer_together_than_with_packs_by_tokens() -> None:
    random = np.random.default_rng(5)
    batch, pool = Batch(np.clip(np.exp(random.normal(5, 1.5, 2000)), 1, 4096).astype(int)), Pool(16, 4096)
    config = PlanningConfig(ATTENTION, cap=1)
    ours, static = (rank_loads(p(batch, pool, config), batch).load for p in (plan, static_cp.plan))
    assert ours.max(axis=0).sum() < static.max(axis=0).sum()


@settings(max_examples=50, deadline=None)
@given(problems())
def test_all_sequences_run_at_one_degree(posed: Problem) -> None:
    batch, pool, cost, cap = posed
    if memory_degree(batch.longest, pool) is not None:
        assert len(set(plan(batch, pool, PlanningConfig(cost, cap)).degree.tolist())) == 1
