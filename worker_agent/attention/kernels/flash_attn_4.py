"""FlashAttention-4: Hopper and data-centre Blackwell GPUs, compiled when first called.

Its backward takes the output and the log-sum-exp from the caller. Both functions are internal to the package, which
is in beta (flash_attn/cute/interface.py of Dao-AILab/flash-attention, which also has the limits). Of the widths that
it takes we use those that all its architectures have: equal ones up to 128, 192/128 for latent attention, and 256.
"""

from __future__ import annotations

from torch import Tensor

from worker_agent.attention.kernels.library import Library
from worker_agent.attention.kernels.varlen import VarlenBlock, VarlenKernel, equal_or_latent_widths


class FlashAttention4Kernel(VarlenKernel):
    """flash_attn.cute."""

    name = "flash-attn-4"
    distribution = "flash-attn-4"
    oldest_gpu, newest_gpu = 9, 11

    def __init__(self) -> None:
        self._library = Library(
            "flash_attn.cute.interface",
            "pip install --pre flash-attn-4",
            {
                "_flash_attn_fwd": ("cu_seqlens_q", "max_seqlen_q", "return_lse"),
                "_flash_attn_bwd": ("cu_seqlens_q", "max_seqlen_q", "deterministic"),
            },
        )

    def _library_refusal(self) -> str | None:
        return self._library.refusal

    def _widths(self, d_qk: int, d_v: int) -> tuple[int, int]:
        widths = equal_or_latent_widths(d_qk, d_v)
        return (256, 256) if 128 < widths[1] < 256 else widths

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, block: VarlenBlock) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._library.call(
            "_flash_attn_fwd",
            q,
            k,
            v,
            cu_seqlens_q=block.cu_q,
            cu_seqlens_k=block.cu_k,
            max_seqlen_q=block.longest_q,
            max_seqlen_k=block.longest_k,
            softmax_scale=block.scale,
            causal=block.causal,
            return_lse=True,
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
        dq, dk, dv = self._library.call(
            "_flash_attn_bwd",
            q,
            k,
            v,
            out,
            dout,
            lse,
            cu_seqlens_q=block.cu_q,
            cu_seqlens_k=block.cu_k,
            max_seqlen_q=block.longest_q,
            max_seqlen_k=block.longest_k,
            softmax_scale=block.scale,
            causal=block.causal,
            deterministic=deterministic,
        )
        return dq, dk, dv
