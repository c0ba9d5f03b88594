"""Typed errors. Each names the thing, the limit and the fix, and carries a reason that a machine can read.

The same reasons travel over gRPC (google.rpc.ErrorInfo), REST (the error envelope) and the command line.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a request was refused."""

    EMPTY_BATCH = "EMPTY_BATCH"
    INVALID_LENGTH = "INVALID_LENGTH"
    INVALID_POOL = "INVALID_POOL"
    INVALID_COST_MODEL = "INVALID_COST_MODEL"
    INVALID_PLAN = "INVALID_PLAN"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNKNOWN_POLICY = "UNKNOWN_POLICY"
    SEQUENCE_TOO_LONG = "SEQUENCE_TOO_LONG"
    INFEASIBLE = "INFEASIBLE"
    UNKNOWN_JOB = "UNKNOWN_JOB"
    UNKNOWN_ITERATION = "UNKNOWN_ITERATION"
    JOB_CONFLICT = "JOB_CONFLICT"
    SHARD_CONFLICT = "SHARD_CONFLICT"
    ATTEMPT_FENCED = "ATTEMPT_FENCED"
    STALE_EPOCH = "STALE_EPOCH"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    UNREACHABLE = "UNREACHABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    RANKS_DISAGREE = "RANKS_DISAGREE"
    FORKED_PROCESS = "FORKED_PROCESS"
    NOT_FOUND = "NOT_FOUND"
    INTERNAL = "INTERNAL"


class HydraCpError(Exception):
    """An expected failure: `str(error)` is for people, `error.reason` for programs.

    `sequence` is the id of the sequence at fault, where there is one.
    """

    def __init__(self, reason: Reason, message: str, *, sequence: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.sequence = sequence

    def __reduce__(self) -> tuple[object, ...]:
        # The default forgets keyword arguments, and planning runs in other processes.
        return _restore, (type(self), self.reason, str(self), self.sequence)


def _restore(kind: type[HydraCpError], reason: Reason, message: str, sequence: int | None) -> HydraCpError:
    return kind(reason, message, sequence=sequence)


class InvalidInputError(HydraCpError, ValueError):
    """The input has no meaning, whatever the pool: a length of 0, an unknown policy."""


class InfeasibleError(HydraCpError, ValueError):
    """The input is well-formed, but no plan on this pool and budget can hold it."""
