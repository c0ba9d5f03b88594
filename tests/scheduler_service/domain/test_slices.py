from collections import defaultdict
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import Batch, InvalidInputError, Plan, PlanSlice, Pool, slice_plan
from scheduler_service.planning import PlanningConfig, new_plan
from tests.support.strategies import batches, pools, random_plan


def by_hand() -> tuple[Plan, Batch]:
    """MB 0: 0 and 2 on ranks 0–1, 1 on rank 2. MB 1: 3 on ranks 0–3."""
    batch, pool = Batch([7, 3, 5, 12]), Pool(ranks=4, token_budget=10)
    return new_plan("by hand", batch, pool, PlanningConfig(), ([0, 0, 0, 1], [0, 2, 0, 0], [2, 1, 2, 4])), batch


def test_a_slice_holds_the_groups_of_its_ranks_and_the_sequences_that_they_loaded() -> None:
    plan, batch = by_hand()
    piece = slice_plan(plan, batch, [3, 1], ranks=[1])
    assert piece.digest == plan.digest
    assert piece.group_microbatch.tolist() == [0, 1]
    assert piece.group_start.tolist() == [0, 0]
    assert piece.group_degree.tolist() == [2, 4]
    assert piece.group_offset.tolist() == [0, 2, 3]
    assert piece.members.tolist() == [0, 2, 3]
    assert piece.member_lengths.tolist() == [7, 5, 12]
    assert piece.loaded.tolist() == [3]
    assert piece.loaded_start.tolist() == [0]
    assert piece.loaded_stream_offset.tolist() == [0]
    assert piece.loaded_stream_tokens.tolist() == [12]


def test_a_rank_without_a_group_or_a_shard_gets_an_empty_slice() -> None:
    plan, batch = by_hand()
    piece = slice_plan(plan, batch, [4], ranks=[3])
    assert piece.group_microbatch.tolist() == [1]
    assert piece.loaded.tolist() == []


@pytest.mark.parametrize("ranks", [[], [-1], [4]])
def test_ranks_outside_the_pool_are_refused(ranks: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="are not all in 0 … 3"):
        slice_plan(*by_hand(), [4], ranks)


@pytest.mark.parametrize("shards", [[3], [5], [], [1, 1, 1, 1, 0]])
def test_shards_that_do_not_make_the_batch_are_refused(shards: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="do not make a batch of 4"):
        slice_plan(*by_hand(), shards, [0])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_equals_a_count_sequence_by_sequence(data: st.DataObject) -> None:
    pool = data.draw(pools(most_ranks=12, most_budget=40))
    if max(pool.capacity(degree) for degree in pool.degrees) == 0:
        return
    batch = data.draw(batches(pool, most_sequences=20))
    plan = random_plan(batch, pool, Random(data.draw(st.integers(0, 999))), PlanningConfig())
    shards = [0] * data.draw(st.integers(1, pool.ranks))
    for _ in range(len(batch)):
        shards[data.draw(st.integers(0, len(shards) - 1))] += 1
    ranks = data.draw(st.lists(st.integers(0, pool.ranks - 1), min_size=1, max_size=4))
    check(slice_plan(plan, batch, shards, ranks), plan, batch, shards, set(ranks))


def check(piece: PlanSlice, plan: Plan, batch: Batch, shards: list[int], ranks: set[int]) -> None:
    pool, lengths = plan.header.pool, batch.lengths.tolist()
    where = list(zip(plan.microbatch.tolist(), plan.start.tolist(), plan.degree.tolist(), strict=True))
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for sequence, group in enumerate(where):
        groups[group].append(sequence)
    mine = sorted(g for g in groups if ranks & set(range(g[1], g[1] + g[2])))

    assert piece.ranks.tolist() == sorted(ranks)
    columns = (piece.group_microbatch, piece.group_start, piece.group_degree)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == mine
    members = [piece.members[a:b].tolist() for a, b in zip(piece.group_offset, piece.group_offset[1:], strict=False)]
    assert members == [groups[group] for group in mine]
    assert piece.member_lengths.tolist() == [lengths[i] for group in mine for i in groups[group]]

    shard_of = np.repeat(np.arange(len(shards)), shards).tolist()
    assert piece.loaded.tolist() == [i for i in range(len(batch)) if shard_of[i] in ranks]
    for row, i in enumerate(piece.loaded.tolist()):
        group = where[i]
        padded = [pool.padded(lengths[j], group[2]) for j in groups[group]]
        multiple = pool.stream_multiple(group[2])
        assert piece.loaded_lengths[row] == lengths[i]
        assert (piece.loaded_microbatch[row], piece.loaded_start[row], piece.loaded_degree[row]) == group
        assert piece.loaded_stream_offset[row] == sum(padded[: groups[group].index(i)])
        assert piece.loaded_stream_tokens[row] == -(-sum(padded) // multiple) * multiple
