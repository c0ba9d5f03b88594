"""The linear program bounds every plan, and is exact where there is nothing to choose."""

import numpy as np
import pytest

from scheduler_service.domain import Batch, CostModel, Pool
from scheduler_service.planning import POLICIES, plan_iteration
from tests.benchmarks.span_program import least_span_s, span_of_means

COST = CostModel(theta=2.6e-10, tau=4.1e-5, overhead=8e-3)


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_one_microbatch_goes_down_and_up_the_pipeline(stages: int) -> None:
    assert span_of_means(0.2, 0.3, 1.0, 0.01, 1, stages) == pytest.approx(stages * (3.5 * 0.2 + 3 * 0.3 + 2 * 0.01))


def test_without_a_pipeline_the_span_is_all_work_however_it_is_split() -> None:
    assert span_of_means(0.2, 0.3, 1.0, 0.01, 7, 1) == pytest.approx(3.5 * 0.2 + 3 * 0.3 + 14 * 0.01)


def test_what_the_token_budget_does_not_hold_has_no_span() -> None:
    assert span_of_means(0.0, 0.3, 0.1, 0.01, 2, 2) == np.inf


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_no_plan_of_any_system_is_below_it(stages: int) -> None:
    batch = Batch(np.random.default_rng(stages).lognormal(6.5, 1.2, 400).clip(1, 8000).astype(int))
    pool = Pool(8, 2048, stages=stages, ep=2)
    least = least_span_s(batch, pool, COST)
    for policy in set(POLICIES) - {"flexsp"}:  # its solver takes minutes
        header = plan_iteration(batch, pool, policy=policy, cost=COST).header
        assert least <= header.predicted_s * (1 + 1e-9)
        if policy == "hydra_search":
            assert least >= 0.9 * header.predicted_s  # a bound that says something
