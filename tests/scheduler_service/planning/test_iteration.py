import subprocess
import sys
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from scheduler_service.domain import Batch, CostModel, InfeasibleError, InvalidInputError, Pool, Reason
from scheduler_service.planning import DEFAULT_POLICY, POLICIES, plan_iteration
from scheduler_service.planning.policies.hydra_search import DOUBLING
from scheduler_service.simulation import forecast, rank_loads
from tests.support.strategies import slowed

COST = CostModel(theta=2.6e-10, tau=4.1e-5, overhead=8e-3)
LENGTHS = [262_144, 40_000, 9_000, 8_192, 8_191, *range(1, 400, 3)]

GOLDEN_DIGEST = "6d4dac1eda7ace934e49890b0585fd39"
"""Digest of the plan below. It changes only when the packing, the closed form or the canonical form does: then every
agent and service of a job must be of the same version, and PLAN_FORMAT must rise."""


def golden_plan():
    return plan_iteration(Batch(LENGTHS), Pool(ranks=64, token_budget=8192, stages=4, ep=8), policy="hydra", cost=COST)


def test_the_digest_is_the_same_on_every_machine_and_in_every_process() -> None:
    assert golden_plan().digest == GOLDEN_DIGEST
    program = "from tests.scheduler_service.planning.test_iteration import golden_plan; print(golden_plan().digest)"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert other.stdout.strip() == GOLDEN_DIGEST


def test_the_digest_covers_columns_pool_cost_target_and_batch_but_not_the_predictions() -> None:
    plan = golden_plan()
    header = plan.header
    others = [
        replace(plan, header=replace(header, pool=replace(header.pool, stages=5))),
        replace(plan, header=replace(header, pool=replace(header.pool, node=8))),
        replace(plan, header=replace(header, pool=replace(header.pool, speeds={3: 0.5}))),
        replace(plan, header=replace(header, pool=replace(header.pool, speeds={3: 0.25}))),
        replace(plan, header=replace(header, pool=replace(header.pool, speeds={2: 0.5}))),
        replace(plan, header=replace(header, cost=CostModel(1.0, 1.0, 1.0))),
        replace(plan, header=replace(header, target=header.target + 1)),
        replace(plan, header=replace(header, cap=1)),
        replace(plan, header=replace(header, microbatches=header.microbatches + 1)),
        replace(plan, header=replace(header, batch_digest="00" * 16)),
        replace(plan, header=replace(header, policy="hydrA")),
        replace(plan, start=np.roll(plan.start, 1)),
        replace(plan, microbatch=np.roll(plan.microbatch, 1)),
        replace(plan, degree=np.roll(plan.degree, 1)),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 1 + len(others)
    described = plan.with_predictions(predicted_s=1.0, lower_bound_s=2.0, plan_s=3.0)
    assert described == plan
    assert (described.header.predicted_s, described.header.lower_bound_s, described.header.plan_s) == (1.0, 2.0, 3.0)


def test_planning_time_is_read_from_the_clock_that_is_given() -> None:
    ticks = iter([10.0, 12.5])
    assert plan_iteration(Batch([1]), Pool(1, 1), clock=lambda: next(ticks)).header.plan_s == 2.5


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="policy 'hydro' is unknown; choose one of hydra") as caught:
        plan_iteration(Batch([1]), Pool(1, 1), policy="hydro")
    assert caught.value.reason == Reason.UNKNOWN_POLICY
    assert DEFAULT_POLICY in POLICIES


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cap", [4.0, True, "4"])
def test_a_cap_that_is_no_whole_number_is_refused(policy: str, cap: object) -> None:
    with pytest.raises(InvalidInputError, match="cap is"):
        plan_iteration(Batch([1]), Pool(8, 8), policy=policy, cap=cap)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_takes_all_ranks_for_equal_refuses_slow_ones(policy: str) -> None:
    pool = Pool(ranks=64, token_budget=8192, stages=4, speeds={3: 0.5, 7: 0})
    if policy in ("hydra", "hydra_search"):
        assert 7 not in plan_iteration(Batch(LENGTHS), pool, policy=policy, cost=COST).start
        return
    message = f"policy {policy} takes all ranks for equally fast, and 2 of this pool .* choose hydra or hydra_search"
    with pytest.raises(InfeasibleError, match=message) as caught:
        plan_iteration(Batch(LENGTHS), pool, policy=policy, cost=COST)
    assert caught.value.reason == Reason.INFEASIBLE


