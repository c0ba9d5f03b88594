"""Child processes of a command: logged to a file, ended with everything that they started, whatever ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Self

from worker_agent.training.lifetime import die_with_parent


class Child:
    """A process with its own process group and a log file. Use as a context manager: leaving it ends the group.

    If the command itself is killed, the kernel ends the child (on Linux).
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C reaches the command alone, which then ends its children in order
                preexec_fn=die_with_parent,
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def stop(self, grace_s: float = 15.0) -> None:
        """SIGTERM to the child, which passes it on; SIGKILL to its whole group after `grace_s`."""
        if self.poll() is None:
            self._process.terminate()
            end = time.monotonic() + grace_s
            while self.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def tail(self, lines: int = 30, around: str | None = None) -> str:
        """The end of its log, or what stands before the first line with `around`, and that line, if there is one."""
        log = self.log.read_text(errors="replace").splitlines()
        end = next((n + 1 for n, line in enumerate(log) if around and around in line), len(log))
        return "\n".join(log[max(0, end - lines) : end])


class Interruption:
    """SIGINT, SIGTERM and SIGHUP as one request to end. Use as a context manager, in the main thread.

    At first a signal raises KeyboardInterrupt where it arrives. After `defer` it is only noted, and `pause` raises:
    an exception out of a signal handler is lost where Python cannot let it pass (in what runs at a fork, in
    a finaliser), and it must not cut the ending of children short.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._requested = self._deferred = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in self._SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        if not self._deferred:
            raise KeyboardInterrupt

    def defer(self) -> None:
        """From here on only `pause` raises."""
        self._deferred = True

    def pause(self, seconds: float) -> None:
        """Sleep, and raise KeyboardInterrupt if a signal has come."""
        time.sleep(seconds)
        if self._requested:
            raise KeyboardInterrupt
