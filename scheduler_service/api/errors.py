"""One envelope for every answer that is no success, whoever noticed: the routes, FastAPI or Starlette."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from scheduler_service.api.schemas import ErrorBody, ErrorEnvelope
from scheduler_service.domain import HydraCpError, InfeasibleError, Reason

_STATUS: dict[Reason, HTTPStatus] = {
    Reason.UNKNOWN_JOB: HTTPStatus.NOT_FOUND,
    Reason.UNKNOWN_ITERATION: HTTPStatus.NOT_FOUND,
    Reason.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Reason.JOB_CONFLICT: HTTPStatus.CONFLICT,
    Reason.SHARD_CONFLICT: HTTPStatus.CONFLICT,
    Reason.ATTEMPT_FENCED: HTTPStatus.CONFLICT,
    Reason.STALE_EPOCH: HTTPStatus.CONFLICT,
    Reason.SHUTTING_DOWN: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
}

DOCUMENTED: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorEnvelope, "description": "No such job, iteration or plan"},
    422: {"model": ErrorEnvelope, "description": "A parameter has no meaning"},
}
"""What the OpenAPI schema says of errors."""


def install(app: FastAPI) -> None:
    """Answer every failure of `app` with the envelope."""

    @app.exception_handler(HydraCpError)
    async def expected(_: Request, error: HydraCpError) -> JSONResponse:
        otherwise = HTTPStatus.UNPROCESSABLE_ENTITY if isinstance(error, InfeasibleError) else HTTPStatus.BAD_REQUEST
        return _answer(_STATUS.get(error.reason, otherwise), error.reason, str(error), error.sequence)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        complaints = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return _answer(HTTPStatus.UNPROCESSABLE_ENTITY, Reason.INVALID_ARGUMENT, "; ".join(complaints))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        reason = Reason.NOT_FOUND if error.status_code == HTTPStatus.NOT_FOUND else Reason.INVALID_ARGUMENT
        return _answer(error.status_code, reason, f"{request.method} {request.url.path}: {error.detail}")

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return _answer(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            Reason.INTERNAL,
            f"{request.method} {request.url.path} failed ({type(error).__name__}); the service's log says more",
        )


def _answer(status: int, reason: Reason, message: str, sequence: int | None = None) -> JSONResponse:
    envelope = ErrorEnvelope(error=ErrorBody(reason=reason, message=message, sequence=sequence))
    return JSONResponse(envelope.model_dump(), status_code=status)
