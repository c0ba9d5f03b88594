"""What the service remembers and shows: frozen values that the store keeps and the transports translate.

Times are Unix seconds, durations seconds, `load` attention load in token²/degree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from scheduler_service.domain import Batch, CostModel, Plan, Pool


class Stream(StrEnum):
    """What an iteration's batch is used for; each stream counts its own iterations."""

    TRAIN = "train"
    VALID = "valid"
    FORWARD_ONLY = "forward_only"


class IterationState(StrEnum):
    """Where an iteration is in its life."""

    COLLECTING = "collecting"
    PLANNING = "planning"
    READY = "ready"
    EXECUTED = "executed"
    FAILED = "failed"


@dataclass(frozen=True)
class Failure:
    """Why there is no plan: `reason` for programs, `message` for people, `sequence` the id at fault if any."""

    reason: str
    message: str
    sequence: int | None = None


@dataclass(frozen=True)
class JobConfig:
    """What a job registers; two registrations under one attempt must agree on all of it."""

    pool: Pool
    policy: str
    cost: CostModel
    cap: int | None
    loader_shards: int


@dataclass(frozen=True)
class JobRecord:
    """A job, and how its planning is doing."""

    job: str
    attempt: int
    config: JobConfig
    registered_at: float
    last_seen_at: float
    newest_planned: int | None = None
    newest_executed: int | None = None
    fallbacks: int = 0
    verdict: str = ""


@dataclass(frozen=True)
class IterationRecord:
    """One iteration in figures: a line of the table, a point of each chart, a row of the history."""

    job: str
    attempt: int
    stream: Stream
    iteration: int
    state: IterationState
    policy: str
    created_at: float
    failure: Failure | None = None
    digest: str | None = None
    missing_shards: int = 0
    sequences: int = 0
    tokens: int = 0
    longest_tokens: int = 0
    microbatches: int = 0
    target: float = 0.0
    cap: int = 0
    predicted_s: float = 0.0
    lower_bound_s: float = 0.0
    baselines_s: dict[str, float] = field(default_factory=dict)
    plan_s: float = 0.0
    lead_s: float | None = None
    pp_bubble: float = 0.0
    dp_bubble: float = 0.0
    load_max: float = 0.0
    load_mean: float = 0.0
    padding: float = 0.0
    idle_share: float = 0.0
    degree_share: dict[int, float] = field(default_factory=dict)
    degree_sequences: dict[int, int] = field(default_factory=dict)
    measured_s: float | None = None
    plan_wait_s: float | None = None
    origin: str | None = None
    fallback_reason: str | None = None
    loss: float | None = None


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """A plan beside what it was made from; shard j of the batch holds `shard_sizes[j]` sequences."""

    plan: Plan
    batch: Batch
    shard_sizes: tuple[int, ...]


@dataclass(frozen=True)
class EventRecord:
    """Something worth a person's attention. Ids rise, also across restarts."""

    id: int
    at: float
    kind: str
    message: str
    job: str | None = None
    iteration: int | None = None
    stream: Stream | None = None


@dataclass(frozen=True)
class ServiceFigures:
    """The service as a whole."""

    version: str
    uptime_s: float
    warm: bool
    grpc_address: str
    jobs: int
    plans: int
    plan_failures: int
    plan_p50_s: float | None
    plan_p99_s: float | None
    parked_fetches: int
    fallbacks: int
    store: str
