"""ByteScale: examples worked by hand, and how close together the ranks end."""

from __future__ import annotations

import numpy as np

from scheduler_service.domain import Batch, CostModel, Plan, Pool
from scheduler_service.planning.policies.bytescale import Unit, _buckets, _in_turn, plan
from scheduler_service.planning.policy import PlanningConfig
from scheduler_service.simulation import forecast

LINEAR = PlanningConfig(CostModel(theta=0.0, tau=1.0, overhead=0.0))


def groups_of(plan: Plan, batch: Batch) -> dict[tuple[int, int, int], list[int]]:
    """Lengths on each (microbatch, start, degree), longest first."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for i in np.argsort(-batch.lengths, kind="stable"):
        key = (int(plan.microbatch[i]), int(plan.start[i]), int(plan.degree[i]))
        groups.setdefault(key, []).append(int(batch.lengths[i]))
    return groups


def test_long_sequences_get_the_fewest_ranks_and_short_ones_are_packed_to_the_budget() -> None:
    # 25 tokens need 3 ranks of 10: four here. 7 + 3 and 6 + 4 fill packs; the 5 is one by itself.
    batch = Batch([3, 25, 7, 6, 5, 4])
    # The 25 takes ranks 0 … 3 (6.25 tokens each), 7 + 3, 6 + 4 and the 5 ranks 4, 5 and 6.
    found = plan(batch, Pool(8, 10), LINEAR)
    assert groups_of(found, batch) == {(0, 0, 4): [25], (0, 4, 1): [7, 3], (0, 5, 1): [6, 4], (0, 6, 1): [5]}


def test_each_rank_is_served_once_a_round_and_only_if_it_is_behind() -> None:
    # 10 and 8 are the first round. Rank 1 is more than 5 % behind and is served alone: 16. Then rank 0 is: 10 of 16.
    batch = Batch([10, 8, 8, 8])
    assert groups_of(plan(batch, Pool(2, 10), LINEAR), batch) == {
        (0, 0, 1): [10], (0, 1, 1): [8], (1, 1, 1): [8], (1, 0, 1): [8],
    }  # fmt: skip


def test_ranks_may_have_different_numbers_of_microbatches() -> None:
    # The 40 costs 20 on each of two ranks; an 11 on the others leaves them behind, so both get another.
    batch = Batch([40, 11, 11, 11, 11])
    assert groups_of(plan(batch, Pool(4, 20), LINEAR), batch) == {
        (0, 0, 2): [40], (0, 2, 1): [11], (0, 3, 1): [11], (1, 2, 1): [11], (1, 3, 1): [11],
    }  # fmt: skip


def test_pp_balance_takes_one_unit_of_each_bucket_in_turn() -> None:
    # Half of 46 is 23, which is reached in the middle of the 8: buckets 10, 9, 8 and 7, 6, 6.
    units = [Unit(1, [i], seconds) for i, seconds in enumerate((10.0, 9.0, 8.0, 7.0, 6.0, 6.0))]
    assert [unit.seconds for unit in _in_turn(_buckets(units, 2))] == [10, 7, 9, 6, 8, 6]
    assert _in_turn(_buckets(units, 1)) == units, "DP-balance"


def test_a_group_waits_until_all_of_its_ranks_are_free() -> None:
    batch = Batch([10, 9, 20, 20])
    found = plan(batch, Pool(2, 10), LINEAR)
    assert groups_of(found, batch) == {(0, 0, 2): [20], (1, 0, 2): [20], (2, 0, 1): [10], (2, 1, 1): [9]}


def test_ranks_end_closer_together_than_the_longest_microbatch() -> None:
    random = np.random.default_rng(5)
    batch, pool = Batch(np.exp(random.normal(4, 2, 2000)).astype(int) + 1), Pool(16, 4096)
    predicted = forecast(plan(batch, pool, PlanningConfig()), batch)
    busy = (predicted.forward_s + predicted.backward_s).sum(axis=1)
    assert busy.max() - busy.min() < (predicted.forward_s + predicted.backward_s).max()
