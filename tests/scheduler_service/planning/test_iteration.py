import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from scheduler_service.domain import Batch, CostModel, HydraCpError, InfeasibleError, InvalidInputError, Pool, Reason
from scheduler_service.planning import DEFAULT_POLICY, POLICIES, plan_iteration, plan_statistics, verify_plan

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


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_a_verified_plan_with_predictions(policy: str) -> None:
    batch = Batch(LENGTHS)
    plan = plan_iteration(batch, Pool(ranks=64, token_budget=8192, stages=4, ep=8), policy=policy, cost=COST)
    verify_plan(plan, batch)
    assert plan.header.policy == policy
    assert plan.header.cost == COST
    assert 0 < plan.header.lower_bound_s <= plan.header.predicted_s
    assert plan.header.plan_s > 0


def test_planning_time_is_read_from_the_clock_that_is_given() -> None:
    ticks = iter([10.0, 12.5])
    assert plan_iteration(Batch([1]), Pool(1, 1), clock=lambda: next(ticks)).header.plan_s == 2.5


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="policy 'hydro' is unknown; choose one of hydra") as caught:
        plan_iteration(Batch([1]), Pool(1, 1), policy="hydro")
    assert caught.value.reason == Reason.UNKNOWN_POLICY
    assert DEFAULT_POLICY in POLICIES


@pytest.mark.parametrize(
    ("lengths", "pool"),
    [
        pytest.param([7], Pool(8, 10), id="n = 1"),
        pytest.param([7, 3], Pool(64, 10), id="fewer sequences than ranks"),
        pytest.param([9] * 50, Pool(8, 10), id="all equal"),
        pytest.param([1] * 50, Pool(8, 10), id="all of length 1"),
        pytest.param([80], Pool(8, 10), id="one sequence of exactly G·B"),
        pytest.param([80, 1, 80], Pool(8, 10), id="exactly G·B beside others"),
        pytest.param([10, 10, 1], Pool(1, 10), id="G = 1"),
        pytest.param([60, 59, 40, 20, 3, 1], Pool(6, 10), id="G = 6"),
        pytest.param([20_000, 5, 4096], Pool(6, 4096), id="G = 6: the power of two above its need is too large"),
        pytest.param([150_000, 9], Pool(24, 8192), id="G = 24"),
        pytest.param([480, 320, 17, 2], Pool(48, 10), id="G = 48"),
        pytest.param([5, 5, 5], Pool(4, 5, microbatch_multiple=4), id="M is aligned upwards"),
        pytest.param([10_000_000, 9_999_999, 1], Pool(4096, 8192, stages=16), id="lengths of ten million"),
    ],
)
@pytest.mark.parametrize("stages", [1, 9])
def test_input_that_must_not_break_it(lengths: list[int], pool: Pool, stages: int) -> None:
    pool = replace(pool, stages=stages)
    plan = plan_iteration(Batch(lengths), pool, policy="hydra", cost=CostModel(theta=1e-6))
    assert len(plan) == len(lengths)
    assert plan.header.microbatches % pool.microbatch_multiple == 0


def test_a_million_sequences() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6.5, 1.6, 1_000_000), 1, 262_144).astype(np.int64)
    batch = Batch(lengths)
    plan = plan_iteration(batch, Pool(ranks=16_384, token_budget=8192, stages=8, ep=32), policy="hydra")
    statistics = plan_statistics(plan, batch)
    assert statistics.tokens == lengths.sum()
    assert statistics.load_max <= plan.header.target


@pytest.mark.parametrize(
    ("lengths", "reason", "sequence"),
    [
        ([], Reason.EMPTY_BATCH, None),
        ([5, 0, 3], Reason.INVALID_LENGTH, 1),
        ([5, 3, -2], Reason.INVALID_LENGTH, 2),
        ([5, 2.5], Reason.INVALID_LENGTH, 1),
        ([float("nan"), 5], Reason.INVALID_LENGTH, 0),
        ([5, 81], Reason.SEQUENCE_TOO_LONG, 1),
    ],
)
def test_bad_input_is_a_typed_error_that_names_the_sequence(
    lengths: list, reason: Reason, sequence: int | None
) -> None:
    with pytest.raises(HydraCpError) as caught:
        plan_iteration(Batch(lengths), Pool(8, 10))
    assert caught.value.reason == reason
    assert caught.value.sequence == sequence
    if sequence is not None:
        assert f"sequence {sequence} has" in str(caught.value)
    assert isinstance(caught.value, InfeasibleError) == (reason == Reason.SEQUENCE_TOO_LONG)


def test_the_same_lengths_give_the_same_plan_again() -> None:
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 8000, 500)
    pool = Pool(32, 8192, stages=4)
    assert plan_iteration(Batch(lengths), pool).digest == plan_iteration(Batch(lengths.tolist()), pool).digest
