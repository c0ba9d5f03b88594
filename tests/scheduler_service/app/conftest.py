from __future__ import annotations

import asyncio

import pytest

from scheduler_service.app import JobConfig
from scheduler_service.app.history import NoHistory
from scheduler_service.app.planner import Planned, PlanOrder
from scheduler_service.app.scheduler import Limits, Scheduler
from scheduler_service.domain import CostModel, Pool
from scheduler_service.planning import plan_iteration, plan_statistics


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class HeldPlanner:
    """Plans for real, in this process, but only while `open` is set."""

    warm = True
    replaced = 0

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.orders: list[PlanOrder] = []

    async def plan(self, order: PlanOrder) -> Planned:
        self.orders.append(order)
        await self.open.wait()
        plan = plan_iteration(order.batch, order.pool, policy=order.policy, cost=order.cost, cap=order.cap)
        return Planned(plan, plan_statistics(plan, order.batch))

    async def predict(self, order: PlanOrder, policies: tuple[str, ...]) -> dict[str, float]:
        return {}


class RecordingHistory(NoHistory):
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.iterations_saved: list = []

    def save_iteration(self, record, planned=None) -> None:  # type: ignore[no-untyped-def]
        self.iterations_saved.append((record, planned))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def config() -> JobConfig:
    return JobConfig(Pool(ranks=4, token_budget=4096, stages=2), "hydra", CostModel(), None, loader_shards=2)


@pytest.fixture
async def planner() -> HeldPlanner:
    return HeldPlanner()


@pytest.fixture
def history() -> RecordingHistory:
    return RecordingHistory()


@pytest.fixture
async def scheduler(clock: Clock, planner: HeldPlanner, history: RecordingHistory) -> Scheduler:
    return Scheduler(
        planner=planner,  # type: ignore[arg-type]
        history=history,
        clock=clock,
        run_id="run1",
        version="test",
        limits=Limits(window=2, max_wait_s=30, job_expiry_s=100),
    )
