"""Replays pipelines operation by operation: 1F1B and interleaved 1F1B, any mix of durations.

The replay is exact for its model: an operation starts when the one before it on its stage has ended and the
result that it needs has arrived. Sends cost latency but occupy no stage. What couples pipelines (EP barriers,
gradient exchange) is the caller's business: it goes into the durations and the start times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import InvalidInputError, Reason

Seconds = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Schedule:
    """The operations of one pipeline: columns (operations,), each operation after all that it waits for.

    The order depends on the three counts only, never on durations. An index equal to the number of operations
    stands for "nothing: the start of the pipeline".
    """

    stages: int
    microbatches: int
    chunks: int
    stage: Indices
    microbatch: Indices
    chunk: Indices
    backward: npt.NDArray[np.bool_]
    previous: Indices
    """The operation before it on the same stage."""
    source: Indices
    """The operation whose result it needs."""
    hop: npt.NDArray[np.bool_]
    """Whether that result comes from another stage."""
    last: Indices
    """The last operation of each stage, (stages,)."""

    def __len__(self) -> int:
        return len(self.stage)


@dataclass(frozen=True, eq=False)
class Operations:
    """What one replica did: columns (operations,) as in `Schedule`, with times in seconds."""

    stage: Indices
    microbatch: Indices
    chunk: Indices
    backward: npt.NDArray[np.bool_]
    start_s: Seconds
    end_s: Seconds


@dataclass(frozen=True, eq=False)
class PipelineReplay:
    """What a replay found. Times in seconds on the clock of `start`."""

    schedule: Schedule
    start: Seconds
    """When each replica may begin, (replicas,)."""
    busy: Seconds
    """Seconds that each stage computes, (replicas, stages)."""
    end: Seconds
    """When each operation ends, (operations, replicas), rows as in `schedule`."""
    p2p_latency: float

    @cached_property
    def stage_end(self) -> Seconds:
        """When each stage has finished its last operation, (replicas, stages)."""
        return self.end[self.schedule.last].T

    @cached_property
    def span(self) -> Seconds:
        """Seconds from a replica's start to the end of its last stage, (replicas,)."""
        return self.stage_end.max(axis=1) - self.start

    @cached_property
    def total_s(self) -> float:
        """Seconds from the earliest start to the latest end of all replicas, T."""
        return float(self.stage_end.max() - self.start.min())

    @cached_property
    def pp_bubble(self) -> Seconds:
        """1 − Σ_i busy_i/(p·span) of each replica, (replicas,); 0 where nothing takes time."""
        available = self.schedule.stages * self.span
        return np.divide(
            available - self.busy.sum(axis=1), available, out=np.zeros_like(available), where=available > 0
        )

    @cached_property
    def dp_bubble(self) -> Seconds:
        """(latest end − its own end)/T of each replica, (replicas,)."""
        ends = self.stage_end.max(axis=1)
        return (ends.max() - ends) / self.total_s if self.total_s > 0 else np.zeros_like(ends)

    def operations(self, replica: int) -> Operations:
        """The timeline of one replica."""
        schedule = self.schedule
        end = np.append(self.end[:, replica], self.start[replica])
        arrived = end[schedule.source] + self.p2p_latency * schedule.hop
        return Operations(
            stage=schedule.stage,
            microbatch=schedule.microbatch,
            chunk=schedule.chunk,
            backward=schedule.backward,
            start_s=np.maximum(end[schedule.previous], arrived),
            end_s=end[:-1],
        )


