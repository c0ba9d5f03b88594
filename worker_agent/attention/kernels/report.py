"""What this machine has of the attention kernels, for people: `make gpu-check` prints it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from worker_agent.attention.kernels.contract import AttentionKernel


@dataclass(frozen=True)
class KernelReport:
    """One adapter on this machine."""

    name: str
    package: str
    """The installed package and release that it uses, as "torch 2.10.0"; or that it is missing."""
    refusal: str | None
    """Why it cannot run here, in words that follow its name; None if it can."""


def report_on(kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, d_qk: int, d_v: int) -> KernelReport:
    """Whether `kernel` can run such inputs on `device`, and by which package."""
    try:
        package = f"{kernel.distribution} {version(kernel.distribution)}"
    except PackageNotFoundError:
        package = f"{kernel.distribution}, not installed"
    return KernelReport(kernel.name, package, kernel.refusal(device, dtype, d_qk, d_v))
