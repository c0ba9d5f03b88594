"""The fit of the simple cost model finds the constants that made the measurements."""

import numpy as np
import pytest

from scheduler_service.domain import CostModel, Pool
from tests.support.ranks import run_ranks
from worker_agent.training.calibration import MICROBATCHES, calibrate, fit_cost_model
from worker_agent.training.config import RunConfig
from worker_agent.training.model import LanguageModel
from worker_agent.training.topology import build_topology
from worker_agent.training.trainer import Trainer


def _seconds(cost: CostModel) -> tuple[list[float], list[float]]:
    load = np.array([sum(length**2 for length in lengths) for lengths in MICROBATCHES], float)
    tokens = np.array([sum(lengths) for lengths in MICROBATCHES], float)
    forward = cost.theta * load + cost.tau * tokens + cost.overhead
    backward = 2.5 * cost.theta * load + 2 * cost.tau * tokens + cost.overhead
    return forward.tolist(), backward.tolist()


def test_exact_measurements_give_back_their_constants():
    cost = CostModel(theta=3e-9, tau=8e-5, overhead=4e-3)
    fitted = fit_cost_model(MICROBATCHES, *_seconds(cost))
    assert (fitted.theta, fitted.tau, fitted.overhead) == pytest.approx((3e-9, 8e-5, 4e-3), rel=1e-6)


def test_constants_are_never_negative():
    forward, backward = _seconds(CostModel(theta=3e-9, tau=8e-5, overhead=0.0))
    fitted = fit_cost_model(MICROBATCHES, [s * 0.97 for s in forward], backward)
    assert min(fitted.theta, fitted.tau, fitted.overhead) >= 0


def _calibrated(rank: int) -> CostModel:
    config = RunConfig()
    pool = Pool(ranks=2, token_budget=4608, ep=2)
    topology = build_topology(pool)
    trainer = Trainer(LanguageModel(config.model, experts=topology.experts), pool, topology, config.optimizer)
    return calibrate(trainer, MICROBATCHES[:4], repeats=1)


def test_every_rank_measures_the_same_model():
    first, second = run_ranks(2, _calibrated)
    assert first == second
    assert first.theta + first.tau + first.overhead > 0
