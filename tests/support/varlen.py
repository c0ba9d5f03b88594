"""A varlen library for the CPU that is as strict as those for GPUs are, and says so instead of hanging or crashing.

It stands for the rules that those libraries have in common (csrc/flash_attn/flash_api.cpp and
hopper/flash_api_stable.cpp of Dao-AILab/flash-attention), so that what their adapters share runs with real numbers on
any machine. It proves nothing about a library itself.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker_agent.attention.kernels.reference import ReferenceKernel
from worker_agent.attention.kernels.varlen import VarlenBlock, VarlenKernel
from worker_agent.attention.layout import Segments


class StrictCpuKernel(VarlenKernel):
    """The reference's numbers, behind the rules of a varlen library with heads of one width."""

    name = "strict-varlen"
    distribution = "hydra-cp"

    def refusal(
        self, device: torch.device, dtype: torch.dtype, d_qk: int, d_v: int, *, deterministic: bool = False
    ) -> str | None:
        return None if device.type == "cpu" and dtype in (torch.float64, torch.bfloat16) else "is for tests on the CPU"

    def _library_refusal(self) -> str | None:
        return None

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, block: VarlenBlock) -> tuple[Tensor, Tensor]:
        segments = checked(q, k, v, block)
        out, lse = ReferenceKernel().forward(q, k, v, segments, scale=block.scale, causal=block.causal)
        return out.to(q.dtype), lse

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
        segments = checked(q, k, v, block)
        assert dout.shape == out.shape == (q.shape[0], q.shape[1], v.shape[2])
        assert dout.dtype == out.dtype == q.dtype
        assert lse.shape == (q.shape[1], q.shape[0])
        assert lse.is_contiguous()
        grads = ReferenceKernel().backward(
            dout, q, k, v, out, lse, segments, scale=block.scale, causal=block.causal, deterministic=deterministic
        )
        dq, dk, dv = (grad.to(q.dtype) for grad in grads)
        return dq, dk, dv


def checked(q: Tensor, k: Tensor, v: Tensor, block: VarlenBlock) -> Segments:
    """The block's sequences, after the checks that such libraries make, or ought to make."""
    assert q.shape[2] == k.shape[2] == v.shape[2]
    for x in (q, k, v):
        assert x.shape[2] % 8 == 0
        assert x.stride(2) == 1
        assert x.data_ptr() % 16 == 0
        assert all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:2])
    for cu, longest, tokens in ((block.cu_q, block.longest_q, len(q)), (block.cu_k, block.longest_k, len(k))):
        assert cu.dtype == torch.int32
        counts = cu.diff()
        assert counts.min() > 0, "a sequence without tokens"
        assert counts.max() == longest
        assert cu[0] == 0
        assert cu[-1] == tokens, "tokens beyond the last boundary"
    assert not block.causal or torch.equal(block.cu_q, block.cu_k)
    return Segments(*(np.diff(cu.numpy().astype(np.int64)) for cu in (block.cu_q, block.cu_k)))
