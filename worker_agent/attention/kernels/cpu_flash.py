"""PyTorch's flash attention for CPUs: the fast path without an accelerator.

The operator takes one batch of equally long sequences, heads of one width, and a causal mask that starts at the top
left; it divides by zero without keys. So it is called once per sequence, never on an empty one; narrower heads are
padded with zeros, which changes neither scores (the scale is explicit) nor the columns that are kept. Query heads that
share a KV head become the heads of one batch entry, whose keys are an expanded view: nothing is repeated in memory.

Source of the operator: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp of PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker_agent.attention.kernels.contract import accumulation_dtype
from worker_agent.attention.layout import Segments

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuFlashKernel:
    """torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, sequence by sequence."""

    name = "torch-cpu-flash"
    distribution = "torch"

    def refusal(
        self, device: torch.device, dtype: torch.dtype, d_qk: int, d_v: int, *, deterministic: bool = False
    ) -> str | None:
        """CPU tensors of the four usual floating-point types."""
        if device.type != "cpu":
            return f"runs on the CPU, the tensors are on {device}"
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"has no instance for {dtype}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Output in the input's dtype; log-sum-exp in fp32, or fp64 for fp64."""
        out = q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=accumulation_dtype(q.dtype))
        width, sharing = max(q.shape[2], v.shape[2]), q.shape[1] // k.shape[1]
        for rows, keys in _sequences(segments):
            part, part_lse = _forward(
                _queries(q[rows], sharing, width),
                _keys(k[keys], sharing, width),
                _keys(v[keys], sharing, width),
                0.0,
                causal,
                scale=scale,
            )
            out[rows] = _rows(part, v.shape[2])
            lse[:, rows] = part_lse.flatten(0, 1)
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
        """Always deterministic; gradients of query heads that share a KV head are summed in the wide dtype."""
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        d_qk, d_v = q.shape[2], v.shape[2]
        width, sharing = max(d_qk, d_v), q.shape[1] // k.shape[1]
        for rows, keys in _sequences(segments):
            part_q, part_k, part_v = _backward(
                _queries(dout[rows], sharing, width),
                _queries(q[rows], sharing, width),
                _keys(k[keys], sharing, width),
                _keys(v[keys], sharing, width),
                _queries(out[rows], sharing, width),
                lse[:, rows].unflatten(0, (-1, sharing)),
                0.0,
                causal,
                scale=scale,
            )
            dq[rows] = _rows(part_q, d_qk)
            dk[keys], dv[keys] = _summed(part_k, d_qk), _summed(part_v, d_v)
        return dq, dk, dv


def _sequences(segments: Segments) -> list[tuple[slice, slice]]:
    return [
        (slice(first_q, end_q), slice(first_k, end_k))
        for first_q, end_q, first_k, end_k in segments.bounds()
        if end_q > first_q and end_k > first_k
    ]


def _queries(x: Tensor, sharing: int, width: int) -> Tensor:
    """(t, h, d) as (h_kv, sharing, t, width)."""
    return _widened(x, width).unflatten(1, (-1, sharing)).permute(1, 2, 0, 3)


def _keys(x: Tensor, sharing: int, width: int) -> Tensor:
    """(t, h_kv, d) as (h_kv, sharing, t, width): one copy in memory for all heads that share it."""
    return _widened(x, width).permute(1, 0, 2).unsqueeze(1).expand(-1, sharing, -1, -1)


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[2] == width else pad(x, (0, width - x.shape[2]))


def _rows(x: Tensor, width: int) -> Tensor:
    """(h_kv, sharing, t, ≥ width) as (t, h, width)."""
    return x[..., :width].permute(2, 0, 1, 3).flatten(1, 2)


def _summed(x: Tensor, width: int) -> Tensor:
    """(h_kv, sharing, t, ≥ width) summed over the heads that share a KV head, as (t, h_kv, width)."""
    return x[..., :width].sum(1, dtype=accumulation_dtype(x.dtype)).permute(1, 0, 2)
