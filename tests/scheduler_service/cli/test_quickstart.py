"""`hydra-cp quickstart` for real: a scheduler, four workers, and nothing left behind, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

SMALL = ("--context", "1024", "--budget", "300", "--batch", "16", "--grpc-port", "0", "--http-port", "0")
TIMEOUT_S = 240.0


@contextmanager
def quickstart(output: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a user starts it; its output is `output`/terminal. Ended, if a test fails, by SIGTERM."""
    output.mkdir(exist_ok=True)
    command = [str(Path(sys.executable).with_name("hydra-cp")), "quickstart", "--output", str(output), *options]
    with (output / "terminal").open("w") as terminal:
        process = subprocess.Popen(
            command, stdout=terminal, stderr=terminal, text=True, env={**os.environ, "LANG": "C.UTF-8"}
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def shown(output: Path) -> str:
    """What the command has printed so far."""
    return (output / "terminal").read_text()


def processes_of(output: Path) -> list[str]:
    """Command lines of all processes that were given `output`: the command, its scheduler, launcher and workers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # ended meanwhile
        if str(output) in line:
            found.append(line)
    return found


def a_worker_of(output: Path) -> int:
    """Process id of one of the workers that write to `output`."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
            if str(output) in line and "worker_agent.training" in line and "torch.distributed.run" not in line:
                return int(folder.name)
    raise AssertionError("no worker runs")


def wait_for(condition: Callable[[], object], output: Path, what: str) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, f"no {what} within {TIMEOUT_S} s:\n{shown(output)}"
        time.sleep(0.05)


def assert_nothing_is_left(output: Path) -> None:
    """Every child ends; the kernel needs a moment for those whose parent was killed."""
    end = time.monotonic() + 30
    while left := processes_of(output):
        assert time.monotonic() < end, "still running:\n" + "\n".join(left)
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_trains_by_the_services_plans_and_says_what_they_did(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        options = (*SMALL, "--grpc-port", str(port), "--iterations", "5", "--exit")
        with quickstart(tmp_path, *options) as process:
            assert process.wait(TIMEOUT_S) == 0, shown(tmp_path)
    assert_nothing_is_left(tmp_path)

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["iterations"] == 5
    assert summary["loss_last"] < summary["loss_first"] - 0.3
    assert all(summary["bytes_sent"][kind] > 0 for kind in ("ulysses", "ring", "ep"))
    assert {"1", "2", "4"} <= summary["degrees"].keys()
    assert summary["fallbacks"] == 0
    assert 0 <= summary["wait_share"] < 1
    assert summary["grpc"] != f"127.0.0.1:{port}", "a port in use is left alone"
    assert all(gain > 0.2 for gain in summary["gain"].values()), "the service predicted every baseline"

    text = shown(tmp_path)
    rows = [line.split() for line in text.splitlines() if re.match(r" +\d+ ", line)]
    assert [row[0] for row in rows] == list("01234")
    assert all("service" in row for row in rows)
    for fact in ("waited for plans", "Ulysses", "fallbacks", "predicted gain", summary["dashboard"]):
        assert fact in text


@pytest.mark.slow
def test_it_serves_on_after_training_until_it_is_told_to_stop(tmp_path: Path):
    with quickstart(tmp_path, *SMALL, "--iterations", "1") as process:
        wait_for(lambda: "serving on" in shown(tmp_path) or process.poll() is not None, tmp_path, "summary")
        dashboard = json.loads((tmp_path / "summary.json").read_text())["dashboard"]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{dashboard}/api/v1/jobs", timeout=10) as response:
            assert "quickstart" in response.read().decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, shown(tmp_path)
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_its_children_end_with_it_in_the_middle_of_training(number: signal.Signals, code: int, tmp_path: Path):
    with quickstart(tmp_path, *SMALL, "--iterations", "100000") as process:
        metrics = tmp_path / "metrics.jsonl"
        wait_for(
            lambda: (metrics.exists() and metrics.read_text()) or process.poll() is not None, tmp_path, "iteration"
        )
        assert len(processes_of(tmp_path)) >= 7, "command, scheduler, launcher and four workers"
        process.send_signal(number)
        assert process.wait(60) == code, shown(tmp_path)
        assert_nothing_is_left(tmp_path)


@pytest.mark.slow
def test_a_worker_that_fails_is_shown_and_fails_the_command(tmp_path: Path):
    with quickstart(tmp_path, *SMALL, "--iterations", "100000") as process:
        metrics = tmp_path / "metrics.jsonl"
        wait_for(
            lambda: (metrics.exists() and metrics.read_text()) or process.poll() is not None, tmp_path, "iteration"
        )
        with quickstart(tmp_path / "terminals", "--output", str(tmp_path)) as second:
            assert second.wait(TIMEOUT_S) == 2
        assert "another quick start runs there" in shown(tmp_path / "terminals")
        os.kill(a_worker_of(tmp_path), signal.SIGKILL)
        assert process.wait(TIMEOUT_S) == 1
    assert "failed (exitcode: -9)" in shown(tmp_path)
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--ep", "3"), 2, "ep 3 does not divide 4 ranks"),
        (("--ep", "3", "--workers", "3"), 2, "ep 3 does not divide the model's 8 experts"),
        (("--batch", "3"), 2, "give a batch of 4 or more"),
        (("--policy", "nope"), 2, "policy 'nope' is unknown"),
        (("--grpc-port", "65536"), 2, "65535"),
        (("--output", "/dev/null/x"), 2, "cannot be a folder to write to"),
        (("--context", "64", "--budget", "1"), 4, "pool 4 × budget 1 holds 4"),
    ],
)
def test_what_cannot_run_is_said_before_anything_starts(options: tuple[str, ...], code: int, message: str, tmp_path):
    with quickstart(tmp_path, *options, "--exit") as process:
        assert process.wait(TIMEOUT_S) == code
    assert message in " ".join(shown(tmp_path).split())
    assert not (tmp_path / "scheduler.log").exists()
