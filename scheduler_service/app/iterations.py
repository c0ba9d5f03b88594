"""The life of an iteration: shards come in, a plan is made, agents fetch and run it, the window moves on.

An iteration stands alone: which others exist, and in what order they come, changes nothing about it. So
iterations may be skipped, sent twice, sent late, or replayed after a checkpoint was restored:
* the same shard again: nothing happens, whatever the iteration's state;
* the same shard with other lengths: refused, while the iteration is in the window;
* a shard that never comes: the iteration stays COLLECTING, visible with what is missing, until it leaves the window;
* an iteration that has left the window: it is opened anew, and the same lengths give the same plan.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_service.app.planner import Planned
from scheduler_service.app.records import (
    Failure,
    IterationRecord,
    IterationState,
    JobConfig,
    PlannedBatch,
    Stream,
)
from scheduler_service.domain import Batch, HydraCpError, InvalidInputError, Reason
from scheduler_service.domain.batch import validated_lengths

Lengths = npt.NDArray[np.int64]

MAX_REASON_CHARACTERS = 1000
"""Longest reason of a fallback that is kept: it goes to every reader of events and of iterations."""


@dataclass(frozen=True)
class Timing:
    """What one rank measured in one iteration. `loss` is the iteration's; None where it has none."""

    stream: Stream
    iteration: int
    rank: int
    iteration_s: float
    plan_wait_s: float
    origin: str | None = None
    fallback_reason: str | None = None
    """Cut to `MAX_REASON_CHARACTERS`."""
    loss: float | None = None

    def __post_init__(self) -> None:
        if self.fallback_reason and len(self.fallback_reason) > MAX_REASON_CHARACTERS:
            object.__setattr__(self, "fallback_reason", f"{self.fallback_reason[:MAX_REASON_CHARACTERS]}…")


class Iteration:
    """One iteration of one stream. Owned by the loop; nothing here waits or does I/O."""

    def __init__(self, job: str, attempt: int, config: JobConfig, stream: Stream, number: int, created_at: float):
        self.job = job
        self.attempt = attempt
        self.config = config
        self.stream = stream
        self.number = number
        self.created_at = created_at
        self.phase = IterationState.COLLECTING
        self.batch: Batch | None = None
        self.planned: PlannedBatch | None = None
        self.error: HydraCpError | None = None
        self.baselines_s: dict[str, float] = {}
        self.parked = 0
        self.settled = asyncio.Event()
        """Set when there is nothing to wait for any more: a plan, a failure, or `refusal`."""
        self.refusal: HydraCpError | None = None
        self.announced = False
        """Whether its execution has been told to the world."""
        self._shards: dict[int, Lengths] = {}
        self._shard_digests: dict[int, bytes] = {}
        self._figures: Planned | None = None
        self._ready_at: float | None = None
        self._first_fetch_at: float | None = None
        self._reported: set[int] = set()
        self._slowest: Timing | None = None
        self._plan_wait_s = 0.0
        self._local: Timing | None = None
        self._loss: float | None = None

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"iteration {self.number}" if self.stream is Stream.TRAIN else f"{self.stream} iteration {self.number}"

    # Collecting

    @property
    def missing_shards(self) -> int:
        """Shards that have not come."""
        return self.config.loader_shards - len(self._shard_digests)

    def put(self, shard: int, lengths: Lengths) -> bool:
        """Take a shard; False if it was here already. Raises SHARD_CONFLICT for other lengths."""
        digest = hashlib.blake2b(lengths.tobytes(), digest_size=16).digest()
        known = self._shard_digests.get(shard)
        if known is None:
            self._shard_digests[shard] = digest
            self._shards[shard] = lengths
            return True
        if known != digest:
            raise HydraCpError(
                Reason.SHARD_CONFLICT,
                f"job {self.job!r}, {self.label}: shard {shard} was submitted before with other lengths; a loader that "
                f"starts over with other data registers with an attempt above {self.attempt}, or under another name",
            )
        return False

    def start_planning(self) -> Batch:
        """All shards in the order of their numbers, as one batch; `InvalidInputError` if all are empty."""
        self.phase = IterationState.PLANNING
        shards = [self._shards[shard] for shard in range(self.config.loader_shards)]
        self._shards.clear()
        self._shard_sizes = tuple(len(shard) for shard in shards)
        self.batch = Batch(np.concatenate(shards))
        return self.batch

    # Planned

    def complete(self, figures: Planned, now: float) -> None:
        """The plan is there."""
        assert self.batch is not None
        self.planned = PlannedBatch(figures.plan, self.batch, self._shard_sizes)
        self._figures = figures
        self._ready_at = now
        self.phase = IterationState.READY
        self.settled.set()

    def fail(self, error: HydraCpError) -> None:
        """There is no plan, and `error` says why."""
        self.error = error
        self.phase = IterationState.FAILED
        self.settled.set()

    def refuse(self, error: HydraCpError) -> None:
        """Send everyone who waits away."""
        self.refusal = error
        self.settled.set()

    def fetched(self, now: float) -> None:
        """Somebody asks for the plan, whether or not it is there."""
        if self._first_fetch_at is None:
            self._first_fetch_at = now

    # Executed

    def measure(self, timing: Timing) -> None:
        """Take what one rank measured; a rank's second report of the same iteration changes nothing."""
        if timing.rank in self._reported:
            return
        self._reported.add(timing.rank)
        if self._slowest is None or timing.iteration_s > self._slowest.iteration_s:
            self._slowest = timing
        self._plan_wait_s = max(self._plan_wait_s, timing.plan_wait_s)
        if timing.origin == "local" and self._local is None:
            self._local = timing
        if self._loss is None:
            self._loss = timing.loss

    @property
    def executed(self) -> bool:
        """Whether any rank has reported it done."""
        return self._slowest is not None

    @property
    def reports(self) -> int:
        """Ranks that have reported."""
        return len(self._reported)

    @property
    def fallback_reason(self) -> str | None:
        """Why the ranks planned for themselves; None if they did not."""
        return None if self._local is None else self._local.fallback_reason or "not said"

    @property
    def state(self) -> IterationState:
        """Where it is. An iteration that ran without our plan is EXECUTED too."""
        return IterationState.EXECUTED if self.executed else self.phase

    def record(self) -> IterationRecord:
        """It in figures."""
        figures, batch, slowest = self._figures, self.batch, self._slowest
        header = figures.plan.header if figures else None
        statistics = figures.statistics if figures else None
        lead = None
        if self._ready_at is not None and self._first_fetch_at is not None:
            lead = self._first_fetch_at - self._ready_at
        return IterationRecord(
            job=self.job,
            attempt=self.attempt,
            stream=self.stream,
            iteration=self.number,
            state=self.state,
            policy=self.config.policy,
            created_at=self.created_at,
            failure=Failure(self.error.reason, str(self.error), self.error.sequence) if self.error else None,
            digest=figures.plan.digest if figures else None,
            missing_shards=self.missing_shards,
            sequences=len(batch) if batch else sum(map(len, self._shards.values())),
            tokens=batch.tokens if batch else sum(int(shard.sum()) for shard in self._shards.values()),
            longest_tokens=batch.longest
            if batch
            else max((int(shard.max()) for shard in self._shards.values() if len(shard)), default=0),
            microbatches=header.microbatches if header else 0,
            target=header.target if header else 0.0,
            cap=header.cap if header else 0,
            predicted_s=header.predicted_s if header else 0.0,
            lower_bound_s=header.lower_bound_s if header else 0.0,
            baselines_s=dict(self.baselines_s),
            plan_s=header.plan_s if header else 0.0,
            lead_s=lead,
            pp_bubble=statistics.pp_bubble if statistics else 0.0,
            dp_bubble=statistics.dp_bubble if statistics else 0.0,
            load_max=statistics.load_max if statistics else 0.0,
            load_mean=statistics.load_mean if statistics else 0.0,
            padding=statistics.padding if statistics else 0.0,
            idle_share=statistics.idle_share if statistics else 0.0,
            degree_share=statistics.degree_share if statistics else {},
            degree_sequences=statistics.degree_sequences if statistics else {},
            measured_s=slowest.iteration_s if slowest else None,
            plan_wait_s=self._plan_wait_s if slowest else None,
            origin=("local" if self._local else slowest.origin) if slowest else None,
            fallback_reason=self.fallback_reason,
            loss=self._loss,
        )


