"""How a sub-command fails: one message on stderr, the error envelope on stdout under --json, and an exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import typer

from scheduler_service.domain import HydraCpError, InfeasibleError, InvalidInputError


class ExitCode(IntEnum):
    """What scripts may rely on."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    """Wrong options or invalid input."""
    UNREACHABLE = 3
    INFEASIBLE = 4
    """Well-formed, but no plan on this pool and budget can hold it."""


def exit_code(error: HydraCpError) -> ExitCode:
    """The exit code for an expected failure."""
    if isinstance(error, InfeasibleError):
        return ExitCode.INFEASIBLE
    return ExitCode.USAGE if isinstance(error, InvalidInputError) else ExitCode.FAILURE


@contextmanager
def plain_interruptions() -> Iterator[None]:
    """Raise Ctrl-C as such: where it comes in the middle of a compiled loop, it arrives as a `SystemError`."""
    try:
        yield
    except SystemError as error:
        cause: BaseException | None = error
        while isinstance(cause, SystemError):
            cause = cause.__cause__
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


@contextmanager
def reported(as_json: bool = False) -> Iterator[None]:
    """Turn an expected failure inside the block into a message and an exit code.

    With `as_json`, stdout also gets {"error": {"reason", "message", "sequence"}}, the envelope of the REST API.
    """
    try:
        with plain_interruptions():
            yield
    except HydraCpError as error:
        if as_json:
            body = {"reason": error.reason, "message": str(error), "sequence": error.sequence}
            typer.echo(json.dumps({"error": body}))
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(exit_code(error)) from None
