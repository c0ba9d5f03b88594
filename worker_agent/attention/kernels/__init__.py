"""Attention kernels, one adapter each, and the choice among them by what they can run here."""

from __future__ import annotations

import torch

from scheduler_service.domain import InvalidInputError, Reason
from worker_agent.attention.kernels.contract import AttentionKernel, accumulation_dtype
from worker_agent.attention.kernels.cpu_flash import CpuFlashKernel
from worker_agent.attention.kernels.flash_attn_2 import FlashAttention2Kernel
from worker_agent.attention.kernels.flash_attn_3 import FlashAttention3Kernel
from worker_agent.attention.kernels.flash_attn_4 import FlashAttention4Kernel
from worker_agent.attention.kernels.reference import ReferenceKernel
from worker_agent.attention.kernels.report import KernelReport, report_on
from worker_agent.attention.kernels.torch_varlen import TorchVarlenKernel

KERNELS: tuple[AttentionKernel, ...] = (
    FlashAttention3Kernel(),
    FlashAttention4Kernel(),
    FlashAttention2Kernel(),
    TorchVarlenKernel(),
    CpuFlashKernel(),
    ReferenceKernel(),
)
"""Every adapter, the fastest first."""


def select_kernel(
    device: torch.device,
    dtype: torch.dtype,
    d_qk: int,
    d_v: int,
    name: str | None = None,
    *,
    deterministic: bool = False,
) -> AttentionKernel:
    """The first kernel that can run such inputs, or the one called `name`.

    Raises `InvalidInputError` with every candidate's reason if none can.
    """
    reasons = []
    for kernel in KERNELS:
        if name is not None and kernel.name != name:
            continue
        refusal = kernel.refusal(device, dtype, d_qk, d_v, deterministic=deterministic)
        if refusal is None:
            return kernel
        reasons.append(f"{kernel.name} {refusal}")
    raise InvalidInputError(
        Reason.INVALID_ARGUMENT,
        f"no attention kernel for {dtype} on {device} with head widths {d_qk} and {d_v}: "
        + ("; ".join(reasons) or f"there is none called {name!r}, only {', '.join(k.name for k in KERNELS)}"),
    )


def describe_kernels(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, d_qk: int = 128, d_v: int = 128
) -> tuple[KernelReport, ...]:
    """What each adapter could do with such inputs here, in the order of choice: the first that can run is chosen."""
    return tuple(report_on(kernel, device, dtype, d_qk, d_v) for kernel in KERNELS)


__all__ = ["AttentionKernel", "KERNELS", "KernelReport", "accumulation_dtype", "describe_kernels", "select_kernel"]
