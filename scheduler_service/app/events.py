"""A bounded ring of events, and those who listen to it.

Ids rise within a run and across restarts: they are milliseconds of the clock, moved up where two events share
one. A listener that does not keep up loses the oldest events it has not taken; it never holds up the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from scheduler_service.app.records import EventRecord, Stream

LISTENER_BACKLOG = 256
"""Events that wait for one listener before the oldest is dropped."""


class EventLog:
    """The newest `keep` events."""

    def __init__(self, clock: Callable[[], float], keep: int, save: Callable[[EventRecord], None]) -> None:
        self._clock = clock
        self._ring: deque[EventRecord] = deque(maxlen=keep)
        self._save = save
        self._listeners: set[_Listener] = set()
        self._last_id = 0
        self._closed = False

    def add(
        self,
        kind: str,
        message: str,
        *,
        job: str | None = None,
        stream: Stream | None = None,
        iteration: int | None = None,
    ) -> EventRecord:
        """Record an event, hand it to the history and to everyone who listens."""
        now = self._clock()
        self._last_id = max(self._last_id + 1, int(now * 1000))
        event = EventRecord(self._last_id, now, kind, message, job, iteration, stream)
        self._ring.append(event)
        self._save(event)
        for listener in self._listeners:
            listener.put(event)
        return event

    def recent(self, limit: int, before: int | None = None) -> list[EventRecord]:
        """The newest `limit` events with an id below `before`, newest first."""
        found = (event for event in reversed(self._ring) if before is None or event.id < before)
        return [event for event, _ in zip(found, range(limit), strict=False)]

    async def listen(self, after: int | None = None) -> AsyncIterator[EventRecord]:
        """Events as they come, first those of the ring with an id above `after`; ends when the log closes."""
        listener = _Listener()
        if after is not None:
            for event in self._ring:
                if event.id > after:
                    listener.put(event)
        self._listeners.add(listener)
        try:
            while not self._closed:
                for event in listener.take():
                    yield event
                await listener.wait()
        finally:
            self._listeners.discard(listener)

    def close(self) -> None:
        """Let every listener end."""
        self._closed = True
        for listener in self._listeners:
            listener.wake()


class _Listener:
    def __init__(self) -> None:
        self._waiting: deque[EventRecord] = deque(maxlen=LISTENER_BACKLOG)
        self._changed = asyncio.Event()

    def put(self, event: EventRecord) -> None:
        self._waiting.append(event)
        self._changed.set()

    def take(self) -> list[EventRecord]:
        self._changed.clear()
        events = list(self._waiting)
        self._waiting.clear()
        return events

    def wake(self) -> None:
        self._changed.set()

    async def wait(self) -> None:
        await self._changed.wait()
