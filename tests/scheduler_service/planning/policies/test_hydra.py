"""HyDra: an example worked by hand from lengths to groups. Its parts have tests of their own."""

from __future__ import annotations

from scheduler_service.domain import Batch, CostModel, Pool
from scheduler_service.planning.policies.hydra import plan
from scheduler_service.planning.policy import PlanningConfig


def test_from_lengths_to_groups() -> None:
    # θ/c = 3.5·2⁻¹³/(2·1.75) = 2⁻¹³, so C*² = 80⁴·2·4·2⁻¹³/10,000 = 4: the cap is 2 and Λ = 80²/2 = 3,200.
    batch, pool = Batch([20, 40, 80, 40]), Pool(4, 100, stages=3)
    found = plan(batch, pool, PlanningConfig(CostModel(theta=2**-13, overhead=1.75)))
    assert (found.header.cap, found.header.target) == (2, 3200.0)
    # The 80 needs two ranks, the 40s (1,600) one each; no rank is free for the 20, which joins the first 40 (2,000).
    assert found.degree.tolist() == [1, 1, 2, 1]
    assert found.start.tolist() == [2, 2, 0, 3]
    assert found.header.microbatches == 1
