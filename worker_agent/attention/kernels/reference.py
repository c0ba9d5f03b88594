"""Explicit softmax in blocks of keys: any device, dtype and head widths. The oracle, and the fallback of last resort.

Memory is bounded by h × t_q × `KEY_BLOCK` scores. Inputs are widened to fp32 (fp64 stays), and results stay wide.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from worker_agent.attention.kernels.contract import accumulation_dtype
from worker_agent.attention.layout import Segments
from worker_agent.attention.merge import merge

KEY_BLOCK = 512
"""Keys per block of scores."""


class ReferenceKernel:
    """Softmax written out; see the contract for shapes."""

    name = "reference"
    distribution = "hydra-cp"

    def refusal(
        self, device: torch.device, dtype: torch.dtype, d_qk: int, d_v: int, *, deterministic: bool = False
    ) -> str | None:
        """Runs anything that is a floating-point number."""
        return None if dtype.is_floating_point else f"{dtype} is no floating-point type"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Merge the blocks of keys one by one into rows that begin without any."""
        wide = accumulation_dtype(q.dtype)
        out = q.new_zeros((q.shape[0], q.shape[1], v.shape[2]), dtype=wide)
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=wide)
        for rows, keys, scores in _blocks(q, k, segments, scale, causal):
            block_lse = scores.logsumexp(-1)
            weights = torch.exp(scores - block_lse.unsqueeze(-1))
            block_out = _per_query_head(weights, v[keys])
            out[rows], lse[:, rows] = merge(out[rows], lse[:, rows], block_out, block_lse.flatten(0, 1))
        return out, lse

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
        """With P = exp(S − LSE) and δ = Σ dout·out: dv = Pᵀ dout, dS = P (dout vᵀ − δ), dq = dS k, dk = dSᵀ q."""
        wide = accumulation_dtype(q.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        delta = (dout.to(wide) * out.to(wide)).sum(-1).T
        heads = k.shape[1]
        for rows, keys, scores in _blocks(q, k, segments, scale, causal):
            weights = torch.exp(scores - lse[:, rows].unflatten(0, (heads, -1)).unsqueeze(-1))
            grouped = _by_kv_head(dout[rows], heads)
            dv[keys] += torch.einsum("kgqs,kgqd->skd", weights, grouped)
            dscores = torch.einsum("kgqd,skd->kgqs", grouped, v[keys].to(wide))
            dscores = weights * (dscores - delta[:, rows].unflatten(0, (heads, -1)).unsqueeze(-1)) * scale
            dq[rows] += _per_query_head(dscores, k[keys])
            dk[keys] += torch.einsum("kgqs,kgqd->skd", dscores, _by_kv_head(q[rows], heads))
        return dq, dk, dv


def _blocks(
    q: Tensor, k: Tensor, segments: Segments, scale: float, causal: bool
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows of queries, rows of keys, and their scores (h_kv, h / h_kv, queries, keys); −∞ above a causal diagonal."""
    for first_q, end_q, first_k, end_k in segments.bounds():
        for block in range(first_k, end_k, KEY_BLOCK):
            keys = slice(block, min(block + KEY_BLOCK, end_k))
            rows = slice(first_q + (block - first_k if causal else 0), end_q)
            if rows.start >= rows.stop:
                continue
            scores = torch.einsum(
                "kgqd,skd->kgqs", _by_kv_head(q[rows], k.shape[1]), k[keys].to(accumulation_dtype(k.dtype))
            )
            if causal:
                hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
                scores = scores.masked_fill(hidden, -torch.inf)
            yield rows, keys, scores * scale


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """(t, h, d) as (h_kv, h / h_kv, t, d), widened."""
    return x.to(accumulation_dtype(x.dtype)).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _per_query_head(weights: Tensor, values: Tensor) -> Tensor:
    """Σ over keys of weights (h_kv, g, q, s) and values (s, h_kv, d), as (q, h, d)."""
    return torch.einsum("kgqs,skd->qkgd", weights, values.to(weights.dtype)).flatten(1, 2)
