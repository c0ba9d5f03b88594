import random
import time

import pytest
import torch
import torch.distributed as dist

from scheduler_service.domain import HydraCpError, InvalidInputError
from tests.support.ranks import run_ranks
from worker_agent.communication import all_to_all
from worker_agent.groups import Group, GroupRegistry, aligned_groups


def members_meet(group: Group, tag: int) -> None:
    """Every member learns who the others are, through the group itself."""
    mine = torch.full((group.degree, 2), tag * 1000 + dist.get_rank())
    mine[:, 1] = torch.arange(group.degree)
    ones = [1] * group.degree
    met = all_to_all(mine, ones, ones, group.process_group, group.counters, "ep")
    assert met[:, 0].tolist() == [tag * 1000 + rank for rank in group.ranks]
    assert (met[:, 1] == group.rank).all()


def ragged_histories(rank: int, seed: int) -> tuple[int, int]:
    """Random plans: per microbatch a random cut of the pool into aligned groups, each rank at its own pace."""
    registry = GroupRegistry()
    plan, pace = random.Random(seed), random.Random(seed + 1 + rank)
    for microbatch in range(40):
        for start, degree in random_partition(plan, 0, registry.size):
            if start <= rank < start + degree:
                time.sleep(pace.choice((0, 0, 0, 0.004)))
                members_meet(registry.group(start, degree), microbatch)
    return registry.report().used, registry.report().member


def random_partition(plan: random.Random, start: int, degree: int) -> list[tuple[int, int]]:
    if degree == 1 or plan.random() < 0.4:
        return [(start, degree)]
    half = degree // 2
    return random_partition(plan, start, half) + random_partition(plan, start + half, half)


def test_ranks_with_different_group_histories_and_delays_never_wait_for_each_other() -> None:
    for used, member in run_ranks(8, ragged_histories, 7):
        assert used <= member == 3


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


def pools_beside_each_other(rank: int) -> None:
    """Two pools whose ranks interleave, as with pipeline stages, and a rank that is in none."""
    first, second = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine = {0: first, 2: first, 1: second, 3: second}.get(rank, dist.GroupMember.NON_GROUP_MEMBER)
    registry = GroupRegistry(mine)
    if rank == 4:
        assert registry.size == 0
        with pytest.raises(HydraCpError):
            registry.group(0, 2)
        return
    assert (registry.size, registry.rank) == (2, rank // 2)
    group = registry.group(0, 2)
    assert group.ranks == (rank % 2, rank % 2 + 2)
    members_meet(group, tag=5)


def test_pools_are_numbered_by_their_own_ranks() -> None:
    run_ranks(5, pools_beside_each_other)


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
