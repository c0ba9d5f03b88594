"""Packed attention on one process, written plainly, and the comparison of a group's ranks with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from worker_agent.attention import ShardLayout, hybrid_attention
from worker_agent.groups import Group


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 4
    d_qk: int = 8
    d_v: int = 8
    causal: bool = True
    scale: float | None = None
    sequence_parallel: int = 1
    kernel: str | None = None
    dtype: torch.dtype = torch.float64


def dense_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float, causal: bool) -> Tensor:
    """Sequence by sequence: softmax(scale·qkᵀ)v, every KV head repeated for its query heads."""
    sharing = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(sharing, 1), v.repeat_interleave(sharing, 1)
    outputs = [(q[:0, :, :1] + k[:0, :, :1]) * v[:0]]  # an empty stream, too, depends on its inputs
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), vs))
    return torch.cat(outputs)


def streams(case: Case, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout of the unpadded packed stream; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(case.lengths)
    shapes = ((case.heads, case.d_qk), (case.kv_heads, case.d_qk), (case.kv_heads, case.d_v), (case.heads, case.d_v))
    q, k, v, dout = (torch.randn(tokens, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return tuple(x.to(case.dtype) for x in (q, k, v, dout))  # type: ignore[return-value]


@cache
def dense_result(case: Case, seed: int = 0) -> tuple[Tensor, ...]:
    """Output, dq, dk, dv on one process, in the case's dtype."""
    q, k, v, dout = streams(case, seed)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scale = case.d_qk**-0.5 if case.scale is None else case.scale
    by_kv_head = zip(q.chunk(case.kv_heads, 1), k.split(1, 1), v.split(1, 1), dout.chunk(case.kv_heads, 1), strict=True)
    outputs = []
    for qs, ks, vs, douts in by_kv_head:  # one at a time: the scores of all would fill the memory
        out = dense_attention(qs, ks, vs, case.lengths, scale, case.causal)
        out.backward(douts)
        outputs.append(out.detach())
    return torch.cat(outputs, 1), *(x.grad for x in leaves)  # type: ignore[misc]


def layout_of(case: Case, group: Group) -> ShardLayout:
    return ShardLayout(case.lengths, group.ulysses, group.ring, group.rank, case.sequence_parallel)


def shard(x: Tensor, layout: ShardLayout, padding: float = torch.nan) -> Tensor:
    """This rank's slots of a stream. Padding is poisoned: whoever reads it shows."""
    slots = x.new_full((layout.tokens, *x.shape[1:]), padding)
    real = layout.token_index >= 0
    slots[real] = x[layout.token_index[real]]
    return slots


def group_result(case: Case, group: Group, *, seed: int = 0, deterministic: bool = False) -> tuple[Tensor, ...]:
    """Output, dq, dk, dv of this rank's slots, through the engine."""
    layout = layout_of(case, group)
    q, k, v, dout = (shard(x, layout) for x in streams(case, seed))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = hybrid_attention(
        *leaves,
        layout,
        group,
        softmax_scale=case.scale,
        causal=case.causal,
        deterministic=deterministic,
        kernel=case.kernel,
    )
    out.backward(dout)
    return out.detach(), *(x.grad for x in leaves)  # type: ignore[misc]


def worst_error(case: Case, group: Group, expected: tuple[Tensor, ...] | None = None) -> float:
    """Largest difference of this rank's output and gradients from one process; fails where padding is not exactly 0.

    `expected`: `dense_result(case)`, where it is too long to be made on every rank.
    """
    expected = expected or dense_result(case)
    layout = layout_of(case, group)
    real = layout.token_index >= 0
    worst = 0.0
    for name, ours, dense in zip(("out", "dq", "dk", "dv"), group_result(case, group), expected, strict=True):
        assert ours.dtype == case.dtype, name
        assert ours.shape == (layout.tokens, *dense.shape[1:]), name
        assert (ours[~real] == 0).all(), f"{name}: padding is not 0 in {case} on {group}"
        difference = ours[real] - dense[layout.token_index[real]]
        assert not difference.isnan().any(), f"{name}: padding was read in {case} on {group}"
        worst = max(worst, difference.abs().max().item() if difference.numel() else 0.0)
    return worst
