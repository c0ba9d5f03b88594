"""PyTorch's flash attention for CPUs: the fast path without an accelerator.

The operator takes one batch of equally long sequences, heads of one width, and a causal mask that starts at the top
left; it divides by zero without keys. So it is called once per sequence, never on an empty one; narrower heads are
padded with zeros, which changes neither scores (the scale is explicit) nor the columns that are kept. Query heads that
share a KV head become the heads of one batch entry, whose keys are an expanded view: nothing is repeated in memory.

Source of the operator: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker_agent.attention.kernels.contract import accumulation_dtype
from worker_agent.attention.layout import Segments

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

COPIED_FROM = 4096
"""Tokens of a sequence from which on each head is copied apart: the operator reads them many times, and reads rows that
lie together faster: by 1 % at 4,096 tokens, 4 % at 16,384 (two heads of 64, bf16). Below, the copy costs more."""


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
        width, sharing = max(q.shape[2], v.shape[2]), q.shape[1] // k.shape[1]
        outs, lses = [], []
        for rows, keys in _sequences(segments):
            part, part_lse = _forward(
                _queries(q[rows], sharing, width),
                _keys(k[keys], sharing, width),
                _keys(v[keys], sharing, width),
                0.0,
                causal,
                scale=scale,
            )
            outs.append((rows, _rows(part, v.shape[2])))
            lses.append((rows, part_lse.flatten(0, 1).T))
        out = _placed(outs, q.new_zeros, (*q.shape[:2], v.shape[2]))
        lse = _placed(lses, partial(q.new_full, fill_value=-torch.inf, dtype=accumulation_dtype(q.dtype)), q.shape[:2])
        return out, lse.T

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
        d_qk, d_v = q.shape[2], v.shape[2]
        dqs, dks, dvs = [], [], []
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
            dqs.append((rows, _rows(part_q, d_qk)))
            dks.append((keys, _summed(part_k, d_qk)))
            dvs.append((keys, _summed(part_v, d_v)))
        return tuple(_placed(parts, x.new_zeros, x.shape) for parts, x in ((dqs, q), (dks, k), (dvs, v)))  # type: ignore[return-value]


def _sequences(segments: Segments) -> list[tuple[slice, slice]]:
    return [
        (slice(first_q, end_q), slice(first_k, end_k))
        for first_q, end_q, first_k, end_k in segments.bounds()
        if end_q > first_q and end_k > first_k
    ]


def _queries(x: Tensor, sharing: int, width: int) -> Tensor:
    """(t, h, d) as (h_kv, sharing, t, width)."""
    return _by_head(x, width).unflatten(0, (-1, sharing))


def _keys(x: Tensor, sharing: int, width: int) -> Tensor:
    """(t, h_kv, d) as (h_kv, sharing, t, width): one copy in memory for all heads that share it."""
    return _by_head(x, width).unsqueeze(1).expand(-1, sharing, -1, -1)


def _by_head(x: Tensor, width: int) -> Tensor:
    """(t, h, d) as (h, t, width)."""
    widened = x if x.shape[2] == width else pad(x, (0, width - x.shape[2]))
    turned = widened.transpose(0, 1)
    return turned.contiguous() if len(x) >= COPIED_FROM else turned


def _rows(x: Tensor, width: int) -> Tensor:
    """(h_kv, sharing, t, ≥ width) as (t, h, width)."""
    return x[..., :width].permute(2, 0, 1, 3).flatten(1, 2)


def _summed(x: Tensor, width: int) -> Tensor:
    """(h_kv, sharing, t, ≥ width) summed over the heads that share a KV head, as (t, h_kv, width)."""
    x = x[..., :width]
    one = x.squeeze(1) if x.shape[1] == 1 else x.sum(1, dtype=accumulation_dtype(x.dtype)).to(x.dtype)
    return one.permute(1, 0, 2)


def _placed(
    parts: list[tuple[slice, Tensor]], new: Callable[[tuple[int, ...]], Tensor], shape: tuple[int, ...]
) -> Tensor:
    """Rows put to their places in a tensor of `shape`; a part that is all of it is not copied."""
    if len(parts) == 1 and parts[0][1].shape == shape:
        return parts[0][1]
    whole = new(shape)
    for rows, part in parts:
        whole[rows] = part
    return whole
