"""The inner level: ranks that hold all heads of some tokens exchange them for some heads of all tokens, and back.

Here is who gets what: the order of rows before and after an exchange, as views and copies that carry gradients; the
exchanges themselves are in `overlap`. Query heads are split evenly. KV heads are fewer: each inner rank gets those
that its query heads read, one for every run of g = gcd(h/h_kv, h/P_u) query heads, so h/g of them travel in all; their
gradients come back one by one and are summed.

Slots of padding travel like any others (rows are of one size on every rank); nothing here reads their values.
"""

from __future__ import annotations

from math import gcd

from torch import Tensor

from scheduler_service.domain import InvalidInputError, Reason


def kv_heads_sent(query_heads: int, kv_heads: int, ulysses: int) -> int:
    """h' = h/g with g = gcd(h/h_kv, h/P_u): KV heads that the inner ranks hold in all, copies counted.

    Every KV head is held h'/h_kv times, by inner ranks next to each other. Raises `InvalidInputError` where heads do
    not divide.
    """
    if query_heads % kv_heads or query_heads % ulysses:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"{query_heads} query heads over {kv_heads} KV heads on Ulysses groups of {ulysses}: the query heads must "
            "be a multiple of both; set the pool's heads and max_ulysses to what the model has",
        )
    return query_heads // gcd(query_heads // kv_heads, query_heads // ulysses)


def rows_by_receiver(x: Tensor, copies: int, ulysses: int) -> Tensor:
    """(t, h, d) → (P_u·t, h·copies/P_u, d): block i holds the heads of inner rank i, of all slots of this rank.

    `copies` of a head lie side by side. They are made in the buffer that is sent, not before (but for head counts where
    a receiver needs two different heads and a copy of one); backward sums the gradients of the copies.
    """
    slots, heads, width = x.shape
    by_head = x.unsqueeze(2).expand(-1, -1, copies, -1).permute(1, 2, 0, 3)
    return by_head.reshape(ulysses, heads * copies // ulysses, slots, width).transpose(1, 2).flatten(0, 1)


def heads_by_slot(x: Tensor, ulysses: int) -> Tensor:
    """(P_u·t, m, d), block i from inner rank i with its heads of this rank's slots → (t, P_u·m, d)."""
    return x.unflatten(0, (ulysses, -1)).transpose(0, 1).flatten(1, 2)
