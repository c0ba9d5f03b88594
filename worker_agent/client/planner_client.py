"""A synchronous client of hydracp.v1.PlannerService on one channel.

Guarantees: a deadline on every call; the channel opens at the first call, in the process that makes it, and a
forked child that inherits it gets `ForkedProcessError` instead of a hang; `http_proxy` is ignored; errors are
`HydraCpError` with the service's reason. It does not retry: whoever calls knows how long it may.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hydracp.v1 import planner_pb2, planner_pb2_grpc

from scheduler_service.domain import PLAN_FORMAT, CostModel, HydraCpError, PlanSlice, Pool, Reason
from worker_agent.client import codec
from worker_agent.client.timing import Timing

ERROR_DOMAIN = "hydracp"
"""Domain of the google.rpc.ErrorInfo that the service sends."""

_Answer = TypeVar("_Answer")

_REASON_OF_STATUS = {
    grpc.StatusCode.UNAVAILABLE: Reason.UNREACHABLE,
    grpc.StatusCode.CANCELLED: Reason.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.MESSAGE_TOO_LARGE,
    grpc.StatusCode.INVALID_ARGUMENT: Reason.INVALID_ARGUMENT,
}
"""For answers without ErrorInfo: from the transport itself, or from something that is not the service."""


class ForkedProcessError(HydraCpError):
    """A forked child used the connection or the agent of its parent."""


@dataclass(frozen=True)
class Registration:
    """The service's answer to a registration."""

    epoch: str
    """Names this registration in later calls."""
    policy: str
    """Policy in force."""
    window: int
    """Iterations before and after the newest one that the service keeps."""


@dataclass(frozen=True)
class FetchedPlan:
    """A slice, or None while the iteration is not planned; `missing_shards` then says what it waits for."""

    slice: PlanSlice | None
    missing_shards: int


