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


@dataclass(frozen=True)
class Verdict:
    """A condition and its reason. Only a change of the condition is worth a line in the log."""

    condition: Condition
    reason: str


def judge(now: float, last_seen_at: float, iterations: Sequence[IterationRecord]) -> Verdict:
    """The verdict over a job's training iterations, newest first."""
    if now - last_seen_at > SILENT_AFTER_S:
        return Verdict(Condition.SILENT, f"silent: no agent has called for {now - last_seen_at:.0f} s")
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
    if 1 < len(executed) < LOOK_BACK:
        executed = executed[:-1]  # the first one has no earlier iteration to be planned behind
    waited = [one for one in executed if (one.plan_wait_s or 0) > NOTICEABLE_SHARE * (one.measured_s or 0)]
    if waited:
        worst = max(waited, key=lambda one: one.plan_wait_s or 0)
        return Verdict(
            Condition.BEHIND,
            f"behind: ranks waited for {len(waited)} of the last {len(executed)} plans, longest "
            f"{worst.plan_wait_s:.3f} s of {worst.measured_s:.3f} s in iteration {worst.iteration}; "
            "submit lengths earlier",
        )
    planned = max((one.iteration for one in iterations if one.digest), default=executed[0].iteration)
    return Verdict(
        Condition.AHEAD,
        f"ahead: iteration {planned} is planned, {executed[0].iteration} has run, and no rank waited for any of the "
        f"last {len(executed)} plans",
    )


def _starting(iterations: Sequence[IterationRecord]) -> str:
    if not iterations:
        return "starting: no lengths have come yet"
    oldest = iterations[-1]
    if oldest.state is IterationState.COLLECTING:
        return f"starting: iteration {oldest.iteration} waits for {oldest.missing_shards} shards"
    return f"starting: iteration {oldest.iteration} is {oldest.state}, none has run yet"
