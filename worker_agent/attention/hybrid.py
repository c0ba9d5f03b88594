"""Attention of packed sequences over a group of ranks: inner Ulysses, outer ring."""

from __future__ import annotations

from torch import Tensor

from worker_agent.attention.inputs import check_attention, check_layout, check_scale
from worker_agent.attention.layout import ShardLayout
from worker_agent.attention.overlap import gradient_anchor, start_exchange
from worker_agent.attention.ring import ring_attention
from worker_agent.attention.ulysses import kv_heads_sent
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

    Collective over `group`, forward and backward: the result needs a gradient on every rank, whatever q, k and v do.
    A layer that has something else to compute meanwhile is written from the same pieces, `start_exchange` and
    `ring_attention`. Raises `InvalidInputError` where shapes, layout and group do not fit each other.
    """
    check_layout(layout, group)
    check_attention(q, k, v, layout.tokens)
    check_scale(softmax_scale)
    heads = q.shape[1]
    kv_heads_sent(heads, k.shape[1], group.ulysses)
    anchor = gradient_anchor(q)
    queries = start_exchange(q, layout, group, anchor)
    values = start_exchange(v, layout, group, anchor, query_heads=heads)
    keys = start_exchange(k, layout, group, anchor, query_heads=heads)
    out = ring_attention(
        queries.wait(),
        keys.wait(),
        values.wait(),
        layout,
        group,
        softmax_scale=softmax_scale,
        causal=causal,
        deterministic=deterministic,
        kernel=kernel,
    )
    return start_exchange(out, layout, group, anchor, to="slots").wait()
