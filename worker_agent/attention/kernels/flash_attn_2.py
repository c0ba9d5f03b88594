"""FlashAttention-2: GPUs from Ampere on, heads of one width up to 256.

Its varlen backward takes the output and the log-sum-exp from the caller. Both functions are internal to the package;
their parameters have been these since 2.7.0 (flash_attn/flash_attn_interface.py; limits: csrc/flash_attn/flash_api.cpp
of Dao-AILab/flash-attention).
"""

from __future__ import annotations

from torch import Tensor

from worker_agent.attention.kernels.library import Library
from worker_agent.attention.kernels.varlen import PackageKernel, VarlenBlock


class FlashAttention2Kernel(PackageKernel):
    """flash_attn 2.7 and later."""

    name = "flash-attn-2"
    distribution = "flash-attn"
    oldest_gpu = 8

    def __init__(self) -> None:
        self.library = Library(
            "flash_attn.flash_attn_interface",
            "pip install --no-build-isolation 'flash-attn>=2.7'",
            {"_flash_attn_varlen_forward": ("window_size_left",), "_flash_attn_varlen_backward": ("window_size_left",)},
        )

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, block: VarlenBlock) -> tuple[Tensor, Tensor]:
        out, lse, _, _ = self.library.call(
            "_flash_attn_varlen_forward", q, k, v, **block.arguments, dropout_p=0.0, causal=block.causal
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
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        self.library.call(
            "_flash_attn_varlen_backward",
            dout,
            q,
            k,
            v,
            out,
            lse,
            dq,
            dk,
            dv,
            **block.arguments,
            dropout_p=0.0,
            causal=block.causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=deterministic,
        )
        return dq, dk, dv
