"""Tokens arrive where the layout says, come back to where they were, and only shards travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import Batch, InvalidInputError, PlanSlice, Pool, slice_plan
from tests.support.plans import random_plan, random_shards
from tests.support.ranks import run_ranks
from worker_agent.communication import ByteCounters
from worker_agent.data import Microbatch, Rerouter, microbatches, routes

POOLS = st.builds(
    Pool,
    ranks=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    token_budget=st.just(1 << 20),
    heads=st.sampled_from([None, 1, 2, 3, 4]),
    max_ulysses=st.sampled_from([None, 1, 2]),
    sequence_parallel=st.sampled_from([1, 2]),
)


def streams(batch: Batch) -> list[np.ndarray]:
    """A value per token that says which token of which sequence it is."""
    return [1000 * sequence + np.arange(length) for sequence, length in enumerate(batch.lengths)]


def expected(microbatch: Microbatch, tokens: list[np.ndarray]) -> np.ndarray:
    """What the layout says that the slots hold, −1 for pads."""
    stream = np.concatenate([tokens[member] for member in microbatch.members] or [np.empty(0, np.int64)])
    index = microbatch.layout.token_index.numpy()
    return np.where(index >= 0, np.append(stream, -1)[index], -1)


@settings(max_examples=150, deadline=None)
@given(
    pool=POOLS,
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=30),
    microbatch_count=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_token_arrives_where_the_layout_says(
    pool: Pool, lengths: list[int], microbatch_count: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    batch = Batch(lengths)
    plan = random_plan(generator, batch, pool, microbatch_count)
    shards = random_shards(generator, len(batch), int(generator.integers(1, pool.ranks + 1)))
    slices = [slice_plan(plan, batch, shards, [rank]) for rank in range(pool.ranks)]
    own = [microbatches(slices[rank], pool, rank) for rank in range(pool.ranks)]
    found = [routes(slices[rank], pool, rank, own[rank]) for rank in range(pool.ranks)]

    tokens = streams(batch)
    messages = [_messages(slices[rank], found[rank], tokens) for rank in range(pool.ranks)]
    for rank in range(pool.ranks):
        arrived = [messages[sender][rank] for sender in range(pool.ranks)]
        assert [len(message) for message in arrived] == found[rank].receive_rows.tolist()
        slots = np.full(sum(microbatch.layout.tokens for microbatch in own[rank]), -1)
        slots[found[rank].receive_slot] = np.concatenate(arrived)
        np.testing.assert_array_equal(slots, np.concatenate([expected(microbatch, tokens) for microbatch in own[rank]]))


def _messages(slice: PlanSlice, found: Any, tokens: list[np.ndarray]) -> list[np.ndarray]:
    loaded = np.concatenate([tokens[sequence] for sequence in slice.loaded] or [np.empty(0, np.int64)])
    return np.split(loaded[found.send_token], np.cumsum(found.send_rows)[:-1])


def _route_on_ranks(rank: int, lengths: list[int], shards: list[int], pool: Pool, seed: int) -> dict[str, int]:
    batch = Batch(lengths)
    plan = random_plan(np.random.default_rng(seed), batch, pool, 3)
    cut = slice_plan(plan, batch, shards, [rank])
    counters = ByteCounters()
    rerouter = Rerouter(cut, pool, rank, dist.group.WORLD, counters)
    tokens = streams(batch)

    mine = [torch.from_numpy(tokens[sequence]) for sequence in cut.loaded]
    arrived = rerouter.route(mine, -1)
    for microbatch, field in zip(rerouter.microbatches, arrived, strict=True):
        assert field.dtype == torch.int64
        assert field.tolist() == expected(microbatch, tokens).tolist()
    for before, after in zip(mine, rerouter.restore(arrived), strict=True):
        assert torch.equal(before, after)

    wide = [torch.stack((field.float(), -field.float()), dim=1) for field in mine]
    arrived = rerouter.route(wide, 0.5, like=torch.empty(0, 2))
    for microbatch, field in zip(rerouter.microbatches, arrived, strict=True):
        there = expected(microbatch, tokens)
        assert field.shape == (microbatch.layout.tokens, 2)
        assert field[:, 0].tolist() == np.where(there >= 0, there, 0.5).tolist()
    for before, after in zip(wide, rerouter.restore(arrived), strict=True):
        assert torch.equal(before, after)

    found = routes(cut, pool, rank, rerouter.microbatches)
    away = int(found.send_rows.sum() - found.send_rows[rank])
    back = int(found.receive_rows.sum() - found.receive_rows[rank])
    return {"counted": counters.snapshot().get("reroute", 0), "sent": (away + back) * (8 + 2 * 4), "away": away}


@pytest.mark.parametrize("shards", [[5, 0, 4, 3], [12, 0, 0, 0], [3, 9]])
def test_ranks_exchange_fields_of_any_type_and_get_them_back(shards: list[int]) -> None:
    lengths = [1, 40, 3, 17, 160, 2, 9, 33, 5, 64, 7, 21]
    told = run_ranks(4, _route_on_ranks, lengths, shards, Pool(ranks=4, token_budget=1 << 20, heads=2), 7)
    assert all(rank["counted"] == rank["sent"] for rank in told)
    # Each token leaves its loader at most once, whatever the size of its group: shards travel, not sequences.
    assert 0 < sum(rank["away"] for rank in told) <= sum(lengths)


def test_a_sequence_that_is_not_the_planned_one_is_named() -> None:
    pool, batch = Pool(ranks=1, token_budget=64), Batch([4, 6])
    cut = slice_plan(random_plan(np.random.default_rng(0), batch, pool, 1), batch, [2], [0])
    rerouter = Rerouter(cut, pool, 0, None, ByteCounters())
    with pytest.raises(InvalidInputError, match=r"5 rows for sequence 1, .* 6 tokens"):
        rerouter.route([torch.zeros(4), torch.zeros(5)], 0.0)
    with pytest.raises(InvalidInputError, match="1 sequences, but this rank loaded 2"):
        rerouter.route([torch.zeros(4)], 0.0)
    with pytest.raises(InvalidInputError, match="slots"):
        rerouter.restore([torch.zeros(3)])
