import random
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from scheduler_service.domain import Batch, HydraCpError, InvalidInputError, Pool, slice_plan
from tests.support.plans import random_plan
from tests.support.ranks import run_ranks
from worker_agent.communication import all_to_all
from worker_agent.data import microbatches
from worker_agent.groups import NAMED_ABOVE, Group, GroupRegistry, GroupReport, aligned_groups


def members_meet(group: Group, tag: int) -> None:
    """Every member learns who the others are, through the group itself."""
    mine = torch.full((group.degree, 2), tag * 1000 + dist.get_rank())
    mine[:, 1] = torch.arange(group.degree)
    ones = [1] * group.degree
    met = all_to_all(mine, ones, ones, group.process_group, group.counters, "ep")
    assert met[:, 0].tolist() == [tag * 1000 + rank for rank in group.ranks]
    assert (met[:, 1] == group.rank).all()


def ragged_histories(rank: int, seed: int, named: bool) -> GroupReport:
    """Random plans: per microbatch a random cut of the pool into aligned groups, each rank at its own pace."""
    registry = GroupRegistry(named=named)
    plan, pace = random.Random(seed), random.Random(seed + 1 + rank)
    for microbatch in range(40):
        for start, degree in random_partition(plan, 0, registry.size):
            if start <= rank < start + degree:
                time.sleep(pace.choice((0, 0, 0, 0.004)))
                members_meet(registry.group(start, degree), microbatch)
    return registry.report()


def random_partition(plan: random.Random, start: int, degree: int) -> list[tuple[int, int]]:
    if degree == 1 or plan.random() < 0.4:
        return [(start, degree)]
    half = degree // 2
    return random_partition(plan, start, half) + random_partition(plan, start + half, half)


@pytest.mark.parametrize("named", [False, True], ids=["by all ranks", "by name"])
def test_ranks_with_different_group_histories_and_delays_never_wait_for_each_other(named: bool) -> None:
    for told in run_ranks(8, ragged_histories, 7, named):
        assert told.used <= told.member == 3
        assert told.created == (3 if named else 4 + 2 + 1), "under names a rank makes only the groups that it is in"


def plans_are_warmed(rank: int, seed: int) -> tuple[int, int, GroupReport]:
    """Adopt random plans, warm each at this rank's own pace, and run the groups in any order of their own."""
    registry, pool = GroupRegistry(), Pool(ranks=8, token_budget=1 << 20, heads=4, max_ulysses=2)
    generator, pace = np.random.default_rng(seed), random.Random(seed + rank)
    first = 0
    for _ in range(6):
        batch = Batch(generator.integers(1, 90, 20))
        plan = random_plan(generator, batch, pool, 5)
        parts = microbatches(slice_plan(plan, batch, [len(batch)], [rank]), pool, rank)
        time.sleep(pace.choice((0, 0.01)))
        registry.warm((part.start, part.degree, part.ulysses) for part in parts)
        held = registry.report().used
        for index, part in enumerate(parts):
            time.sleep(pace.choice((0, 0, 0.004)))
            group = registry.group(part.start, part.degree, part.ulysses)
            if group.process_group is not None:
                members_meet(group, index)
        assert registry.report().used == held, "everything that the plan runs on was warm"
        first = first or held
    registry.warm((part.start, part.degree, part.ulysses) for part in reversed(parts))  # warm already: no exchange
    return first, held, registry.report()


def test_a_plans_groups_are_warm_before_it_runs_and_stay_few() -> None:
    told = run_ranks(8, plans_are_warmed, 5)
    for first, held, report in told:
        assert 0 < first <= held == report.used <= report.member == 3
        assert report.device_bytes == 0
    # What is warm leads to collectives: a rank that thought otherwise than its peers would wait for ever.
    for start, degree in aligned_groups(8):
        assert len({(start, degree) in report.warm for _, _, report in told[start : start + degree]}) == 1


def hybrid_cuts(rank: int) -> None:
    registry = GroupRegistry()
    six = registry.group(0, 6, ulysses=2)
    assert (six.ring, six.ulysses_index, six.ring_index) == (3, rank % 2, rank // 2)
    assert six.ring_peer(1) == (rank + 2) % 6
    assert six.ring_peer(-1) == (rank - 2) % 6
    assert dist.get_process_group_ranks(six.ulysses_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert registry.group(0, 6).ulysses == 6
    alone = registry.group(rank, 1)
    assert (alone.process_group, alone.ulysses_group, alone.rank) == (None, None, 0)
    other = 0 if rank >= 2 else 2
    with pytest.raises(HydraCpError, match=f"pool rank {rank} is not in the group of ranks {other}"):
        registry.group(other, 2)
    with pytest.raises(InvalidInputError, match="cannot be cut into Ulysses groups of 3"):
        registry.group(0, 6, ulysses=3)
    for start, degree in ((1, 2), (0, 3), (4, 4), (0, 8), (0, 0)):
        with pytest.raises(InvalidInputError, match="the full pool"):
            registry.group(start, degree)


def test_a_full_pool_of_six_is_cut_into_ulysses_and_an_odd_ring() -> None:
    run_ranks(6, hybrid_cuts)


def pools_beside_each_other(rank: int, named: bool) -> None:
    """Two pools whose ranks interleave, as with pipeline stages, and a rank that is in none."""
    if named:
        neighbours = GroupRegistry(dist.new_group([0, 1]), named=True)
        assert neighbours.size == (2 if rank < 2 else 0), "another group of two ranks from rank 0 on"
    first, second = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine = {0: first, 2: first, 1: second, 3: second}.get(rank, dist.GroupMember.NON_GROUP_MEMBER)
    registry = GroupRegistry(mine, named=named)
    if rank == 4:
        assert registry.size == 0
        with pytest.raises(HydraCpError):
            registry.group(0, 2)
        return
    assert (registry.size, registry.rank) == (2, rank // 2)
    group = registry.group(0, 2)
    assert group.ranks == (rank % 2, rank % 2 + 2)
    members_meet(group, tag=5)


@pytest.mark.parametrize("named", [False, True], ids=["by all ranks", "by name"])
def test_pools_are_numbered_by_their_own_ranks(named: bool) -> None:
    run_ranks(5, pools_beside_each_other, named)


def test_without_torch_distributed_the_pool_is_this_process() -> None:
    group = GroupRegistry().group(0, 1)
    assert (group.degree, group.ring, group.process_group) == (1, 1, None)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8, 24, 100, 128])
def test_a_rank_is_in_at_most_log2_plus_one_groups(size: int) -> None:
    groups = aligned_groups(size)
    assert len(set(groups)) == len(groups)
    assert (0, size) in groups or size == 1
    for rank in range(size):
        assert sum(start <= rank < start + degree for start, degree in groups) <= size.bit_length()


def test_only_pools_of_more_than_five_hundred_ranks_are_made_by_name() -> None:
    assert len(aligned_groups(512)) <= NAMED_ABOVE < len(aligned_groups(1024))


def registries_one_after_the_other(rank: int) -> None:
    for tag in range(3):
        members_meet(GroupRegistry(named=True).group(0, 4), tag)


def test_a_job_may_make_its_named_groups_again() -> None:
    run_ranks(4, registries_one_after_the_other)
