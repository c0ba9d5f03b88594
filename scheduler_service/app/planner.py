"""Planning in worker processes, so that the loop answers polls and probes while a large plan is made.

Plans and baselines have processes of their own: what is only shown never delays what training waits for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_service.app.workers import WorkerDiedError, WorkerPool
from scheduler_service.domain import Batch, CostModel, HydraCpError, InfeasibleError, Plan, Pool, Reason
from scheduler_service.planning import PlanStatistics, plan_iteration, plan_statistics, warm_up

_ATTEMPTS = 2
"""How often one batch is given to a process: once more than it may kill one by accident."""

_BASELINE_NICENESS = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanOrder:
    """What to plan, and how."""

    batch: Batch
    pool: Pool
    policy: str
    cost: CostModel
    cap: int | None = None


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan and its figures."""

    plan: Plan
    statistics: PlanStatistics


class Planner:
    """Processes that plan. `start` before the first call, `close` at the end."""

    def __init__(self, workers: int) -> None:
        self._size = workers
        self._plans: WorkerPool | None = None
        self._baselines: WorkerPool | None = None
        self._closed = False
        self.warm = False
        """Whether every process has compiled the planner's loops."""

    async def start(self) -> None:
        """Start the processes and return when they are warm."""
        self._plans = WorkerPool(self._size)
        # One compiles first: the others find its result in numba's cache.
        await self._plans.run(warm_up)
        await self._plans.on_each(warm_up)
        self.warm = True

    @property
    def replaced(self) -> int:
        """Processes that died and were replaced."""
        return sum(pool.replaced for pool in (self._plans, self._baselines) if pool)

    async def plan(self, order: PlanOrder) -> Planned:
        """The plan of `order`. Raises what planning raises; INTERNAL if the batch kills two processes."""
        pool = await self._started()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await pool.run(_plan, order)
            except WorkerDiedError as error:
                if self._closed:
                    raise _closing() from error
                logger.error("planner %s while it planned %d sequences", error, len(order.batch))
                if attempt == _ATTEMPTS:
                    raise HydraCpError(
                        Reason.INTERNAL,
                        f"the planner's {error} {_ATTEMPTS} times on a batch of {len(order.batch):,} sequences; "
                        "if the code is -9, give the scheduler more memory",
                    ) from error
        raise AssertionError("unreachable")

    async def predict(self, order: PlanOrder, policies: Sequence[str]) -> dict[str, float]:
        """Predicted seconds of the same batch under other policies; those that cannot hold it are left out."""
        if self._closed:
            return {}
        if self._baselines is None:
            self._baselines = WorkerPool(1, niceness=_BASELINE_NICENESS)
        try:
            return await self._baselines.run(_predict, order, tuple(policies))
        except WorkerDiedError as error:
            logger.warning("baseline %s", error)
            return {}

    def close(self) -> None:
        """End all processes, also in the middle of a plan."""
        self.warm = False
        self._closed = True
        for pool in (self._plans, self._baselines):
            if pool is not None:
                pool.close()

    async def _started(self) -> WorkerPool:
        while self._plans is None and not self._closed:  # a call that came before `start`
            await asyncio.sleep(0.05)
        if self._closed or self._plans is None:
            raise _closing()
        return self._plans


def _closing() -> HydraCpError:
    return HydraCpError(Reason.SHUTTING_DOWN, "the planner is shutting down; try again in a moment")


def _plan(order: PlanOrder) -> Planned:
    plan = plan_iteration(order.batch, order.pool, policy=order.policy, cost=order.cost, cap=order.cap)
    _ = plan.digest  # computed here, and carried along
    return Planned(plan, plan_statistics(plan, order.batch))


def _predict(order: PlanOrder, policies: tuple[str, ...]) -> dict[str, float]:
    seconds = {}
    for policy in policies:
        try:
            plan = plan_iteration(order.batch, order.pool, policy=policy, cost=order.cost)
        except InfeasibleError:
            continue
        seconds[policy] = plan.header.predicted_s
    return seconds
