"""Jobs by name: registration, attempts that fence each other, epochs, expiry."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from scheduler_service.app.iterations import Window
from scheduler_service.app.records import JobConfig, JobRecord
from scheduler_service.app.verdict import Verdict
from scheduler_service.domain import HydraCpError, InvalidInputError, Reason

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ATTEMPT = re.compile(r"[0-9]{1,10}")


class Job:
    """A registered job. Its epoch names one registration: this attempt, on this run of the service."""

    def __init__(self, name: str, attempt: int, config: JobConfig, epoch: str, now: float, window: int):
        self.name = name
        self.attempt = attempt
        self.config = config
        self.epoch = epoch
        self.registered_at = now
        self.last_seen_at = now
        self.window = Window(window)
        self.newest_planned: int | None = None
        self.newest_executed: int | None = None
        self.fallbacks = 0
        self.verdict: Verdict | None = None

    def record(self) -> JobRecord:
        """It as the world sees it."""
        return JobRecord(
            job=self.name,
            attempt=self.attempt,
            config=self.config,
            registered_at=self.registered_at,
            last_seen_at=self.last_seen_at,
            newest_planned=self.newest_planned,
            newest_executed=self.newest_executed,
            fallbacks=self.fallbacks,
            verdict=self.verdict.reason if self.verdict else "",
        )


class JobRegistry:
    """`run_id` tells this run of the service from all others: epochs of another run are stale."""

    def __init__(self, clock: Callable[[], float], run_id: str, window: int) -> None:
        self._clock = clock
        self._run_id = run_id
        self._window = window
        self._jobs: dict[str, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def find(self, name: str) -> Job | None:
        """The job, if it is registered."""
        return self._jobs.get(name)

    def register(self, name: str, attempt: int, config: JobConfig) -> tuple[Job, Job | None]:
        """The job, and the one that it supersedes: itself when it was registered before, None when it is new.

        Raises JOB_CONFLICT for another configuration under the same attempt, ATTEMPT_FENCED for an attempt below
        the current one.
        """
        _validate(name, attempt, config)
        now = self._clock()
        current = self._jobs.get(name)
        if current is not None and attempt < current.attempt:
            raise _fenced(current, attempt)
        if current is not None and attempt == current.attempt:
            if current.config != config:
                raise HydraCpError(Reason.JOB_CONFLICT, _difference(current, config))
            current.last_seen_at = now
            return current, current
        job = Job(name, attempt, config, f"{attempt}.{self._run_id}", now, self._window)
        self._jobs[name] = job
        return job, current

    def authorise(self, name: str, epoch: str) -> Job:
        """The job that an agent of `epoch` speaks for.

        Raises UNKNOWN_JOB, STALE_EPOCH (of another run of the service) or ATTEMPT_FENCED (of an older attempt).
        """
        job = self._jobs.get(name)
        if job is None:
            raise HydraCpError(Reason.UNKNOWN_JOB, f"job {name!r} is not registered here; call RegisterJob first")
        if epoch != job.epoch:
            attempt, _, run_id = epoch.partition(".")
            if run_id == self._run_id and _ATTEMPT.fullmatch(attempt) and int(attempt) < job.attempt:
                raise _fenced(job, int(attempt))
            raise HydraCpError(
                Reason.STALE_EPOCH,
                f"job {name!r}: epoch {epoch!r} is not of this run of the scheduler, which has restarted; "
                "register again and submit again what is still needed",
            )
        job.last_seen_at = self._clock()
        return job

    def expire(self, silent_s: float) -> list[Job]:
        """Forget, and return, the jobs whose agents have been silent for longer than `silent_s` seconds."""
        now = self._clock()
        gone = [job for job in self if now - job.last_seen_at > silent_s]
        for job in gone:
            del self._jobs[job.name]
        return gone


def _fenced(current: Job, attempt: int) -> HydraCpError:
    return HydraCpError(
        Reason.ATTEMPT_FENCED,
        f"job {current.name!r}: attempt {attempt} was superseded by attempt {current.attempt}; this agent must stop, "
        f"or register with an attempt above {current.attempt}",
    )


def _validate(name: str, attempt: int, config: JobConfig) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"job name {name[:140]!r} is not usable; give 1 to 128 letters, digits, dots, underscores or dashes",
        )
    if attempt < 0:
        raise InvalidInputError(Reason.INVALID_ARGUMENT, f"job {name!r}: attempt is {attempt}; give 0 or more")
    if not 1 <= config.loader_shards <= config.pool.ranks:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"job {name!r}: loader_shards is {config.loader_shards}; shard j is loaded by pool rank j, so give 1 to "
            f"{config.pool.ranks}",
        )
    if config.cap is not None and config.cap not in config.pool.degrees:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"job {name!r}: cap {config.cap} is no degree of its pool; choose one of "
            f"{', '.join(map(str, config.pool.degrees))}",
        )


def _difference(current: Job, config: JobConfig) -> str:
    names = ("pool", "policy", "cost", "cap", "loader_shards")
    changed = [
        f"{name} {getattr(current.config, name)!r} → {getattr(config, name)!r}"
        for name in names
        if getattr(current.config, name) != getattr(config, name)
    ]
    return (
        f"job {current.name!r}, attempt {current.attempt} is registered with another configuration "
        f"({'; '.join(changed)}); register with a higher attempt, or under another name"
    )
