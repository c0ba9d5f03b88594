"""Runs a real `hydra-cp serve` in its own process, and kills and restarts it on the same addresses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_READY_TIMEOUT_S = 240.0
_EXIT_TIMEOUT_S = 30.0


class Scheduler:
    """A scheduler process. `grpc` and `http` are its addresses, "host:port"; they survive a restart."""

    def __init__(self, folder: Path, arguments: tuple[str, ...] = (), environment: Mapping[str, str] | None = None):
        self.grpc = self.http = "127.0.0.1:0"
        self.log = folder / "scheduler.log"
        self._folder = folder
        self._arguments = arguments
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running scheduler."""
        assert self._process is not None, "the scheduler is not running"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, None while it runs."""
        assert self._process is not None, "the scheduler was never started"
        return self._process.poll()

    def start(self) -> None:
        """Start it and wait until it says that it is warm. On the first start it picks free ports."""
        ready = self._folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [
            str(Path(sys.executable).with_name("hydra-cp")), "serve", "--grpc", self.grpc, "--http", self.http,
            "--store", f"sqlite:///{self._folder / 'store.db'}", "--ready-file", str(ready), *self._arguments,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)
        end = time.monotonic() + _READY_TIMEOUT_S
        addresses = None
        while addresses is None:
            if self._process.poll() is not None:
                raise RuntimeError(f"the scheduler exited with {self._process.returncode}:\n{self.tail()}")
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"the scheduler was not ready within {_READY_TIMEOUT_S} s:\n{self.tail()}")
            time.sleep(0.05)
            addresses = _read(ready)
        self.grpc, self.http = addresses["grpc"], addresses["http"]

    def kill(self) -> None:
        """End it by SIGKILL, as a machine that dies would, and reap it."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End it by SIGTERM and return its exit code."""
        return self._end(signal.SIGTERM)

    def restart(self) -> None:
        """`kill` it if it runs, and start it again on the same addresses with the same store."""
        self.kill()
        self.start()

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None, "the scheduler was never started"
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            return self._process.wait(timeout=_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise TimeoutError(
                f"the scheduler did not exit within {_EXIT_TIMEOUT_S} s of {number.name}:\n{self.tail()}"
            ) from None


@contextmanager
def scheduler(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Scheduler]:
    """A ready scheduler with its own store on free ports; `arguments` go to `hydra-cp serve`. Killed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        process = Scheduler(Path(folder), arguments, environment)
        try:
            process.start()
            yield process
        finally:
            if process._process is not None:
                process.kill()


def _read(ready: Path) -> dict[str, str] | None:
    """The ready file, or None while it is not there or only half written."""
    try:
        addresses: dict[str, str] = json.loads(ready.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return addresses