class PlannerClient:
    """Calls the service at `target` ("host:port"). Threads may share one client. Each call raises `HydraCpError`."""

    def __init__(self, target: str, *, max_message_bytes: int = 64 << 20) -> None:
        self.target = target
        self._max_message_bytes = max_message_bytes
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._pid: int | None = None
        self._closed = False

    def register_job(
        self,
        job: str,
        attempt: int,
        pool: Pool,
        *,
        policy: str,
        cost: CostModel,
        cap: int | None,
        loader_shards: int,
        timeout_s: float,
    ) -> Registration:
        """Make the job known; every rank may, as long as all say the same."""
        request = planner_pb2.RegisterJobRequest(
            job=job,
            attempt=attempt,
            pool=codec.pool_message(pool),
            policy=policy,
            cost=codec.cost_message(cost),
            cap=cap or 0,
            loader_shards=loader_shards,
            plan_formats=[PLAN_FORMAT],
        )
        answer = self._call(lambda stub: stub.RegisterJob(request, timeout=timeout_s))
        if answer.plan_format != PLAN_FORMAT:
            raise HydraCpError(
                Reason.INVALID_ARGUMENT,
                f"{self.target} plans in format {answer.plan_format}, the agent reads {PLAN_FORMAT}: upgrade the older",
            )
        return Registration(answer.epoch, answer.policy, answer.window)

    def submit_lengths(
        self, job: str, epoch: str, iteration: int, shard: int, lengths: npt.NDArray[np.int64], *, timeout_s: float
    ) -> None:
        """Submit one loader's lengths (tokens) of one training iteration."""
        request = planner_pb2.SubmitLengthsRequest(
            job=job,
            epoch=epoch,
            stream=planner_pb2.STREAM_TRAIN,
            iteration=iteration,
            shard=shard,
            lengths=lengths.tolist(),
        )
        self._call(lambda stub: stub.SubmitLengths(request, timeout=timeout_s))

    def fetch_plan(
        self, job: str, epoch: str, iteration: int, ranks: Sequence[int], *, wait_s: float, timeout_s: float
    ) -> FetchedPlan:
        """Fetch the slice of `ranks`; the service parks the call for up to `wait_s`, which is below `timeout_s`."""
        wait = Duration()
        wait.FromNanoseconds(int(wait_s * 1e9))
        request = planner_pb2.FetchPlanRequest(
            job=job, epoch=epoch, stream=planner_pb2.STREAM_TRAIN, iteration=iteration, ranks=ranks, wait=wait
        )
        answer = self._call(lambda stub: stub.FetchPlan(request, timeout=timeout_s))
        found = codec.plan_slice(answer.slice) if answer.HasField("slice") else None
        return FetchedPlan(found, answer.missing_shards)

    def report_timings(self, job: str, epoch: str, timings: Sequence[Timing], *, timeout_s: float) -> None:
        """Send what ranks measured."""
        request = planner_pb2.ReportTimingsRequest(
            job=job, epoch=epoch, timings=[codec.timing_message(timing) for timing in timings]
        )
        self._call(lambda stub: stub.ReportTimings(request, timeout=timeout_s))

    def close(self) -> None:
        """Close the channel; calls in flight and later ones end with UNREACHABLE."""
        if self._pid not in (None, os.getpid()):
            return  # the parent's channel
        with self._lock:
            self._closed = True
            if self._channel is not None:
                self._channel.close()

    def _call(self, call: Callable[[planner_pb2_grpc.PlannerServiceStub], _Answer]) -> _Answer:
        try:
            return call(planner_pb2_grpc.PlannerServiceStub(self._opened()))
        except grpc.RpcError as error:
            raise decoded(error, self.target) from error
        except ValueError as error:
            # What grpc raises for a call on a channel that was closed meanwhile.
            if self._closed:
                raise self._closed_error() from error
            raise

    def _opened(self) -> grpc.Channel:
        # Before the lock, which the parent's threads may have held when it forked.
        if self._pid not in (None, os.getpid()):
            raise ForkedProcessError(
                Reason.FORKED_PROCESS,
                f"process {os.getpid()} uses the connection to {self.target} that process {self._pid} opened before "
                "it forked; make a client of its own in the child",
            )
        with self._lock:
            if self._closed:
                raise self._closed_error()
            if self._channel is None:
                self._pid = os.getpid()
                self._channel = grpc.insecure_channel(self.target, options=channel_options(self._max_message_bytes))
            return self._channel

    def _closed_error(self) -> HydraCpError:
        return HydraCpError(Reason.UNREACHABLE, f"the client of {self.target} is closed")


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """How the channel behaves; keepalive is slower than what the service allows."""
    return [
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # Only while a call is in flight; finds a dead peer behind a parked fetch.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        # A restarted service is found within about a second or two, also at a new address of the same name.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
        # Not shared with other clients of this process, whose failures would count against this one.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def decoded(error: grpc.RpcError, target: str) -> HydraCpError:
    """The service's error with its reason, or what the transport says in our words."""
    info = _error_info(error)
    code, details = error.code(), error.details() or ""
    if info is not None and info.reason in Reason.__members__:
        sequence = info.metadata.get("sequence", "")
        return HydraCpError(Reason(info.reason), details, sequence=int(sequence) if sequence.isdecimal() else None)
    reason = _REASON_OF_STATUS.get(code, Reason.INTERNAL)
    told = {
        Reason.UNREACHABLE: f"no connection to the scheduler at {target}",
        Reason.DEADLINE_EXCEEDED: f"the scheduler at {target} did not answer in time",
        Reason.MESSAGE_TOO_LARGE: f"a message to or from {target} passes max_message_bytes of client or service",
    }.get(reason, f"the scheduler at {target} failed")
    return HydraCpError(reason, f"{told} ({code.name}: {details})")


def _error_info(error: Any) -> error_details_pb2.ErrorInfo | None:
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # the trailing status contradicts the call's: not written by the service
        return None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            return info
    return None
