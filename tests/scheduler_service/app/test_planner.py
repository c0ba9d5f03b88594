"""Planning in processes of its own gives what planning here gives, and survives their death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from scheduler_service.app.planner import Planner, PlanOrder
from scheduler_service.domain import Batch, CostModel, HydraCpError, InfeasibleError, InvalidInputError, Pool, Reason
from scheduler_service.planning import DEFAULT_POLICY, plan_iteration

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL = Pool(ranks=8, token_budget=1024)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def planner() -> AsyncIterator[Planner]:
    planner = Planner(workers=1)
    early = asyncio.create_task(planner.plan(order([5])))  # before `start`: it waits
    await asyncio.wait_for(planner.start(), 200)
    assert (await early).plan.header.sequences == 1
    yield planner
    planner.close()


def order(lengths, policy=DEFAULT_POLICY):  # type: ignore[no-untyped-def]
    return PlanOrder(Batch(lengths), POOL, policy, CostModel())


async def test_plans_are_those_of_this_process(planner):
    planned = await planner.plan(order([500, 30, 2000]))
    again = plan_iteration(Batch([500, 30, 2000]), POOL)
    assert planned.plan.digest == again.digest
    np.testing.assert_array_equal(planned.plan.start, again.start)
    assert planned.statistics.tokens == 2530


async def test_errors_keep_their_type_and_their_sequence(planner):
    with pytest.raises(InfeasibleError, match="sequence 1 has 9,000 tokens") as caught:
        await planner.plan(order([1, 9000]))
    assert caught.value.sequence == 1
    with pytest.raises(InvalidInputError, match="policy 'none' is unknown"):
        await planner.plan(order([1], policy="none"))


async def test_baselines_are_predicted_for_the_same_batch(planner):
    baselines = await planner.predict(order([500, 30, 2000]), ["static_cp", "megatron"])
    assert set(baselines) == {"static_cp", "megatron"}
    assert min(baselines.values()) > 0


async def test_a_batch_whose_process_is_killed_is_planned_again(planner):
    replaced = planner.replaced
    long = asyncio.create_task(planner.plan(order(np.tile([700, 300, 20], 200_000))))
    await asyncio.sleep(0.1)
    (worker,) = planner._plans._workers
    assert not long.done(), "the batch is too small to be caught in the act"
    worker.kill()
    assert (await asyncio.wait_for(long, 200)).plan.header.sequences == 600_000
    assert planner.replaced == replaced + 1


async def test_a_batch_that_kills_every_process_fails_and_the_next_one_is_planned(planner, monkeypatch):
    replaced = planner.replaced
    with monkeypatch.context() as patched:
        patched.setattr("scheduler_service.app.planner._plan", _die)
        with pytest.raises(HydraCpError, match=r"exit code -9 2 times on a batch of 2 sequences") as caught:
            await planner.plan(order([1, 2]))
    assert caught.value.reason is Reason.INTERNAL
    assert (await planner.plan(order([1, 2]))).plan.header.sequences == 2
    assert planner.replaced == replaced + 2


def _die(_: PlanOrder) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def test_closing_in_the_middle_of_a_plan_says_so_and_waits_for_nothing():
    planner = Planner(workers=1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(planner.plan(order([1])), 0.1)  # not started: it would wait
    starting = asyncio.create_task(planner.start())
    waiting = asyncio.create_task(planner.plan(order([1, 2])))
    await asyncio.sleep(0.1)
    planner.close()
    for call in (waiting, planner.plan(order([1]))):
        with pytest.raises(HydraCpError) as caught:
            await asyncio.wait_for(call, 60)
        assert caught.value.reason is Reason.SHUTTING_DOWN
    await asyncio.gather(starting, return_exceptions=True)
