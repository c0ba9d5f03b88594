"""The outer level: keys and values travel around the ring while every rank attends to those that it holds.

Forward: this rank computes with its own keys first and passes them on; after each hop it holds those of one ring index
back. Partial outputs are merged in fp32 (fp64 for fp64). Backward starts from the keys that arrived last and runs the
ring the other way, so that keys and their gradients travel P_r − 1 hops each and end where they belong:

    rank r holds the keys of     r → r−1 → … → r+1   forward
                                 r+1 → r+2 → … → r   backward; gradients of the keys travel with them, in fp32

A hop is one batch of one send and one receive, posted before the block that hides it; between two ranks messages keep
one order on both sides. A ring of one runs the same code and sends nothing. Only real tokens take part: padding is
taken out first and comes back as zeros, in the output and in every gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from worker_agent.attention.kernels import AttentionKernel, accumulation_dtype
from worker_agent.attention.layout import RingStep, ShardLayout
from worker_agent.attention.merge import merge
from worker_agent.groups import Group


@dataclass(frozen=True)
class BlockAttention:
    """A kernel with its settings, applied to the rows of one ring step. It is not called where a step has none."""

    kernel: AttentionKernel
    scale: float
    deterministic: bool

    def forward(self, step: RingStep, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the step's rows of `q`, over the step's rows of `kv`."""
        q, k, v = _step_inputs(step, q, kv)
        if len(step.segments) == 0:
            wide = accumulation_dtype(q.dtype)
            return q.new_zeros((0, q.shape[1], v.shape[2])), q.new_zeros((q.shape[1], 0), dtype=wide)
        return self.kernel.forward(q, k, v, step.segments, scale=self.scale, causal=step.causal)

    def backward(
        self, step: RingStep, dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The step's part of the gradients of its rows of `q` and `kv`; `out` and `lse` are those over all steps."""
        q, k, v = _step_inputs(step, q, kv)
        if len(step.segments) == 0:
            return q.new_zeros(q.shape), kv.new_zeros((0, *kv.shape[1:]))
        dq, dk, dv = self.kernel.backward(
            step.queries.take(dout),
            q,
            k,
            v,
            step.queries.take(out),
            step.queries.take(lse, dim=1),
            step.segments,
            scale=self.scale,
            causal=step.causal,
            deterministic=self.deterministic,
        )
        return dq, torch.cat((dk, dv), dim=-1)


def ring_attention(
    q: Tensor, kv: Tensor, layout: ShardLayout, group: Group, attention: BlockAttention, *, causal: bool
) -> Tensor:
    """Attention of a ring shard: q (T, h, d_qk), kv (T, h_kv, d_qk + d_v) → (T, h, d_v); T = `layout.ring_tokens`.

    Collective over the ranks at this inner place of the ring, forward and backward.
    """
    return cast(Tensor, _RingAttention.apply(q, kv, layout, group, attention, causal))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        layout: ShardLayout,
        group: Group,
        attention: BlockAttention,
        causal: bool,
    ) -> Tensor:
        ctx.context = (layout, group, attention, causal)
        q = layout.real_rows.take(q)
        out, lse, kv = _forward(q, layout.real_rows.take(kv), *ctx.context)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        return _with_padding(out, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = ctx.saved_tensors
        layout = ctx.context[0]
        dq, dkv = _backward(layout.real_rows.take(dout), q, kv, out, lse, *ctx.context)
        return _with_padding(dq.to(q.dtype), layout), _with_padding(dkv.to(q.dtype), layout), None, None, None, None


def _forward(
    q: Tensor, kv: Tensor, layout: ShardLayout, group: Group, attention: BlockAttention, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and the keys and values that this rank holds at the end. Every row sees its own keys."""
    own, *others = steps = layout.steps(causal)
    for step, following in zip(steps, (*others, None), strict=True):
        hop = None if following is None else _Hop(kv, group, +1, layout.real_tokens(following.source))
        part_out, part_lse = attention.forward(step, q, kv)
        if step is own:
            out, lse = part_out.to(part_lse.dtype) if others else part_out, part_lse
        else:
            before = step.queries.take(out), step.queries.take(lse, dim=1)
            merged_out, merged_lse = merge(*before, part_out, part_lse)
            step.queries.put(out, merged_out)
            step.queries.put(lse, merged_lse, dim=1)
        if hop is not None:
            kv = hop.wait()
    return out, lse, kv


def _backward(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: ShardLayout,
    group: Group,
    attention: BlockAttention,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of `q` and of this rank's own keys and values, in the accumulation dtype where there are several."""
    steps = layout.steps(causal)[::-1]
    if len(steps) == 1:
        return attention.backward(steps[0], dout, q, kv, out, lse)
    dq = torch.zeros_like(q, dtype=lse.dtype)
    dkv = torch.zeros_like(kv, dtype=lse.dtype)
    gradient_hop: _Hop | None = None
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        rows = 0 if following is None else layout.real_tokens(following.source)
        hop = None if following is None else _Hop(kv, group, -1, rows)
        dq_part, dkv_part = attention.backward(step, dout, q, kv, out, lse)
        if gradient_hop is not None:
            dkv = gradient_hop.wait()
        step.queries.add(dq, dq_part)
        step.keys.add(dkv, dkv_part)
        if hop is not None:
            gradient_hop = _Hop(dkv, group, -1, rows)
            kv = hop.wait()
    return dq, dkv


class _Hop:
    """One tensor on its way to the next rank of the ring (direction ±1), while one of `rows` rows comes in.

    Both ends know the number of rows from the layout; a tensor without rows is not sent.
    """

    def __init__(self, sent: Tensor, group: Group, direction: int, rows: int) -> None:
        self._sent = sent.contiguous()  # kept until it has left
        self._received = sent.new_empty((rows, *sent.shape[1:]))
        operations = []
        if self._sent.numel():
            to = group.ring_peer(direction)
            operations.append(dist.P2POp(dist.isend, self._sent, to, group.process_group))
            group.counters.add("ring", self._sent.numel() * self._sent.element_size())
        if self._received.numel():
            source = group.ring_peer(-direction)
            operations.append(dist.P2POp(dist.irecv, self._received, source, group.process_group))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _step_inputs(step: RingStep, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = step.keys.take(kv).split((q.shape[2], kv.shape[2] - q.shape[2]), dim=-1)
    return step.queries.take(q), keys, values


def _with_padding(x: Tensor, layout: ShardLayout) -> Tensor:
    """Rows of real tokens put back to their slots, zeros elsewhere."""
    if x.shape[0] == layout.ring_tokens:
        return x
    padded = x.new_zeros((layout.ring_tokens, *x.shape[1:]))
    layout.real_rows.put(padded, x)
    return padded
