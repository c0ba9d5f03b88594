"""Long polls, health, reflection, limits: what the server does besides answering."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from hydracp.v1 import plan_pb2, planner_pb2, planner_pb2_grpc

from tests.support.planner_client import (
    OPTIONS,
    SMALL_POOL,
    TIMEOUT_S,
    error_info,
    fetch_request,
    planner,
    register,
    submit,
)
from tests.support.rest import get, until

SERVICE = "hydracp.v1.PlannerService"


def parked(service) -> int:  # type: ignore[no-untyped-def]
    return get(service, "/api/v1/statistics")["parked_fetches"]


def test_long_polls_park_and_wake_together(service, stub, job):
    epoch = register(stub, job)
    with ThreadPoolExecutor(20) as threads:
        calls = [
            threads.submit(stub.FetchPlan, fetch_request(job, epoch, 0, [rank % 4]), timeout=TIMEOUT_S)
            for rank in range(20)
        ]
        until(lambda: parked(service) == 20)
        assert not any(call.done() for call in calls)
        submit(stub, job, epoch, 0, ([5], [6]))
        digests = {call.result(TIMEOUT_S).slice.digest for call in calls}
    assert len(digests) == 1
    assert parked(service) == 0


async def test_two_hundred_polls_that_are_cancelled_leave_nothing_parked(service, job):
    async with grpc.aio.insecure_channel(service.grpc, options=OPTIONS) as channel:
        stub = planner_pb2_grpc.PlannerServiceStub(channel)
        registration = planner_pb2.RegisterJobRequest(job=job, pool=SMALL_POOL, loader_shards=2)
        epoch = (await stub.RegisterJob(registration, timeout=TIMEOUT_S)).epoch
        for _ in range(3):
            calls = [stub.FetchPlan(fetch_request(job, epoch, 0, [0]), timeout=TIMEOUT_S) for _ in range(200)]
            waiting = asyncio.gather(*calls, return_exceptions=True)
            await asyncio.to_thread(until, lambda: parked(service) == 200)
            for call in calls:
                call.cancel()
            await waiting
            await asyncio.to_thread(until, lambda: parked(service) == 0)


def test_probes_are_answered_while_a_large_plan_is_made(service):
    """Not a timing: the plan is still being made when the answers are there."""
    lengths = np.minimum(np.random.default_rng(3).lognormal(6.5, 1.3, 600_000).astype(int) + 1, 200_000)
    request = planner_pb2.PlanBatchRequest(
        lengths=lengths.tolist(), pool=plan_pb2.Pool(ranks=512, token_budget=8192, stages=9)
    )
    done = threading.Event()
    with planner(service.grpc) as stub, grpc.insecure_channel(service.grpc, options=OPTIONS) as other:
        health = health_pb2_grpc.HealthStub(other)
        call = stub.PlanBatch.future(request, timeout=200)
        call.add_done_callback(lambda _: done.set())
        before = 0
        while not done.is_set():
            answer = health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert get(service, "/healthz") == {"status": "ok"}
            before += not done.is_set()
        assert len(call.result().plan.degree) == len(lengths)
    assert before >= 3


def test_health_tells_alive_and_ready_apart(service):
    with grpc.insecure_channel(service.grpc, options=OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="hydra.v1"), timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_describes_every_method(service):
    with grpc.insecure_channel(service.grpc, options=OPTIONS) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        described = DescriptorPool(database).FindServiceByName(SERVICE)
    assert [method.name for method in described.methods] == [
        "PlanBatch", "RegisterJob", "SubmitLengths", "FetchPlan", "StreamPlan", "ReportTimings",
    ]  # fmt: skip


def test_a_proxy_in_the_environment_is_not_asked(service, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "grpc_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        with planner(service.grpc) as stub:
            answer = stub.PlanBatch(planner_pb2.PlanBatchRequest(lengths=[5], pool=SMALL_POOL), timeout=TIMEOUT_S)
        proxy.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert answer.plan.digest


def test_messages_over_the_limit_are_refused_with_the_setting_and_the_way_out(limited):
    pool = plan_pb2.Pool(ranks=4, token_budget=4096)
    with planner(limited.grpc) as stub:
        with pytest.raises(grpc.RpcError, match=r"the request has .*HYDRACP_MAX_MESSAGE_BYTES") as caught:
            stub.PlanBatch(planner_pb2.PlanBatchRequest(lengths=[100] * 100_000, pool=pool), timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_info(caught.value).reason == "MESSAGE_TOO_LARGE"
        with pytest.raises(grpc.RpcError, match=r"the answer has .* allows 65,536.*StreamPlan") as caught:
            stub.PlanBatch(planner_pb2.PlanBatchRequest(lengths=[100] * 40_000, pool=pool), timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        epoch = register(stub, "large", shards=1, pool=pool)
        submit(stub, "large", epoch, 0, [[100] * 40_000])
        with pytest.raises(grpc.RpcError, match=r"the answer has .*ask for fewer ranks, or use StreamPlan"):
            stub.FetchPlan(fetch_request("large", epoch, 0), timeout=TIMEOUT_S)
        pieces = list(
            stub.StreamPlan(
                planner_pb2.StreamPlanRequest(job="large", iteration=0, piece_sequences=5_000), timeout=TIMEOUT_S
            )
        )
    assert sum(len(piece.plan.degree) for piece in pieces) == 40_000
