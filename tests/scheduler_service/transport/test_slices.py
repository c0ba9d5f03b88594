"""Slices are cut once per plan and ranks, and live no longer than the plan."""

from __future__ import annotations

import asyncio
import gc

import pytest
from hydracp.v1 import planner_pb2

from scheduler_service.app import PlannedBatch
from scheduler_service.domain import Batch, InvalidInputError, Pool
from scheduler_service.planning import plan_iteration
from scheduler_service.transport import slices
from scheduler_service.transport.slices import SliceCache


@pytest.fixture
def planned():
    batch = Batch([100, 3000, 50, 70, 2000])
    return PlannedBatch(plan_iteration(batch, Pool(ranks=4, token_budget=4096)), batch, (3, 2))


async def test_many_who_ask_at_once_get_the_same_bytes_cut_once(planned, monkeypatch):
    cut = []
    real = slices._serialised
    monkeypatch.setattr(slices, "_serialised", lambda *arguments: cut.append(arguments) or real(*arguments))
    cache = SliceCache()
    answers = await asyncio.gather(*(cache.get(planned, (0, 1)) for _ in range(50)))
    assert len({id(answer) for answer in answers}) == len(cut) == 1
    assert list(planner_pb2.FetchPlanResponse.FromString(answers[0]).slice.ranks) == [0, 1]
    await cache.get(planned, (2,))
    assert len(cut) == 2
    cache.close()


async def test_slices_go_with_their_plan():
    cache = SliceCache()
    batch = Batch([5, 6])
    for _ in range(20):
        planned = PlannedBatch(plan_iteration(batch, Pool(ranks=2, token_budget=8)), batch, (2,))
        await cache.get(planned, (0,))
    del planned
    for _ in range(100):
        gc.collect()
        if not len(cache._slices):
            break
        await asyncio.sleep(0.02)
    assert len(cache._slices) == 0
    cache.close()


async def test_wrong_ranks_fail_every_time_and_are_not_kept(planned):
    cache = SliceCache()
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="not all in 0 … 3"):
            await cache.get(planned, (9,))
    assert cache._slices[planned] == {}
    cache.close()
