"""One rank's planner: lengths go in early, plans come out in time, and all ranks run by the same one.

A daemon thread per rank of the job, in every pipeline stage, takes the submitted iterations in order. For each:
lengths to the service; meet the other ranks (from here on the service's time counts, so a slow loader is no reason to
fall back); fetch; agree. If any rank lacks the plan, or plans differ, all ranks gather the lengths and compute the same
local plan, and compare digests again. The agent's collectives run on a process group of its own, beside the
training's.

Guarantees: never a mix of plans, never a hang (`plan` returns or raises within `plan_timeout_s`), and no waiting in
the steady state, which `PlanStep.wait_s` shows. It does not survive the death of a rank: the others get an error.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, HydraCpError, InvalidInputError, PlanSlice, Reason
from scheduler_service.planning import warm_up
from worker_agent.client.agreement import (
    CONNECTION,
    Decision,
    Outcome,
    Peers,
    Status,
    Verdict,
    decide,
    outcomes,
    record,
)
from worker_agent.client.config import AgentConfig
from worker_agent.client.planner_client import ForkedProcessError, PlannerClient
from worker_agent.client.session import TRANSIENT, Session
from worker_agent.client.sources import PlanSource, ServiceSource, local_plan
from worker_agent.client.telemetry import Reporter
from worker_agent.client.timing import PlanOrigin, Timing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_SLOWEST_RETRY_S = 1.0


@dataclass(frozen=True)
class PlanStep:
    """The plan that this rank runs an iteration by."""

    iteration: int
    slice: PlanSlice
    origin: PlanOrigin
    reason: str
    """Why the plan is a local one, in words, the same on every rank; empty for the service's."""
    wait_s: float
    """How long `PlanAgent.plan` waited, in seconds."""


@dataclass(frozen=True)
class AgentStatistics:
    """What an agent did so far."""

    served: int = 0
    """Iterations planned by the service."""
    fallbacks: int = 0
    """Iterations planned by the ranks."""
    reports_sent: int = 0
    reports_dropped: int = 0
    """Timings that never reached the service."""


_Result = tuple[PlanSlice, PlanOrigin, str]


@dataclass(eq=False)
class _Task:
    """An iteration on its way from `submit` to `plan`."""

    iteration: int
    lengths: npt.NDArray[np.int64] = field(repr=False)
    result: Future[_Result] = field(default_factory=Future, repr=False)


@dataclass(frozen=True)
class _Answer:
    """What the source had for this rank: a plan, or why not, for the other ranks and in words for the log."""

    outcome: Outcome
    slice: PlanSlice | None = None
    detail: str = ""


