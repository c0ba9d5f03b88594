"""Whether a job's planner is ahead of its training, decided from records alone, with the reason in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from scheduler_service.app.records import IterationRecord, IterationState

SILENT_AFTER_S = 120.0
"""Seconds without a call of any agent after which a job counts as silent."""

LOOK_BACK = 10
"""Executed iterations that are looked at."""

NOTICEABLE_SHARE = 0.01
"""Waiting for a plan counts when it takes more than this share of the iteration."""


class Condition(StrEnum):
    """How a job is doing."""

    STARTING = "starting"
    AHEAD = "ahead"
    BEHIND = "behind"
    FALLING_BACK = "falling back"
    FAILING = "failing"
    SILENT = "silent"
    IDLE = "idle"


@dataclass(frozen=True)
class Verdict:
    """A condition and its reason. Only a change of the condition is worth a line in the log."""

    condition: Condition
    reason: str


def judge(now: float, last_seen_at: float, iterations: Sequence[IterationRecord]) -> Verdict:
    """The verdict over a job's training iterations, newest first."""
    if now - last_seen_at > SILENT_AFTER_S:
        return _without_calls(now - last_seen_at, iterations)
    if iterations and iterations[0].state is IterationState.FAILED and iterations[0].failure:
        newest = iterations[0]
        return Verdict(
            Condition.FAILING, f"failing: iteration {newest.iteration} has no plan: {iterations[0].failure.message}"
        )
    executed = [one for one in iterations if one.state is IterationState.EXECUTED][:LOOK_BACK]
    if not executed:
        return Verdict(Condition.STARTING, _starting(iterations))
    fell_back = [one for one in executed if one.origin == "local"]
    if fell_back:
        latest = fell_back[0]
        return Verdict(
            Condition.FALLING_BACK,
            f"falling back: {len(fell_back)} of the last {len(executed)} iterations ran on plans that the ranks made "
            f"themselves, last iteration {latest.iteration}: {latest.fallback_reason}",
        )
    # A job's first iteration has no earlier one to be planned behind.
    judged = executed if len(executed) == LOOK_BACK else executed[:-1]
    waited = [one for one in judged if (one.plan_wait_s or 0) > NOTICEABLE_SHARE * (one.measured_s or 0)]
    if waited:
        worst = max(waited, key=lambda one: one.plan_wait_s or 0)
        return Verdict(
            Condition.BEHIND,
            f"behind: ranks waited for {len(waited)} of the last {len(judged)} plans, longest "
            f"{worst.plan_wait_s:.3f} s of {worst.measured_s:.3f} s in iteration {worst.iteration}; "
            "submit lengths earlier",
        )
    planned = max((one.iteration for one in iterations if one.digest), default=executed[0].iteration)
    progress = f"iteration {planned} is planned, {executed[0].iteration} has run"
    if not judged:
        return Verdict(Condition.STARTING, f"starting: {progress}, too few to judge by")
    return Verdict(Condition.AHEAD, f"ahead: {progress}, and no rank waited for any of the last {len(judged)} plans")


def _without_calls(seconds: float, iterations: Sequence[IterationRecord]) -> Verdict:
    """A job that has run all it asked for has ended or pauses; one that has not is in trouble."""
    pending = [one for one in iterations if one.state is not IterationState.EXECUTED]
    if iterations and not pending:
        return Verdict(
            Condition.IDLE,
            f"idle: every iteration up to {iterations[0].iteration} has run, "
            f"and no agent has called for {seconds:.0f} s",
        )
    waiting = f", with iteration {pending[-1].iteration} {pending[-1].state}" if pending else ""
    return Verdict(Condition.SILENT, f"silent: no agent has called for {seconds:.0f} s{waiting}")


def _starting(iterations: Sequence[IterationRecord]) -> str:
    if not iterations:
        return "starting: no lengths have come yet"
    oldest = iterations[-1]
    if oldest.state is IterationState.COLLECTING:
        return f"starting: iteration {oldest.iteration} waits for {oldest.missing_shards} shards"
    return f"starting: iteration {oldest.iteration} is {oldest.state}, none has run yet"
