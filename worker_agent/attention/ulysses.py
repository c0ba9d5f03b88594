"""The inner level: ranks that hold all heads of some tokens exchange them for some heads of all tokens, and back.

Differentiable, by `exchange` and views around it. Query heads are split evenly. KV heads are fewer: each inner rank
gets those that its query heads read, one for every run of g = gcd(h/h_kv, h/P_u) query heads, so h/g of them travel
in all; their gradients come back one by one and are summed. Keys and values travel together, in one buffer whose rows
hold the key and then the value of a head, so that their widths may differ.

Slots of padding travel like any others (rows are of one size on every rank); nothing here reads their values.
"""

from __future__ import annotations

from math import gcd

from torch import Tensor, cat

from scheduler_service.domain import InvalidInputError, Reason
from worker_agent.communication import exchange
from worker_agent.groups import Group


def scatter_queries(q: Tensor, group: Group) -> Tensor:
    """(t, h, d) of this rank's slots → (t·P_u, h/P_u, d): this rank's heads, of the slots of all inner ranks."""
    return q if group.ulysses == 1 else _scatter_heads(q, group)


def scatter_keys_values(k: Tensor, v: Tensor, query_heads: int, group: Group) -> Tensor:
    """(t, h_kv, d_qk) and (t, h_kv, d_v) → (t·P_u, h/P_u/g, d_qk + d_v): the KV heads that this rank's queries read.

    Head i of the result is read by query heads i·g … (i+1)·g − 1 of `scatter_queries`, as a kernel expects it.
    """
    copies = kv_heads_sent(query_heads, k.shape[1], group.ulysses) // k.shape[1]
    both = cat((k, v), dim=-1)
    if group.ulysses == 1:
        return both
    return _scatter_heads(both if copies == 1 else _repeated(both, copies), group)


def gather_outputs(out: Tensor, group: Group) -> Tensor:
    """(t·P_u, h/P_u, d) → (t, h, d): the inverse of `scatter_queries`."""
    if group.ulysses == 1:
        return out
    slots = out.shape[0] // group.ulysses
    rows = [slots] * group.ulysses
    received = exchange(out, rows, rows, group.ulysses_group, group.counters, "ulysses")
    return received.unflatten(0, (group.ulysses, slots)).transpose(0, 1).flatten(1, 2)


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


def _scatter_heads(x: Tensor, group: Group) -> Tensor:
    by_receiver = x.unflatten(1, (group.ulysses, -1)).transpose(0, 1).flatten(0, 1)
    rows = [x.shape[0]] * group.ulysses
    return exchange(by_receiver, rows, rows, group.ulysses_group, group.counters, "ulysses")


def _repeated(x: Tensor, copies: int) -> Tensor:
    """(t, h_kv, d) → (t, h_kv·copies, d), copies of a head side by side; backward sums their gradients."""
    return x.unsqueeze(2).expand(-1, -1, copies, -1).flatten(1, 2)
