"""Multi-head latent attention that exchanges latents instead of keys and values.

Keys and values of all heads come from one low-rank latent of each token. Where they are wider than P_u latents, every
inner rank gathers the latents of all inner ranks and makes the keys and values of its own heads from them: the same
work in all, and fewer bytes (`latent_is_cheaper`). Queries and outputs are exchanged as ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scheduler_service.domain import InvalidInputError, Reason
from worker_agent.attention.inputs import check_layout, check_rows, check_scale, described
from worker_agent.attention.layout import ShardLayout
from worker_agent.attention.overlap import gradient_anchor, start_exchange, start_gather
from worker_agent.attention.ring import ring_attention, with_padding
from worker_agent.attention.ulysses import kv_heads_sent
from worker_agent.groups import Group


def latent_is_cheaper(ulysses: int, heads: int, latent_width: int, d_qk: int, d_v: int) -> bool:
    """Whether gathering latents sends fewer bytes than exchanging keys and values of all heads.

    `latent_width` = kv_lora + rope. Per token and element, (P_u − 1)·latent_width against
    (P_u − 1)/P_u·h·(d_qk + d_v): where P_u·latent_width < h·(d_qk + d_v). False on a rank alone, which sends nothing.
    """
    return ulysses > 1 and ulysses * latent_width < heads * (d_qk + d_v)


def latent_attention(
    q: Tensor,
    c_kv: Tensor,
    k_rope: Tensor,
    w_up: Tensor,
    layout: ShardLayout,
    group: Group,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    deterministic: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """`hybrid_attention` whose keys and values are made from latents, after the exchange instead of before.

    q (t, h, nope + rope), c_kv (t, kv_lora) and k_rope (t, rope), rotated, hold this rank's t = `layout.tokens` slots;
    w_up is (kv_lora, h·(nope + d_v)), by head the columns of the key and then those of the value. Returns (t, h, d_v).
    Slots of padding are never read; other options as in `hybrid_attention`.

    Gradients of `w_up`, a parameter that all ranks hold alike: this rank leaves those of its own heads' columns, summed
    over the tokens of all inner ranks, and zeros in the other columns. So *summing* gradients over the ranks, as
    for any other parameter, gives those of the whole group; each column is counted once. (`hybrid_attention` leaves all
    columns, for this rank's own tokens: the sum is the same.) Gradients of c_kv and k_rope are whole: the inner ranks'
    parts are summed on their way back.

    Collective over `group`, forward and backward. Raises `InvalidInputError`.
    """
    check_layout(layout, group)
    _check(q, c_kv, k_rope, w_up, layout, group)
    check_scale(softmax_scale)
    anchor = gradient_anchor(q)
    latent = start_gather(torch.cat((c_kv, k_rope), dim=-1), layout, group, anchor)
    queries = start_exchange(q, layout, group, anchor)
    k, v = expand_gathered(latent.wait(), w_up, q.shape[1], q.shape[2], layout, group)
    out = ring_attention(
        queries.wait(),
        k,
        v,
        layout,
        group,
        softmax_scale=softmax_scale,
        causal=causal,
        deterministic=deterministic,
        kernel=kernel,
    )
    return start_exchange(out, layout, group, anchor, to="slots").wait()


def expand_gathered(
    latent: Tensor, w_up: Tensor, heads: int, d_qk: int, layout: ShardLayout, group: Group
) -> tuple[Tensor, Tensor]:
    """Keys and values of this rank's share of `heads`, as `ring_attention` takes them.

    `latent` (T, kv_lora + rope) are the gathered rows of the ring shard, c_kv before the rotated key; `w_up` is whole.
    Its gradient is that of this rank's columns, see `latent_attention`.
    """
    own = heads // group.ulysses
    columns = w_up.shape[1] // group.ulysses
    kv_lora = w_up.shape[0]
    # Padding may hold anything, and would reach the gradient of the weights.
    latent = with_padding(layout.real_rows.take(latent), layout)
    c_kv, k_rope = latent.split((kv_lora, latent.shape[1] - kv_lora), dim=-1)
    own_columns = w_up.narrow(1, group.ulysses_index * columns, columns)
    k_nope, v = expand_latent(c_kv, own_columns, own, d_qk - k_rope.shape[1])
    return add_position(k_nope, k_rope), v


def expand_latent(c_kv: Tensor, w_up: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """Keys without their position (t, heads, nope), and values (t, heads, d_v), from latents (t, kv_lora)."""
    both = (c_kv @ w_up).unflatten(1, (heads, -1))
    k_nope, v = both.split((nope, both.shape[2] - nope), dim=-1)
    return k_nope, v


def add_position(k_nope: Tensor, k_rope: Tensor) -> Tensor:
    """Keys (t, heads, nope + rope): each head's part, and the rotated part (t, rope) that all heads share."""
    return torch.cat((k_nope, k_rope.unsqueeze(1).expand(-1, k_nope.shape[1], -1)), dim=-1)


def _check(q: Tensor, c_kv: Tensor, k_rope: Tensor, w_up: Tensor, layout: ShardLayout, group: Group) -> None:
    check_rows(q, layout.tokens, dims=3)
    check_rows(c_kv, layout.tokens, dims=2)
    check_rows(k_rope, layout.tokens, dims=2)
    heads, nope = q.shape[1], q.shape[2] - k_rope.shape[1]
    fits = (
        q.dtype == c_kv.dtype == k_rope.dtype == w_up.dtype
        and q.device == c_kv.device == k_rope.device == w_up.device
        and w_up.dim() == 2
        and w_up.shape[0] == c_kv.shape[1]
        and heads > 0
        and nope >= 0
        and w_up.shape[1] % heads == 0
        and w_up.shape[1] // heads > nope
    )
    if not fits:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"q {described(q)}, c_kv {described(c_kv)}, k_rope {described(k_rope)}, w_up {described(w_up)}: expected "
            "q (t, h, nope + rope), c_kv (t, kv_lora), k_rope (t, rope) and w_up (kv_lora, h·(nope + d_v)) of one "
            "dtype on one device",
        )
    kv_heads_sent(heads, heads, group.ulysses)
