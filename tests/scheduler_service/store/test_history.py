"""The plan history: what is kept, what is dropped, and what a broken database does (nothing)."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from scheduler_service.app import (
    EventRecord,
    Failure,
    IterationRecord,
    IterationState,
    JobConfig,
    JobRecord,
    PlannedBatch,
    Stream,
)
from scheduler_service.domain import Batch, CostModel, InvalidInputError, Pool
from scheduler_service.planning import plan_iteration
from scheduler_service.store import Retention, SqlHistory
from scheduler_service.store import history as module
from tests.support.rest import until

POOL = Pool(ranks=4, token_budget=4096, stages=2)


def record(iteration, **more):  # type: ignore[no-untyped-def]
    values = {"digest": "d", "state": IterationState.READY, **more}
    return IterationRecord("job", 0, Stream.TRAIN, iteration, policy="hydra", created_at=1.5, **values)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "new folder" / "history.db"


@pytest.fixture
def history(file) -> Iterator[SqlHistory]:
    made = SqlHistory(f"sqlite:///{file}", Retention(iterations=20, plans=3, events=10))
    made.start()
    yield made
    made.close()


async def eventually(read, expected):  # type: ignore[no-untyped-def]
    """What `read` gives once it is as expected: the writer has its own thread."""
    async with asyncio.timeout(30):
        while (found := await read()) != expected:
            await asyncio.sleep(0.02)
    return found


async def test_an_iteration_comes_back_as_it_was_saved(history):
    saved = record(
        3,
        failure=Failure("INFEASIBLE", "why", 7),
        degree_share={1: 0.25, 4: 0.75},
        degree_sequences={1: 9},
        baselines_s={"megatron": 1.5},
        lead_s=-0.25,
        target=1.5e13,
        loss=2.0,
        origin="local",
    )
    history.save_iteration(saved)
    await eventually(lambda: history.iteration("job", Stream.TRAIN, 3), saved)
    assert await history.iterations("job", Stream.TRAIN, 5, None) == [saved]
    assert await history.iteration("job", Stream.VALID, 3) is None


async def test_a_plan_comes_back_with_its_digest(history):
    batch = Batch([100, 3000, 50, 70, 2000])
    plan = plan_iteration(batch, POOL)
    history.save_iteration(record(0, digest=plan.digest), PlannedBatch(plan, batch, (3, 2)))

    async def digest() -> str | None:
        planned = await history.planned("job", Stream.TRAIN, 0)
        return planned and planned.plan.digest

    await eventually(digest, plan.digest)
    planned = await history.planned("job", Stream.TRAIN, 0)
    assert planned.batch == batch
    assert planned.shard_sizes == (3, 2)
    assert planned.plan.header == plan.header


async def test_jobs_and_events_come_back(history):
    pool = Pool(ranks=8, token_budget=64, ep=2, speeds={3: 0.5, 7: 0})
    config = JobConfig(pool, "hydra", CostModel(theta=1e-9), None, 4)
    job = JobRecord("job", 1, config, 1.0, 2.0, newest_planned=7, verdict="ahead")
    event = EventRecord(5, 1.5, "plan_ready", "iteration 0", "job", 0, Stream.TRAIN)
    history.save_job(replace(job, attempt=0))
    history.save_job(job)
    history.save_event(event)
    history.save_event(EventRecord(6, 1.6, "started", "no job"))
    await eventually(lambda: history.jobs(), [job])
    await eventually(lambda: history.events(1, 6), [event])


async def test_later_figures_replace_earlier_ones_and_pages_go_backwards(history):
    for iteration in range(5):
        history.save_iteration(record(iteration))
    done = record(4, state=IterationState.EXECUTED, measured_s=2.0)
    history.save_iteration(done)
    await eventually(lambda: history.iteration("job", Stream.TRAIN, 4), done)
    page = await history.iterations("job", Stream.TRAIN, 2, 4)
    assert [one.iteration for one in page] == [3, 2]


async def test_a_report_without_the_plan_adds_to_the_row_that_has_it(history):
    """The service restarted between planning and the report."""
    history.save_iteration(record(0, sequences=5))
    history.save_iteration(record(0, digest=None, state=IterationState.EXECUTED, measured_s=2.0, loss=1.0))
    merged = record(0, sequences=5, state=IterationState.EXECUTED, measured_s=2.0, loss=1.0)
    await eventually(lambda: history.iteration("job", Stream.TRAIN, 0), merged)


async def test_only_the_newest_rows_are_kept(history):
    batch = Batch([5, 6])
    planned = PlannedBatch(plan_iteration(batch, POOL), batch, (2,))
    for iteration in range(60):
        history.save_iteration(record(iteration), planned)
        history.save_event(EventRecord(iteration + 1, 0.0, "kind", "message"))
    await eventually(lambda: history.iteration("job", Stream.TRAIN, 59), record(59))
    await eventually(lambda: _numbers(history), list(range(59, 39, -1)))
    assert [event.id for event in await history.events(100, None)] == list(range(60, 50, -1))
    assert await history.planned("job", Stream.TRAIN, 57) is not None
    assert await history.planned("job", Stream.TRAIN, 56) is None


async def _numbers(history: SqlHistory) -> list[int]:
    return [one.iteration for one in await history.iterations("job", Stream.TRAIN, 100, None)]


async def test_closing_writes_what_waits_and_another_run_reads_it(file):
    first = SqlHistory(f"sqlite:///{file}")
    first.start()
    for iteration in range(200):
        first.save_iteration(record(iteration))
    first.close()
    second = SqlHistory(f"sqlite:///{file}")
    second.start()
    try:
        await eventually(lambda: second.iteration("job", Stream.TRAIN, 199), record(199))
    finally:
        second.close()


async def test_a_deleted_file_is_made_anew(history, file):
    history.save_iteration(record(0))
    await eventually(lambda: history.iteration("job", Stream.TRAIN, 0), record(0))
    for one in file.parent.iterdir():
        one.unlink()
    history.save_iteration(record(1))
    await eventually(lambda: _numbers(history), [1])
    assert history.state == "ok"


async def test_a_path_that_cannot_be_written_is_told_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    blocked = tmp_path / "folder"
    blocked.write_text("a file where a folder should be")
    history = SqlHistory(f"sqlite:///{blocked}/history.db")
    history.start()
    try:
        history.save_iteration(record(0))
        await asyncio.to_thread(until, lambda: history.state.startswith("broken: "))
        assert await history.iterations("job", Stream.TRAIN, 5, None) == []
        blocked.unlink()  # somebody repairs it
        await eventually(lambda: _numbers(history), [0])
        await asyncio.to_thread(until, lambda: history.state == "ok")
    finally:
        history.close()


async def test_a_file_that_is_no_database_is_left_alone(tmp_path):
    file = tmp_path / "letters.txt"
    file.write_text("dear reader, " * 1000)
    history = SqlHistory(f"sqlite:///{file}")
    history.start()
    try:
        await asyncio.to_thread(until, lambda: "not a database" in history.state)
        assert await history.jobs() == []
    finally:
        history.close()
    assert file.read_text().startswith("dear reader")


async def test_a_database_of_another_version_is_left_alone(tmp_path):
    file = tmp_path / "new.db"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE schema_version (version INTEGER PRIMARY KEY)")
        connection.execute("INSERT INTO schema_version VALUES (99)")
    history = SqlHistory(f"sqlite:///{file}")
    history.start()
    try:
        await asyncio.to_thread(until, lambda: "has schema 99" in history.state)
    finally:
        history.close()
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("schema_version",)]


async def test_a_locked_database_holds_up_nobody_and_a_full_queue_drops_and_counts(history, file, monkeypatch):
    history.save_iteration(record(0))
    await eventually(lambda: _numbers(history), [0])
    lock = sqlite3.connect(file, isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    began = threading.active_count()
    for iteration in range(1, 2 * module._QUEUE_ROWS):
        history.save_iteration(record(iteration))  # returns although nothing can be written
    assert threading.active_count() == began
    assert "dropped" in history.state
    lock.execute("ROLLBACK")
    lock.close()
    await asyncio.to_thread(until, lambda: history.state == "ok")


async def test_fifty_readers_and_writers_never_find_it_locked(history, caplog):
    def write(writer: int) -> None:
        for iteration in range(5):
            history.save_iteration(record(writer * 5 + iteration))
            time.sleep(0.001)

    async def read() -> None:
        for _ in range(5):
            await history.iterations("job", Stream.TRAIN, 20, None)

    writers = [asyncio.to_thread(write, writer) for writer in range(50)]
    await asyncio.gather(*writers, *(read() for _ in range(50)))
    await asyncio.to_thread(until, lambda: history._queue.empty())
    assert history.state == "ok"
    assert "locked" not in caplog.text


@pytest.mark.parametrize(
    "url", ["", "history.db", "sqlite://", "sqlite:///:memory:", "postgresql://host/db", "nonsense:///x"]
)
def test_other_urls_are_refused_with_an_example(url):
    with pytest.raises(InvalidInputError, match="sqlite:///FILE"):
        SqlHistory(url)
