"""Attention of packed sequences over a group of ranks: inner Ulysses, outer ring."""

from __future__ import annotations

import math

from torch import Tensor

from scheduler_service.domain import InvalidInputError, Reason
from worker_agent.attention.kernels import select_kernel
from worker_agent.attention.layout import ShardLayout
from worker_agent.attention.ring import BlockAttention, ring_attention
from worker_agent.attention.ulysses import gather_outputs, kv_heads_sent, scatter_keys_values, scatter_queries
from worker_agent.groups import Group


def hybrid_attention(
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
    """Each sequence of `layout` attends to itself, over all ranks of `group`.

    q (t, h, d_qk), k (t, h_kv, d_qk) and v (t, h_kv, d_v) hold this rank's t = `layout.tokens` slots, rotated by
    `layout.positions`; the result (t, h, d_v) is in the dtype of q. Slots of padding are never read, and have output
    0 and gradient 0. `softmax_scale`: 1/√d_qk if None. `kernel`: an adapter's name, else the fastest that can run
    such inputs. `deterministic`: bit-equal from run to run. Numerics: partial results are merged, and gradients
    summed, in fp32 (fp64 for fp64), and rounded once.

    Collective over `group`, forward and, if q, k or v needs a gradient, backward: then they need it on every rank.
    Raises `InvalidInputError` where shapes, layout and group do not fit each other.
    """
    _check(q, k, v, layout, group)
    if softmax_scale is not None and not (math.isfinite(softmax_scale) and softmax_scale > 0):
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"softmax_scale is {softmax_scale}; give a finite number above 0: kernels scale the mask's −∞, too",
        )
    attention = BlockAttention(
        kernel=select_kernel(q.device, q.dtype, q.shape[2], v.shape[2], kernel),
        scale=q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale,
        deterministic=deterministic,
    )
    queries = scatter_queries(q, group)
    keys_values = scatter_keys_values(k, v, q.shape[1], group)
    out = ring_attention(queries, keys_values, layout, group, attention, causal=causal)
    return gather_outputs(out, group)


def _check(q: Tensor, k: Tensor, v: Tensor, layout: ShardLayout, group: Group) -> None:
    if (layout.ulysses, layout.ring, layout.rank) != (group.ulysses, group.ring, group.rank):
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"the layout is that of rank {layout.rank} of {layout.ulysses} × {layout.ring} ranks, the group that of "
            f"rank {group.rank} of {group.ulysses} × {group.ring}: make both from the same microbatch of the plan",
        )
    fits = (
        q.dim() == k.dim() == v.dim() == 3
        and q.shape[0] == k.shape[0] == v.shape[0] == layout.tokens
        and q.shape[2] == k.shape[2]
        and k.shape[1] == v.shape[1]
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and min(q.shape[1], k.shape[1], q.shape[2], v.shape[2]) > 0
    )
    if not fits:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"q {_described(q)}, k {_described(k)}, v {_described(v)} for a layout of {layout.tokens} slots: expected "
            f"q (t, h, d_qk), k (t, h_kv, d_qk), v (t, h_kv, d_v) of one dtype on one device, with t = {layout.tokens} "
            "and heads and widths of 1 or more",
        )
    kv_heads_sent(q.shape[1], k.shape[1], group.ulysses)


def _described(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} {x.device}"