class PlanAgent:
    """Submits this rank's lengths, and has the iteration's plan ready when the step wants it.

    `rank` is the pool rank. `process_group` is a gloo group of all ranks of the job that only the agent uses, None for
    one rank: of the pool, or with pipeline stages or tensor parallelism of every stage's pools; ranks that are the same
    pool rank submit the same lengths. All ranks submit the same iterations in the same order; iterations may start
    anywhere (a checkpoint) and may come again once their plan was taken. `source` is where plans are asked for, by
    default the service.
    """

    def __init__(
        self,
        config: AgentConfig,
        rank: int,
        process_group: ProcessGroup | None = None,
        *,
        source: PlanSource | None = None,
    ) -> None:
        self._config = config
        self._rank = rank
        if not 0 <= rank < config.pool.ranks:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT, f"agent: rank {rank} is none of a pool of {config.pool.ranks} ranks"
            )
        self._peers = Peers(process_group, config.pool, config.agreement_timeout_s)
        self._client = PlannerClient(config.target, max_message_bytes=config.max_message_bytes)
        session = Session(self._client, config)
        self._source = source or ServiceSource(session, rank)
        self._reporter = Reporter(session, config.report_queue)
        self._pid = os.getpid()
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._tasks: dict[int, _Task] = {}
        self._queue: deque[_Task] = deque()
        self._failure: HydraCpError | None = None
        self._disconnected = False
        self._served = self._fallbacks = 0
        self._last_why = ""
        self._doing = "waiting for lengths"
        self._known = ""
        self._thread = threading.Thread(target=self._run, name="hydracp-plan", daemon=True)
        self._thread.start()

    def submit(self, iteration: int, lengths: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Start planning `iteration` with the `lengths` (tokens) that this rank loaded; returns at once.

        The global order is (rank, local order). A rank beyond `loader_shards` submits none. Raises
        `InvalidInputError` for a length that no plan can have, and for an iteration that is still to be taken.
        """
        self._check_process()
        column = _lengths(lengths)
        if len(column) and self._rank >= self._config.shards:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT,
                f"rank {self._rank} submits {len(column)} lengths, but only ranks 0 … {self._config.shards - 1} load "
                f"data (loader_shards {self._config.shards})",
            )
        task = _Task(iteration, column)
        with self._wake:
            if iteration in self._tasks:
                raise InvalidInputError(
                    Reason.INVALID_ARGUMENT,
                    f"iteration {iteration} is submitted already; take its plan before it comes again",
                )
            self._tasks[iteration] = task
            if self._failure is not None:
                task.result.set_exception(self._failure)
            self._queue.append(task)
            self._wake.notify()

    def plan(self, iteration: int) -> PlanStep:
        """The plan of a submitted iteration, once; waits if it is not there yet.

        Raises the planning error where no plan can hold the batch (on every rank alike), `HydraCpError`
        (RANKS_DISAGREE) where a rank is gone, (DEADLINE_EXCEEDED) after `plan_timeout_s`.
        """
        self._check_process()
        with self._wake:
            task = self._tasks.get(iteration)
        if task is None:
            raise InvalidInputError(
                Reason.UNKNOWN_ITERATION,
                f"iteration {iteration} was not submitted: call submit(iteration, lengths) first",
            )
        asked = time.perf_counter()
        try:
            found, origin, reason = task.result.result(self._config.plan_timeout_s)
        except TimeoutError:
            situation = self._situation()
            log.error("no plan for iteration %d: %s", iteration, situation)
            raise HydraCpError(Reason.DEADLINE_EXCEEDED, f"no plan for iteration {iteration}: {situation}") from None
        with self._wake:
            self._tasks.pop(iteration, None)
        return PlanStep(iteration, found, origin, reason, time.perf_counter() - asked)

    def report(self, timing: Timing) -> None:
        """Send what was measured, in the background; never blocks."""
        self._check_process()
        self._reporter.put(timing)

    def statistics(self) -> AgentStatistics:
        """Counts so far."""
        return AgentStatistics(self._served, self._fallbacks, self._reporter.sent, self._reporter.dropped)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send the queued timings, for at most `timeout_s`, and stop; plans that are not taken are lost."""
        if os.getpid() != self._pid:
            return  # the parent's agent
        self._closing.set()
        self._reporter.close(timeout_s)
        self._client.close()  # wakes a parked fetch
        with self._wake:
            self._wake.notify_all()
        # Not for long: a thread that waits for other ranks, which may have closed already, is left to itself.
        self._thread.join(timeout=1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            # Now, while the job still builds its model: a fallback must not wait for a compiler.
            self._doing = "compiling the local planner"
            warm_up()
            while (task := self._next()) is not None:
                self._resolve(task)
            self._fail(_closed())
        except Exception as error:
            self._fail(error)

    def _next(self) -> _Task | None:
        with self._wake:
            while not self._queue and not self._closing.is_set():
                self._doing = "waiting for lengths"
                self._wake.wait()
            # It stays in the queue until it is resolved, so that a failure of the agent reaches it.
            return None if self._closing.is_set() else self._queue[0]

    def _resolve(self, task: _Task) -> None:
        """Bring one iteration to its result: a plan, or the planning error that every rank gets."""
        try:
            result = self._planned(task)
        except HydraCpError as error:
            if error.reason in _FATAL:
                raise
            self._finish(task)
            task.result.set_exception(error)
        else:
            self._finish(task)
            task.result.set_result(result)

    def _finish(self, task: _Task) -> None:
        with self._wake:
            self._queue.remove(task)

    def _planned(self, task: _Task) -> _Result:
        self._known = ""
        records = self._meet(task)
        answer = self._ask(task, records["status"])
        self._known = answer.outcome.digest
        decision = decide(outcomes(self._exchange(task, 1, answer.outcome)))
        self._disconnected = decision.disconnected
        self._log(task, decision, answer.detail)
        if decision.verdict is Verdict.USE and answer.slice is not None:
            self._served += 1
            return answer.slice, PlanOrigin.SERVICE, ""
        if decision.verdict is Verdict.STOP:
            raise HydraCpError(decision.stop_reason or Reason.INTERNAL, f"{decision.why}. {answer.detail}".strip())
        found = self._plan_locally(task, records)
        self._fallbacks += 1
        return found, PlanOrigin.LOCAL, decision.why

    def _meet(self, task: _Task) -> npt.NDArray[np.void]:
        """Hand in what is there, and wait for the other ranks' lengths: everyone's records."""
        self._doing = "submitting lengths"
        status = Status.PLANNED
        try:
            self._source.submit(task.iteration, task.lengths)
            self._submit_ahead(task)
        except Exception as error:  # whatever it is, the other ranks are waiting
            status = _status(error)
        return self._exchange(task, 0, Outcome(status), "the other ranks' lengths", sequences=len(task.lengths))

    def _submit_ahead(self, task: _Task) -> None:
        """Hand in the iterations that wait behind `task`, so that the service plans them meanwhile."""
        last = task.iteration + self._source.window()
        with self._wake:
            waiting = [other for other in self._queue if task.iteration < other.iteration <= last]
        for other in waiting:
            self._source.submit(other.iteration, other.lengths)

    def _ask(self, task: _Task, statuses: npt.NDArray[np.int32]) -> _Answer:
        """Fetch the plan; after an iteration without connection, only once every rank is connected again."""
        connected = [Status(int(status)) not in CONNECTION for status in statuses]
        if self._disconnected and not all(connected):
            own = self._peers.place
            return _Answer(Outcome(Status.SKIPPED if connected[own] else Status(int(statuses[own]))))
        self._doing = "fetching the plan"
        return self._fetch(task, time.monotonic() + self._config.fetch_timeout_s)

    def _fetch(self, task: _Task, deadline: float) -> _Answer:
        """Submit (again) and fetch until there is a plan, a final no, or `deadline`."""
        status, detail, pause = Status.UNPLANNED, "", _FIRST_RETRY_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._source.submit(task.iteration, task.lengths)
                answer = self._source.fetch(task.iteration, left)
                if answer.slice is not None:
                    self._check_slice(task, answer.slice)
                    return _Answer(Outcome(Status.PLANNED, answer.slice.digest), answer.slice)
                status, detail = Status.UNPLANNED, _unplanned(answer.missing_shards)
            except Exception as error:  # whatever it is, the other ranks are waiting
                if not _is_transient(error):
                    return _Answer(Outcome(_status(error)), detail=str(error))
                # The last try may be too short for any answer, which says nothing of the scheduler.
                if _status(error) is not Status.UNANSWERED or left >= self._config.call_timeout_s:
                    status, detail = _status(error), str(error)
            if self._closing.wait(min(pause, left)):
                raise _closed()
            pause = min(2 * pause, _SLOWEST_RETRY_S)
        return _Answer(Outcome(status), detail=detail)

    def _check_slice(self, task: _Task, found: PlanSlice) -> None:
        """That the plan is for this rank and for what it loaded: the data is cut by it."""
        if found.ranks.tolist() != [self._rank] or not np.array_equal(found.loaded_lengths, task.lengths):
            raise HydraCpError(
                Reason.INVALID_PLAN,
                f"plan {found.digest} of iteration {task.iteration} is for ranks {found.ranks.tolist()} and "
                f"{len(found.loaded)} other sequences than the {len(task.lengths)} that rank {self._rank} submitted",
            )

    def _plan_locally(self, task: _Task, records: npt.NDArray[np.void]) -> PlanSlice:
        """The same local plan on every rank, or an error on every rank."""
        self._doing = "gathering every rank's lengths for a local plan"
        shards = self._peers.gather_lengths(task.lengths, records)
        found, trouble, outcome = None, None, Outcome(Status.REFUSED)
        try:
            found = local_plan(self._config, shards[: self._config.shards], self._rank)
            self._check_slice(task, found)
            outcome = Outcome(Status.PLANNED, found.digest)
        except Exception as error:  # whatever it is, the others are waiting to hear of it
            trouble = error
        self._known = outcome.digest
        told = outcomes(self._exchange(task, 2, outcome, "the other ranks' local plans"))
        decision = decide(told)
        if found is not None and decision.verdict is Verdict.USE:
            return found
        if isinstance(trouble, HydraCpError) and all(other.status == Status.REFUSED for other in told):
            raise trouble
        raise HydraCpError(
            Reason.RANKS_DISAGREE,
            f"local plans of iteration {task.iteration} do not agree: {trouble or decision.why}; every rank needs the "
            "same version of hydra-cp, the same AgentConfig, and the same sequences as others of its pool rank",
        ) from trouble

    def _exchange(
        self, task: _Task, step: int, outcome: Outcome, what: str = "the other ranks' digests", *, sequences: int = 0
    ) -> npt.NDArray[np.void]:
        self._doing = f"waiting for {what}"
        return self._peers.gather_records(
            record(task.iteration, step, outcome.status, self._rank, sequences=sequences, digest=outcome.digest)
        )

    def _log(self, task: _Task, decision: Decision, detail: str) -> None:
        """Say what changed; every rank says its own trouble, the first also the common verdict."""
        why = "" if decision.verdict is Verdict.USE else decision.why
        if why == self._last_why:
            return
        self._last_why = why
        if not why:
            log.info("iteration %d: plans come from the scheduler at %s again", task.iteration, self._config.target)
        else:
            level = logging.WARNING if detail or self._peers.place == 0 else logging.INFO
            log.log(level, "iteration %d: all ranks %s: %s. %s", task.iteration, _DOES[decision.verdict], why, detail)

    def _fail(self, error: Exception) -> None:
        """End the agent: every plan that is waited for, and every later one, gets the error."""
        if isinstance(error, HydraCpError) and error.reason == Reason.UNREACHABLE:
            failure = error  # closed on purpose
        else:
            situation = self._situation()
            log.error("the plan agent ends: %s; %s", error, situation)
            reason = error.reason if isinstance(error, HydraCpError) else Reason.INTERNAL
            failure = HydraCpError(reason, f"{error}; {situation}")
            failure.__cause__ = error
        with self._wake:
            self._failure = failure
            left = [task for task in self._queue if not task.result.done()]
            self._queue.clear()
        for task in left:
            task.result.set_exception(failure)

    def _situation(self) -> str:
        """What this rank knows and waits for: what one wants to read of every rank after a hang."""
        with self._wake:
            queued = [task.iteration for task in self._queue]
        return (
            f"rank {self._peers.place} of the job, {self._rank} of a pool of {self._config.pool.ranks}, was "
            f"{self._doing}; own plan {self._known or 'none'}; "
            f"iterations not resolved {queued[:8]}; time-outs {self._config.timeout_chain()}"
        )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                Reason.FORKED_PROCESS,
                f"process {os.getpid()} uses the plan agent of process {self._pid}, from which it was forked: threads "
                "do not survive a fork, so call submit and plan in the process that made the agent",
            )


def _lengths(lengths: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    return Batch(lengths).lengths if len(lengths) else np.empty(0, np.int64)


def _closed() -> HydraCpError:
    return HydraCpError(Reason.UNREACHABLE, "the plan agent is closed")


_DOES = {Verdict.FALL_BACK: "plan locally", Verdict.STOP: "stop"}

_FATAL = frozenset({Reason.RANKS_DISAGREE, Reason.UNREACHABLE})
"""What ends the agent: its collectives are out of step, or it was closed."""

_STATUS_OF_REASON = {
    Reason.UNREACHABLE: Status.UNREACHABLE,
    Reason.SHUTTING_DOWN: Status.UNREACHABLE,
    Reason.DEADLINE_EXCEEDED: Status.UNANSWERED,
    Reason.STALE_EPOCH: Status.UNPLANNED,
    Reason.UNKNOWN_JOB: Status.UNPLANNED,
    Reason.UNKNOWN_ITERATION: Status.UNPLANNED,
    Reason.ATTEMPT_FENCED: Status.FENCED,
    Reason.JOB_CONFLICT: Status.MISCONFIGURED,
    Reason.UNKNOWN_POLICY: Status.MISCONFIGURED,
    Reason.INVALID_POOL: Status.MISCONFIGURED,
    Reason.INVALID_COST_MODEL: Status.MISCONFIGURED,
}


def _status(error: Exception) -> Status:
    """What a failed call means for the plan of this rank."""
    return _STATUS_OF_REASON.get(error.reason, Status.REFUSED) if isinstance(error, HydraCpError) else Status.REFUSED


def _is_transient(error: Exception) -> bool:
    return isinstance(error, HydraCpError) and error.reason in TRANSIENT


def _unplanned(missing_shards: int) -> str:
    return f"{missing_shards} shards are missing there" if missing_shards else "it was still planning"
