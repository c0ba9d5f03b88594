"""Attention kernels, one adapter each, and the choice among them by what they can run here."""

from __future__ import annotations

import torch

from scheduler_service.domain import InvalidInputError, Reason
from worker_agent.attention.kernels.contract import AttentionKernel, accumulation_dtype
from worker_agent.attention.kernels.cpu_flash import CpuFlashKernel
from worker_agent.attention.kernels.reference import ReferenceKernel

KERNELS: tuple[AttentionKernel, ...] = (CpuFlashKernel(), ReferenceKernel())
"""Every adapter, the fastest first."""


def select_kernel(
    device: torch.device, dtype: torch.dtype, d_qk: int, d_v: int, name: str | None = None
) -> AttentionKernel:
    """The first kernel that can run such inputs, or the one called `name`.

    Raises `InvalidInputError` with every candidate's reason if none can.
    """
    reasons = []
    for kernel in KERNELS:
        if name is not None and kernel.name != name:
            continue
        refusal = kernel.refusal(device, dtype, d_qk, d_v)
        if refusal is None:
            return kernel
        reasons.append(f"{kernel.name} {refusal}")
    raise InvalidInputError(
        Reason.INVALID_ARGUMENT,
        f"no attention kernel for {dtype} on {device} with head widths {d_qk} and {d_v}: "
        + ("; ".join(reasons) or f"there is none called {name!r}, only {', '.join(k.name for k in KERNELS)}"),
    )


__all__ = ["AttentionKernel", "KERNELS", "accumulation_dtype", "select_kernel"]
