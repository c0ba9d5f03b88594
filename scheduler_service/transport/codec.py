"""Between protobuf messages and domain types. Columns go through numpy, never row by row in Python.

An optional number that is 0 in a message is not set, and means the domain's default.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields

import numpy as np
import numpy.typing as npt
from hydracp.v1 import plan_pb2, planner_pb2

from scheduler_service.app import IterationState, JobConfig, PlannedBatch, Stream
from scheduler_service.app.iterations import Timing
from scheduler_service.app.planner import Planned, PlanOrder
from scheduler_service.domain import Batch, CostModel, InvalidInputError, Plan, PlanHeader, PlanSlice, Pool, Reason
from scheduler_service.domain.plan import PLAN_FORMAT
from scheduler_service.planning import DEFAULT_POLICY, PlanStatistics

_STREAMS = {
    planner_pb2.STREAM_UNSPECIFIED: Stream.TRAIN,
    planner_pb2.STREAM_TRAIN: Stream.TRAIN,
    planner_pb2.STREAM_VALID: Stream.VALID,
    planner_pb2.STREAM_FORWARD_ONLY: Stream.FORWARD_ONLY,
}
_STATES = {
    IterationState.COLLECTING: planner_pb2.ITERATION_STATE_COLLECTING,
    IterationState.PLANNING: planner_pb2.ITERATION_STATE_PLANNING,
    IterationState.READY: planner_pb2.ITERATION_STATE_READY,
    IterationState.EXECUTED: planner_pb2.ITERATION_STATE_EXECUTED,
    IterationState.FAILED: planner_pb2.ITERATION_STATE_FAILED,
}
_ORIGINS = {planner_pb2.PLAN_ORIGIN_SERVICE: "service", planner_pb2.PLAN_ORIGIN_LOCAL: "local"}


# From messages


def pool(message: plan_pb2.Pool) -> Pool:
    """A pool. Raises `InvalidInputError` (INVALID_POOL)."""
    given = {field.name: getattr(message, field.name) for field in fields(Pool) if field.name != "speeds"}
    return Pool(
        speeds=[(slow.rank, _speed(slow)) for slow in message.speeds],
        **{
            name: value
            for name, value in given.items()
            # What has a default may be left out; what has none is judged as it is.
            if value != 0 or name in ("ranks", "token_budget")
        },
    )


def _speed(slow: plan_pb2.RankSpeed) -> float:
    """The speed, never a default: 0 takes the rank out of work."""
    if not slow.HasField("speed"):
        raise InvalidInputError(
            Reason.INVALID_POOL, f"pool: speeds names rank {slow.rank} without a speed; 0 excludes it, 1 is full speed"
        )
    return slow.speed


def cost_model(message: plan_pb2.CostModel | None) -> CostModel:
    """A cost model, the default one for None."""
    return CostModel() if message is None else CostModel(message.theta, message.tau, message.overhead)


def stream(value: planner_pb2.Stream) -> Stream:
    """A stream. Raises `InvalidInputError` for a number of a later version."""
    if value not in _STREAMS:
        raise InvalidInputError(Reason.INVALID_ARGUMENT, f"stream {value} is not known to this version; give 1 to 3")
    return _STREAMS[value]


def plan_order(message: planner_pb2.PlanBatchRequest) -> PlanOrder:
    """What PlanBatch asks for. Raises `InvalidInputError` that names the sequence or the field of the pool."""
    return PlanOrder(
        batch=Batch(column(message.lengths)),
        pool=pool(message.pool),
        policy=message.policy or DEFAULT_POLICY,
        cost=cost_model(message.cost if message.HasField("cost") else None),
        cap=_cap(message.cap),
    )


def job_config(message: planner_pb2.RegisterJobRequest) -> JobConfig:
    """What RegisterJob asks for. Raises `InvalidInputError` that names the field of the pool."""
    return JobConfig(
        pool=pool(message.pool),
        policy=message.policy or DEFAULT_POLICY,
        cost=cost_model(message.cost if message.HasField("cost") else None),
        cap=_cap(message.cap),
        loader_shards=message.loader_shards,
    )


def timings(messages: Iterable[planner_pb2.IterationTiming]) -> list[Timing]:
    """What ReportTimings brings. A loss that is no number is no loss."""
    return [
        Timing(
            stream=stream(message.stream),
            iteration=message.iteration,
            rank=message.rank,
            iteration_s=message.iteration_s,
            plan_wait_s=message.plan_wait_s,
            origin=_ORIGINS.get(message.origin),
            fallback_reason=message.fallback_reason or None,
            loss=message.loss if math.isfinite(message.loss) else None,
        )
        for message in messages
    ]


def column(values: Iterable[int]) -> npt.NDArray[np.int64]:
    """A repeated field as a column."""
    return np.fromiter(values, np.int64)


def _cap(value: int) -> int | None:
    if value < 0:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT, f"cap is {value}; give a degree, or 0 to let the policy choose"
        )
    return value or None


# To messages


def pool_message(value: Pool) -> plan_pb2.Pool:
    """A pool as a message."""
    numbers = {field.name: getattr(value, field.name) or 0 for field in fields(Pool) if field.name != "speeds"}
    speeds = [plan_pb2.RankSpeed(rank=rank, speed=speed) for rank, speed in dict(value.speeds).items()]
    return plan_pb2.Pool(**numbers, speeds=speeds)


def cost_message(value: CostModel) -> plan_pb2.CostModel:
    """A cost model as a message."""
    return plan_pb2.CostModel(theta=value.theta, tau=value.tau, overhead=value.overhead)


def header_message(value: PlanHeader) -> plan_pb2.PlanHeader:
    """What a plan says of itself, as a message."""
    return plan_pb2.PlanHeader(
        format=PLAN_FORMAT,
        policy=value.policy,
        pool=pool_message(value.pool),
        cost=cost_message(value.cost),
        target=value.target,
        cap=value.cap,
        microbatches=value.microbatches,
        sequences=value.sequences,
        batch_digest=value.batch_digest,
        predicted_s=value.predicted_s,
        lower_bound_s=value.lower_bound_s,
        plan_s=value.plan_s,
    )


def plan_message(value: Plan, first: int = 0, count: int | None = None) -> plan_pb2.Plan:
    """Sequences first … first + count − 1 of a plan, all of them by default, with its header."""
    part = slice(first, None if count is None else first + count)
    return plan_pb2.Plan(
        microbatch=value.microbatch[part].tolist(),
        start=value.start[part].tolist(),
        degree=value.degree[part].tolist(),
        digest=value.digest,
        header=header_message(value.header),
    )


def statistics_message(value: PlanStatistics) -> plan_pb2.PlanStatistics:
    """A plan's figures as a message."""
    return plan_pb2.PlanStatistics(
        tokens=value.tokens,
        sum_of_squares=value.sum_of_squares,
        load_max=value.load_max,
        load_mean=value.load_mean,
        load_min=value.load_min,
        padding=value.padding,
        degrees=value.degrees,
        degree_sequences=value.degree_sequences.values(),
        degree_share=value.degree_share.values(),
        idle_share=value.idle_share,
        pp_bubble=value.pp_bubble,
        dp_bubble=value.dp_bubble,
    )


