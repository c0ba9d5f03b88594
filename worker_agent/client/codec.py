"""Between protobuf and the domain, on the agent's side. Columns go to numpy in one pass each."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Protocol

import numpy as np
import numpy.typing as npt
from hydracp.v1 import plan_pb2, planner_pb2

from scheduler_service.domain import CostModel, HydraCpError, PlanSlice, Pool, Reason
from worker_agent.client.timing import PlanOrigin, Timing

_ORIGINS = {
    PlanOrigin.SERVICE: planner_pb2.PLAN_ORIGIN_SERVICE,
    PlanOrigin.LOCAL: planner_pb2.PLAN_ORIGIN_LOCAL,
}


class _Repeated(Sized, Iterable[int], Protocol):
    """A packed repeated field."""


def pool_message(pool: Pool) -> plan_pb2.Pool:
    """The pool; numbers that are not set become 0."""
    return plan_pb2.Pool(
        ranks=pool.ranks,
        token_budget=pool.token_budget,
        stages=pool.stages,
        ep=pool.ep,
        heads=pool.heads or 0,
        max_ulysses=pool.max_ulysses or 0,
        node=pool.node or 0,
        max_degree=pool.max_degree or 0,
        microbatch_multiple=pool.microbatch_multiple,
        sequence_parallel=pool.sequence_parallel,
        speeds=[plan_pb2.RankSpeed(rank=rank, speed=speed) for rank, speed in dict(pool.speeds).items()],
    )


def cost_message(cost: CostModel) -> plan_pb2.CostModel:
    """The cost model."""
    return plan_pb2.CostModel(theta=cost.theta, tau=cost.tau, overhead=cost.overhead)


def plan_slice(message: plan_pb2.PlanSlice) -> PlanSlice:
    """The slice as columns. Raises `HydraCpError` (INVALID_PLAN) for columns that do not fit together."""
    columns = PlanSlice(
        digest=message.digest,
        policy=message.policy,
        microbatches=message.microbatches,
        target=message.target,
        cap=message.cap,
        predicted_s=message.predicted_s,
        ranks=_int32(message.ranks),
        group_microbatch=_int32(message.group_microbatch),
        group_start=_int32(message.group_start),
        group_degree=_int32(message.group_degree),
        group_offset=_int32(message.group_offset),
        members=_int32(message.members),
        member_lengths=_int32(message.member_lengths),
        shard_offset=_int32(message.shard_offset),
        loaded=_int32(message.loaded),
        loaded_lengths=_int32(message.loaded_lengths),
        loaded_microbatch=_int32(message.loaded_microbatch),
        loaded_start=_int32(message.loaded_start),
        loaded_degree=_int32(message.loaded_degree),
        loaded_stream_offset=_int64(message.loaded_stream_offset),
        loaded_stream_tokens=_int64(message.loaded_stream_tokens),
    )
    _check_lengths(columns)
    return columns


def timing_message(timing: Timing) -> planner_pb2.IterationTiming:
    """What one rank measured in one training iteration."""
    return planner_pb2.IterationTiming(
        stream=planner_pb2.STREAM_TRAIN,
        iteration=timing.iteration,
        rank=timing.rank,
        iteration_s=timing.iteration_s,
        plan_wait_s=timing.plan_wait_s,
        origin=_ORIGINS[PlanOrigin(timing.origin)],
        fallback_reason=timing.fallback_reason,
        digest=timing.digest,
        forward_s=timing.forward_s,
        backward_s=timing.backward_s,
        loss=timing.loss,
        ulysses_bytes=timing.ulysses_bytes,
        ring_bytes=timing.ring_bytes,
        ep_bytes=timing.ep_bytes,
    )


def _int32(values: _Repeated) -> npt.NDArray[np.int32]:
    return np.fromiter(values, np.int32, len(values))


def _int64(values: _Repeated) -> npt.NDArray[np.int64]:
    return np.fromiter(values, np.int64, len(values))


def _check_lengths(columns: PlanSlice) -> None:
    side_by_side = (
        ("group_microbatch", "group_start", "group_degree"),
        ("members", "member_lengths"),
        (
            "loaded", "loaded_lengths", "loaded_microbatch", "loaded_start", "loaded_degree", "loaded_stream_offset",
            "loaded_stream_tokens",
        ),
    )  # fmt: skip
    for names in side_by_side:
        sizes = {name: len(getattr(columns, name)) for name in names}
        if len(set(sizes.values())) > 1:
            raise HydraCpError(Reason.INVALID_PLAN, f"plan {columns.digest}: columns differ in length: {sizes}")
    groups = len(columns.group_start)
    if len(columns.group_offset) != groups + 1 or columns.group_offset[-1] != len(columns.members):
        raise HydraCpError(
            Reason.INVALID_PLAN,
            f"plan {columns.digest}: group_offset does not cut {len(columns.members)} members into {groups} groups",
        )
