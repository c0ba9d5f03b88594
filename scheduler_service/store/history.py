"""Plan history in SQLite: one thread writes, planning never waits for it, and it may break without harm.

Saving puts a row into a bounded queue and returns. A database that cannot be opened or written is tried again
until it can; meanwhile rows wait, and are dropped, and counted, when the queue is full. Reading from a broken
database finds nothing. `state` says how things are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    Connection,
    Engine,
    Executable,
    RowMapping,
    Select,
    Table,
    create_engine,
    delete,
    event,
    insert,
    make_url,
    select,
    update,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import ArgumentError, DatabaseError, DataError, IntegrityError, ProgrammingError, SQLAlchemyError

from scheduler_service.app import EventRecord, IterationRecord, JobRecord, PlannedBatch, Stream
from scheduler_service.domain import InvalidInputError, Reason
from scheduler_service.store import rows, tables

_QUEUE_ROWS = 512
_BATCH_ROWS = 64
_RETRY_S = 1.0
_BUSY_TIMEOUT_MS = 5000
_FLUSH_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)

Record = TypeVar("Record")


@dataclass(frozen=True)
class Retention:
    """How many rows of each kind are kept, the newest ones."""

    iterations: int = 10_000
    plans: int = 1_000
    events: int = 10_000


class SchemaVersionError(Exception):
    """The database was written by another version."""


class SqlHistory:
    """The history at `url`, sqlite:///FILE. `start` before the first use, `close` at the end.

    Raises `InvalidInputError` for a URL that is none, or of another kind of database; never for one that is there
    but does not work.
    """

    def __init__(self, url: str, retention: Retention | None = None) -> None:
        self._engine, self._file = _engine_of(url)
        self._retention = retention or Retention()
        self._queue: queue.Queue[Callable[[Connection], None] | None] = queue.Queue(_QUEUE_ROWS)
        self._writer = threading.Thread(target=self._write_until_closed, name="hydracp-store", daemon=True)
        self._closing = threading.Event()
        self._inode: int | None = None
        self._problem: str | None = None
        self._dropped = 0

    @property
    def state(self) -> str:
        """'ok', or in words what is wrong."""
        if self._problem is None:
            return "ok"
        lost = f"; {self._dropped:,} records dropped" if self._dropped else ""
        return f"broken: {self._problem}{lost}"

    def start(self) -> None:
        """Open the database, in the writer's thread: one that is slow or away holds up nothing."""
        self._writer.start()

    def close(self) -> None:
        """Write what waits, for at most a few seconds, and let go of the database. Blocks."""
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_FLUSH_TIMEOUT_S)
        self._writer.join(_FLUSH_TIMEOUT_S)
        self._engine.dispose()

    # Saving

    def save_job(self, job: JobRecord) -> None:
        """Remember a registration."""
        row = rows.job_row(job)
        self._enqueue(lambda connection: _upsert(connection, tables.jobs, row, ("job",)))

    def save_iteration(self, record: IterationRecord, planned: PlannedBatch | None = None) -> None:
        """Remember an iteration and, when it is given, its plan."""
        self._enqueue(lambda connection: _write_iteration(connection, record, planned))

    def save_event(self, event: EventRecord) -> None:
        """Remember an event."""
        row = rows.event_row(event)
        self._enqueue(lambda connection: connection.execute(insert(tables.events).prefix_with("OR IGNORE"), row))

    def _enqueue(self, write: Callable[[Connection], Any]) -> None:
        try:
            self._queue.put_nowait(write)
        except queue.Full:
            self._dropped += 1
            if self._problem is None:
                self._note(f"it does not keep up: {_QUEUE_ROWS} records wait")

    # Reading

    async def jobs(self) -> list[JobRecord]:
        """Jobs that are remembered."""
        return await self._read(select(tables.jobs), rows.job_record)

    async def iterations(self, job: str, stream: Stream, limit: int, before: int | None) -> list[IterationRecord]:
        """The newest `limit` iterations with a number below `before`, newest first."""
        table = tables.iterations
        query = select(table).where(table.c.job == job, table.c.stream == stream)
        if before is not None:
            query = query.where(table.c.iteration < before)
        return await self._read(query.order_by(table.c.iteration.desc()).limit(limit), rows.iteration_record)

    async def iteration(self, job: str, stream: Stream, number: int) -> IterationRecord | None:
        """One iteration in figures."""
        found = await self._read(_one(tables.iterations, job, stream, number), rows.iteration_record)
        return found[0] if found else None

    async def planned(self, job: str, stream: Stream, number: int) -> PlannedBatch | None:
        """Its plan and batch."""
        found = await self._read(_one(tables.plans, job, stream, number), rows.planned_batch)
        return found[0] if found else None

    async def events(self, limit: int, before: int | None) -> list[EventRecord]:
        """The newest `limit` events with an id below `before`, newest first."""
        query = select(tables.events)
        if before is not None:
            query = query.where(tables.events.c.id < before)
        return await self._read(query.order_by(tables.events.c.id.desc()).limit(limit), rows.event_record)

    async def _read(self, query: Select[Any], record: Callable[[RowMapping], Record]) -> list[Record]:
        return await asyncio.to_thread(self._read_now, query, record)

    def _read_now(self, query: Select[Any], record: Callable[[RowMapping], Record]) -> list[Record]:
        if self._inode is None:  # not opened yet, or lost: connecting would create an empty file
            return []
        try:
            with self._engine.connect() as connection:
                return [record(row) for row in connection.execute(query).mappings()]
        except SQLAlchemyError as error:
            logger.warning("the plan history cannot be read: %s", _words(error))
            return []

    # The writer's thread

    def _write_until_closed(self) -> None:
        waiting: list[Callable[[Connection], None]] = []
        last = False
        self._attempt([])
        while not last or waiting:
            if not waiting:
                waiting, last = self._take()
            if self._attempt(waiting):
                waiting = []
            elif self._closing.is_set():
                return
            else:
                self._closing.wait(_RETRY_S)

    def _take(self) -> tuple[list[Callable[[Connection], None]], bool]:
        """Rows that wait, at least one, and whether they are the last."""
        taken = []
        write = self._queue.get()
        while write is not None:
            taken.append(write)
            if len(taken) == _BATCH_ROWS:
                return taken, False
            try:
                write = self._queue.get_nowait()
            except queue.Empty:
                return taken, False
        return taken, True

    def _attempt(self, writes: list[Callable[[Connection], None]]) -> bool:
        """Write in one transaction; False to try the same again later."""
        try:
            self._open_if_needed()
            with self._engine.connect().execution_options(immediate=True) as connection, connection.begin():
                for write in writes:
                    write(connection)
                _trim(connection, self._retention)
        except (IntegrityError, DataError, ProgrammingError) as error:
            logger.exception("%d records do not fit the plan history and are dropped", len(writes))
            self._dropped += len(writes)
            self._note(_words(error))
            return True
        except (SQLAlchemyError, SchemaVersionError, OSError) as error:
            self._note(_words(error))
            self._inode = None
            return False
        if self._problem is not None:
            logger.info("the plan history works again; %d records were dropped", self._dropped)
        self._problem, self._dropped = None, 0
        return True

    def _open_if_needed(self) -> None:
        """Open the file, or the one that has taken its place: SQLite would go on writing to a deleted one."""
        if self._inode is not None and self._inode == _inode(self._file):
            return
        self._inode = None
        self._engine.dispose()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._engine.connect().execution_options(immediate=True) as connection, connection.begin():
            tables.metadata.create_all(connection)
            versions = connection.execute(select(tables.schema_version.c.version)).scalars().all()
            if not versions:
                connection.execute(insert(tables.schema_version), {"version": tables.SCHEMA_VERSION})
            elif versions != [tables.SCHEMA_VERSION]:
                raise SchemaVersionError(
                    f"{self._file} has schema {max(versions)}, this version of hydra-cp writes "
                    f"{tables.SCHEMA_VERSION}; give --store another file"
                )
        self._inode = _inode(self._file)

    def _note(self, problem: str) -> None:
        if problem != self._problem:
            logger.warning("the plan history is broken, planning goes on without it: %s", problem)
        self._problem = problem


