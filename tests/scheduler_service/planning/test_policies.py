"""What holds for every scheduling system: valid plans or refusals that help, whatever comes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import Batch, CostModel, HydraCpError, InfeasibleError, Pool, Reason
from scheduler_service.planning import POLICIES, plan_iteration
from scheduler_service.simulation import rank_loads
from tests import fuzz
from tests.support.claims import POWERS_ONLY, planned
from tests.support.problems import Problem, problems
from tests.support.strategies import batches, costs, pools

every_policy = pytest.mark.parametrize("policy", POLICIES)

SOLVER = "flexsp"
"""Takes up to seconds for a plan: it gets fewer and smaller batches."""


@every_policy
def test_every_answer_is_right_on_batches_that_hypothesis_finds(policy: str) -> None:
    @settings(max_examples=10 if policy == SOLVER else 60, deadline=None)
    @given(small_problems() if policy == SOLVER else problems())
    def check(posed: Problem) -> None:
        planned(posed, policy, twice=True)

    check()


@st.composite
def small_problems(draw: st.DrawFn) -> Problem:
    pool = draw(pools(most_ranks=6))
    return Problem(draw(batches(pool, most_sequences=12)), pool, draw(costs()), None)


def test_every_answer_is_right_on_random_and_adversarial_batches() -> None:
    """A small run of `make fuzz`."""
    findings = fuzz.check(seed=0, numbers=range(60))
    assert findings.failures == []
    assert all(tally.plans > 0 for policy, tally in findings.tallies.items() if policy != SOLVER)


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
        pytest.param([40, 39, 20, 3, 1], Pool(6, 10), id="G = 6"),
        pytest.param([80_000, 9], Pool(24, 8192), id="G = 24"),
        pytest.param([300, 320, 17, 2], Pool(48, 10), id="G = 48"),
        pytest.param([17, 9, 9, 1], Pool(4, 9, heads=1), id="fits two ranks unpadded, but not padded"),
        pytest.param([10_000_000, 9_999_999, 1], Pool(2048, 8192), id="lengths of ten million"),
    ],
)
@every_policy
def test_input_that_must_not_break_it(policy: str, lengths: list[int], pool: Pool) -> None:
    for stages in (1, 9):
        posed = Problem(Batch(lengths), replace(pool, stages=stages), CostModel(theta=1e-6), None)
        assert planned(posed, policy) is not None


@pytest.mark.parametrize(
    ("lengths", "pool"),
    [
        ([150_000, 9], Pool(24, 8192)),
        ([20_000, 5, 4096], Pool(6, 4096)),
        ([60, 59, 40, 20, 3, 1], Pool(6, 10)),
    ],
)
@every_policy
def test_a_sequence_that_only_the_full_pool_holds_runs_there_or_is_refused_where_the_system_has_no_such_group(
    policy: str, lengths: list[int], pool: Pool
) -> None:
    plan = planned(Problem(Batch(lengths), pool, CostModel(), None), policy)
    if policy in POWERS_ONLY:
        assert plan is None
    else:
        assert plan is not None
        assert plan.degree[0] == pool.ranks


@every_policy
def test_no_rank_holds_more_padded_tokens_than_the_budget_in_any_microbatch(policy: str) -> None:
    """Rings of three, streams padded for sequence parallelism, bins that would be full without padding."""
    pool = Pool(6, 60, stages=3, heads=2, max_ulysses=2, sequence_parallel=3)
    batch = Batch([*np.random.default_rng(0).integers(1, 200, 12), *[30] * 12, *[29] * 12, *[1] * 24])
    plan = plan_iteration(batch, pool, policy=policy)
    tokens = rank_loads(plan, batch).tokens
    assert 0.8 * pool.token_budget < tokens.max() <= pool.token_budget


@every_policy
def test_the_number_of_microbatches_is_rounded_up_to_the_multiple_of_an_interleaved_pipeline(policy: str) -> None:
    pool = Pool(4, 5, stages=2, microbatch_multiple=4)
    for count in (3, 16, 17):
        plan = planned(Problem(Batch([5] * count), pool, CostModel(), None), policy)
        assert plan is not None
        assert plan.header.microbatches % 4 == 0
        assert plan.header.microbatches > plan.microbatch.max()


@every_policy
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
    policy: str, lengths: list, reason: Reason, sequence: int | None
) -> None:
    with pytest.raises(HydraCpError) as caught:
        plan_iteration(Batch(lengths), Pool(8, 10), policy=policy)
    assert caught.value.reason == reason
    assert caught.value.sequence == sequence
    if sequence is not None:
        assert f"sequence {sequence} has" in str(caught.value)
    assert isinstance(caught.value, InfeasibleError) == (reason == Reason.SEQUENCE_TOO_LONG)


@every_policy
def test_a_sequence_beyond_the_pool_is_refused_with_the_budget_and_the_pool_that_would_hold_it(policy: str) -> None:
    pool = Pool(6, 10)  # the largest power of two is 4
    with pytest.raises(InfeasibleError) as caught:
        plan_iteration(Batch([1, 61]), pool, policy=policy)
    budget, ranks = (16, 8) if policy in POWERS_ONLY else (11, 7)
    assert f"raise the budget to {budget} tokens or the pool to {ranks} ranks" in str(caught.value)


@pytest.mark.parametrize("policy", ["hydra", "hydra_search"])
def test_the_fixed_cost_of_a_microbatch_keeps_the_search_from_splitting_further(policy: str) -> None:
    batch = Batch(np.clip(np.random.default_rng(1).lognormal(5, 1.5, 600), 1, 8000).astype(int))
    pool = Pool(16, 65_536, stages=8)
    few, many = (
        plan_iteration(batch, pool, policy=policy, cost=CostModel(1e-7, 1e-6, overhead)).header.microbatches
        for overhead in (100.0, 1e-4)
    )
    assert few < many


@pytest.mark.parametrize("policy", ["hydra", "hydra_search"])
def test_a_million_sequences(policy: str) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6.5, 1.6, 1_000_000), 1, 262_144).astype(np.int64)
    plan = plan_iteration(Batch(lengths), Pool(ranks=16_384, token_budget=8192, stages=8, ep=32), policy=policy)
    assert len(plan) == 1_000_000
    assert 0 < plan.header.lower_bound_s <= plan.header.predicted_s