def replay_pipeline(
    forward: npt.ArrayLike,
    backward: npt.ArrayLike,
    start: npt.ArrayLike | None = None,
    p2p_latency: float = 0.0,
    chunks: int = 1,
) -> PipelineReplay:
    """Run the 1F1B schedule of every replica with the given durations.

    `forward`, `backward`: seconds, (replicas, stages, microbatches). `start`: seconds, (replicas,), when each
    replica may begin; 0 without. `p2p_latency`: seconds from the end of an operation until its result has reached
    the next stage.

    With `chunks` = v > 1 the schedule is interleaved: each stage holds v chunks of the model, chunk j of stage i
    being the (j·p + i)-th slice. The arrays still give the seconds of a *whole stage*, all its chunks together,
    and each chunk takes a v-th of them: the same arrays can be replayed with and without interleaving.

    Raises `InvalidInputError` for other shapes, for durations that are negative or not finite, and where
    interleaving is asked for and the microbatches are no multiple of the stages.

    Cost: 2·p·M·v vector operations over the replicas; memory (operations, replicas).
    """
    forward, backward = _durations("forward", forward), _durations("backward", backward)
    if forward.shape != backward.shape:
        raise _invalid(f"forward has shape {forward.shape} and backward {backward.shape}; give both the same")
    replicas, stages, microbatches = forward.shape
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise _invalid(f"chunks is {chunks!r}; give a whole number, 1 or more")
    if chunks > 1 and microbatches % stages:
        raise _invalid(
            f"{microbatches} microbatches are no multiple of {stages} stages; interleaving needs "
            f"{-(-microbatches // stages) * stages}"
        )
    if not np.isfinite(p2p_latency) or p2p_latency < 0:
        raise _invalid(f"p2p_latency is {p2p_latency!r}; give finite seconds, 0 or more")

    schedule = schedule_of(stages, microbatches, chunks)
    start = np.zeros(replicas) if start is None else _start_times(start, replicas)
    return PipelineReplay(
        schedule=schedule,
        start=start,
        busy=forward.sum(axis=2) + backward.sum(axis=2),
        end=_ends(schedule, forward, backward, start, p2p_latency),
        p2p_latency=p2p_latency,
    )


def _ends(schedule: Schedule, forward: Seconds, backward: Seconds, start: Seconds, latency: float) -> Seconds:
    """The ends of all operations, (operations, replicas); a last row holds `start` while they are computed."""
    duration = (_by_operation(forward, schedule.chunks), _by_operation(backward, schedule.chunks))
    end = np.empty((len(schedule) + 1, len(start)))
    end[-1] = start
    columns = (schedule.backward, schedule.stage, schedule.microbatch, schedule.previous, schedule.source, schedule.hop)
    for row, (is_backward, stage, microbatch, previous, source, hop) in zip(
        end, zip(*(column.tolist() for column in columns), strict=True), strict=False
    ):
        if hop and latency:
            np.add(end[source], latency, out=row)
            np.maximum(row, end[previous], out=row)
        else:
            np.maximum(end[source], end[previous], out=row)
        row += duration[is_backward][stage, microbatch]
    return end[:-1]


def _by_operation(seconds: Seconds, chunks: int) -> Seconds:
    """Durations of one chunk as (stages, microbatches, replicas), so that an operation's replicas lie side by side."""
    replicas, stages, microbatches = seconds.shape
    if seconds.strides[1] == 0:  # one set of times for all stages, broadcast: copy it once, not once per stage
        rows = np.ascontiguousarray(seconds[:, 0].T) / chunks
        return np.broadcast_to(rows, (stages, microbatches, replicas))
    return np.ascontiguousarray(np.moveaxis(seconds, 0, -1)) / chunks


