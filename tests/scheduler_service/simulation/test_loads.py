"""Loads of groups and ranks against examples worked by hand and against plain loops."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import Batch, InvalidInputError, Plan, Pool
from scheduler_service.planning.policy import PlanningConfig, new_plan
from scheduler_service.simulation import group_loads, rank_loads
from tests.support.strategies import batches, pools, random_plan


@pytest.fixture
def small() -> tuple[Plan, Batch]:
    """Microbatch 0: 10 and 6 tokens on ranks 0 … 1, 3 tokens on rank 2. Microbatch 1: 5 tokens on rank 3."""
    batch = Batch([10, 3, 6, 5])
    columns = ([0, 0, 0, 1], [0, 2, 0, 3], [2, 1, 2, 1])
    return new_plan("hand", batch, Pool(ranks=4, token_budget=8), PlanningConfig(), columns), batch


def test_groups_come_by_microbatch_and_start(small: tuple[Plan, Batch]) -> None:
    groups = group_loads(*small)
    assert groups.microbatch.tolist() == [0, 0, 1]
    assert groups.start.tolist() == [0, 2, 3]
    assert groups.degree.tolist() == [2, 1, 1]
    assert groups.load.tolist() == [(100 + 36) / 2, 9, 25]
    assert groups.tokens.tolist() == [8, 3, 5]


def test_ranks_get_the_load_of_their_group_and_empty_slots_none(small: tuple[Plan, Batch]) -> None:
    loads = rank_loads(*small)
    assert loads.load.tolist() == [[68, 0], [68, 0], [9, 0], [0, 25]]
    assert loads.tokens.tolist() == [[8, 0], [8, 0], [3, 0], [0, 5]]
    assert loads.degree.tolist() == [[2, 0], [2, 0], [1, 0], [0, 1]]
    assert loads.start.tolist() == [[0, -1], [0, -1], [2, -1], [-1, 3]]


def test_tokens_hold_the_padding_of_the_ring_and_of_tensor_parallelism() -> None:
    batch = Batch([5, 1])
    ring = Pool(ranks=2, token_budget=8, heads=1)  # a ring of 2: each sequence in 4 chunks, 8 + 4 tokens
    plan = new_plan("hand", batch, ring, PlanningConfig(), ([0, 0], [0, 0], [2, 2]))
    assert rank_loads(plan, batch).tokens.tolist() == [[6], [6]]
    tensor_parallel = Pool(ranks=2, token_budget=8, sequence_parallel=4)  # 6 tokens in a multiple of 2·4
    plan = new_plan("hand", batch, tensor_parallel, PlanningConfig(), ([0, 0], [0, 0], [2, 2]))
    assert rank_loads(plan, batch).tokens.tolist() == [[4], [4]]


def test_a_plan_of_another_batch_is_refused(small: tuple[Plan, Batch]) -> None:
    with pytest.raises(InvalidInputError, match="places 4 sequences, the batch has 1"):
        group_loads(small[0], Batch([1]))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_a_loop_over_ranks_and_sequences(data: st.DataObject) -> None:
    pool = data.draw(pools().filter(lambda pool: pool.capacity(1) > 0))
    batch = data.draw(batches(pool))
    plan = random_plan(batch, pool, Random(data.draw(st.integers(0, 999))), PlanningConfig())
    found = rank_loads(plan, batch)
    for rank in range(pool.ranks):
        for microbatch in range(plan.header.microbatches):
            mine = [
                i
                for i in range(len(batch))
                if plan.microbatch[i] == microbatch and plan.start[i] <= rank < plan.start[i] + plan.degree[i]
            ]
            degree = int(plan.degree[mine[0]]) if mine else 0
            load = sum(int(batch.lengths[i]) ** 2 for i in mine) / max(degree, 1)
            tokens = 0
            if mine:
                multiple = pool.stream_multiple(degree)
                total = sum(pool.padded(int(batch.lengths[i]), degree) for i in mine)
                tokens = -(-total // multiple) * multiple // degree
            assert found.load[rank, microbatch] == pytest.approx(load)
            assert found.tokens[rank, microbatch] == tokens
            assert found.degree[rank, microbatch] == degree
            assert found.start[rank, microbatch] == (plan.start[mine[0]] if mine else -1)
    assert np.isclose(found.load.sum(), batch.sum_of_squares)
