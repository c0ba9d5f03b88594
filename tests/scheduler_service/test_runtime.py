"""`hydra-cp serve` as a process: signals in every state, kill -9, ports that are taken, a store that breaks."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from hydracp.v1 import planner_pb2

from scheduler_service.config import Settings
from scheduler_service.runtime import Runtime
from tests.support.planner_client import TIMEOUT_S, error_info, fetch_request, planner, register, retry_info, submit
from tests.support.rest import get, until
from tests.support.scheduler import scheduler

SHARDS = ([100, 3000, 50], [70, 2000])
ONE_WORKER = {"HYDRACP_PLANNER_WORKERS": "1"}


def serve(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`hydra-cp serve` whose output we read ourselves."""
    command = [
        str(Path(sys.executable).with_name("hydra-cp")),
        "serve",
        "--grpc",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
    ]
    return subprocess.Popen(
        [*command, "--store", f"sqlite:///{folder / 'store.db'}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **ONE_WORKER, **environment},
    )


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def event_stream(address: str) -> socket.socket:
    """A client that listens to events and never hangs up."""
    host, _, port = address.rpartition(":")
    client = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
    client.sendall(f"GET /api/v1/events/stream HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
    assert b"200 OK" in client.recv(4096)
    return client


def test_sigterm_sends_parked_polls_and_event_streams_away_and_exits_with_0():
    with scheduler(environment=ONE_WORKER) as service, planner(service.grpc) as stub, ExitStack() as clients:
        epoch = register(stub, "job")
        threads = clients.enter_context(ThreadPoolExecutor(10))
        polls = [
            threads.submit(stub.FetchPlan, fetch_request("job", epoch, number), timeout=TIMEOUT_S)
            for number in range(10)
        ]
        streams = [clients.enter_context(event_stream(service.http)) for _ in range(20)]
        until(lambda: get(service, "/api/v1/statistics")["parked_fetches"] == 10)
        planners = children(service.pid)
        assert service.stop() == 0, service.tail()
        for poll in polls:
            error = poll.exception(TIMEOUT_S)
            assert isinstance(error, grpc.RpcError)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert error_info(error).reason == "SHUTTING_DOWN"
            assert retry_info(error).retry_delay.seconds == 1
        for stream in streams:
            while stream.recv(4096):
                pass  # up to the end of the stream, not for ever
        until(lambda: all(gone(pid) for pid in planners))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_it_is_ready_ends_it_with_0(tmp_path, number):
    ready = tmp_path / "ready.json"
    process = serve(tmp_path, "--ready-file", str(ready))
    try:
        until(lambda: bool(children(process.pid)))  # the planner's processes start: it serves, but is not warm
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert not ready.exists()


def test_a_signal_while_it_is_still_loading_ends_it_with_0(tmp_path):
    process = serve(tmp_path)
    try:
        until(lambda: _handles_sigterm(process.pid))
        process.terminate()
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output


def _handles_sigterm(pid: int) -> bool:
    caught = re.search(r"^SigCgt:\s+([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_after_kill_9_agents_register_again_and_get_the_same_plans():
    def plan(stub, epoch):  # type: ignore[no-untyped-def]
        digests = []
        for iteration in range(3):
            submit(stub, "job", epoch, iteration, ([*SHARDS[0], iteration + 1], SHARDS[1]))
            answer = stub.FetchPlan(fetch_request("job", epoch, iteration, [0]), timeout=TIMEOUT_S)
            digests.append(answer.slice.digest)
        return digests

    with scheduler(environment=ONE_WORKER) as service:
        with planner(service.grpc) as stub:
            epoch = register(stub, "job")
            before = plan(stub, epoch)
            until(lambda: len(_stored(service, "job")) == 3)
            planners = children(service.pid)
            service.restart()
        until(lambda: all(gone(pid) for pid in planners))
        history = get(service, "/api/v1/jobs/job/iterations")["iterations"]
        assert [one["digest"] for one in reversed(history)] == before
        assert get(service, "/api/v1/jobs/job")["verdict"].startswith("not running")
        assert get(service, "/api/v1/jobs/job/iterations/1/plan")["digest"] == before[1]
        with planner(service.grpc) as stub:
            with pytest.raises(grpc.RpcError) as caught:
                submit(stub, "job", epoch, 3, SHARDS)
            assert error_info(caught.value).reason == "UNKNOWN_JOB"
            again = register(stub, "job")
            assert again != epoch
            with pytest.raises(grpc.RpcError) as caught:
                submit(stub, "job", epoch, 3, SHARDS)
            assert error_info(caught.value).reason == "STALE_EPOCH"
            assert plan(stub, again) == before


def _stored(service, job):  # type: ignore[no-untyped-def]
    """Iterations that the file holds: what survives a kill."""
    with sqlite3.connect(service._folder / "store.db") as connection:
        return connection.execute("SELECT iteration FROM plans WHERE job = ?", (job,)).fetchall()


@pytest.mark.parametrize("name", ["grpc", "http"])
def test_a_second_server_on_a_port_fails_and_names_it(tmp_path, name):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = serve(tmp_path, f"--{name}", address)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"{name} address {address} cannot be bound" in output
    assert f"--{name}" in output


def test_a_store_that_is_broken_then_mended_then_deleted_stops_nothing(tmp_path):
    folder = tmp_path / "folder"
    folder.write_text("a file where a folder should be")
    with (
        scheduler("--store", f"sqlite:///{folder}/store.db", environment=ONE_WORKER) as service,
        planner(service.grpc) as stub,
    ):
        epoch = register(stub, "job")

        def plans_and_shows_it(iteration: int) -> None:
            submit(stub, "job", epoch, iteration, SHARDS)
            answer = stub.FetchPlan(fetch_request("job", epoch, iteration, [0]), timeout=TIMEOUT_S)
            assert answer.state == planner_pb2.ITERATION_STATE_READY
            shown = get(service, f"/api/v1/jobs/job/iterations/{iteration}")
            assert shown["digest"] == answer.slice.digest

        def state() -> str:
            return get(service, "/api/v1/statistics")["store"]

        assert state().startswith("broken: ")
        plans_and_shows_it(0)
        folder.unlink()
        until(lambda: state() == "ok")
        plans_and_shows_it(1)
        until((folder / "store.db").exists)
        for file in folder.iterdir():
            file.unlink()
        plans_and_shows_it(2)
        until((folder / "store.db").exists)
        assert state() == "ok"


def test_the_ready_file_and_the_log_name_the_bound_addresses(tmp_path):
    ready = tmp_path / "ready.json"
    process = serve(tmp_path, "--ready-file", str(ready))
    try:
        until(ready.exists)
        said = json.loads(ready.read_text())
        assert said["pid"] == process.pid
        assert not said["grpc"].endswith(":0")
        process.terminate()
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    lines = [json.loads(line) for line in output.splitlines()]
    assert any(said["grpc"] in line["event"] and said["http"] in line["event"] for line in lines)
    assert lines[-1]["event"] == "stopping: SIGTERM"


def test_a_setting_that_makes_no_sense_is_refused_by_name_with_code_2(tmp_path):
    process = serve(tmp_path, HYDRACP_WINDOW="none")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "window" in output


async def test_the_first_part_that_fails_stops_all_with_its_reason(tmp_path, monkeypatch):
    runtime = Runtime(Settings(grpc="127.0.0.1:0", http="127.0.0.1:0", store=f"sqlite:///{tmp_path}/store.db"))

    async def fail() -> None:
        raise RuntimeError("the planner cannot start")

    monkeypatch.setattr(runtime._planner, "start", fail)
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match="the planner cannot start"):
            await runtime.run()
    host, _, port = runtime.grpc_address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        left = [task for task in left if not task.done()]
    assert left == []
