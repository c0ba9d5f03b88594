"""The JSON of the REST API. The dashboard's TypeScript types are generated from it.

Units are in the names: `_s` seconds, `_tokens` tokens; `load` is attention load in token²/degree.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from scheduler_service.app import IterationState, Stream


class ErrorBody(BaseModel):
    """What went wrong: `message` for people, `reason` for programs (the same as over gRPC)."""

    reason: str
    message: str
    sequence: int | None = None


class ErrorEnvelope(BaseModel):
    """Every answer that is no success."""

    error: ErrorBody


class PoolModel(BaseModel):
    """The ranks that are planned for; see the planning documentation."""

    ranks: int
    token_budget: int
    stages: int
    ep: int
    heads: int | None = None
    max_ulysses: int | None = None
    node: int | None = None
    max_degree: int | None = None
    microbatch_multiple: int
    sequence_parallel: int
    speeds: dict[int, float] = Field(
        default_factory=dict, description="Rank to speed, where it is not 1; a rank of speed 0 is excluded"
    )


class CostModelModel(BaseModel):
    """Constants of the simple cost model, in seconds."""

    theta: float
    tau: float
    overhead: float


class Job(BaseModel):
    """A registered job, and how its planning is doing."""

    job: str
    attempt: int
    policy: str
    pool: PoolModel
    cost: CostModelModel
    loader_shards: int
    registered_at: Annotated[float, Field(description="Unix seconds")]
    last_seen_at: Annotated[float, Field(description="Unix seconds of the last call of any of its agents")]
    newest_planned: int | None = Field(default=None, description="Newest train iteration with a plan")
    newest_executed: int | None = Field(default=None, description="Newest train iteration that agents reported done")
    fallbacks: int = Field(default=0, description="Executed iterations whose plan the ranks computed themselves")
    verdict: str = Field(default="", description="In words: whether the planner is ahead, and why or why not")


class IterationSummary(BaseModel):
    """One line of the iteration table and one point of each chart of the overview."""

    iteration: int
    stream: Stream
    state: IterationState
    failure: ErrorBody | None = None
    digest: str | None = None
    policy: str
    sequences: int
    tokens: int
    longest_tokens: int
    microbatches: int = 0
    target: float = Field(default=0.0, description="Load target Λ, token²")
    cap: int = 0
    predicted_s: float = 0.0
    lower_bound_s: float = 0.0
    baselines_s: dict[str, float] = Field(
        default_factory=dict, description="Predicted seconds of other policies on the same batch"
    )
    plan_s: float = 0.0
    lead_s: float | None = Field(default=None, description="Seconds between plan ready and first fetch; > 0 is ahead")
    pp_bubble: float = 0.0
    dp_bubble: float = 0.0
    load_max: float = 0.0
    load_mean: float = 0.0
    imbalance: float = Field(default=0.0, description="Largest over mean attention load of ranks and microbatches")
    padding: float = 0.0
    idle_share: float = 0.0
    degree_share: dict[int, float] = Field(default_factory=dict, description="Degree to share of occupied slots")
    degree_sequences: dict[int, int] = Field(default_factory=dict, description="Degree to number of sequences")
    created_at: float = 0.0
    measured_s: float | None = Field(default=None, description="Slowest rank's iteration time as reported by agents")
    plan_wait_s: float | None = Field(default=None, description="Longest wait for the plan of any rank, as reported")
    origin: Literal["service", "local"] | None = Field(default=None, description="Where the plan that ran came from")
    fallback_reason: str | None = None
    loss: float | None = None


class IterationPage(BaseModel):
    """Newest first."""

    iterations: list[IterationSummary]
    next_before: int | None = Field(default=None, description="Pass as `before` for the next page")


class LoadMap(BaseModel):
    """Rank × microbatch matrices, row by row (`values[rank][microbatch]`)."""

    ranks: int
    microbatches: int
    load: list[list[float]] = Field(description="Attention load of the rank in the microbatch, token²/degree")
    tokens: list[list[int]] = Field(description="Padded tokens of the rank in the microbatch")
    degree: list[list[int]] = Field(description="Degree of the rank's group, 0 without a sequence")
    start: list[list[int]] = Field(description="First rank of the rank's group, −1 without a sequence")


class TimelineOp(BaseModel):
    """One forward or backward of one microbatch on one stage."""

    stage: int
    microbatch: int
    kind: Literal["F", "B"]
    start_s: float
    end_s: float


class Timeline(BaseModel):
    """The predicted 1F1B schedule of one pipeline (the slowest, unless asked otherwise)."""

    pipeline: int = Field(description="EP group whose pipeline this is")
    pipelines: int
    stages: int
    span_s: float
    pp_bubble: float
    operations: list[TimelineOp]


class PlacedSequence(BaseModel):
    """One sequence of a plan."""

    id: int
    length: int
    shard: int
    microbatch: int
    start: int
    degree: int
    load: float = Field(description="Attention load on each of its ranks, token²/degree")
    memory_degree: int = Field(description="Smallest degree that the token budget allows")
    why: str = Field(description="In words: why this degree and this group")


class PlanPage(BaseModel):
    """Sequences of a plan, in the order asked for."""

    iteration: int
    digest: str
    total: int
    offset: int
    sequences: list[PlacedSequence]


class ServiceStatistics(BaseModel):
    """The service as a whole."""

    version: str
    uptime_s: float
    warm: bool
    grpc_address: str
    jobs: int
    plans: int
    plan_failures: int
    plan_p50_s: float | None = None
    plan_p99_s: float | None = None
    parked_fetches: int
    fallbacks: int
    store: str = Field(description="State of the plan history in words, 'ok' when it keeps up")


class Event(BaseModel):
    """Something worth a person's attention; also what the event stream sends."""

    id: int
    at: float = Field(description="Unix seconds")
    kind: str = Field(description="job_registered, plan_ready, plan_failed, iteration_executed, fallback, …")
    job: str | None = None
    iteration: int | None = None
    stream: Stream | None = None
    message: str


class EventPage(BaseModel):
    """Newest first."""

    events: list[Event]