def certificate_message(header: PlanHeader) -> plan_pb2.Certificate:
    """How far the plan may be from the best one, as a message."""
    bound = header.lower_bound_s
    return plan_pb2.Certificate(
        lower_bound_s=bound,
        predicted_s=header.predicted_s,
        gap=header.predicted_s / bound - 1 if bound > 0 else 0.0,
    )


def plan_batch_response(value: Planned) -> planner_pb2.PlanBatchResponse:
    """The answer to PlanBatch."""
    return planner_pb2.PlanBatchResponse(
        plan=plan_message(value.plan),
        statistics=statistics_message(value.statistics),
        certificate=certificate_message(value.plan.header),
    )


def slice_message(value: PlanSlice) -> plan_pb2.PlanSlice:
    """A slice as a message: its fields have the same names."""
    return plan_pb2.PlanSlice(
        **{
            field.name: given.tolist() if isinstance(given := getattr(value, field.name), np.ndarray) else given
            for field in fields(PlanSlice)
        }
    )


def piece(value: PlannedBatch, first: int, count: int) -> planner_pb2.StreamPlanResponse:
    """Sequences first … first + count − 1 of a plan, for StreamPlan."""
    return planner_pb2.StreamPlanResponse(
        first=first,
        plan=plan_message(value.plan, first, count),
        lengths=value.batch.lengths[first : first + count].tolist(),
    )


def state(value: IterationState) -> planner_pb2.IterationState:
    """A state as its number."""
    return _STATES[value]
