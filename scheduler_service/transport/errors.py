"""From typed errors to gRPC statuses with a machine-readable reason; one interceptor for all methods."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from scheduler_service.domain import HydraCpError, InfeasibleError, InvalidInputError, Reason

DOMAIN = "hydracp"
"""Domain of every google.rpc.ErrorInfo."""

MAX_MESSAGE_BYTES = 1500
"""Longest message of a status, in UTF-8. It travels twice, in headers, where a byte may take three; clients drop
answers whose headers pass 8 KiB."""

RETRY_AFTER_S = 1
"""When an agent that was sent away should try again."""

_CODES: dict[Reason, grpc.StatusCode] = {
    Reason.UNKNOWN_JOB: grpc.StatusCode.NOT_FOUND,
    Reason.UNKNOWN_ITERATION: grpc.StatusCode.NOT_FOUND,
    Reason.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.JOB_CONFLICT: grpc.StatusCode.ALREADY_EXISTS,
    Reason.SHARD_CONFLICT: grpc.StatusCode.ALREADY_EXISTS,
    Reason.ATTEMPT_FENCED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.STALE_EPOCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.MESSAGE_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}

logger = logging.getLogger(__name__)


def code_of(error: HydraCpError) -> grpc.StatusCode:
    """The status code of an error: by its reason, else by its kind."""
    if error.reason in _CODES:
        return _CODES[error.reason]
    if isinstance(error, InfeasibleError):
        return grpc.StatusCode.FAILED_PRECONDITION
    if isinstance(error, InvalidInputError):
        return grpc.StatusCode.INVALID_ARGUMENT
    # The rest are faults of ours, such as a plan that its verifier refuses, and bad arguments without a class.
    return grpc.StatusCode.INTERNAL if error.reason is Reason.INVALID_PLAN else grpc.StatusCode.FAILED_PRECONDITION


def status_of(error: HydraCpError) -> status_pb2.Status:
    """The rich status of an error: google.rpc.ErrorInfo, and RetryInfo where trying again makes sense."""
    metadata = {} if error.sequence is None else {"sequence": str(error.sequence)}
    details = [_packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))]
    if error.reason is Reason.SHUTTING_DOWN:
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=RETRY_AFTER_S))))
    return status_pb2.Status(code=code_of(error).value[0], message=_shortened(str(error)), details=details)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a method of `service` raises into a status.

    What nobody expected is logged, and told without its details.
    """

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wrap the method's handler."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(self._prefix):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _guarded_stream(method, handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            _guarded(method, handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )


def _guarded(method: str, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            await _abort(method, error, context)

    return call


def _guarded_stream(method: str, behaviour: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for answer in behaviour(request, context):
                yield answer
        except Exception as error:
            await _abort(method, error, context)

    return call


async def _abort(method: str, error: Exception, context: grpc.aio.ServicerContext) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, HydraCpError):
        status = rpc_status.to_status(status_of(error))
        await context.abort(status.code, status.details, status.trailing_metadata)
    logger.error("%s failed", method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: the scheduler's log says more")
    raise asyncio.CancelledError  # abort never returns; this is for the type checker


def _shortened(message: str) -> str:
    """A message may quote what was sent, whatever its length."""
    encoded = message.encode()
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return message
    return encoded[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "…"


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
