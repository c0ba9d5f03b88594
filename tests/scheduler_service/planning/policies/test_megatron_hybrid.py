"""Megatron-Core 0.16's hybrid scheduler: examples worked by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from scheduler_service.domain import Batch, Plan, Pool
from scheduler_service.planning.feasibility import memory_degree, powers_of_two
from scheduler_service.planning.policies.megatron_hybrid import microbatches, plan
from scheduler_service.planning.policy import PlanningConfig
from tests.support.problems import Problem, problems

ANY = PlanningConfig()


def lists_of(batch: Batch, pool: Pool) -> list[list[tuple[int, list[int]]]]:
    """Of each microbatch of the original: size and lengths of each group, in the order in which they run."""
    return [
        [(group.size, batch.lengths[group.members].tolist()) for group in groups]
        for groups in microbatches(batch, pool)
    ]


def steps_of(plan: Plan, batch: Batch) -> dict[tuple[int, int, int], list[int]]:
    """Lengths on each (microbatch, start, degree)."""
    steps: dict[tuple[int, int, int], list[int]] = {}
    columns = zip(plan.microbatch.tolist(), plan.start.tolist(), plan.degree.tolist(), strict=True)
    for i, key in enumerate(columns):
        steps.setdefault(key, []).append(int(batch.lengths[i]))
    return steps


def test_the_lists_of_a_microbatch_become_one_slot_for_each_sequence() -> None:
    # The 20 needs two ranks, the others one: 6 and 3 take the two that are left, 1 joins the less loaded. Loads are
    # 200, 200, 36, 10: far from balanced, but a group keeps its last sequence.
    batch, pool = Batch([3, 20, 1, 6]), Pool(4, 10)
    assert lists_of(batch, pool) == [[(2, [20]), (1, [6]), (1, [3, 1])]]
    found = plan(batch, pool, ANY)
    assert steps_of(found, batch) == {(0, 0, 2): [20], (0, 2, 1): [6], (0, 3, 1): [3], (1, 3, 1): [1]}
    assert found.header.microbatches == 2


def test_what_is_placed_beyond_balance_is_taken_back() -> None:
    # 15s and 14s need two ranks, 9s one. The mean work of two buckets is 680, so the first holds all of the former
    # (632) and one 9 (713 of 748). Three 15s and a 14 take all ranks; the other 14s join the 14 (196) and a 15 (211),
    # and are taken back: 211 − 113 and then 196 − 113 shrink to 113 − 98. No rank is free for a group of one.
    # They wait behind the 9s: eight of those take all ranks, the ninth would make 162 and is taken back as well.
    batch, pool = Batch([15] * 3 + [14] * 3 + [9] * 9), Pool(8, 10)
    assert lists_of(batch, pool) == [
        [(2, [15]), (2, [15]), (2, [15]), (2, [14])],
        [(1, [9])] * 8,
        [(4, [14]), (2, [14]), (2, [9])],
    ]


def test_a_microbatch_ends_when_the_ranks_are_balanced_after_the_need_fell() -> None:
    # 14 on two ranks: 98 each. The 10 and the 10 on one each: 100. Within 5 %: the last 10 waits.
    batch = Batch([10, 14, 10, 10])
    assert lists_of(batch, Pool(4, 10)) == [[(2, [14]), (1, [10]), (1, [10])], [(4, [10])]]


def test_without_a_fall_in_need_everything_is_placed_and_the_surplus_taken_back() -> None:
    # 9 and 8 take a rank each, the 7 joins the 64 (113), the 6 the 81 (117): within 5 %.
    assert lists_of(Batch([9, 8, 7, 6]), Pool(2, 10)) == [[(1, [9, 6]), (1, [8, 7])]]
    # Without the 6, 113 and 81 differ by 32; without the 7 as well, 81 and 64 by 17.
    assert lists_of(Batch([9, 8, 7]), Pool(2, 10)) == [[(1, [9]), (1, [8])], [(2, [7])]]


def test_empty_ranks_are_filled_by_doubling_the_first_of_the_smallest_groups() -> None:
    # Three ranks taken of eight: 1, 1, 1 → 2, 1, 1 → 2, 2, 1 → 2, 2, 2 → 4, 2, 2.
    assert lists_of(Batch([9, 8, 7]), Pool(8, 10)) == [[(4, [9]), (2, [8]), (2, [7])]]


def test_ranks_that_no_doubling_can_use_stay_empty() -> None:
    assert lists_of(Batch([40]), Pool(6, 10)) == [[(4, [40])]]
    assert lists_of(Batch([9]), Pool(8, 10, max_degree=2)) == [[(2, [9])]]
    # Without Ulysses two ranks cut into four chunks: 1 token becomes 4, and two ranks of a budget of 1 hold none.
    assert lists_of(Batch([1]), Pool(2, 1, heads=1)) == [[(1, [1])]]


@settings(max_examples=50, deadline=None)
@given(problems())
def test_a_group_runs_one_sequence_in_a_step(posed: Problem) -> None:
    batch, pool, *_ = posed
    if memory_degree(batch.longest, pool, powers_of_two) is not None:
        assert all(len(lengths) == 1 for lengths in steps_of(plan(batch, pool, ANY), batch).values())


def test_no_rank_of_a_power_of_two_pool_is_empty_in_a_microbatch_of_the_original() -> None:
    random = np.random.default_rng(5)
    batch, pool = Batch(np.exp(random.normal(4, 2, 400)).astype(int) + 1), Pool(16, 4096)
    assert all(sum(group.size for group in groups) == 16 for groups in microbatches(batch, pool))
