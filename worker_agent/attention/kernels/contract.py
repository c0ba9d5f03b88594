"""What an attention kernel has to do, whatever library it comes from.

The engine calls kernels on blocks: the queries of one rank against some of the keys, several sequences at a time, in
packed streams without padding. Partial results of blocks are merged outside, so a forward returns its log-sum-exp, and
a backward takes the *global* output and log-sum-exp of its queries and returns this block's part of the gradients.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from worker_agent.attention.layout import Segments


class AttentionKernel(Protocol):
    """One implementation of block attention, stateless, on q (t_q, h, d_qk), k (t_k, h_kv, d_qk), v (t_k, h_kv, d_v).

    h is a multiple of h_kv; query head i reads KV head i // (h / h_kv). Only the last dimension of an input has to
    be contiguous. Rows that no segment covers, and segments that lack queries or keys, give output 0, log-sum-exp
    −∞ and gradient 0, whatever the library underneath does with them.
    """

    name: str
    distribution: str
    """The installed package that it comes with."""

    def refusal(
        self, device: torch.device, dtype: torch.dtype, d_qk: int, d_v: int, *, deterministic: bool = False
    ) -> str | None:
        """Why this kernel cannot run such inputs on this machine, in words that follow its name; None if it can."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Output (t_q, h, d_v) in the input's dtype or wider, and natural-log LSE (h, t_q) in `accumulation_dtype`.

        `causal`: query j of a segment sees keys 0 … j (top left), where the segment has as many keys as queries.
        """
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        *,
        scale: float,
        causal: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this block in the input's dtype or wider.

        `out`, in the input's dtype, and `lse` are those over all keys. `deterministic`: bit-equal from run to run.
        """
        ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32: what log-sum-exps, merged outputs and summed gradients are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
