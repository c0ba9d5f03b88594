"""The planner's processes: they die, are replaced, and never outlive us."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from scheduler_service.app.workers import WorkerDiedError, WorkerPool
from scheduler_service.domain import HydraCpError, Reason


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ZeroDivisionError("by accident")


async def test_a_process_that_dies_is_replaced_and_the_others_go_on():
    pool = WorkerPool(2)
    try:
        calls = [pool.run(die), pool.run(os.getpid), pool.run(os.getpid), pool.run(os.getpid)]
        died, *pids = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        assert isinstance(died, WorkerDiedError)
        assert "-9" in str(died)
        assert all(isinstance(pid, int) for pid in pids)
        assert pool.replaced == 1
    finally:
        pool.close()


async def test_a_caller_that_goes_away_does_not_free_a_process_that_still_works():
    pool = WorkerPool(1)
    try:
        first = await pool.run(os.getpid)
        abandoned = asyncio.create_task(pool.run(time.sleep, 0.3))
        await asyncio.sleep(0.05)
        abandoned.cancel()
        assert await asyncio.wait_for(pool.run(os.getpid), 60) == first
        assert pool.replaced == 0
    finally:
        pool.close()


async def test_unexpected_failures_are_internal_and_show_where():
    pool = WorkerPool(1)
    try:
        with pytest.raises(HydraCpError, match="ZeroDivisionError: by accident") as caught:
            await pool.run(fail)
        assert caught.value.reason is Reason.INTERNAL
    finally:
        pool.close()


async def test_closing_ends_processes_in_the_middle_of_a_call():
    pool = WorkerPool(2)
    pids = set(await asyncio.gather(pool.run(os.getpid), pool.run(os.getpid)))
    stuck = asyncio.create_task(pool.run(time.sleep, 600))
    await asyncio.sleep(0.1)
    pool.close()
    with pytest.raises(WorkerDiedError):
        await asyncio.wait_for(stuck, 30)
    for pid in pids:
        gone(pid)


_OWNER = """
import asyncio, os
from scheduler_service.app.workers import WorkerPool

async def main():
    pool = WorkerPool(2)
    print(*await asyncio.gather(pool.run(os.getpid), pool.run(os.getpid)), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_no_process_outlives_an_owner_that_is_killed(tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(_OWNER)
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        owner.kill()
        owner.wait()
    for pid in pids:
        gone(pid)


def gone(pid: int) -> None:
    """Wait until there is no such process, or only its exit code."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} is still there")
