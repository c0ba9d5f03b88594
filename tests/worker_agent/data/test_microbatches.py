"""Every rank runs the plan's number of microbatches, and all ranks of a group see the same group."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from scheduler_service.domain import Batch, InvalidInputError, Pool, slice_plan
from scheduler_service.planning import plan_iteration
from tests.support.plans import random_plan
from worker_agent.data import microbatches


def test_fewer_sequences_than_ranks_leave_dummies_with_the_same_number_of_microbatches() -> None:
    pool, batch = Pool(ranks=8, token_budget=64, sequence_parallel=2), Batch([10, 3])
    plan = plan_iteration(batch, pool, policy="hydra")
    every_rank = [microbatches(slice_plan(plan, batch, [2], [rank]), pool, rank) for rank in range(8)]
    assert {len(own) for own in every_rank} == {plan.header.microbatches}
    dummies = [mb for own in every_rank for mb in own if mb.is_dummy]
    assert dummies
    for dummy in dummies:
        assert dummy.degree == 1
        assert dummy.layout.tokens > 0
        assert (dummy.layout.token_index == -1).all()


def test_ranks_of_a_group_agree_on_it_and_hold_its_tokens_once() -> None:
    pool = Pool(ranks=6, token_budget=1 << 20, heads=2)
    batch = Batch(np.random.default_rng(1).integers(1, 200, 40))
    plan = random_plan(np.random.default_rng(2), batch, pool, 3)
    one_slice_for_all = slice_plan(plan, batch, [40], range(6))
    held = np.zeros(len(batch), np.int64)
    for rank in range(6):
        for index, microbatch in enumerate(microbatches(one_slice_for_all, pool, rank)):
            assert microbatch.start <= rank < microbatch.start + microbatch.degree
            assert (microbatch.ulysses, microbatch.ring) == pool.shape(microbatch.degree)
            assert (plan.microbatch[microbatch.members] == index).all()
            assert (plan.start[microbatch.members] == microbatch.start).all()
            sequence = microbatch.layout.sequence.numpy()
            np.add.at(held, microbatch.members[sequence[sequence >= 0]], 1)
    np.testing.assert_array_equal(held, batch.lengths)


def test_a_slice_for_other_ranks_or_with_overlapping_groups_is_refused() -> None:
    pool, batch = Pool(ranks=2, token_budget=64), Batch([10, 3])
    cut = slice_plan(random_plan(np.random.default_rng(0), batch, pool, 1), batch, [2], [0])
    with pytest.raises(InvalidInputError, match="not for 1"):
        microbatches(cut, pool, 1)
    twice = dataclasses.replace(
        cut,
        group_microbatch=np.array([0, 0], np.int32),
        group_start=np.array([0, 0], np.int32),
        group_degree=np.array([1, 2], np.int32),
        group_offset=np.array([0, 1, 2], np.int32),
    )
    with pytest.raises(InvalidInputError, match="twice"):
        microbatches(twice, pool, 0)
