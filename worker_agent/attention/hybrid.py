"""Attention of packed sequences over a group of ranks: inner Ulysses, outer ring."""

from __future__ import annotations

from torch import Tensor, cat

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
    anchor = gradient_anchor(q)
    copied = kv_heads_sent(q.shape[1], k.shape[1], group.ulysses) > k.shape[1]
    if group.ulysses > 1 and not copied:
        own_q, own_k, own_v = _exchange_together(q, k, v, layout, group, anchor)
    else:
        own_q, own_k, own_v = _exchange_apart(q, k, v, layout, group, anchor)
    out = ring_attention(
        own_q,
        own_k,
        own_v,
        layout,
        group,
        softmax_scale=softmax_scale,
        causal=causal,
        deterministic=deterministic,
        kernel=kernel,
    )
    return start_exchange(out, layout, group, anchor, to="slots").wait()


def _exchange_together(
    q: Tensor, k: Tensor, v: Tensor, layout: ShardLayout, group: Group, anchor: Tensor
) -> tuple[Tensor, ...]:
    """One exchange carries all three, as nothing runs beside them: a slot's heads for one inner rank lie in a row."""
    by_rank = [x.unflatten(1, (group.ulysses, -1)).flatten(2) for x in (q, k, v)]
    arrived = start_exchange(cat(by_rank, dim=-1), layout, group, anchor).wait().squeeze(1)
    pieces = arrived.split([x.shape[2] for x in by_rank], dim=-1)
    return tuple(piece.unflatten(1, (-1, x.shape[2])) for piece, x in zip(pieces, (q, k, v), strict=True))


def _exchange_apart(
    q: Tensor, k: Tensor, v: Tensor, layout: ShardLayout, group: Group, anchor: Tensor
) -> tuple[Tensor, ...]:
    """Heads of keys and values that several inner ranks read are copied into what is sent, and nowhere else."""
    heads = q.shape[1]
    pending = [start_exchange(x, layout, group, anchor, query_heads=heads) for x in (q, v, k)]
    own_q, own_v, own_k = (exchange.wait() for exchange in pending)
    return own_q, own_k, own_v
