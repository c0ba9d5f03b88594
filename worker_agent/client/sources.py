"""Where plans come from: the service, or the rank itself. A source finds a plan; whether it is used is agreed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, HydraCpError, PlanSlice, Reason, slice_plan
from scheduler_service.planning import plan_iteration
from worker_agent.client.config import FALLBACK_POLICY, AgentConfig
from worker_agent.client.planner_client import FetchedPlan
from worker_agent.client.session import Session

Lengths = npt.NDArray[np.int64]


class PlanSource(Protocol):
    """What an agent asks for the plans of its rank. Every method may raise `HydraCpError`."""

    def submit(self, iteration: int, lengths: Lengths) -> None:
        """Make this rank's lengths known, unless they are. Waits at most the configured call time-outs."""
        ...

    def fetch(self, iteration: int, timeout_s: float) -> FetchedPlan:
        """The plan of a submitted iteration, or none if it is not ready within `timeout_s`."""
        ...

    def window(self) -> int:
        """How many iterations beyond the current one the source takes."""
        ...


class ServiceSource:
    """Plans from the service, fetched by this rank for itself."""

    def __init__(self, session: Session, rank: int) -> None:
        self._session = session
        self._rank = rank
        self._submitted: dict[int, str] = {}
        """Iteration → the epoch under which the service took its lengths."""

    def submit(self, iteration: int, lengths: Lengths) -> None:
        """Submit shard `rank`; a rank that loads nothing only registers."""
        session = self._session
        epoch = session.registered().epoch
        if self._submitted.get(iteration) == epoch:
            return
        if self._rank < session.config.shards:
            config = session.config
            session.call(
                lambda epoch: session.client.submit_lengths(
                    config.job, epoch, iteration, self._rank, lengths, timeout_s=config.call_timeout_s
                )
            )
        self._submitted[iteration] = epoch

    def fetch(self, iteration: int, timeout_s: float) -> FetchedPlan:
        """Park at the service for most of `timeout_s`; the rest is for the answer's way back."""
        session = self._session
        try:
            answer = session.call(
                lambda epoch: session.client.fetch_plan(
                    session.config.job,
                    epoch,
                    iteration,
                    [self._rank],
                    wait_s=max(0.5 * timeout_s, timeout_s - 1.0),
                    timeout_s=timeout_s,
                )
            )
        except HydraCpError as error:
            if error.reason == Reason.UNKNOWN_ITERATION:
                self._submitted.pop(iteration, None)
            raise
        if answer.slice is not None:
            # The epoch of what is done is of no use any more, and jobs run for months.
            self._submitted.pop(iteration, None)
        return answer

    def window(self) -> int:
        """What the service keeps before and after the newest iteration."""
        return self._session.registered().window


def local_plan(config: AgentConfig, shards: Sequence[Lengths], rank: int) -> PlanSlice:
    """What the service would have planned by `FALLBACK_POLICY` for these shards, as `rank` sees it.

    A pure function of its arguments, so that ranks that agree on the lengths agree on the plan, to the digest.
    Raises `HydraCpError` where no plan can hold the batch.
    """
    batch = Batch(np.concatenate(shards))
    plan = plan_iteration(batch, config.pool, policy=FALLBACK_POLICY, cost=config.cost, cap=config.cap)
    return slice_plan(plan, batch, [len(shard) for shard in shards], [rank])
