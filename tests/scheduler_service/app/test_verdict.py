from __future__ import annotations

import re

import pytest

from scheduler_service.app import Failure, IterationRecord, IterationState, Stream
from scheduler_service.app.verdict import Condition, judge


def record(iteration, state=IterationState.EXECUTED, **more):  # type: ignore[no-untyped-def]
    values = {"measured_s": 2.0, "plan_wait_s": 0.0, "origin": "service", "digest": "d", **more}
    return IterationRecord("job", 0, Stream.TRAIN, iteration, state, "hydra", 0.0, **values)


@pytest.mark.parametrize(
    ("iterations", "condition", "words"),
    [
        ([], Condition.STARTING, "no lengths have come yet"),
        (
            [record(0, IterationState.COLLECTING, missing_shards=3, measured_s=None)],
            Condition.STARTING,
            "iteration 0 waits for 3 shards",
        ),
        ([record(2, IterationState.READY), record(1), record(0)], Condition.AHEAD, "iteration 2 is planned, 1 has run"),
        ([record(1, plan_wait_s=0.5), record(0)], Condition.BEHIND, "longest 0.500 s of 2.000 s in iteration 1"),
        ([record(1, plan_wait_s=0.001), record(0)], Condition.AHEAD, "no rank waited"),
        ([record(1, IterationState.READY), record(0, plan_wait_s=0.5)], Condition.STARTING, "0 has run, too few"),
        # A job's first plan has no earlier iteration to be made behind.
        ([record(1), record(0, plan_wait_s=0.5)], Condition.AHEAD, "no rank waited for any of the last 1"),
        (
            [record(1), record(0, origin="local", fallback_reason="service gone")],
            Condition.FALLING_BACK,
            "1 of the last 2 .* iteration 0: service gone",
        ),
        (
            [record(1, IterationState.FAILED, failure=Failure("SEQUENCE_TOO_LONG", "sequence 3 has …")), record(0)],
            Condition.FAILING,
            "iteration 1 has no plan: sequence 3",
        ),
    ],
)
def test_the_verdict_and_its_reason(iterations, condition, words):
    verdict = judge(100.0, 99.0, iterations)
    assert verdict.condition is condition
    assert re.search(words, verdict.reason), verdict.reason


def test_a_job_whose_agents_do_not_call_while_a_plan_waits_is_silent():
    verdict = judge(1000.0, 100.0, [record(3, IterationState.READY), record(2)])
    assert verdict.condition is Condition.SILENT
    assert "900 s, with iteration 3 ready" in verdict.reason


def test_a_job_that_has_run_all_it_submitted_is_idle_when_nobody_calls():
    verdict = judge(1000.0, 100.0, [record(3), record(2)])
    assert verdict.condition is Condition.IDLE
    assert "every iteration up to 3 has run" in verdict.reason
