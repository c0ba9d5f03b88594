"""The job's registration at the service, shared by whatever calls it: made at the first call, renewed when lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from scheduler_service.domain import HydraCpError, Reason
from worker_agent.client.config import AgentConfig
from worker_agent.client.planner_client import PlannerClient, Registration

FORGOTTEN = frozenset({Reason.STALE_EPOCH, Reason.UNKNOWN_JOB})
"""The service restarted, or dropped the job: register again and submit again what is still needed."""

TRANSIENT = FORGOTTEN | {Reason.UNREACHABLE, Reason.DEADLINE_EXCEEDED, Reason.SHUTTING_DOWN, Reason.UNKNOWN_ITERATION}
"""What the same call may get past a little later."""

_Answer = TypeVar("_Answer")


class Session:
    """Calls the service under the epoch of the newest registration. Threads may share it."""

    def __init__(self, client: PlannerClient, config: AgentConfig) -> None:
        self.client = client
        self.config = config
        self._lock = threading.Lock()
        self._registration: Registration | None = None

    def registered(self) -> Registration:
        """The registration in force, made now if there is none. Raises `HydraCpError`."""
        config = self.config
        with self._lock:
            if self._registration is None:
                self._registration = self.client.register_job(
                    config.job,
                    config.attempt,
                    config.pool,
                    policy=config.policy,
                    cost=config.cost,
                    cap=config.cap,
                    loader_shards=config.shards,
                    timeout_s=config.call_timeout_s,
                )
            return self._registration

    def call(self, operation: Callable[[str], _Answer]) -> _Answer:
        """`operation(epoch)`. If the service no longer knows the epoch, the next call registers again."""
        registration = self.registered()
        try:
            return operation(registration.epoch)
        except HydraCpError as error:
            if error.reason in FORGOTTEN:
                with self._lock:
                    if self._registration is registration:
                        self._registration = None
            raise
