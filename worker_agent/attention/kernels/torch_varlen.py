"""PyTorch's own FlashAttention for GPUs: the operators under `torch.nn.attention.varlen.varlen_attn`.

They are called directly, because the public function's backward takes only its own output and log-sum-exp. Heads are
of one width up to 256. The backward is deterministic where PyTorch is told to be, so it is told so for the call.

Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu and torch/nn/attention/varlen.py of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from worker_agent.attention.kernels.varlen import VarlenBlock, VarlenKernel

OLDEST_TORCH = "2.10"
"""The first release with `varlen_attn`, whose log-sum-exp is (heads, tokens)."""


class TorchVarlenKernel(VarlenKernel):
    """torch.ops.aten._flash_attention_forward and _flash_attention_backward."""

    name = "torch-varlen"
    distribution = "torch"
    oldest_gpu = 8

    def _library_refusal(self) -> str | None:
        if torch.__version__ < OLDEST_TORCH:
            return f"needs PyTorch {OLDEST_TORCH}, this is {torch.__version__}"
        return None

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, block: VarlenBlock) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
            q,
            k,
            v,
            block.cu_q,
            block.cu_k,
            block.longest_q,
            block.longest_k,
            0.0,  # dropout
            block.causal,
            False,  # no debug mask
            scale=block.scale,
            window_size_left=-1,
            window_size_right=-1,
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
        no_dropout_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        with _deterministic(deterministic):
            return torch.ops.aten._flash_attention_backward.default(
                dout,
                q,
                k,
                v,
                out,
                lse,
                block.cu_q,
                block.cu_k,
                block.longest_q,
                block.longest_k,
                0.0,
                block.causal,
                no_dropout_state,
                unused,
                scale=block.scale,
                window_size_left=-1,
                window_size_right=-1,
            )


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """PyTorch's deterministic mode where it is wanted; the mode that the process had before and after."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or before == (True, False):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
