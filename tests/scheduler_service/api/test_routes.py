"""Every route of /api/v1 on a live scheduler with a job in the middle of its training."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_service.api import views
from scheduler_service.api.schemas import (
    ErrorEnvelope,
    EventPage,
    IterationPage,
    IterationSummary,
    Job,
    LoadMap,
    PlanPage,
    ServiceStatistics,
    Timeline,
)
from scheduler_service.app import JobConfig, JobRecord
from scheduler_service.domain import Batch, CostModel, Pool
from scheduler_service.planning import DEFAULT_POLICY, explain, plan_iteration
from scheduler_service.simulation import forecast, rank_loads
from tests.support.rest import get, request

LENGTHS = [100, 3000, 50, 900, 14, 70, 2000, 4100, 2500]  # of iteration 4, shard by shard


@pytest.fixture(scope="module")
def planned():
    batch = Batch(LENGTHS)
    return plan_iteration(batch, Pool(ranks=4, token_budget=4096, stages=2, ep=2), cost=CostModel()), batch


def test_jobs(live):
    jobs = [Job.model_validate(one) for one in get(live.service, "/api/v1/jobs")]
    job = Job.model_validate(get(live.service, live.path))
    assert job in jobs
    assert jobs == sorted(jobs, key=lambda one: -one.last_seen_at)
    assert job.job == live.name
    assert (job.pool.ranks, job.pool.token_budget, job.pool.ep, job.pool.heads) == (4, 4096, 2, None)
    assert (job.loader_shards, job.policy, job.attempt) == (2, DEFAULT_POLICY, 0)
    assert (job.newest_planned, job.newest_executed, job.fallbacks) == (4, 3, 1)
    assert job.verdict.startswith("falling back: 1 of the last 4")
    assert job.last_seen_at >= job.registered_at


def test_a_jobs_slow_ranks_are_shown_by_rank():
    config = JobConfig(Pool(8, 64, speeds={3: 0.5, 7: 0}), "hydra", CostModel(), None, 4)
    assert views.job(JobRecord("slow", 0, config, 1.0, 2.0)).pool.speeds == {3: 0.5, 7: 0.0}


def test_iterations_come_newest_first_in_pages(live):
    seen: list[IterationSummary] = []
    before = None
    while True:
        parameters = {"limit": 4} if before is None else {"limit": 4, "before": before}
        page = IterationPage.model_validate(get(live.service, f"{live.path}/iterations", params=parameters))
        seen += page.iterations
        before = page.next_before
        if before is None:
            break
    assert [one.iteration for one in seen] == [5, 4, 3, 2, 1, 0]
    assert [one.state for one in seen] == ["collecting", "ready", *4 * ["executed"]]
    assert get(live.service, f"{live.path}/iterations", params={"stream": "valid"})["iterations"] == []


def test_one_iteration_in_figures(live, planned):
    plan, _ = planned
    one = IterationSummary.model_validate(get(live.service, f"{live.path}/iterations/4"))
    assert (one.digest, one.microbatches) == (plan.digest, plan.header.microbatches)
    assert (one.target, one.cap, one.predicted_s) == (plan.header.target, plan.header.cap, plan.header.predicted_s)
    assert (one.sequences, one.tokens, one.longest_tokens) == (9, sum(LENGTHS), 4100)
    assert set(one.baselines_s) == {"static_cp", "megatron"}
    assert 0 < one.lower_bound_s <= one.predicted_s
    assert one.imbalance == pytest.approx(one.load_max / one.load_mean)
    assert sum(one.degree_sequences.values()) == 9
    assert sum(one.degree_share.values()) == pytest.approx(1)
    assert (one.measured_s, one.origin, one.loss) == (None, None, None)


def test_a_fallback_shows_what_the_ranks_reported(live):
    one = IterationSummary.model_validate(get(live.service, f"{live.path}/iterations/2"))
    assert (one.state, one.origin, one.fallback_reason) == ("executed", "local", "no plan within 2 s")
    assert (one.measured_s, one.plan_wait_s, one.loss) == (1.3, 0.25, 3.0)


def test_the_load_map_is_that_of_the_plan(live, planned):
    shown = LoadMap.model_validate(get(live.service, f"{live.path}/iterations/4/load"))
    loads = rank_loads(*planned)
    for name in ("load", "tokens", "degree", "start"):
        np.testing.assert_array_equal(getattr(shown, name), getattr(loads, name), err_msg=name)
    assert np.shape(shown.load) == (shown.ranks, shown.microbatches)


def test_the_timeline_is_that_of_the_slowest_pipeline_or_the_one_asked_for(live, planned):
    replay = forecast(*planned).replay
    slowest = Timeline.model_validate(get(live.service, f"{live.path}/iterations/4/timeline"))
    assert slowest.pipeline == replay.span.argmax()
    assert slowest.span_s == pytest.approx(replay.span.max())
    for pipeline in (0, 1):
        shown = Timeline.model_validate(
            get(live.service, f"{live.path}/iterations/4/timeline", params={"pipeline": pipeline})
        )
        assert (shown.pipeline, shown.pipelines, shown.stages) == (pipeline, 2, 2)
        assert len(shown.operations) == 2 * 2 * planned[0].header.microbatches
        assert max(op.end_s for op in shown.operations) == pytest.approx(shown.span_s)
        assert shown.pp_bubble == pytest.approx(replay.pp_bubble[pipeline])
    refused = request(live.service, f"{live.path}/iterations/4/timeline", params={"pipeline": 2})
    assert refused.status_code == 400
    assert "pipeline 2 is not one of the plan's 2" in refused.json()["error"]["message"]


def plan_page(live, **parameters):  # type: ignore[no-untyped-def]
    return PlanPage.model_validate(get(live.service, f"{live.path}/iterations/4/plan", params=parameters))


def test_pages_of_a_plan_are_sorted_and_say_why(live, planned):
    plan, batch = planned
    by_length = plan_page(live, limit=3)
    assert [one.length for one in by_length.sequences] == [4100, 3000, 2500]
    assert (by_length.total, by_length.digest) == (9, plan.digest)
    rest = plan_page(live, limit=50, offset=3)
    assert len(rest.sequences) == 6
    in_order = plan_page(live, sort="id").sequences
    assert [one.id for one in in_order] == list(range(9))
    assert [one.shard for one in in_order] == [0] * 5 + [1] * 4
    for one in in_order:
        assert (one.microbatch, one.start, one.degree) == (
            plan.microbatch[one.id], plan.start[one.id], plan.degree[one.id],
        )  # fmt: skip
        assert one.load == one.length**2 / one.degree
        assert one.memory_degree == (2 if one.length > 4096 else 1)
        assert one.why == explain(plan, batch, one.id) != ""
    placed = [(one.microbatch, one.start, one.id) for one in plan_page(live, sort="microbatch").sequences]
    assert placed == sorted(placed)


def test_pages_of_a_plan_can_be_narrowed_to_a_microbatch_and_a_rank(live, planned):
    plan, _ = planned
    for rank in range(4):
        for microbatch in range(plan.header.microbatches):
            shown = plan_page(live, rank=rank, microbatch=microbatch, sort="id")
            expected = [
                i
                for i in range(9)
                if plan.microbatch[i] == microbatch and plan.start[i] <= rank < plan.start[i] + plan.degree[i]
            ]
            assert [one.id for one in shown.sequences] == expected
            assert shown.total == len(expected)


def test_statistics(live):
    figures = ServiceStatistics.model_validate(get(live.service, "/api/v1/statistics"))
    assert (figures.plans, figures.plan_failures, figures.fallbacks) == (5, 0, 1)
    assert figures.jobs == len(get(live.service, "/api/v1/jobs"))
    assert figures.grpc_address == live.service.grpc
    assert (figures.warm, figures.store, figures.parked_fetches) == (True, "ok", 0)
    assert 0 < figures.plan_p50_s <= figures.plan_p99_s


def test_events_come_newest_first_in_pages(live):
    everything = EventPage.model_validate(get(live.service, "/api/v1/events", params={"limit": 500})).events
    ids = [event.id for event in everything]
    assert ids == sorted(ids, reverse=True)
    assert {"job_registered", "plan_ready", "iteration_executed", "fallback", "verdict"} <= {e.kind for e in everything}
    page = EventPage.model_validate(get(live.service, "/api/v1/events", params={"limit": 2, "before": ids[2]})).events
    assert [event.id for event in page] == ids[3:5]


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/api/v1/jobs/nobody", 404, "UNKNOWN_JOB"),
        ("/api/v1/jobs/nobody/iterations", 404, "UNKNOWN_JOB"),
        ("{job}/iterations/99", 404, "UNKNOWN_ITERATION"),
        ("{job}/iterations/99/load", 404, "UNKNOWN_ITERATION"),
        ("{job}/iterations/5/plan", 404, "UNKNOWN_ITERATION"),  # still collecting
        ("{job}/iterations/-1", 422, "INVALID_ARGUMENT"),
        ("{job}/iterations/one", 422, "INVALID_ARGUMENT"),
        ("{job}/iterations?limit=0", 422, "INVALID_ARGUMENT"),
        ("{job}/iterations?stream=test", 422, "INVALID_ARGUMENT"),
        ("{job}/iterations/4/plan?sort=size", 422, "INVALID_ARGUMENT"),
        ("/api/v1/nothing", 404, "NOT_FOUND"),
        ("/api/v1/jobs/" + "x" * 200, 422, "INVALID_ARGUMENT"),
    ],
)
def test_every_failure_has_the_same_envelope(live, path, status, reason):
    answer = request(live.service, path.format(job=live.path))
    assert answer.status_code == status
    assert ErrorEnvelope.model_validate(answer.json()).error.reason == reason
    assert answer.json()["error"]["message"]


def test_writing_is_refused_with_the_envelope_too(live):
    import httpx

    answer = httpx.post(f"http://{live.service.http}/api/v1/jobs", trust_env=False, timeout=60)
    assert answer.status_code == 405
    assert ErrorEnvelope.model_validate(answer.json()).error.message


def test_probes(live):
    assert get(live.service, "/healthz") == {"status": "ok"}
    assert get(live.service, "/readyz") == {"status": "ok"}
