"""The gRPC server: PlannerService, health, reflection; one port, explicit message limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from hydracp.v1 import planner_pb2

from scheduler_service.app.scheduler import Scheduler
from scheduler_service.domain import HydraCpError, InvalidInputError, Reason
from scheduler_service.transport.errors import ErrorInterceptor
from scheduler_service.transport.servicer import PlannerServicer

_DESCRIPTOR = planner_pb2.DESCRIPTOR.services_by_name["PlannerService"]

SERVICE_NAME: str = _DESCRIPTOR.full_name
"""hydracp.v1.PlannerService, also the name under which health says that plans can be had."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_MIN_PING_INTERVAL_MS = 10_000
"""Agents ping every 30 s; gRPC's own minimum of 5 minutes would disconnect them (too_many_pings)."""


class GrpcServer:
    """`start` binds `address` ("host:port", port 0 for a free one); a port that is taken is an error, never shared."""

    def __init__(self, scheduler: Scheduler, address: str, max_message_bytes: int) -> None:
        self._requested = address
        self._servicer = PlannerServicer(scheduler, max_message_bytes)
        self._health = health.aio.HealthServicer()
        # Twice the limit: requests above it reach us and are refused by name; see `_parser`.
        self._server = grpc.aio.server(
            interceptors=(ErrorInterceptor(SERVICE_NAME),),
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", 2 * max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ),
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE_NAME, _handlers(self._servicer, max_message_bytes)),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self) -> str:
        """Bind and serve; the address that was bound. Raises `InvalidInputError` that names a port that is taken."""
        host, _, _ = self._requested.rpartition(":")
        try:
            port = self._server.add_insecure_port(self._requested)
        except RuntimeError as error:
            raise address_in_use("grpc", self._requested, error) from error
        await self._health.set("", _SERVING)
        await self._health.set(SERVICE_NAME, _NOT_SERVING)
        await self._server.start()
        return f"{host}:{port}"

    async def set_ready(self) -> None:
        """Health says from now on that plans can be had."""
        await self._health.set(SERVICE_NAME, _SERVING)

    async def not_ready(self) -> None:
        """Health says for good that no plans can be had."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, let those that run finish within `grace_s` seconds, and end."""
        await self._server.stop(grace_s)
        self._servicer.close()


def address_in_use(name: str, address: str, error: Exception) -> InvalidInputError:
    """What to say of an address that cannot be bound."""
    return InvalidInputError(
        Reason.INVALID_ARGUMENT,
        f"{name} address {address} cannot be bound ({error}); end the process that holds the port, "
        f"or give another --{name} (port 0 takes a free one)",
    )


def _handlers(servicer: PlannerServicer, limit: int) -> dict[str, grpc.RpcMethodHandler]:
    """Every method of the service, by the descriptor. Answers may be messages or what they serialise to."""
    handlers = {}
    for method in _DESCRIPTOR.methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        request = getattr(planner_pb2, method.input_type.name)
        behaviour = getattr(servicer, method.name)
        checked = _checked_stream(behaviour) if method.server_streaming else _checked(behaviour)
        handlers[method.name] = make(checked, _parser(request, limit), _serialise)
    return handlers


def _parser(message: Any, limit: int) -> Callable[[bytes], Any]:
    """Parses, or says what is wrong with the bytes: a parser that raises would tell the client nothing of use."""

    def parse(data: bytes) -> Any:
        if len(data) > limit:
            return HydraCpError(
                Reason.MESSAGE_TOO_LARGE,
                f"the request has {len(data):,} bytes, the scheduler's max_message_bytes allows {limit:,}; "
                "raise it (HYDRACP_MAX_MESSAGE_BYTES) on both sides, or send less at once",
            )
        try:
            return message.FromString(data)
        except DecodeError:
            return InvalidInputError(
                Reason.INVALID_ARGUMENT,
                f"the request of {len(data):,} bytes is no {message.DESCRIPTOR.full_name}; compare the versions of the "
                "client's and the scheduler's protos",
            )

    return parse


def _checked(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if isinstance(request, HydraCpError):
            raise request
        return await behaviour(request, context)

    return call


def _checked_stream(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if isinstance(request, HydraCpError):
            raise request
        async for answer in behaviour(request, context):
            yield answer

    return call


def _serialise(answer: Any) -> bytes:
    data: bytes = answer if isinstance(answer, bytes) else answer.SerializeToString()
    return data
