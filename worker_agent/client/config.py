"""What an agent has to be told: the service, the job, and how long it may wait for what."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scheduler_service.domain import CostModel, InvalidInputError, Pool, Reason

FALLBACK_POLICY = "hydra"
"""What ranks plan by on their own: deterministic, no search, and fast enough to run in every rank."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """One job's planning, the same on every rank of the job.

    The time-outs nest: whatever waits inside gives up before whatever waits for it, so that the error that
    surfaces is the one that knows the cause. Raises `InvalidInputError` (INVALID_ARGUMENT) with the whole chain
    where they do not, and for shards that the pool cannot load.
    """

    target: str
    """Address of the service, "host:port"."""

    job: str
    """Name of the job, [A-Za-z0-9._-]."""

    pool: Pool
    """The ranks to plan for."""

    attempt: int = 0
    """Counts elastic restarts; a higher attempt fences the lower ones."""

    policy: str = ""
    """What the service plans by; empty for its default. Without the service, ranks plan by `FALLBACK_POLICY`."""

    cost: CostModel = field(default_factory=CostModel)
    """Cost model of the service's and of local plans."""

    cap: int | None = None
    """Fixes the degree cap C; None lets the policy choose."""

    loader_shards: int | None = None
    """Pool ranks 0 … loader_shards − 1 load data, shard j on rank j. None: every rank."""

    call_timeout_s: float = 2.0
    """Deadline of one short call: registration, submission, telemetry."""

    fetch_timeout_s: float = 10.0
    """How long the service may take for a plan once every rank has submitted its lengths."""

    agreement_timeout_s: float = 120.0
    """How long a rank waits for the slowest of the others, in each of the agent's collectives."""

    plan_timeout_s: float = 300.0
    """How long `PlanAgent.plan` waits at most. The job's own watchdog should wait longer."""

    max_message_bytes: int = 64 << 20
    """Largest message in either direction; the service has a setting of the same name."""

    report_queue: int = 1024
    """Timings that may wait to be sent; the oldest are dropped first."""

    def __post_init__(self) -> None:
        if not self.target or not self.job:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT, f"agent: target is {self.target!r} and job is {self.job!r}; give both"
            )
        if not 1 <= self.shards <= self.pool.ranks:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT,
                f"agent: loader_shards is {self.loader_shards}; shard j is loaded by pool rank j, so give 1 to "
                f"{self.pool.ranks}",
            )
        if self.report_queue < 1:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT, f"agent: report_queue is {self.report_queue}; give 1 or more"
            )
        times = (self.call_timeout_s, self.fetch_timeout_s, self.agreement_timeout_s, self.plan_timeout_s)
        nested = (
            0 < self.call_timeout_s <= self.fetch_timeout_s
            and self.longest_fetch_s < self.agreement_timeout_s
            and self.longest_iteration_s < self.plan_timeout_s
        )
        if not nested or not all(map(math.isfinite, times)):
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT, f"agent: time-outs must nest and be finite, but here: {self.timeout_chain()}"
            )

    @property
    def shards(self) -> int:
        """Number of loader shards."""
        return self.pool.ranks if self.loader_shards is None else self.loader_shards

    @property
    def longest_fetch_s(self) -> float:
        """Most seconds between two ranks that come from the fetch: its last try may register and submit again."""
        return self.fetch_timeout_s + 2 * self.call_timeout_s

    @property
    def longest_iteration_s(self) -> float:
        """Most seconds that one iteration's plan waits for others: both agreements and the fetch between them."""
        return self.longest_fetch_s + 2 * self.agreement_timeout_s

    def timeout_chain(self) -> str:
        """The time-outs and the order that they must be in, in words."""
        return (
            f"0 < call_timeout_s {self.call_timeout_s:g} ≤ fetch_timeout_s {self.fetch_timeout_s:g}; "
            f"fetch + 2 × call = {self.longest_fetch_s:g} < agreement_timeout_s {self.agreement_timeout_s:g}; "
            f"fetch + 2 × call + 2 × agreement = {self.longest_iteration_s:g} < plan_timeout_s {self.plan_timeout_s:g} "
            "< the job's watchdog"
        )
