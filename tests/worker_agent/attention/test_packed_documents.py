"""Documents that share a packed stream do not see each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.attention import Case, layout_of, shard, streams
from tests.support.ranks import run_ranks
from worker_agent.attention import hybrid_attention
from worker_agent.groups import Group, GroupRegistry

PACK = Case((37, 9, 64, 5), heads=4, kv_heads=2, d_qk=8, d_v=6)
CHANGED = 1
"""The document that gets other contents; it lies between others in every rank's shard."""


def attended(group: Group, causal: bool, changed: bool) -> tuple[Tensor, ...]:
    """Output and gradients of this rank's slots, with the documents as they are or with one of them replaced."""
    layout = layout_of(PACK, group)
    x = streams(PACK)
    if changed:
        first = sum(PACK.lengths[:CHANGED])
        for column in x:
            column[first : first + PACK.lengths[CHANGED]] *= -3.0
    q, k, v, dout = (shard(column, layout) for column in x)
    leaves = [column.requires_grad_() for column in (q, k, v)]
    out = hybrid_attention(*leaves, layout, group, causal=causal)
    out.backward(dout)
    return out.detach(), *(leaf.grad for leaf in leaves)  # type: ignore[misc]


def difference(rank: int, causal: bool) -> list[tuple[bool, bool]]:
    """For each cut: whether the other documents are the same to the bit, and whether the changed one is another."""
    registry, found = GroupRegistry(), []
    for ulysses in (4, 2, 1):
        group = registry.group(0, 4, ulysses)
        sequence = layout_of(PACK, group).sequence
        others, own = (sequence >= 0) & (sequence != CHANGED), sequence == CHANGED
        pairs = list(zip(attended(group, causal, False), attended(group, causal, True), strict=True))
        same = all(torch.equal(before[others], after[others]) for before, after in pairs)
        found.append((same, not own.any() or not torch.equal(pairs[0][0][own], pairs[0][1][own])))
    return found


@pytest.mark.parametrize("causal", [True, False])
def test_replacing_one_document_changes_nothing_in_the_others_to_the_bit(causal: bool) -> None:
    assert run_ranks(4, difference, causal) == [[(True, True)] * 3] * 4