class Window:
    """The iterations of a job that are in memory: per stream the `capacity` that were touched last.

    Touched, not numbered: a job that goes back to a checkpoint, or skips ahead, brings its own window along.
    An iteration that is being planned, or that somebody waits for, stays beyond the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._streams: dict[Stream, OrderedDict[int, Iteration]] = {stream: OrderedDict() for stream in Stream}

    def find(self, stream: Stream, number: int) -> Iteration | None:
        """The iteration, if it is here. Moves nothing."""
        return self._streams[stream].get(number)

    def newest(self, stream: Stream) -> int:
        """Highest number that is here; −1 if nothing is."""
        return max(self._streams[stream], default=-1)

    def touch(self, iteration: Iteration) -> list[Iteration]:
        """Put `iteration` at the near end, adding it if need be; return those that left for it."""
        kept = self._streams[iteration.stream]
        kept[iteration.number] = iteration
        kept.move_to_end(iteration.number)
        surplus = len(kept) - self._capacity
        if surplus <= 0:
            return []
        idle = [old for old in kept.values() if old is not iteration and _may_leave(old)][:surplus]
        for old in idle:
            del kept[old.number]
        return idle

    def all(self, stream: Stream | None = None) -> Iterator[Iteration]:
        """Every iteration of `stream`, or of all of them."""
        for name, kept in self._streams.items():
            if stream is None or name is stream:
                yield from kept.values()


def validated_shard(shard: int, lengths: npt.ArrayLike) -> Lengths:
    """A shard's lengths as a column. It may be empty; a wrong length is named by its place in the shard."""
    column = np.asarray(lengths, np.int64)
    if column.size == 0:
        return column.reshape(0)
    try:
        return validated_lengths(column)
    except InvalidInputError as error:
        raise InvalidInputError(error.reason, f"shard {shard}: {error}", sequence=error.sequence) from error


def _may_leave(iteration: Iteration) -> bool:
    return iteration.parked == 0 and iteration.phase is not IterationState.PLANNING
