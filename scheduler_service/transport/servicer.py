"""The methods of hydracp.v1.PlannerService: translate, call the use case, translate back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
from hydracp.v1 import planner_pb2

from scheduler_service.app.scheduler import Scheduler
from scheduler_service.domain import PLAN_FORMAT, HydraCpError, InvalidInputError, Reason
from scheduler_service.transport import codec
from scheduler_service.transport.slices import SliceCache

PIECE_SEQUENCES = 65_536
"""Most sequences of one piece of StreamPlan: some 1.5 MiB, below every client's default limit of 4 MiB."""


class PlannerServicer:
    """`max_message_bytes` bounds every answer; one that is larger is refused with what to do instead."""

    def __init__(self, scheduler: Scheduler, max_message_bytes: int) -> None:
        self._scheduler = scheduler
        self._max_message_bytes = max_message_bytes
        self._slices = SliceCache()

    def close(self) -> None:
        """Let go of what it holds."""
        self._slices.close()

    async def PlanBatch(self, request: planner_pb2.PlanBatchRequest, _: grpc.aio.ServicerContext) -> bytes:
        """Plan one batch."""
        # Columns of a million sequences take a while to convert: not on the loop.
        order = await asyncio.to_thread(codec.plan_order, request)
        planned = await self._scheduler.plan_batch(order)
        answer = await asyncio.to_thread(lambda: codec.plan_batch_response(planned).SerializeToString())
        return self._bounded(answer, "register a job and read its plan by StreamPlan")

    async def RegisterJob(
        self, request: planner_pb2.RegisterJobRequest, _: grpc.aio.ServicerContext
    ) -> planner_pb2.RegisterJobResponse:
        """Make a job known."""
        job = self._scheduler.register(
            request.job, request.attempt, codec.job_config(request), formats=list(request.plan_formats)
        )
        return planner_pb2.RegisterJobResponse(
            epoch=job.epoch,
            plan_format=PLAN_FORMAT,
            window=self._scheduler.limits.window,
            policy=job.config.policy,
            cost=codec.cost_message(job.config.cost),
        )

    async def SubmitLengths(
        self, request: planner_pb2.SubmitLengthsRequest, _: grpc.aio.ServicerContext
    ) -> planner_pb2.SubmitLengthsResponse:
        """Take one shard."""
        submission = self._scheduler.submit(
            request.job,
            request.epoch,
            codec.stream(request.stream),
            request.iteration,
            request.shard,
            codec.column(request.lengths),
        )
        return planner_pb2.SubmitLengthsResponse(
            state=codec.state(submission.state), missing_shards=submission.missing_shards
        )

    async def FetchPlan(self, request: planner_pb2.FetchPlanRequest, _: grpc.aio.ServicerContext) -> bytes:
        """Wait for a plan and return a slice of it. Two messages end to end are one: the slice is not copied."""
        iteration = await self._scheduler.fetch(
            request.job,
            request.epoch,
            codec.stream(request.stream),
            request.iteration,
            request.wait.seconds + request.wait.nanos * 1e-9,
        )
        planned = iteration.planned
        head = planner_pb2.FetchPlanResponse(
            state=codec.state(iteration.phase if planned is None else iteration.state),
            epoch=request.epoch,
            missing_shards=iteration.missing_shards,
        ).SerializeToString()
        if planned is None:
            return head
        ranks = tuple(request.ranks) or tuple(range(planned.plan.header.pool.ranks))
        return self._bounded(head + await self._slices.get(planned, ranks), "ask for fewer ranks, or use StreamPlan")

    async def StreamPlan(
        self, request: planner_pb2.StreamPlanRequest, _: grpc.aio.ServicerContext
    ) -> AsyncIterator[planner_pb2.StreamPlanResponse]:
        """Send a whole plan in pieces."""
        if request.piece_sequences < 0:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT, f"piece_sequences is {request.piece_sequences}; give 1 or more, or 0"
            )
        planned = await self._scheduler.whole_plan(
            request.job, request.epoch, codec.stream(request.stream), request.iteration
        )
        size = min(request.piece_sequences or PIECE_SEQUENCES, PIECE_SEQUENCES)
        for first in range(0, len(planned.plan), size):
            yield codec.piece(planned, first, size)

    async def ReportTimings(
        self, request: planner_pb2.ReportTimingsRequest, _: grpc.aio.ServicerContext
    ) -> planner_pb2.ReportTimingsResponse:
        """Take measurements."""
        self._scheduler.report(request.job, request.epoch, codec.timings(request.timings))
        return planner_pb2.ReportTimingsResponse()

    def _bounded(self, answer: bytes, instead: str) -> bytes:
        if len(answer) > self._max_message_bytes:
            raise HydraCpError(
                Reason.MESSAGE_TOO_LARGE,
                f"the answer has {len(answer):,} bytes, the scheduler's max_message_bytes allows "
                f"{self._max_message_bytes:,}; raise it (HYDRACP_MAX_MESSAGE_BYTES) on both sides, or {instead}",
            )
        return answer
