"""A plain gRPC client of the planner service, as a script would write it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hydracp.v1 import plan_pb2, planner_pb2, planner_pb2_grpc

OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.enable_http_proxy", 0))
TIMEOUT_S = 60.0
SMALL_POOL = plan_pb2.Pool(ranks=4, token_budget=4096, stages=2, ep=2)


@contextmanager
def planner(address: str) -> Iterator[planner_pb2_grpc.PlannerServiceStub]:
    """A stub over its own channel."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        yield planner_pb2_grpc.PlannerServiceStub(channel)


def register(
    stub: planner_pb2_grpc.PlannerServiceStub, job: str, shards: int = 2, attempt: int = 0, **more: object
) -> str:
    """Register `job` and return its epoch."""
    more.setdefault("pool", SMALL_POOL)
    request = planner_pb2.RegisterJobRequest(job=job, attempt=attempt, loader_shards=shards, **more)
    return stub.RegisterJob(request, timeout=TIMEOUT_S).epoch


def submit(
    stub: planner_pb2_grpc.PlannerServiceStub, job: str, epoch: str, iteration: int, shards: Sequence[Sequence[int]]
) -> planner_pb2.SubmitLengthsResponse:
    """Submit all shards of an iteration; the last answer."""
    for shard, lengths in enumerate(shards):
        answer = stub.SubmitLengths(
            planner_pb2.SubmitLengthsRequest(job=job, epoch=epoch, iteration=iteration, shard=shard, lengths=lengths),
            timeout=TIMEOUT_S,
        )
    return answer


def fetch_request(
    job: str, epoch: str, iteration: int, ranks: Sequence[int] = (), wait_s: int = 30
) -> planner_pb2.FetchPlanRequest:
    """A request that parks for `wait_s` seconds."""
    request = planner_pb2.FetchPlanRequest(job=job, epoch=epoch, iteration=iteration, ranks=ranks)
    request.wait.FromSeconds(wait_s)
    return request


def error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo:
    """The google.rpc.ErrorInfo of a failed call."""
    return _detail(error, error_details_pb2.ErrorInfo())


def retry_info(error: grpc.RpcError) -> error_details_pb2.RetryInfo:
    """The google.rpc.RetryInfo of a failed call."""
    return _detail(error, error_details_pb2.RetryInfo())


def _detail(error, into):  # type: ignore[no-untyped-def]
    status = rpc_status.from_call(error)
    assert status is not None, f"no rich status in {error!r}"
    found = [detail for detail in status.details if detail.Is(into.DESCRIPTOR)]
    assert found, f"no {into.DESCRIPTOR.full_name} among {[detail.type_url for detail in status.details]}"
    found[0].Unpack(into)
    return into
