"""The verifier: every rule that a plan must keep, checked from the columns alone.

It shares no code with the planners, and every plan passes it before it leaves `plan_iteration`. It judges validity,
not quality: attention load and the load target are no matter of validity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, HydraCpError, Plan, Reason

LongColumn = npt.NDArray[np.int64]


class InvalidPlanError(HydraCpError):
    """A plan breaks a rule: a fault of the planner, or of whoever changed the plan."""

    def __init__(self, rule: str, *, sequence: int | None = None) -> None:
        super().__init__(Reason.INVALID_PLAN, f"invalid plan: {rule}", sequence=sequence)


def verify_plan(plan: Plan, batch: Batch) -> None:
    """Check that `plan` places every sequence of `batch` once, in valid groups, within the token budget.

    Raises `InvalidPlanError` (reason INVALID_PLAN) with the first broken rule and where it is broken.
    """
    _check_batch(plan, batch)
    _check_microbatches(plan)
    _check_degrees(plan)
    _check_excluded(plan)
    groups = _groups(plan, batch)
    _check_disjoint(groups)
    _check_budget(plan, groups)
    if hashlib.blake2b(plan.canonical_bytes(), digest_size=16).hexdigest() != plan.digest:
        raise InvalidPlanError(f"digest {plan.digest} does not match its canonical bytes; the plan was changed")


class _Groups(NamedTuple):
    """Groups in the order of (microbatch, start), int64 columns."""

    microbatch: LongColumn
    start: LongColumn
    degree: LongColumn
    tokens: LongColumn
    """Padded tokens of the whole group, its tail included."""


def _groups(plan: Plan, batch: Batch) -> _Groups:
    """Sequences that agree in microbatch, start and degree, whether or not the groups are disjoint."""
    order = plan.group_order
    microbatch, start, degree = plan.microbatch[order], plan.start[order], plan.degree[order]
    begins = np.ones(len(plan), bool)
    begins[1:] = (np.diff(microbatch) != 0) | (np.diff(start) != 0) | (np.diff(degree) != 0)
    first = np.flatnonzero(begins)

    chunks = _per_degree(degree, plan.header.pool.chunks)
    padded = batch.lengths[order]
    padded += chunks - 1
    padded //= chunks
    padded *= chunks
    multiple = _per_degree(degree[first], plan.header.pool.stream_multiple)
    tokens = -(-np.add.reduceat(padded, first) // multiple) * multiple
    return _Groups(
        microbatch[first].astype(np.int64), start[first].astype(np.int64), degree[first].astype(np.int64), tokens
    )


def _per_degree(degree: npt.NDArray[np.int32], value: Callable[[int], int]) -> LongColumn:
    """`value(degree)` beside each degree, evaluated once per degree that occurs."""
    table = np.zeros(int(degree.max()) + 1, np.int64)
    occurring = np.flatnonzero(np.bincount(degree))
    table[occurring] = [value(int(d)) for d in occurring]
    return table[degree]


def _check_batch(plan: Plan, batch: Batch) -> None:
    if len(plan) != len(batch):
        raise InvalidPlanError(f"it places {len(plan)} sequences, the batch has {len(batch)}")
    if plan.header.batch_digest != batch.digest:
        raise InvalidPlanError(f"it is for batch {plan.header.batch_digest}, not for {batch.digest}")


def _check_microbatches(plan: Plan) -> None:
    count, multiple = plan.header.microbatches, plan.header.pool.microbatch_multiple
    outside = (plan.microbatch < 0) | (plan.microbatch >= count)
    _refuse_any(outside, plan.microbatch, f"a microbatch outside 0 … {count - 1}")
    if count % multiple:
        raise InvalidPlanError(f"{count} microbatches are no multiple of {multiple}")
    used = int(plan.microbatch.max()) + 1
    if count - used >= multiple:
        raise InvalidPlanError(
            f"microbatches {used} … {count - 1} are empty, more than the multiple {multiple} asks for"
        )
    empty = np.flatnonzero(np.bincount(plan.microbatch, minlength=used)[:used] == 0)
    if len(empty):
        raise InvalidPlanError(f"microbatch {empty[0]} of {used} is empty")


def _check_degrees(plan: Plan) -> None:
    pool = plan.header.pool
    allowed = np.zeros(pool.ranks + 1, bool)
    allowed[list(pool.degrees)] = True
    inside = (plan.degree >= 1) & (plan.degree <= pool.ranks)
    wrong = ~inside | ~allowed[np.where(inside, plan.degree, 0)]
    _refuse_any(wrong, plan.degree, f"a degree that is none of {', '.join(map(str, pool.degrees))}")
    _refuse_any((plan.start < 0) | (plan.start > pool.ranks - plan.degree), plan.start, "a start that leaves the pool")
    _refuse_any(plan.start % plan.degree != 0, plan.start, "a start that is no multiple of its degree")


def _check_excluded(plan: Plan) -> None:
    """Count the excluded ranks below each rank: a group holds one where the count rises inside it."""
    excluded = [rank for rank, speed in dict(plan.header.pool.speeds).items() if speed == 0]
    if not excluded:
        return
    below = np.cumsum(np.bincount(np.array(excluded) + 1, minlength=plan.header.pool.ranks + 1))
    held = below[plan.start + plan.degree] > below[plan.start]
    _refuse_any(held, plan.start, "an excluded rank in its group, which starts at")


def _check_disjoint(groups: _Groups) -> None:
    """In the order of (microbatch, start) a group overlaps another exactly if it overlaps the one before it."""
    same = groups.microbatch[1:] == groups.microbatch[:-1]
    overlap = same & (groups.start[1:] < groups.start[:-1] + groups.degree[:-1])
    if overlap.any():
        row = int(overlap.argmax())
        raise InvalidPlanError(
            f"in microbatch {groups.microbatch[row]}, the groups on ranks {_ranks(groups, row)} and "
            f"{_ranks(groups, row + 1)} overlap"
        )


def _check_budget(plan: Plan, groups: _Groups) -> None:
    budget = plan.header.pool.token_budget
    over = groups.tokens > groups.degree * budget
    if over.any():
        row = int(over.argmax())
        raise InvalidPlanError(
            f"in microbatch {groups.microbatch[row]}, ranks {_ranks(groups, row)} hold "
            f"{groups.tokens[row] // groups.degree[row]:,} padded tokens each, over the budget of {budget:,}"
        )


def _ranks(groups: _Groups, row: int) -> str:
    return f"{groups.start[row]} … {groups.start[row] + groups.degree[row] - 1}"


def _refuse_any(wrong: npt.NDArray[np.bool_], column: npt.NDArray[np.int32], fault: str) -> None:
    if wrong.any():
        sequence = int(wrong.argmax())
        raise InvalidPlanError(f"sequence {sequence} has {fault}: {column[sequence]}", sequence=sequence)
