"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for `number` when this process's parent dies, however it dies. Linux only; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
