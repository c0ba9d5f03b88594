"""What ranks measured, sent in the background.

Guarantees: `Reporter.put` never blocks and never fails; what cannot be sent waits in a bounded queue whose
oldest entries are dropped and counted; closing waits a bounded time for the rest to leave.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from scheduler_service.domain import HydraCpError
from worker_agent.client.session import TRANSIENT, Session
from worker_agent.client.timing import Timing

_BATCH = 256
_PAUSE_S = 0.5
_CLOSING_PAUSE_S = 0.1


class Reporter:
    """Sends timings on a daemon thread of its own, in order, in batches."""

    def __init__(self, session: Session, limit: int) -> None:
        self._session = session
        self._queue: deque[Timing] = deque(maxlen=limit)
        self._wake = threading.Condition()
        self._close_at: float | None = None
        self._in_flight = 0
        self._abandoned = False
        self.sent = 0
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="hydracp-report", daemon=True)
        self._thread.start()

    def put(self, timing: Timing) -> None:
        """Queue `timing`; a full queue drops its oldest entry."""
        with self._wake:
            self.dropped += len(self._queue) == self._queue.maxlen
            self._queue.append(timing)
            self._wake.notify()

    def close(self, timeout_s: float) -> None:
        """Send what is queued, for at most `timeout_s`, and stop: what is then neither sent nor refused is dropped.

        Returns after at most `timeout_s` and two calls, the registration and the report that may be under way.
        """
        with self._wake:
            self._close_at = time.monotonic() + timeout_s
            self._wake.notify()
        self._thread.join(timeout_s + 2 * self._session.config.call_timeout_s)
        with self._wake:
            self._abandoned = True
            self.dropped += len(self._queue) + self._in_flight
            self._queue.clear()
            self._in_flight = 0

    def _run(self) -> None:
        while batch := self._take():
            while not self._send(batch):
                self._pause()

    def _take(self) -> list[Timing]:
        """The next batch; empty once everything is sent, or may no longer be."""
        with self._wake:
            while not self._queue and self._close_at is None:
                self._wake.wait()
            if self._overdue():
                return []
            batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            self._in_flight = len(batch)
            return batch

    def _send(self, batch: list[Timing]) -> bool:
        """Whether `batch` is done with: taken by the service, or refused for good."""
        session = self._session
        config = session.config
        try:
            session.call(
                lambda epoch: session.client.report_timings(config.job, epoch, batch, timeout_s=config.call_timeout_s)
            )
        except HydraCpError as error:
            if error.reason in TRANSIENT and not self._overdue():
                return False
            self._count(dropped=len(batch))
            return True
        self._count(sent=len(batch))
        return True

    def _count(self, sent: int = 0, dropped: int = 0) -> None:
        """Settle the batch in flight, once: what `close` gave up on has been counted there."""
        with self._wake:
            if not self._abandoned:
                self.sent += sent
                self.dropped += dropped
                self._in_flight = 0

    def _pause(self) -> None:
        time.sleep(_PAUSE_S if self._close_at is None else _CLOSING_PAUSE_S)

    def _overdue(self) -> bool:
        return self._close_at is not None and time.monotonic() > self._close_at
