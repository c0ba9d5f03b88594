"""Systems are compared on one batch, each on its own engine, each at its best largest degree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.domain import Batch
from scheduler_service.planning import POLICIES, plan_iteration, verify_plan
from scheduler_service.planning.comparison import ENGINES, compare
from scheduler_service.simulation.cluster import Engine
from scheduler_service.simulation.job import simulate
from scheduler_service.simulation.presets import load_cluster
from scheduler_service.simulation.simple_cost import simple_cost

CLUSTER = replace(load_cluster("paper_2048_h800"), ranks=32)
BATCH = Batch([200_000, 90_000, 40_000, 30_000] + [700, 2500, 6000] * 160)


def test_every_system_has_an_engine_and_gives_a_valid_plan() -> None:
    assert ENGINES.keys() == POLICIES.keys()
    quick = [policy for policy in POLICIES if policy != "flexsp"]  # its solver takes half a minute
    for outcome in compare(BATCH, CLUSTER, quick):
        assert outcome.error is None
        verify_plan(outcome.plan, BATCH)
        assert outcome.simulation.iteration_s > 0
        assert outcome.engine in ENGINES[outcome.policy]


@pytest.mark.parametrize("policy", ["hydra", "static_cp"])
def test_no_largest_degree_next_to_the_chosen_one_is_faster(policy: str) -> None:
    (found,) = compare(BATCH, CLUSTER, [policy])
    chosen = int(found.plan.degree.max())
    jobs = [CLUSTER.with_engine(engine) for engine in ENGINES[policy]]
    for limit in (None, chosen // 2):
        try:
            pool = replace(jobs[0].pool, max_degree=limit)
            plan = plan_iteration(BATCH, pool, policy=policy, cost=simple_cost(jobs[0]))
        except ValueError:  # the longest sequence does not fit
            continue
        assert min(simulate(plan, BATCH, job).iteration_s for job in jobs) >= found.simulation.iteration_s


def test_one_engine_for_all_when_asked() -> None:
    found = list(compare(BATCH, CLUSTER, ["megatron", "hydra"], engine=Engine.HYBRID))
    assert [outcome.engine for outcome in found] == [Engine.HYBRID] * 2


def test_a_system_that_cannot_plan_says_why_and_the_others_go_on() -> None:
    too_long = Batch([400_000, 100])
    found = list(compare(too_long, CLUSTER, ["hydra", "megatron"]))
    assert [outcome.plan for outcome in found] == [None, None]
    assert all("400,000" in str(outcome.error) for outcome in found)
