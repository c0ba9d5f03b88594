"""The service's use cases in one place: what the gRPC and REST servers call.

One asyncio loop owns all state; methods that do not wait are plain functions. Planning happens in other
processes, remembering in the history's own thread; neither can hold up an answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler_service.app.events import EventLog
from scheduler_service.app.history import History
from scheduler_service.app.iterations import Iteration, Timing, validated_shard
from scheduler_service.app.jobs import Job, JobRegistry
from scheduler_service.app.planner import Planned, Planner, PlanOrder
from scheduler_service.app.records import (
    IterationRecord,
    IterationState,
    JobConfig,
    JobRecord,
    PlannedBatch,
    ServiceFigures,
    Stream,
)
from scheduler_service.app.verdict import judge
from scheduler_service.domain import PLAN_FORMAT, HydraCpError, InvalidInputError, Reason
from scheduler_service.planning import POLICIES, find_policy

MAX_ITERATION = 2**53 - 1
"""Highest number of an iteration: the largest that JSON's readers keep exactly."""

_PLAN_TIMES = 1000
"""Planning times that the percentiles look at."""

_EVENTS_KEPT = 1000

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What bounds the service. Times in seconds."""

    window: int = 8
    """Iterations before and after the newest one that stay in memory."""
    max_wait_s: float = 60.0
    """Longest time that a fetch may park."""
    job_expiry_s: float = 3600.0
    """A job whose agents are silent for longer is forgotten."""
    baseline_policies: tuple[str, ...] = ("static_cp", "megatron")
    """Policies whose predicted time is shown beside each plan."""
    baseline_max_sequences: int = 4096
    """Batches with more sequences get no baselines."""


@dataclass(frozen=True)
class Submission:
    """Where an iteration stands after a shard came."""

    state: IterationState
    missing_shards: int


@dataclass
class _Counts:
    plans: int = 0
    failures: int = 0
    fallbacks: int = 0
    parked: int = 0
    plan_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_PLAN_TIMES))

    def planned(self, seconds: float) -> None:
        self.plans += 1
        self.plan_times_s.append(seconds)


class Scheduler:
    """The use cases. `run` keeps it going; `stop` sends waiting agents away."""

    def __init__(
        self,
        *,
        planner: Planner,
        history: History,
        clock: Callable[[], float],
        run_id: str,
        version: str,
        limits: Limits | None = None,
    ) -> None:
        self.version = version
        self.limits = limits or Limits()
        self.grpc_address = ""
        self.stopping = False
        self._clock = clock
        self._started_at = clock()
        self._planner = planner
        self._history = history
        self._jobs = JobRegistry(clock, run_id, capacity_of(self.limits.window))
        self.events = EventLog(clock, _EVENTS_KEPT, history.save_event)
        self._counts = _Counts()
        self._tasks: set[asyncio.Task[None]] = set()

    # Life

    @property
    def ready(self) -> bool:
        """Whether agents should be sent here."""
        return self._planner.warm and not self.stopping

    async def run(self) -> None:
        """Forget silent jobs, for as long as the service lives."""
        while True:
            await asyncio.sleep(min(60.0, self.limits.job_expiry_s / 4))
            for job in self._jobs.expire(self.limits.job_expiry_s):
                gone = HydraCpError(Reason.UNKNOWN_JOB, f"job {job.name!r} has expired; register again")
                self._dismiss(job, gone)
                self.events.add("job_expired", f"no agent called for {self.limits.job_expiry_s:g} s", job=job.name)
            for job in self._jobs:
                self._judge(job)

    def stop(self) -> None:
        """Refuse every call from now on, and answer those that are parked: another scheduler will come."""
        self.stopping = True
        for job in self._jobs:
            self._dismiss(job, _shutting_down())
        self.events.close()

    async def close(self) -> None:
        """Drop what is still being planned."""
        for task in self._tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # Agents and tools

    async def plan_batch(self, order: PlanOrder) -> Planned:
        """Plan one batch, stateless."""
        self._refuse_if_stopping()
        began = self._clock()
        planned = await self._planner.plan(order)
        self._counts.planned(self._clock() - began)
        return planned

    def register(self, name: str, attempt: int, config: JobConfig, formats: Sequence[int] = ()) -> Job:
        """Make a job known; see `JobRegistry.register`.

        Raises for a policy that we do not have or that the pool is not for, and for plan formats that we do not have.
        """
        self._refuse_if_stopping()
        find_policy(config.policy, config.pool)
        if formats and PLAN_FORMAT not in formats:
            raise HydraCpError(
                Reason.INVALID_ARGUMENT,
                f"job {name!r}: the agent reads plan formats {list(formats)}, this scheduler writes {PLAN_FORMAT}; "
                "upgrade the older of the two",
            )
        job, before = self._jobs.register(name, attempt, config)
        if before is job:
            return job
        if before is not None:
            self._dismiss(
                before,
                HydraCpError(
                    Reason.ATTEMPT_FENCED, f"job {name!r}: attempt {before.attempt} was superseded by {attempt}"
                ),
            )
            self.events.add("job_superseded", f"attempt {before.attempt} was superseded by {attempt}", job=name)
        pool = config.pool
        self.events.add(
            "job_registered",
            f"attempt {attempt}: {pool.ranks} ranks × {pool.token_budget:,} tokens, {pool.stages} stages, "
            f"EP {pool.ep}, {config.loader_shards} loader shards, policy {config.policy}",
            job=name,
        )
        self._history.save_job(job.record())
        self._judge(job)
        return job

    def submit(
        self, name: str, epoch: str, stream: Stream, number: int, shard: int, lengths: npt.ArrayLike
    ) -> Submission:
        """Take one loader's lengths of one iteration; the last shard starts planning."""
        job = self._authorise(name, epoch)
        if not 0 <= shard < job.config.loader_shards:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT,
                f"job {name!r}: shard {shard} is none of its {job.config.loader_shards} loader shards; give 0 to "
                f"{job.config.loader_shards - 1}",
            )
        column = validated_shard(shard, lengths)
        iteration = self._open(job, stream, number)
        if iteration.put(shard, column) and iteration.missing_shards == 0:
            self._plan(job, iteration)
        return Submission(iteration.phase, iteration.missing_shards)

    async def fetch(self, name: str, epoch: str, stream: Stream, number: int, wait_s: float) -> Iteration:
        """The iteration once it has a plan, or as it is after `wait_s` seconds (capped by `max_wait_s`).

        Raises what planning raised if it failed, SHUTTING_DOWN, or ATTEMPT_FENCED if the job is superseded meanwhile.
        """
        job = self._authorise(name, epoch)
        iteration = self._open(job, stream, number)
        iteration.fetched(self._clock())
        if not iteration.settled.is_set() and wait_s > 0:
            await self._park(iteration, min(wait_s, self.limits.max_wait_s))
        for error in (iteration.refusal, iteration.error):
            if error is not None:
                raise _again(error)
        return iteration

    async def whole_plan(self, name: str, epoch: str, stream: Stream, number: int) -> PlannedBatch:
        """A plan that is ready or remembered. Readers that are no part of the job have no epoch."""
        self._refuse_if_stopping()
        if epoch:
            self._jobs.authorise(name, epoch)
        return await self.planned(name, stream, number)

    def report(self, name: str, epoch: str, timings: Sequence[Timing]) -> None:
        """Take what agents measured. Timings of iterations that have left the window are dropped."""
        job = self._authorise(name, epoch)
        for timing in timings:
            _validate(timing, job)
        for timing in timings:
            iteration = job.window.find(timing.stream, timing.iteration)
            if iteration is None:
                # The ranks ran it while we were away, and may have submitted later ones before they tell us of it;
                # or it is so old that nobody looks at it any more.
                if timing.iteration < job.window.newest(timing.stream) - self.limits.window:
                    continue
                iteration = self._open(job, timing.stream, timing.iteration)
            self._measure(job, iteration, timing)

    # People

    async def jobs(self) -> list[JobRecord]:
        """Registered jobs, then those that only the history knows; each the most recently active first."""
        for job in self._jobs:
            self._judge(job)
        live = {job.name: job.record() for job in self._jobs}
        remembered = [
            replace(record, verdict="not running: it is known from the history only")
            for record in await self._history.jobs()
            if record.job not in live
        ]
        return [
            *sorted(live.values(), key=lambda record: -record.last_seen_at),
            *sorted(remembered, key=lambda record: -record.last_seen_at),
        ]

    async def job(self, name: str) -> JobRecord:
        """One job. Raises UNKNOWN_JOB."""
        for record in await self.jobs():
            if record.job == name:
                return record
        raise HydraCpError(Reason.UNKNOWN_JOB, f"job {name!r} is not known here")

    async def iterations(self, name: str, stream: Stream, limit: int, before: int | None) -> list[IterationRecord]:
        """The newest `limit` iterations below `before`, newest first, from memory and history. Raises UNKNOWN_JOB."""
        remembered = await self._history.iterations(name, stream, limit, before)
        found = {record.iteration: record for record in remembered}
        job = self._jobs.find(name)
        if job is None and not found:
            await self.job(name)
        for iteration in job.window.all(stream) if job else ():
            if before is None or iteration.number < before:
                found[iteration.number] = iteration.record()
        return [found[number] for number in sorted(found, reverse=True)[:limit]]

    async def iteration(self, name: str, stream: Stream, number: int) -> IterationRecord:
        """One iteration in figures. Raises UNKNOWN_JOB, UNKNOWN_ITERATION."""
        job = self._jobs.find(name)
        here = job and job.window.find(stream, number)
        record = here.record() if here else await self._history.iteration(name, stream, number)
        if record is None:
            await self.job(name)
            raise HydraCpError(
                Reason.UNKNOWN_ITERATION,
                f"job {name!r} has no {stream} iteration {number} in memory or in its history "
                f"(store: {self._history.state})",
            )
        return record

    async def planned(self, name: str, stream: Stream, number: int) -> PlannedBatch:
        """The plan of an iteration and what it was made from. Raises UNKNOWN_JOB, UNKNOWN_ITERATION."""
        job = self._jobs.find(name)
        here = job and job.window.find(stream, number)
        planned = (here and here.planned) or await self._history.planned(name, stream, number)
        if planned is None:
            record = await self.iteration(name, stream, number)
            raise HydraCpError(
                Reason.UNKNOWN_ITERATION,
                f"job {name!r}, {stream} iteration {number} is {record.state} and has no plan"
                + (f": {record.failure.message}" if record.failure else " that is still kept"),
            )
        return planned

    async def recent_events(self, limit: int, before: int | None) -> list[Any]:
        """The newest `limit` events with an id below `before`, newest first, from memory and history."""
        recent = self.events.recent(limit, before)
        if len(recent) == limit:
            return recent
        oldest = recent[-1].id if recent else before
        return recent + await self._history.events(limit - len(recent), oldest)

    def statistics(self) -> ServiceFigures:
        """The service as a whole."""
        times = self._counts.plan_times_s
        p50, p99 = np.percentile(times, (50, 99)).tolist() if times else (None, None)
        return ServiceFigures(
            version=self.version,
            uptime_s=self._clock() - self._started_at,
            warm=self._planner.warm,
            grpc_address=self.grpc_address,
            jobs=len(self._jobs),
            plans=self._counts.plans,
            plan_failures=self._counts.failures,
            plan_p50_s=p50,
            plan_p99_s=p99,
            parked_fetches=self._counts.parked,
            fallbacks=self._counts.fallbacks,
            store=self._history.state,
        )

    # Inside

    def _refuse_if_stopping(self) -> None:
        if self.stopping:
            raise _shutting_down()

    def _authorise(self, name: str, epoch: str) -> Job:
        self._refuse_if_stopping()
        return self._jobs.authorise(name, epoch)

    def _open(self, job: Job, stream: Stream, number: int) -> Iteration:
        """The iteration, made if it is not there; others may leave the window for it."""
        if not 0 <= number <= MAX_ITERATION:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT, f"job {job.name!r}: iteration {number} is none; give 0 to {MAX_ITERATION}"
            )
        iteration = job.window.find(stream, number)
        if iteration is None:
            iteration = Iteration(job.name, job.attempt, job.config, stream, number, self._clock())
        for left in job.window.touch(iteration):
            self._evict(left)
        return iteration

    def _evict(self, iteration: Iteration) -> None:
        if iteration.phase is IterationState.COLLECTING and not iteration.executed:
            self.events.add(
                "iteration_incomplete",
                f"{iteration.label} left the window; {iteration.missing_shards} of {iteration.config.loader_shards} "
                "shards never came",
                job=iteration.job,
                stream=iteration.stream,
                iteration=iteration.number,
            )
        if iteration.executed:
            self._announce(iteration)
        self._history.save_iteration(iteration.record())

    def _dismiss(self, job: Job, error: HydraCpError) -> None:
        for iteration in job.window.all():
            iteration.refuse(error)

    async def _park(self, iteration: Iteration, wait_s: float) -> None:
        self._counts.parked += 1
        iteration.parked += 1
        try:
            async with asyncio.timeout(wait_s):
                await iteration.settled.wait()
        except TimeoutError:
            pass
        finally:
            self._counts.parked -= 1
            iteration.parked -= 1

    def _plan(self, job: Job, iteration: Iteration) -> None:
        try:
            batch = iteration.start_planning()
        except HydraCpError as error:
            self._failed(job, iteration, error)
            return
        config = job.config
        order = PlanOrder(batch, config.pool, config.policy, config.cost, config.cap)
        self._spawn(self._plan_in_background(job, iteration, order))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _plan_in_background(self, job: Job, iteration: Iteration, order: PlanOrder) -> None:
        began = self._clock()
        try:
            figures = await self._planner.plan(order)
        except HydraCpError as error:
            self._failed(job, iteration, error)
            return
        now = self._clock()
        iteration.complete(figures, now)
        self._counts.planned(now - began)
        if iteration.stream is Stream.TRAIN:
            job.newest_planned = max(job.newest_planned or 0, iteration.number)
        header = figures.plan.header
        self.events.add(
            "plan_ready",
            f"{iteration.label}: {header.sequences:,} sequences in {header.microbatches} microbatches, planned in "
            f"{1e3 * header.plan_s:.1f} ms, ready {1e3 * (now - began):.1f} ms after the last shard",
            job=job.name,
            stream=iteration.stream,
            iteration=iteration.number,
        )
        self._history.save_iteration(iteration.record(), iteration.planned)
        self._judge(job)
        await self._add_baselines(iteration, order)

    async def _add_baselines(self, iteration: Iteration, order: PlanOrder) -> None:
        """Predictions of other policies, after the plan has gone out."""
        policies = [name for name in self.limits.baseline_policies if name in POLICIES and name != order.policy]
        if not policies or len(order.batch) > self.limits.baseline_max_sequences:
            return
        try:
            iteration.baselines_s = await self._planner.predict(order, policies)
        except HydraCpError as error:
            logger.warning("no baselines for %s of job %r: %s", iteration.label, iteration.job, error)
            return
        self._history.save_iteration(iteration.record())

    def _failed(self, job: Job, iteration: Iteration, error: HydraCpError) -> None:
        iteration.fail(error)
        self._counts.failures += 1
        self.events.add(
            "plan_failed",
            f"{iteration.label}: {error}",
            job=job.name,
            stream=iteration.stream,
            iteration=iteration.number,
        )
        self._history.save_iteration(iteration.record())
        self._judge(job)

    def _measure(self, job: Job, iteration: Iteration, timing: Timing) -> None:
        fell_back = iteration.fallback_reason is not None
        iteration.measure(timing)
        if iteration.fallback_reason is not None and not fell_back:
            job.fallbacks += 1
            self._counts.fallbacks += 1
            self.events.add(
                "fallback",
                f"{iteration.label} ran on a plan that the ranks made themselves: {iteration.fallback_reason}",
                job=job.name,
                stream=iteration.stream,
                iteration=iteration.number,
            )
        if iteration.stream is Stream.TRAIN:
            job.newest_executed = max(job.newest_executed or 0, iteration.number)
        if iteration.reports == job.config.pool.ranks:
            self._announce(iteration)
        for earlier in job.window.all(iteration.stream):
            # Reports are best effort: one that is missing must not hide that the iteration has run.
            if earlier.executed and earlier.number < iteration.number:
                self._announce(earlier)

    def _announce(self, iteration: Iteration) -> None:
        if iteration.announced:
            return
        iteration.announced = True
        record = iteration.record()
        ranks = iteration.config.pool.ranks
        told = "" if iteration.reports == ranks else f" by the {iteration.reports} of {ranks} ranks that reported"
        self.events.add(
            "iteration_executed",
            f"{iteration.label}: {record.measured_s:.3f} s, {record.predicted_s:.3f} s predicted, "
            f"{record.plan_wait_s:.3f} s waited for the plan{told}",
            job=iteration.job,
            stream=iteration.stream,
            iteration=iteration.number,
        )
        self._history.save_iteration(record)
        job = self._jobs.find(iteration.job)
        if job is not None:
            self._judge(job)
            self._history.save_job(job.record())

    def _judge(self, job: Job) -> None:
        trained = sorted(job.window.all(Stream.TRAIN), key=lambda one: -one.number)
        verdict = judge(self._clock(), job.last_seen_at, [iteration.record() for iteration in trained])
        changed = job.verdict is None or job.verdict.condition is not verdict.condition
        job.verdict = verdict
        if changed:
            logger.info("job %r is %s", job.name, verdict.reason)
            self.events.add("verdict", verdict.reason, job=job.name)


def capacity_of(window: int) -> int:
    """Iterations in memory for `window` ones before and after the newest."""
    return 2 * window + 1


def _shutting_down() -> HydraCpError:
    return HydraCpError(Reason.SHUTTING_DOWN, "the scheduler is shutting down; try again in a moment")


def _again(error: HydraCpError) -> HydraCpError:
    """A copy to raise: an exception that several waiters raise would collect all their tracebacks."""
    return type(error)(error.reason, str(error), sequence=error.sequence)


def _validate(timing: Timing, job: Job) -> None:
    wrong = None
    if not 0 <= timing.rank < job.config.pool.ranks:
        wrong = f"rank {timing.rank} is outside its pool of {job.config.pool.ranks}"
    elif not 0 <= timing.iteration <= MAX_ITERATION:
        wrong = f"iteration {timing.iteration} is none"
    elif not all(math.isfinite(seconds) and seconds >= 0 for seconds in (timing.iteration_s, timing.plan_wait_s)):
        wrong = f"rank {timing.rank} reports {timing.iteration_s} s and {timing.plan_wait_s} s of waiting"
    if wrong:
        raise InvalidInputError(Reason.INVALID_ARGUMENT, f"job {job.name!r}, timing: {wrong}")
