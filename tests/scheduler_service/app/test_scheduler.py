"""The life of iterations, in every order in which the world may send them."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from scheduler_service.app import IterationState, Stream
from scheduler_service.app.iterations import Timing
from scheduler_service.domain import HydraCpError, InfeasibleError, InvalidInputError, Reason

TRAIN = Stream.TRAIN
SHARDS = ([100, 3000, 50], [70, 2000])


def submit(scheduler, job, number, shards=SHARDS, order=None):  # type: ignore[no-untyped-def]
    for shard in order or range(len(shards)):
        answer = scheduler.submit(job.name, job.epoch, TRAIN, number, shard, shards[shard])
    return answer


async def fetched(scheduler, job, number, wait_s=20.0):  # type: ignore[no-untyped-def]
    return await scheduler.fetch(job.name, job.epoch, TRAIN, number, wait_s)


def timing(number, rank, **more):  # type: ignore[no-untyped-def]
    return Timing(TRAIN, number, rank, **{"iteration_s": 1.0, "plan_wait_s": 0.0, "origin": "service", **more})


def kinds(scheduler):  # type: ignore[no-untyped-def]
    return [event.kind for event in reversed(scheduler.events.recent(100))]


async def test_the_last_shard_starts_planning_and_the_plan_holds_all_sequences(scheduler, config):
    job = scheduler.register("a", 0, config)
    first = scheduler.submit("a", job.epoch, TRAIN, 0, 0, SHARDS[0])
    assert (first.state, first.missing_shards) == (IterationState.COLLECTING, 1)
    last = scheduler.submit("a", job.epoch, TRAIN, 0, 1, SHARDS[1])
    assert (last.state, last.missing_shards) == (IterationState.PLANNING, 0)
    iteration = await fetched(scheduler, job, 0)
    assert iteration.state is IterationState.READY
    assert iteration.planned.batch.lengths.tolist() == [*SHARDS[0], *SHARDS[1]]
    assert iteration.planned.shard_sizes == (3, 2)


async def test_the_order_in_which_shards_arrive_does_not_change_the_plan(scheduler, config):
    job = scheduler.register("a", 0, config)
    submit(scheduler, job, 0, order=(0, 1))
    submit(scheduler, job, 1, order=(1, 0))
    digests = {(await fetched(scheduler, job, number)).planned.plan.digest for number in (0, 1)}
    assert len(digests) == 1


async def test_a_shard_that_comes_twice_changes_nothing_in_any_state(scheduler, planner, config):
    job = scheduler.register("a", 0, config)
    planner.open.clear()
    assert scheduler.submit("a", job.epoch, TRAIN, 0, 0, SHARDS[0]).missing_shards == 1
    assert scheduler.submit("a", job.epoch, TRAIN, 0, 0, SHARDS[0]).missing_shards == 1
    submit(scheduler, job, 0)
    assert submit(scheduler, job, 0).state is IterationState.PLANNING
    planner.open.set()
    await fetched(scheduler, job, 0)
    assert submit(scheduler, job, 0).state is IterationState.READY
    assert len(planner.orders) == 1


@pytest.mark.parametrize("planned", [False, True])
async def test_a_shard_with_other_lengths_is_refused(scheduler, config, planned):
    job = scheduler.register("a", 0, config)
    scheduler.submit("a", job.epoch, TRAIN, 0, 0, SHARDS[0])
    if planned:
        submit(scheduler, job, 0)
        await fetched(scheduler, job, 0)
    with pytest.raises(HydraCpError, match="shard 0 was submitted before with other lengths") as caught:
        scheduler.submit("a", job.epoch, TRAIN, 0, 0, [1])
    assert caught.value.reason is Reason.SHARD_CONFLICT


async def test_a_shard_that_never_comes_leaves_the_iteration_collecting_and_visible(scheduler, config):
    job = scheduler.register("a", 0, config)
    scheduler.submit("a", job.epoch, TRAIN, 0, 1, SHARDS[1])
    iteration = await fetched(scheduler, job, 0, wait_s=0.01)
    assert iteration.planned is None
    record = await scheduler.iteration("a", TRAIN, 0)
    assert (record.state, record.missing_shards, record.sequences) == (IterationState.COLLECTING, 1, 2)


async def test_an_incomplete_iteration_that_leaves_the_window_is_told(scheduler, config, history):
    job = scheduler.register("a", 0, config)
    scheduler.submit("a", job.epoch, TRAIN, 0, 1, SHARDS[1])
    for number in range(1, 6):  # the window holds five
        submit(scheduler, job, number)
        await fetched(scheduler, job, number)
    assert "iteration_incomplete" in kinds(scheduler)
    assert [r.state for r, _ in history.iterations_saved if r.iteration == 0] == [IterationState.COLLECTING]


async def test_a_fetch_may_come_before_its_iteration_exists(scheduler, config):
    job = scheduler.register("a", 0, config)
    waiting = asyncio.create_task(fetched(scheduler, job, 7))
    await asyncio.sleep(0)
    assert scheduler.statistics().parked_fetches == 1
    submit(scheduler, job, 7)
    assert (await waiting).planned is not None
    assert scheduler.statistics().parked_fetches == 0


async def test_iterations_may_be_skipped(scheduler, config):
    job = scheduler.register("a", 0, config)
    submit(scheduler, job, 0)
    submit(scheduler, job, 1_000_000)
    assert (await fetched(scheduler, job, 1_000_000)).planned is not None
    assert [r.iteration for r in await scheduler.iterations("a", TRAIN, 10, None)] == [1_000_000, 0]


async def test_an_iteration_replayed_after_a_restore_gets_the_same_plan(scheduler, config):
    job = scheduler.register("a", 0, config)
    digests = []
    for number in range(8):
        submit(scheduler, job, number, ([100 + number, 3000], [2000]))
        digests.append((await fetched(scheduler, job, number)).planned.plan.digest)
    assert job.window.find(TRAIN, 1) is None, "it has left the window"
    for number in (1, 2, 7):  # 7 is still here
        submit(scheduler, job, number, ([100 + number, 3000], [2000]))
        assert (await fetched(scheduler, job, number)).planned.plan.digest == digests[number]


async def test_the_window_is_bounded_but_never_drops_what_is_waited_for(scheduler, planner, config):
    job = scheduler.register("a", 0, config)
    planner.open.clear()
    submit(scheduler, job, 0)
    waiting = asyncio.create_task(fetched(scheduler, job, 100))
    await asyncio.sleep(0)
    for number in range(1, 50):
        scheduler.submit("a", job.epoch, TRAIN, number, 0, SHARDS[0])
    kept = {iteration.number for iteration in job.window.all(TRAIN)}
    assert len(kept) <= 5
    assert {0, 100} <= kept
    waiting.cancel()
    planner.open.set()


async def test_streams_count_their_own_iterations(scheduler, config):
    job = scheduler.register("a", 0, config)
    submit(scheduler, job, 0)
    for shard in (0, 1):
        scheduler.submit("a", job.epoch, Stream.VALID, 0, shard, [5])
    train = await fetched(scheduler, job, 0)
    valid = await scheduler.fetch("a", job.epoch, Stream.VALID, 0, 20)
    assert (len(train.planned.batch), len(valid.planned.batch)) == (5, 2)
    assert job.newest_planned == 0


async def test_a_failed_plan_reaches_everyone_who_fetches_it(scheduler, config):
    job = scheduler.register("a", 0, config)
    waiting = asyncio.create_task(fetched(scheduler, job, 0))
    await asyncio.sleep(0)
    submit(scheduler, job, 0, ([100], [50, 99_999]))
    for attempt in (waiting, fetched(scheduler, job, 0)):
        with pytest.raises(InfeasibleError, match="sequence 2 has 99,999 tokens") as caught:
            await attempt
        assert caught.value.sequence == 2
    record = await scheduler.iteration("a", TRAIN, 0)
    assert record.state is IterationState.FAILED
    assert record.failure.reason == Reason.SEQUENCE_TOO_LONG
    assert job.verdict.reason.startswith("failing: iteration 0 has no plan: sequence 2")


async def test_an_iteration_of_empty_shards_fails_by_name(scheduler, config):
    job = scheduler.register("a", 0, config)
    submit(scheduler, job, 0, ([], []))
    with pytest.raises(InvalidInputError) as caught:
        await fetched(scheduler, job, 0)
    assert caught.value.reason is Reason.EMPTY_BATCH
    submit(scheduler, job, 1, ([], [5]))
    assert (await fetched(scheduler, job, 1)).planned.shard_sizes == (0, 1)


@pytest.mark.parametrize(
    ("shard", "number", "lengths", "message"),
    [
        (2, 0, [1], "shard 2 is none of its 2 loader shards"),
        (-1, 0, [1], "shard -1 is none"),
        (0, -1, [1], "iteration -1 is none"),
        (0, 0, [5, 0], "shard 0: sequence 1 has length 0"),
        (0, 0, [1 << 40], "shard 0: sequence 0 has length 1099511627776"),
    ],
)
async def test_wrong_submissions_name_what_is_wrong_and_leave_no_trace(
    scheduler, config, shard, number, lengths, message
):
    job = scheduler.register("a", 0, config)
    with pytest.raises(InvalidInputError, match=message):
        scheduler.submit("a", job.epoch, TRAIN, number, shard, lengths)
    assert list(job.window.all()) == []


async def test_registering_again_is_idempotent_and_another_configuration_is_refused(scheduler, config):
    job = scheduler.register("a", 0, config)
    assert scheduler.register("a", 0, config) is job
    other = type(config)(config.pool, "hydra", config.cost, 2, 2)
    with pytest.raises(HydraCpError, match=r"cap None → 2.*higher attempt") as caught:
        scheduler.register("a", 0, other)
    assert caught.value.reason is Reason.JOB_CONFLICT
    assert kinds(scheduler).count("job_registered") == 1


async def test_a_higher_attempt_supersedes_and_fences_the_lower_one(scheduler, config):
    old = scheduler.register("a", 0, config)
    waiting = asyncio.create_task(fetched(scheduler, old, 0))
    await asyncio.sleep(0)
    new = scheduler.register("a", 1, config)
    assert new.epoch != old.epoch
    for call in (waiting, fetched(scheduler, old, 0)):
        with pytest.raises(HydraCpError, match="attempt 0 was superseded by") as caught:
            await call
        assert caught.value.reason is Reason.ATTEMPT_FENCED
    with pytest.raises(HydraCpError) as caught:
        scheduler.register("a", 0, config)
    assert caught.value.reason is Reason.ATTEMPT_FENCED
    submit(scheduler, new, 0, ([7], [8]))  # other data under the new attempt: a fresh start
    assert (await fetched(scheduler, new, 0)).planned.batch.lengths.tolist() == [7, 8]


async def test_an_epoch_of_another_run_is_stale_and_an_unknown_job_is_unknown(scheduler, config):
    scheduler.register("a", 0, config)
    for name, epoch, reason in (("a", "0.run0", Reason.STALE_EPOCH), ("b", "0.run1", Reason.UNKNOWN_JOB)):
        with pytest.raises(HydraCpError) as caught:
            scheduler.submit(name, epoch, TRAIN, 0, 0, [1])
        assert caught.value.reason is reason


@pytest.mark.parametrize("name", ["", "a b", "ü", "a/b", "x" * 129])
async def test_job_names_are_checked(scheduler, config, name):
    with pytest.raises(InvalidInputError, match="is not usable"):
        scheduler.register(name, 0, config)


async def test_an_agent_that_reads_no_plan_format_of_ours_is_refused(scheduler, config):
    with pytest.raises(HydraCpError, match=r"reads plan formats \[99\]"):
        scheduler.register("a", 0, config, formats=[99])
    assert scheduler.register("a", 0, config, formats=[1, 99])


async def test_silent_jobs_expire_and_their_parked_agents_are_told_to_register_again(scheduler, config, clock):
    scheduler.limits = replace(scheduler.limits, job_expiry_s=0.04)
    loop = asyncio.create_task(scheduler.run())
    job = scheduler.register("a", 0, config)
    waiting = asyncio.create_task(fetched(scheduler, job, 0))
    await asyncio.sleep(0)
    clock.now += 1
    with pytest.raises(HydraCpError, match="expired") as caught:
        await asyncio.wait_for(waiting, 10)
    assert caught.value.reason is Reason.UNKNOWN_JOB
    assert scheduler.statistics().jobs == 0
    loop.cancel()


async def test_timings_are_aggregated_over_ranks_and_duplicates_do_not_count(scheduler, config):
    job = scheduler.register("a", 0, config)
    submit(scheduler, job, 0)
    await fetched(scheduler, job, 0)
    reports = [timing(0, rank, iteration_s=1.0 + rank, plan_wait_s=0.1 * rank, loss=2.5) for rank in range(3)]
    scheduler.report("a", job.epoch, reports)
    scheduler.report("a", job.epoch, [timing(0, 2, iteration_s=99.0)])
    assert "iteration_executed" not in kinds(scheduler), "rank 3 is missing"
    scheduler.report("a", job.epoch, [timing(0, 3, iteration_s=0.5)])
    record = await scheduler.iteration("a", TRAIN, 0)
    assert record.state is IterationState.EXECUTED
    assert (record.measured_s, record.plan_wait_s, record.loss, record.origin) == (3.0, 0.2, 2.5, "service")
    assert kinds(scheduler).count("iteration_executed") == 1
    assert job.newest_executed == 0


async def test_a_missing_report_does_not_hide_that_an_iteration_ran(scheduler, config):
    job = scheduler.register("a", 0, config)
    scheduler.report("a", job.epoch, [timing(0, 0)])
    scheduler.report("a", job.epoch, [timing(1, 0)])
    told = [event for event in scheduler.events.recent(100) if event.kind == "iteration_executed"]
    assert [event.iteration for event in told] == [0]
    assert "1 of 4 ranks" in told[0].message


async def test_a_fallback_is_counted_once_with_its_reason(scheduler, config):
    job = scheduler.register("a", 0, config)
    scheduler.report(
        "a", job.epoch, [timing(0, rank, origin="local", fallback_reason="no plan in 2 s") for rank in range(4)]
    )
    record = await scheduler.iteration("a", TRAIN, 0)
    assert (record.state, record.origin, record.fallback_reason) == (IterationState.EXECUTED, "local", "no plan in 2 s")
    assert (job.fallbacks, scheduler.statistics().fallbacks) == (1, 1)
    assert job.verdict.reason.startswith("falling back: 1 of the last 1")


async def test_a_reason_of_any_length_is_kept_short(scheduler, config):
    job = scheduler.register("a", 0, config)
    scheduler.report("a", job.epoch, [timing(0, 0, origin="local", fallback_reason="x" * 1_000_000)])
    assert len((await scheduler.iteration("a", TRAIN, 0)).fallback_reason) < 1100


async def test_an_iteration_that_ran_locally_can_still_be_planned(scheduler, config):
    """A replay after a restore may need it."""
    job = scheduler.register("a", 0, config)
    scheduler.report("a", job.epoch, [timing(0, 0, origin="local")])
    submit(scheduler, job, 0)
    assert (await fetched(scheduler, job, 0)).planned is not None


async def test_reports_of_fallbacks_count_also_when_later_iterations_were_submitted_first(scheduler, config):
    """After a restart of the service, agents submit what is ahead and tell of what is behind, in any order."""
    job = scheduler.register("a", 0, config)
    submit(scheduler, job, 5)
    await fetched(scheduler, job, 5)
    scheduler.report("a", job.epoch, [timing(4, rank, origin="local") for rank in range(4)])
    assert (await scheduler.iteration("a", TRAIN, 4)).origin == "local"
    assert job.fallbacks == 1


async def test_timings_of_iterations_that_left_the_window_are_dropped(scheduler, config):
    job = scheduler.register("a", 0, config)
    submit(scheduler, job, 50)
    await fetched(scheduler, job, 50)
    scheduler.report("a", job.epoch, [timing(3, 0)])
    assert [one.number for one in job.window.all()] == [50]


@pytest.mark.parametrize(
    "wrong",
    [timing(0, 4), timing(0, -1), timing(-1, 0), timing(0, 0, iteration_s=math.nan), timing(0, 0, plan_wait_s=-1)],
)
async def test_timings_that_make_no_sense_are_refused(scheduler, config, wrong):
    job = scheduler.register("a", 0, config)
    with pytest.raises(InvalidInputError, match="timing"):
        scheduler.report("a", job.epoch, [wrong])


async def test_stopping_wakes_parked_fetches_and_refuses_new_calls(scheduler, config):
    job = scheduler.register("a", 0, config)
    waiting = [asyncio.create_task(fetched(scheduler, job, number)) for number in range(20)]
    await asyncio.sleep(0)
    scheduler.stop()
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, HydraCpError)
        assert error.reason is Reason.SHUTTING_DOWN
    with pytest.raises(HydraCpError) as caught:
        scheduler.register("b", 0, config)
    assert caught.value.reason is Reason.SHUTTING_DOWN
    assert not scheduler.ready
    await scheduler.close()


async def test_cancelled_fetches_leave_nothing_behind(scheduler, config):
    job = scheduler.register("a", 0, config)
    before = len(asyncio.all_tasks())
    waiting = [asyncio.create_task(fetched(scheduler, job, 0)) for _ in range(200)]
    await asyncio.sleep(0)
    assert scheduler.statistics().parked_fetches == 200
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert scheduler.statistics().parked_fetches == 0
    assert len(asyncio.all_tasks()) == before
    assert job.window.find(TRAIN, 0).parked == 0


async def test_lead_says_how_long_a_plan_lay_ready(scheduler, config, clock):
    job = scheduler.register("a", 0, config)
    submit(scheduler, job, 0)
    while job.newest_planned is None:
        await asyncio.sleep(0)
    clock.now += 2.5
    await fetched(scheduler, job, 0)
    clock.now += 1
    await fetched(scheduler, job, 0)
    assert (await scheduler.iteration("a", TRAIN, 0)).lead_s == pytest.approx(2.5)


async def test_pages_of_iterations_and_unknown_names(scheduler, config):
    job = scheduler.register("a", 0, config)
    for number in range(5):
        submit(scheduler, job, number)
        await fetched(scheduler, job, number)
    assert [r.iteration for r in await scheduler.iterations("a", TRAIN, 2, 3)] == [2, 1]
    for call, reason in (
        (scheduler.iterations("nobody", TRAIN, 5, None), Reason.UNKNOWN_JOB),
        (scheduler.iteration("nobody", TRAIN, 0), Reason.UNKNOWN_JOB),
        (scheduler.iteration("a", TRAIN, 77), Reason.UNKNOWN_ITERATION),
        (scheduler.planned("a", TRAIN, 77), Reason.UNKNOWN_ITERATION),
        (scheduler.planned("a", Stream.VALID, 0), Reason.UNKNOWN_ITERATION),
    ):
        with pytest.raises(HydraCpError) as caught:
            await call
        assert caught.value.reason is reason