@lru_cache(maxsize=64)
def schedule_of(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The 1F1B schedule, interleaved where `chunks` > 1 (then `microbatches` must be a multiple of `stages`).

    Stage i runs w forwards, then forward and backward in turns, then the last w backwards, with
    w = min(M, p−i−1), and w = min(M·v, 2(p−i−1) + (v−1)·p) when interleaved. Its k-th forward is of chunk
    (k mod p·v) // p and microbatch p·(k // (p·v)) + k mod p; its k-th backward is of chunk v−1−that.
    """
    names = np.arange(2 * stages * chunks * microbatches)
    name_of = names.reshape(stages, 2, chunks, microbatches)
    stage, backward, chunk, microbatch = np.unravel_index(names, name_of.shape)
    source = _sources(name_of).ravel()

    # Stages take turns to run as far as their inputs allow; the order in which that happens is the schedule.
    queues = [_stage_order(name_of[i], stages - i - 1, stages).tolist() for i in range(stages)]
    needs, done = source.tolist(), [False] * len(names) + [True]
    order: list[int] = []
    while len(order) < len(names):
        for queue in queues:
            while queue and done[needs[queue[-1]]]:
                done[queue[-1]] = True
                order.append(queue.pop())

    run = np.array(order)
    position = np.append(np.argsort(run), len(run))  # of a name in the order; the start keeps its own index
    previous = np.empty(len(run), np.int32)
    last = np.empty(stages, np.int32)
    for i in range(stages):
        mine = np.flatnonzero(stage[run] == i)
        previous[mine] = np.append(len(run), mine[:-1])
        last[i] = mine[-1]
    from_stage = np.append(stage, -1)[source]
    return Schedule(
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        stage=stage[run].astype(np.int32),
        microbatch=microbatch[run].astype(np.int32),
        chunk=chunk[run].astype(np.int32),
        backward=backward[run].astype(bool),
        previous=previous,
        source=position[source[run]].astype(np.int32),
        hop=((from_stage >= 0) & (from_stage != stage))[run],
        last=last,
    )


def _stage_order(name_of: npt.NDArray[np.int64], stages_behind: int, stages: int) -> npt.NDArray[np.int64]:
    """Names of one stage's operations, the first to run last, from its names (kind, chunk, microbatch)."""
    _, chunks, microbatches = name_of.shape
    k = np.arange(chunks * microbatches)
    chunk = k % (stages * chunks) // stages
    microbatch = k // (stages * chunks) * stages + k % stages
    forwards = name_of[0, chunk, microbatch]
    backwards = name_of[1, chunks - 1 - chunk, microbatch]
    warm_up = stages_behind if chunks == 1 else 2 * stages_behind + (chunks - 1) * stages
    warm_up = min(len(k), warm_up)
    turns = np.stack((forwards[warm_up:], backwards[: len(k) - warm_up]), axis=1).ravel()
    return np.concatenate((forwards[:warm_up], turns, backwards[len(k) - warm_up :]))[::-1]


def _sources(name_of: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The name of the operation that each one gets its input from; the number of names where it needs none."""
    source = np.full_like(name_of, name_of.size)
    forward, backward = name_of[:, 0], name_of[:, 1]  # (stages, chunks, microbatches)
    source[1:, 0] = forward[:-1]
    source[0, 0, 1:] = forward[-1, :-1]
    source[:-1, 1] = backward[1:]
    source[-1, 1, :-1] = backward[0, 1:]
    source[-1, 1, -1] = forward[-1, -1]
    return source


def _durations(name: str, given: npt.ArrayLike) -> Seconds:
    seconds = _floats(name, given)
    if seconds.ndim != 3 or 0 in seconds.shape:
        raise _invalid(f"{name} has shape {seconds.shape}; give (replicas, stages, microbatches), each 1 or more")
    wrong = ~((seconds >= 0) & np.isfinite(seconds))
    if wrong.any():
        where = tuple(int(axis) for axis in np.unravel_index(wrong.argmax(), wrong.shape))
        raise _invalid(f"{name}{list(where)} is {seconds[where]}; a duration is finite seconds, 0 or more")
    return seconds


def _start_times(given: npt.ArrayLike, replicas: int) -> Seconds:
    start = _floats("start", given)
    if start.shape != (replicas,):
        raise _invalid(f"start has shape {start.shape}; give one time for each of {replicas} replicas")
    if not np.isfinite(start).all() or (start < 0).any():
        raise _invalid("start holds a time that is negative or not finite; give seconds, 0 or more")
    return start


def _floats(name: str, given: npt.ArrayLike) -> Seconds:
    try:
        return np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise _invalid(f"{name} is no array of numbers: {error}") from error


def _invalid(message: str) -> InvalidInputError:
    return InvalidInputError(Reason.INVALID_ARGUMENT, f"pipeline replay: {message}")
