import numpy as np
import pytest

from scheduler_service.domain import Batch, CostModel, Pool
from scheduler_service.planning import PlanningConfig, new_plan, plan_iteration, plan_statistics
from scheduler_service.simulation import forecast, rank_loads


def test_figures_of_a_plan_by_hand() -> None:
    batch, pool = Batch([17, 3, 2]), Pool(ranks=4, token_budget=12, heads=1)
    # MB 0: 17 on ranks 0–1 (4 chunks: 20 tokens), 3 on rank 2; MB 1: 2 on rank 0.
    columns = ([0, 0, 1], [0, 2, 0], [2, 1, 1])
    statistics = plan_statistics(new_plan("by hand", batch, pool, PlanningConfig(), columns), batch)
    assert statistics.tokens == 22
    assert statistics.longest_tokens == 17
    assert statistics.sum_of_squares == 289 + 9 + 4
    assert (statistics.load_max, statistics.load_min) == (144.5, 0.0)
    assert statistics.peak_min == 4.0
    assert statistics.load_mean == (289 + 9 + 4) / 8
    assert statistics.imbalance == 144.5 * 8 / 302
    assert statistics.padding == 25 / 22
    assert statistics.degrees == (1, 2)
    assert statistics.degree_sequences == {1: 2, 2: 1}
    assert statistics.degree_share == {1: 0.5, 2: 0.5}
    assert statistics.idle_share == 0.5


def test_figures_agree_with_the_matrices_and_the_forecast() -> None:
    batch = Batch(np.random.default_rng(1).integers(1, 3000, 200))
    plan = plan_iteration(batch, Pool(ranks=12, token_budget=1000, stages=3, ep=4), cost=CostModel(theta=1e-6))
    statistics, loads, predicted = plan_statistics(plan, batch), rank_loads(plan, batch), forecast(plan, batch)
    assert statistics.load_max == loads.load.max()
    assert statistics.load_min == loads.load.min()
    assert statistics.peak_min == loads.load.max(axis=0).min()
    assert statistics.load_mean == pytest.approx(loads.load.mean(), rel=1e-12)
    assert statistics.padding * batch.tokens == pytest.approx(loads.tokens.sum(), rel=1e-12)
    assert statistics.idle_share == pytest.approx((loads.degree == 0).mean())
    assert sum(statistics.degree_share.values()) == pytest.approx(1)
    assert (statistics.pp_bubble, statistics.dp_bubble) == (predicted.pp_bubble, predicted.dp_bubble)
