"""FlashAttention-3: Hopper GPUs, with an instance for the 192/128 heads of latent attention.

A package of its own, built from the hopper folder of Dao-AILab/flash-attention. Its backward takes the output and the
log-sum-exp from the caller; the parameter `is_causal` came with its custom operators in November 2025
(hopper/flash_attn_interface.py; limits: hopper/flash_api_stable.cpp).
"""

from __future__ import annotations

from torch import Tensor

from worker_agent.attention.kernels.library import Library
from worker_agent.attention.kernels.varlen import PackageKernel, VarlenBlock, equal_or_latent_widths


class FlashAttention3Kernel(PackageKernel):
    """flash_attn_3."""

    name = "flash-attn-3"
    distribution = "flash_attn_3"
    oldest_gpu = newest_gpu = 9
    widest_deterministic = 192

    def __init__(self) -> None:
        self.library = Library(
            "flash_attn_interface",
            "build flash_attn_3 from the hopper folder of github.com/Dao-AILab/flash-attention, December 2025 or later",
            {"_flash_attn_forward": ("cu_seqlens_q", "window_size_left"), "_flash_attn_backward": ("is_causal",)},
        )

    def _widths(self, d_qk: int, d_v: int) -> tuple[int, int]:
        return equal_or_latent_widths(d_qk, d_v)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, block: VarlenBlock) -> tuple[Tensor, Tensor]:
        out, lse, _, _ = self.library.call("_flash_attn_forward", q, k, v, **block.arguments, causal=block.causal)
        return out, lse

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: VarlenBlock,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        self.library.call(
            "_flash_attn_backward",
            dout,
            q,
            k,
            v,
            out,
            lse,
            **block.arguments,
            dq=dq,
            dk=dk,
            dv=dv,
            is_causal=block.causal,
            deterministic=deterministic,
        )
        return dq, dk, dv
