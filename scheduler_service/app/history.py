"""What the use cases ask of a plan history. The store implements it; without a store nothing is remembered."""

from __future__ import annotations

from typing import Protocol

from scheduler_service.app.records import EventRecord, IterationRecord, JobRecord, PlannedBatch, Stream


class History(Protocol):
    """Remembers what left memory. Saving returns at once and never fails; reading may find nothing.

    A history that is broken, full or behind says so in `state`; it stops neither planning nor reading.
    """

    @property
    def state(self) -> str:
        """'ok', or in words what is wrong."""
        ...

    def save_job(self, job: JobRecord) -> None:
        """Remember a registration; a later one of the same job replaces it."""
        ...

    def save_iteration(self, record: IterationRecord, planned: PlannedBatch | None = None) -> None:
        """Remember an iteration; later figures of the same one replace it, its plan is kept."""
        ...

    def save_event(self, event: EventRecord) -> None:
        """Remember an event."""
        ...

    async def jobs(self) -> list[JobRecord]:
        """Jobs that are remembered."""
        ...

    async def iterations(self, job: str, stream: Stream, limit: int, before: int | None) -> list[IterationRecord]:
        """The newest `limit` iterations with a number below `before`, newest first."""
        ...

    async def iteration(self, job: str, stream: Stream, number: int) -> IterationRecord | None:
        """One iteration in figures."""
        ...

    async def planned(self, job: str, stream: Stream, number: int) -> PlannedBatch | None:
        """Its plan and batch."""
        ...

    async def events(self, limit: int, before: int | None) -> list[EventRecord]:
        """The newest `limit` events with an id below `before`, newest first."""
        ...


class NoHistory:
    """Forgets everything."""

    state = "off"

    def save_job(self, job: JobRecord) -> None:
        """Forget it."""

    def save_iteration(self, record: IterationRecord, planned: PlannedBatch | None = None) -> None:
        """Forget it."""

    def save_event(self, event: EventRecord) -> None:
        """Forget it."""

    async def jobs(self) -> list[JobRecord]:
        """Nothing."""
        return []

    async def iterations(self, job: str, stream: Stream, limit: int, before: int | None) -> list[IterationRecord]:
        """Nothing."""
        return []

    async def iteration(self, job: str, stream: Stream, number: int) -> IterationRecord | None:
        """Nothing."""
        return None

    async def planned(self, job: str, stream: Stream, number: int) -> PlannedBatch | None:
        """Nothing."""
        return None

    async def events(self, limit: int, before: int | None) -> list[EventRecord]:
        """Nothing."""
        return []
