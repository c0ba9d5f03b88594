"""The outer level: keys and values travel around the ring while every rank attends to those that it holds.

Forward: this rank computes with its own keys first and passes them on; after each hop it holds those of one ring index
back. Partial outputs are merged in fp32 (fp64 for fp64). Backward starts from the keys that arrived last and runs the
ring the other way, so that keys and their gradients travel P_r − 1 hops each and end where they belong:

    rank r holds the keys of     r → r−1 → … → r+1   forward
                                 r+1 → r+2 → … → r   backward; gradients of the keys travel with them, in fp32

A hop is one batch of one send and one receive, posted before the block that hides it; between two ranks messages keep
one order on both sides. Keys and values, whose widths may differ, travel in one flat buffer. A ring of one sends, and
copies, nothing. Only real tokens take part: padding is
taken out first and comes back as zeros, in the output and in every gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from worker_agent.attention.inputs import check_attention, check_layout, check_scale
from worker_agent.attention.kernels import AttentionKernel, accumulation_dtype, select_kernel
from worker_agent.attention.layout import RingStep, ShardLayout
from worker_agent.attention.merge import merge
from worker_agent.groups import Group


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: ShardLayout,
    group: Group,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    deterministic: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """Attention of a ring shard: q (T, h, d_qk), k (T, h_kv, d_qk), v (T, h_kv, d_v) → (T, h, d_v).

    T = `layout.ring_tokens`, the slots of all inner ranks; the heads are this rank's. Options as in `hybrid_attention`.
    Collective over the ranks at this inner place of the ring, forward and backward. Raises `InvalidInputError`.
    """
    check_layout(layout, group)
    check_attention(q, k, v, layout.ring_tokens)
    check_scale(softmax_scale)
    attention = BlockAttention(
        kernel=select_kernel(q.device, q.dtype, q.shape[2], v.shape[2], kernel, deterministic=deterministic),
        scale=q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale,
        deterministic=deterministic,
    )
    return cast(Tensor, _RingAttention.apply(q, k, v, layout, group, attention, causal))


@dataclass(frozen=True)
class BlockAttention:
    """A kernel with its settings, applied to the rows of one ring step. It is not called where a step has none."""

    kernel: AttentionKernel
    scale: float
    deterministic: bool

    def forward(self, step: RingStep, q: Tensor, kv: _KeysValues) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the step's rows of `q`, over the step's rows of `kv`."""
        q, k, v = step.queries.take(q), step.keys.take(kv.keys), step.keys.take(kv.values)
        if len(step.segments) == 0:
            wide = accumulation_dtype(q.dtype)
            return q.new_zeros((0, q.shape[1], v.shape[2])), q.new_zeros((q.shape[1], 0), dtype=wide)
        return self.kernel.forward(q, k, v, step.segments, scale=self.scale, causal=step.causal)

    def backward(
        self, step: RingStep, dout: Tensor, q: Tensor, kv: _KeysValues, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The step's part of the gradients of its rows of q, k and v; `out` and `lse` are those over all steps."""
        q, k, v = step.queries.take(q), step.keys.take(kv.keys), step.keys.take(kv.values)
        if len(step.segments) == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        return self.kernel.backward(
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


class _KeysValues:
    """Keys (n, h_kv, d_qk) and values (n, h_kv, d_v), or their gradients."""

    def __init__(self, keys: Tensor, values: Tensor, flat: Tensor | None = None) -> None:
        self.keys, self.values, self._flat = keys, values, flat

    @property
    def flat(self) -> Tensor:
        """All keys and then all values, in one buffer of one dimension."""
        if self._flat is None:
            self._flat = torch.cat((self.keys.flatten(), self.values.flatten()))
        return self._flat

    def empty(self, rows: int) -> _KeysValues:
        """As many heads and widths for `rows` tokens, as views of one flat buffer that is not filled yet."""
        return self._views(self.flat.new_empty(rows * self._row))

    def zeros(self, dtype: torch.dtype) -> _KeysValues:
        """As many tokens, heads and widths, as views of one flat buffer of zeros."""
        return self._views(torch.zeros_like(self.flat, dtype=dtype))

    @property
    def _row(self) -> int:
        """Elements of one token."""
        return self.keys.shape[1] * (self.keys.shape[2] + self.values.shape[2])

    def _views(self, flat: Tensor) -> _KeysValues:
        rows = flat.numel() // self._row
        keys, values = (torch.Size((rows, *x.shape[1:])) for x in (self.keys, self.values))
        return _KeysValues(flat[: keys.numel()].view(keys), flat[keys.numel() :].view(values), flat)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: ShardLayout,
        group: Group,
        attention: BlockAttention,
        causal: bool,
    ) -> Tensor:
        ctx.context = (layout, group, attention, causal)
        q, k, v = (layout.real_rows.take(x) for x in (q, k, v))
        out, lse, kv = _forward(q, _KeysValues(k, v), *ctx.context)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv.keys, kv.values, out, lse)
        return with_padding(out, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        layout = ctx.context[0]
        gradients = _backward(layout.real_rows.take(dout), q, _KeysValues(k, v), out, lse, *ctx.context)
        return *(with_padding(x.to(q.dtype), layout) for x in gradients), None, None, None, None


def _forward(
    q: Tensor, kv: _KeysValues, layout: ShardLayout, group: Group, attention: BlockAttention, causal: bool
) -> tuple[Tensor, Tensor, _KeysValues]:
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
    kv: _KeysValues,
    out: Tensor,
    lse: Tensor,
    layout: ShardLayout,
    group: Group,
    attention: BlockAttention,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `q` and of this rank's own keys and values, in the accumulation dtype where there are several."""
    steps = layout.steps(causal)[::-1]
    if len(steps) == 1:
        return attention.backward(steps[0], dout, q, kv, out, lse)
    dq = torch.zeros_like(q, dtype=lse.dtype)
    dkv = kv.zeros(lse.dtype)
    gradient_hop: _Hop | None = None
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        rows = 0 if following is None else layout.real_tokens(following.source)
        hop = None if following is None else _Hop(kv, group, -1, rows)
        dq_part, dk_part, dv_part = attention.backward(step, dout, q, kv, out, lse)
        if gradient_hop is not None:
            dkv = gradient_hop.wait()
        step.queries.add(dq, dq_part)
        step.keys.add(dkv.keys, dk_part)
        step.keys.add(dkv.values, dv_part)
        if hop is not None:
            gradient_hop = _Hop(dkv, group, -1, rows)
            kv = hop.wait()
    return dq, dkv.keys, dkv.values


class _Hop:
    """Keys and values on their way to the next rank of the ring (direction ±1), while those of `rows` tokens come in.

    Both ends know the number of rows from the layout; where there are none nothing is sent.
    """

    def __init__(self, sent: _KeysValues, group: Group, direction: int, rows: int) -> None:
        self._sent = sent  # kept until it has left
        self._received = sent.empty(rows)
        operations = []
        if sent.flat.numel():
            to = group.ring_peer(direction)
            operations.append(dist.P2POp(dist.isend, sent.flat, to, group.process_group))
            group.counters.add("ring", sent.flat.numel() * sent.flat.element_size())
        if rows:
            source = group.ring_peer(-direction)
            operations.append(dist.P2POp(dist.irecv, self._received.flat, source, group.process_group))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> _KeysValues:
        for work in self._works:
            work.wait()
        return self._received


def with_padding(x: Tensor, layout: ShardLayout) -> Tensor:
    """Rows of real tokens put back to their slots, zeros elsewhere."""
    if x.shape[0] == layout.ring_tokens:
        return x
    padded = x.new_zeros((layout.ring_tokens, *x.shape[1:]))
    layout.real_rows.put(padded, x)
    return padded