@pytest.mark.parametrize("policy", ["hydra", "hydra_search"])
def test_a_planner_that_knows_of_a_slow_rank_loses_little_to_it(policy: str) -> None:
    """One rank in 64 at half its speed: taken for equal, it holds up all others. Another one is excluded."""
    batch = Batch(np.clip(np.random.default_rng(1).lognormal(6.5, 1.6, 3000), 1, 120_000).astype(int))
    even = Pool(ranks=64, token_budget=8192, stages=4, ep=8)
    slow, excluding = replace(even, speeds={13: 0.5}), replace(even, speeds={13: 0.5, 40: 0})
    blind = plan_iteration(batch, even, policy=policy)
    blind_s = forecast(replace(blind, header=replace(blind.header, pool=slow)), batch).iteration_s
    known = plan_iteration(batch, slow, policy=policy)
    assert known.header.predicted_s <= 0.65 * blind_s
    loads = rank_loads(known, batch)
    assert loads.load[13].sum() <= 0.55 * loads.load.sum(axis=1).mean()
    assert loads.tokens[13].sum() <= 0.6 * loads.tokens.sum(axis=1).mean()
    assert rank_loads(plan_iteration(batch, excluding, policy=policy), batch).tokens[40].max() == 0


@pytest.mark.parametrize(("policy", "apart"), [("hydra", 0.0), ("hydra_search", DOUBLING * 4)])
def test_to_know_of_slow_ranks_is_never_worse_than_to_take_them_for_equal_or_to_leave_them_out(
    policy: str, apart: float
) -> None:
    """Also where hardly a rank has full speed, and only such have a share that holds a sequence of the whole budget.

    But for what `hydra_search` gives for narrower groups, which from 16 ranks to one are four doublings away.
    """
    even = Pool(ranks=16, token_budget=8192, stages=4)
    random = Random(3)
    pools = [replace(even, speeds=dict.fromkeys(range(1, 16), 0.99))] + [slowed(even, random) for _ in range(20)]
    mixed = Batch(np.clip(np.random.default_rng(4).lognormal(7, 1.6, 300), 1, 8192).astype(int))
    for pool, batch in product(pools, (Batch([8192] * 160), mixed)):
        blind = plan_iteration(batch, pool.evened, policy=policy)
        blind_s = forecast(replace(blind, header=replace(blind.header, pool=pool)), batch).iteration_s
        known_s = plan_iteration(batch, pool, policy=policy).header.predicted_s
        assert known_s <= blind_s * (1 + apart)
        if pool.without_slow != pool:
            without = plan_iteration(batch, pool.without_slow, policy=policy).header.predicted_s
            assert known_s <= without * (1 + apart)


@pytest.mark.parametrize("policy", ["hydra", "hydra_search"])
def test_a_degree_cap_holds_where_only_the_slow_ranks_give_groups_of_it(policy: str) -> None:
    """Without rank 4 the pool of 6 has no group of 6."""
    pool, batch = Pool(ranks=6, token_budget=4096, speeds={4: 0.5}), Batch([9_000, 4_000, 300, 200])
    plan = plan_iteration(batch, pool, policy=policy, cap=6)
    assert plan.degree.max() <= 6


@pytest.mark.parametrize("policy", POLICIES)
def test_the_number_of_microbatches_is_aligned_upwards_never_downwards(policy: str) -> None:
    """Four sequences of 1,000 on each of 64 ranks, and 8.5 times that: nine microbatches hold them, eight do not."""
    batch, pool = Batch([1000] * 17 * 128), Pool(ranks=64, token_budget=4096, stages=4)
    fewest = -(-len(batch) // (64 * 4))
    assert fewest == 9
    for multiple in (4, 6, 9):
        plan = plan_iteration(batch, replace(pool, microbatch_multiple=multiple), policy=policy)  # verifies the budget
        assert plan.header.microbatches % multiple == 0
        assert plan.header.microbatches >= fewest


def test_the_added_microbatches_stay_empty_by_the_paper_and_are_put_to_use_by_the_search() -> None:
    batch = Batch(np.clip(np.random.default_rng(0).lognormal(5.7, 1.9, 900), 16, 100_000).astype(int))
    pool = Pool(ranks=64, token_budget=8192, stages=9, ep=8, microbatch_multiple=9)
    base, plan = plan_iteration(batch, pool, policy="hydra"), plan_iteration(batch, pool, policy="hydra_search")
    assert base.microbatch.max() + 1 < base.header.microbatches == 9
    assert plan.microbatch.max() + 1 == plan.header.microbatches
    assert plan.header.predicted_s < base.header.predicted_s
