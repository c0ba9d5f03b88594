"""The running service: one task group owns the gRPC and HTTP servers, the planner and the store.

The first part that fails stops all, and its reason is what the caller gets. SIGTERM and SIGINT end it in every
state, also before it is ready: not ready any more → parked polls and event streams are sent away → calls that
run may finish → the store is flushed → the end, within `grace_s`. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import version

import uvicorn

from scheduler_service.api.application import create_app
from scheduler_service.app.history import NoHistory
from scheduler_service.app.planner import Planner
from scheduler_service.app.scheduler import Limits, Scheduler
from scheduler_service.config import Settings
from scheduler_service.store import Retention, SqlHistory
from scheduler_service.transport import GrpcServer
from scheduler_service.transport.server import address_in_use

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger(__name__)


class Runtime:
    """One run of the service. `run` returns when a signal, or `stop`, has ended it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.grpc_address = ""
        self.http_address = ""
        self.ready = asyncio.Event()
        """Set once plans can be had."""
        self._stopping = asyncio.Event()
        self._history = _history(settings)
        self._planner = Planner(settings.planner_workers)
        self._scheduler = Scheduler(
            planner=self._planner,
            history=self._history,
            clock=time.time,
            run_id=uuid.uuid4().hex[:16],
            version=version("hydra-cp"),
            limits=Limits(
                window=settings.window,
                max_wait_s=settings.max_wait_s,
                job_expiry_s=settings.job_expiry_s,
                baseline_policies=settings.baseline_policies,
                baseline_max_sequences=settings.baseline_max_sequences,
            ),
        )
        self._grpc = GrpcServer(self._scheduler, settings.grpc, settings.max_message_bytes)
        self._http = _HttpServer(
            uvicorn.Config(
                create_app(self._scheduler),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # An open event stream would otherwise hold up the end for ever.
                timeout_graceful_shutdown=max(1, int(settings.grace_s / 2)),
            )
        )

    async def run(self) -> None:
        """Serve until stopped. Raises the first failure of any part."""
        with _signals_to(self._on_signal), _listening(self.settings.http) as listener:
            self.http_address = _address(self.settings.http, listener)
            try:
                self.grpc_address = self._scheduler.grpc_address = await self._grpc.start()
                await self._serve(listener)
            except* Exception as group:
                raise _first(group) from None

    def stop(self, reason: str) -> None:
        """Begin the end."""
        if not self._stopping.is_set():
            logger.info("stopping: %s", reason)
        self._stopping.set()

    async def _serve(self, listener: socket.socket) -> None:
        if isinstance(self._history, SqlHistory):
            self._history.start()
        async with asyncio.TaskGroup() as group:
            http = group.create_task(self._http.serve(sockets=[listener]), name="http")
            loops = [
                group.create_task(self._scheduler.run(), name="jobs"),
                group.create_task(self._warm_up(), name="planner"),
            ]
            try:
                await self._stopping.wait()
            finally:
                for loop in loops:  # first of all: what warms up would take the end of the planner for a failure
                    loop.cancel()
                await self._shut_down(http)

    async def _warm_up(self) -> None:
        await self._planner.start()
        await self._grpc.set_ready()
        self.ready.set()
        logger.info("ready: gRPC on %s, REST and dashboard on http://%s", self.grpc_address, self.http_address)
        if self.settings.ready_file is not None:
            addresses = {"grpc": self.grpc_address, "http": self.http_address, "pid": os.getpid()}
            half = self.settings.ready_file.with_suffix(".part")
            half.write_text(json.dumps(addresses))
            half.replace(self.settings.ready_file)  # whoever sees the file sees all of it

    async def _shut_down(self, http: asyncio.Task[None]) -> None:
        self._scheduler.stop()
        await self._grpc.not_ready()
        self._http.should_exit = True
        await asyncio.gather(self._grpc.stop(self.settings.grace_s / 2), asyncio.wait([http]))
        await self._scheduler.close()
        self._planner.close()
        if isinstance(self._history, SqlHistory):
            await asyncio.to_thread(self._history.close)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            logger.warning("%s again: ending at once", number.name)
            os._exit(1)
        self.stop(number.name)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the runtime has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _history(settings: Settings) -> SqlHistory | NoHistory:
    if settings.store == "off":
        return NoHistory()
    return SqlHistory(
        settings.store, Retention(settings.history_iterations, settings.history_plans, settings.history_events)
    )


@contextlib.contextmanager
def _signals_to(handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _listening(address: str) -> socket.socket:
    """A socket bound to HOST:PORT, shared with nobody. Raises `InvalidInputError` that names the port."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        return socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise address_in_use("http", address, error) from error


def _address(requested: str, listener: socket.socket) -> str:
    return f"{requested.rpartition(':')[0]}:{listener.getsockname()[1]}"


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that stopped the others."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
