"""FlashAttention-4: Hopper and data-centre Blackwell GPUs, compiled when first called.

Its backward takes the output and the log-sum-exp from the caller. Both functions are internal to the package, which
is in beta (flash_attn/cute/interface.py of Dao-AILab/flash-attention, which also has the limits). Of the widths that
it takes we use those that all its architectures have: equal ones up to 128, 192/128 for latent attention, and 256.
"""

from __future__ import annotations

from torch import Tensor

from worker_agent.attention.kernels.library import Library
from worker_agent.attention.kernels.varlen import PackageKernel, VarlenBlock, equal_or_latent_widths


class FlashAttention4Kernel(PackageKernel):
    """flash_attn.cute."""

    name = "flash-attn-4"
    distribution = "flash-attn-4"
    oldest_gpu, newest_gpu = 9, 11

    def __init__(self) -> None:
        self.library = Library(
            "flash_attn.cute.interface",
            "pip install --pre flash-attn-4",
            {
                "_flash_attn_fwd": ("cu_seqlens_q", "max_seqlen_q", "return_lse"),
                "_flash_attn_bwd": ("cu_seqlens_q", "max_seqlen_q", "deterministic"),
            },
        )

    def _widths(self, d_qk: int, d_v: int) -> tuple[int, int]:
        widths = equal_or_latent_widths(d_qk, d_v)
        return (256, 256) if 128 < widths[1] < 256 else widths

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, block: VarlenBlock) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.library.call(
            "_flash_attn_fwd", q, k, v, **block.arguments, causal=block.causal, return_lse=True
        )
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
        dq, dk, dv = self.library.call(
            "_flash_attn_bwd",
            q,
            k,
            v,
            out,
            dout,
            lse,
            **block.arguments,
            causal=block.causal,
            deterministic=deterministic,
        )
        return dq, dk, dv
