"""Processes that compute away from the loop. Each has a pipe to us; nothing is shared.

Unlike a process pool of the standard library, one that dies takes no other call along and is replaced, one that
is stuck can be killed at shutdown, and all end by themselves when this process is killed: their pipe closes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from scheduler_service.domain import HydraCpError, Reason

# Spawned, not forked: gRPC's threads do not survive a fork.
_CONTEXT = multiprocessing.get_context("spawn")

Result = TypeVar("Result")


class WorkerDiedError(Exception):
    """The process ended in the middle of a call."""


class WorkerPool:
    """`size` processes that take calls one at a time, in the order in which they come."""

    def __init__(self, size: int, *, niceness: int = 0) -> None:
        self._niceness = niceness
        self._workers = [_Worker(niceness) for _ in range(size)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="hydracp-worker")
        self._closed = False
        self.replaced = 0
        """Processes that died and were replaced."""
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def on_each(self, function: Callable[[], object]) -> None:
        """Call `function` once in every process; all must be idle."""
        await asyncio.gather(*(self.run(function) for _ in self._workers))

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """`function(*arguments)` in the next idle process; both must pickle.

        Raises what the function raises if that is a `HydraCpError`, one with reason INTERNAL for anything else,
        and `WorkerDiedError` if the process ends before it answers, or all were ended.
        """
        worker = await self._idle.get()
        if self._closed:
            self._idle.put_nowait(worker)  # for the next who waits
            raise WorkerDiedError("processes were ended")
        call = asyncio.get_running_loop().run_in_executor(self._threads, worker.call, function, arguments)
        # A caller that goes away leaves the process busy: it is idle again when the call is done, not before.
        call.add_done_callback(lambda done: self._release(worker, done))
        outcome, value = await asyncio.shield(call)
        if outcome == "returned":
            result: Result = value
            return result
        raise value

    def close(self) -> None:
        """End the processes, also in the middle of a call."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._idle.put_nowait(self._workers[0])  # wakes those who wait for one
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _release(self, worker: _Worker, done: asyncio.Future[Any]) -> None:
        if self._closed:
            return
        if not done.cancelled() and done.exception() is not None:
            worker.kill()
            self._workers.remove(worker)
            worker = _Worker(self._niceness)
            self._workers.append(worker)
            self.replaced += 1
        self._idle.put_nowait(worker)


class _Worker:
    def __init__(self, niceness: int) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, niceness), daemon=True, name="hydracp-planner")
        self._process.start()
        theirs.close()

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
        """Blocks until the process has answered."""
        try:
            self._pipe.send((function, arguments))
            answer: tuple[str, Any] = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(timeout=5)
            raise WorkerDiedError(f"process ended with exit code {self._process.exitcode}") from error
        return answer

    def kill(self) -> None:
        self._process.kill()


def _serve(pipe: Connection, niceness: int) -> None:
    """The body of a process: answer calls until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    os.nice(niceness)
    while True:
        try:
            function, arguments = pipe.recv()
            pipe.send(_outcome(function, arguments))
        except (EOFError, OSError):
            return


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "returned", function(*arguments)
    except HydraCpError as error:
        return "raised", error
    except Exception:
        return "raised", HydraCpError(Reason.INTERNAL, f"planning failed unexpectedly:\n{traceback.format_exc()}")
