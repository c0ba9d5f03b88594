"""The simple cost model fitted to a cluster predicts what its operators do."""

from __future__ import annotations

import pytest

from scheduler_service.domain import Batch
from scheduler_service.planning import plan_iteration
from scheduler_service.simulation.job import simulate
from scheduler_service.simulation.presets import load_cluster
from scheduler_service.simulation.simple_cost import simple_cost


@pytest.mark.parametrize("name", ["paper_512_h20", "paper_2048_h800", "hy3_8k"])
def test_it_is_within_a_fifth_of_the_full_model(name: str) -> None:
    cluster = load_cluster(name)
    batch = Batch([131072] * 4 + [2000] * (3 * cluster.ranks) + [8000] * (2 * cluster.ranks))
    plan = plan_iteration(batch, cluster.pool, policy="hydra", cost=simple_cost(cluster))
    full = simulate(plan, batch, cluster).replay.span.max()
    assert plan.header.predicted_s == pytest.approx(full, rel=0.2)