def _engine_of(url: str) -> tuple[Engine, Path]:
    try:
        parsed = make_url(url)
    except ArgumentError:
        parsed = None
    if parsed is None or parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"store {url!r} is not usable; give sqlite:///FILE (with four slashes, an absolute path)",
        )
    engine = create_engine(parsed)
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    return engine, Path(parsed.database)


def _configure(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # `_begin` begins; the driver would begin late and deferred
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={_BUSY_TIMEOUT_MS}"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    # A writer that begins as a reader may fail to upgrade, whatever the busy timeout.
    immediate = connection.get_execution_options().get("immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _write_iteration(connection: Connection, record: IterationRecord, planned: PlannedBatch | None) -> None:
    table, key = tables.iterations, ("job", "stream", "iteration")
    row = rows.iteration_row(record)
    if planned is not None:
        _upsert(connection, tables.plans, rows.plan_row(record, planned), key)
    if record.digest is None and _update_measured(connection, row):
        return
    _upsert(connection, table, row, key)


def _update_measured(connection: Connection, row: rows.Row) -> bool:
    """Add what was measured to a row whose plan an earlier run of the service made; False if there is none."""
    table = tables.iterations
    statement = (
        update(table)
        .where(table.c.job == row["job"], table.c.stream == row["stream"], table.c.iteration == row["iteration"])
        .where(table.c.attempt == row["attempt"], table.c.digest.is_not(None))
        .values({name: row[name] for name in tables.MEASURED})
    )
    return connection.execute(statement).rowcount > 0


def _upsert(connection: Connection, table: Table, row: rows.Row, key: tuple[str, ...]) -> None:
    statement = sqlite.insert(table).values(row)
    changed = {name: statement.excluded[name] for name in row if name not in key}
    connection.execute(statement.on_conflict_do_update(index_elements=list(key), set_=changed))


def _trim(connection: Connection, retention: Retention) -> None:
    for table in (tables.iterations, tables.plans, tables.events):
        connection.execute(_delete_all_but(table, getattr(retention, table.name)))


def _delete_all_but(table: Table, keep: int) -> Executable:
    oldest_to_go = select(table.c.id).order_by(table.c.id.desc()).offset(keep).limit(1).scalar_subquery()
    return delete(table).where(table.c.id <= oldest_to_go)


def _one(table: Table, job: str, stream: Stream, number: int) -> Select[Any]:
    return select(table).where(table.c.job == job, table.c.stream == stream, table.c.iteration == number)


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except OSError:
        return None


def _words(error: Exception) -> str:
    """The first line of what the database said, without the statement."""
    cause = error.orig if isinstance(error, DatabaseError) and error.orig else error
    return (str(cause) or type(cause).__name__).splitlines()[0]
