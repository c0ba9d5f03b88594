"""Exchanges that run beside computation, against the same layer with exchanges that block.

One launch of four ranks gathers what the tests look at.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scheduler_service.domain import HydraCpError, InvalidInputError
from tests.support.exchanges import Waited, held_back, intercepted
from tests.support.ranks import run_ranks
from worker_agent.attention import ShardLayout, gradient_anchor, ring_attention, start_exchange, start_gather
from worker_agent.attention.ulysses import heads_by_slot, rows_by_receiver
from worker_agent.communication import exchange
from worker_agent.groups import Group, GroupRegistry

RANKS = 4
SHAPES = (1, 2, 4)
"""P_u: no exchange at all but for the ring, both, and no ring."""
HEADS, KV_HEADS, D_QK, D_V, HIDDEN = 4, 1, 6, 5, 7
LENGTHS = (13, 1, 40, 5)

Tensors = dict[str, Tensor]
Exchanged = Callable[[Tensor, str], Tensor]


def inputs(layout: ShardLayout) -> Tensors:
    """Leaves of the layer: one input for each branch, so that each gradient is one term and has to be bit-equal."""
    generator = torch.Generator().manual_seed(layout.rank)
    columns = {"q": HEADS * D_QK, "k": KV_HEADS * D_QK, "v": KV_HEADS * D_V, "gate": HEADS * D_V}
    made = {f"x_{name}": torch.randn(layout.tokens, HIDDEN, generator=generator) for name in columns}
    generator.manual_seed(99)
    made |= {f"w_{name}": torch.randn(HIDDEN, width, generator=generator) for name, width in columns.items()}
    return {name: x.double().requires_grad_() for name, x in made.items()}


def overlapped(leaves: Tensors, layout: ShardLayout, group: Group) -> Tensor:
    """A gated layer as the modules are written; (t, h, d_v)."""
    anchor = gradient_anchor(leaves["x_q"])
    queries = start_exchange(projected(leaves, "q", HEADS), layout, group, anchor)
    values = start_exchange(projected(leaves, "v", KV_HEADS), layout, group, anchor, query_heads=HEADS)
    keys = start_exchange(projected(leaves, "k", KV_HEADS), layout, group, anchor, query_heads=HEADS)
    q, v, k = queries.wait(), values.wait(), keys.wait()
    out = start_exchange(ring_attention(q, k, v, layout, group), layout, group, anchor, to="slots")
    gate = projected(leaves, "gate", HEADS).sigmoid()
    return out.wait() * gate


def blocking(leaves: Tensors, layout: ShardLayout, group: Group) -> Tensor:
    """The same with exchanges that are over when they return."""
    rows = [layout.tokens] * group.ulysses

    def exchanged(x: Tensor) -> Tensor:
        return exchange(x, rows, rows, group.ulysses_group, group.counters, "ulysses")

    q = exchanged(rows_by_receiver(projected(leaves, "q", HEADS), 1, group.ulysses))
    k, v = (
        exchanged(rows_by_receiver(projected(leaves, name, KV_HEADS), group.ulysses // KV_HEADS, group.ulysses))
        for name in "kv"
    )
    out = heads_by_slot(exchanged(ring_attention(q, k, v, layout, group)), group.ulysses)
    return out * projected(leaves, "gate", HEADS).sigmoid()


def projected(leaves: Tensors, name: str, heads: int) -> Tensor:
    return (leaves[f"x_{name}"] @ leaves[f"w_{name}"]).unflatten(1, (heads, -1))


Layer = Callable[[Tensors, ShardLayout, Group], Tensor]


def gradients(
    layer: Layer, layout: ShardLayout, group: Group, *, frozen: bool = False, unused: bool = False, passes: int = 1
) -> Tensors:
    """Output and gradients of one rank. `frozen`: no leaf needs one. `unused`: the loss takes 0 of the output."""
    leaves = inputs(layout)
    if frozen:
        leaves = {name: x.detach() for name, x in leaves.items()}
    out = layer(leaves, layout, group)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7 + layout.rank), dtype=out.dtype)
    loss = (out * weight).sum() * (0 if unused else 1)
    for attempt in range(passes):
        loss.backward(retain_graph=attempt + 1 < passes)
    return {"out": out.detach()} | {name: x.grad for name, x in leaves.items() if x.grad is not None}


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Counted:
    """Counts collectives that were started, and those that were waited for."""

    def __init__(self) -> None:
        self.started = self.waited = 0

    def start(self, received: Tensor, collective: Callable[[], dist.Work]) -> Waited:
        self.started += 1
        work = collective()

        def arrive() -> None:
            self.waited += 1
            work.wait()

        return Waited(arrive)


def late(received: Tensor, collective: Callable[[], dist.Work], pace: random.Random) -> Waited:
    """Launch and arrival after times of this rank's own."""
    time.sleep(pace.choice((0, 0, 0.005)))
    work = collective()

    def arrive() -> None:
        time.sleep(pace.choice((0, 0, 0.005)))
        work.wait()

    return Waited(arrive)


def checkpointed(layer: Layer, leaves: Tensors, layout: ShardLayout, group: Group) -> Tensor:
    out: Any = checkpoint(layer, leaves, layout, group, use_reentrant=False)
    return out


def ends_in_an_exchange(leaves: Tensors, layout: ShardLayout, group: Group) -> Tensor:
    """Nothing is saved after the launch but by the wait; what is saved last without it lies before the launch."""
    x = projected(leaves, "q", HEADS).sin()
    return start_exchange(x, layout, group, gradient_anchor(x)).wait()


def arrives_elsewhere(group: Group, layout: ShardLayout) -> Tensors:
    """Gradients of views, through views: every element is its own number, and is to get that number back."""
    rank = group.ulysses_index

    def numbers(ranks: Tensor, slots: Tensor, heads: Tensor) -> Tensor:
        width = torch.arange(2.0)
        return ((ranks * 100 + slots)[:, None, None] * 100 + heads[None, :, None]) * 10 + width

    slots, heads = torch.arange(layout.tokens), torch.arange(HEADS)
    own = numbers(torch.full_like(slots, rank), slots, heads)
    x = own.transpose(0, 2).contiguous().requires_grad_()  # given as a view that is not contiguous
    there = start_exchange(x.transpose(0, 2), layout, group, gradient_anchor(x))
    y = there.wait()
    all_ranks = torch.arange(group.ulysses).repeat_interleave(layout.tokens)
    own_heads = heads.chunk(group.ulysses)[rank]
    expected = numbers(all_ranks, slots.repeat(group.ulysses), own_heads)
    # The gradient comes as a view, too: transposed for one half, expanded for the other.
    (y.permute(2, 1, 0)[..., ::2] * expected.permute(2, 1, 0)[..., ::2]).sum().backward(retain_graph=True)
    half = x.grad
    x.grad = None
    y.sum().backward()
    assert half is not None
    even = torch.arange(group.ulysses * layout.tokens).reshape(group.ulysses, -1)[rank] % 2 == 0
    return {
        "arrived": y.detach() - expected,
        "transposed": half.transpose(0, 2) - own * even[:, None, None],
        "expanded": x.grad - 1,  # type: ignore[operator]
    }


def evidence(rank: int) -> list[dict[str, Any]]:
    """What this rank saw of everything that the tests claim, by shape."""
    registry = GroupRegistry()
    return [evidence_on(registry.group(0, RANKS, ulysses)) for ulysses in SHAPES]


def evidence_on(group: Group) -> dict[str, Any]:
    rank = group.rank
    layout = ShardLayout(LENGTHS, group.ulysses, group.ring, rank)
    run = partial(gradients, layout=layout, group=group)
    expected = run(blocking)
    found: dict[str, Any] = {"blocking": same(run(overlapped), expected)}

    with intercepted(held_back):
        found["held back"] = same(run(overlapped), expected)
        found["held back, checkpointed"] = same(run(partial(checkpointed, overlapped)), expected)
    pace = random.Random(rank)
    with intercepted(partial(late, pace=pace)):
        found["late"] = all(same(run(overlapped), expected) for _ in range(5))

    counted = Counted()
    with intercepted(counted.start):
        found["checkpointed"] = same(run(partial(checkpointed, overlapped)), expected)
        found["exchanges of a checkpointed layer"] = (counted.started, counted.waited)
        plain = run(ends_in_an_exchange)
        counted.started = counted.waited = 0
        found["ends in an exchange"] = same(run(partial(checkpointed, ends_in_an_exchange)), plain)
        found["exchanges of one that ends in one"] = (counted.started, counted.waited)

    found["frozen everywhere"] = list(run(overlapped, frozen=True))
    found["frozen here"] = same(run(overlapped, frozen=rank == 1), {"out": expected["out"]} if rank == 1 else expected)
    checkpointed_layer = partial(checkpointed, overlapped)
    found["frozen here, checkpointed"] = same(
        run(checkpointed_layer, frozen=rank == 1), {"out": expected["out"]} if rank == 1 else expected
    )
    twice = run(overlapped, passes=2)
    found["twice"] = same(twice, {name: x if name == "out" else 2 * x for name, x in expected.items()})
    found["unused here"] = same(run(overlapped, unused=rank == 2), run(blocking, unused=rank == 2))
    found["views"] = arrives_elsewhere(group, layout)
    return found


@pytest.fixture(scope="module")
def found() -> list[list[dict[str, Any]]]:
    """By rank and shape."""
    return run_ranks(RANKS, evidence)


def everywhere(found: list[list[dict[str, Any]]], *names: str) -> None:
    for rank, shapes in enumerate(found):
        for ulysses, seen in zip(SHAPES, shapes, strict=True):
            for name in names:
                assert seen[name] is True, f"{name!r} on rank {rank} with {ulysses} inner ranks"


def test_output_and_gradients_are_bit_equal_to_those_of_blocking_exchanges(found: list[list[dict[str, Any]]]) -> None:
    everywhere(found, "blocking")


def test_nothing_reads_a_tensor_or_a_gradient_before_its_exchange_arrived(found: list[list[dict[str, Any]]]) -> None:
    everywhere(found, "held back", "held back, checkpointed")


def test_random_delays_around_launch_and_arrival_change_nothing(found: list[list[dict[str, Any]]]) -> None:
    everywhere(found, "late")


def test_a_checkpointed_layer_is_bit_equal_and_leaves_no_exchange_behind(found: list[list[dict[str, Any]]]) -> None:
    everywhere(found, "checkpointed", "ends in an exchange")
    for alone, *shapes in found:
        assert alone["exchanges of a checkpointed layer"] == (0, 0)
        for seen in shapes:  # forward, again, and back
            assert seen["exchanges of a checkpointed layer"] == (12, 12)
            assert seen["exchanges of one that ends in one"] == (3, 3)


def test_ranks_whose_inputs_need_no_gradient_still_send_gradients_back(found: list[list[dict[str, Any]]]) -> None:
    everywhere(found, "frozen here", "frozen here, checkpointed")
    assert all(seen["frozen everywhere"] == ["out"] for shapes in found for seen in shapes)


def test_a_retained_graph_can_be_run_backward_again(found: list[list[dict[str, Any]]]) -> None:
    everywhere(found, "twice")


def test_an_output_that_one_rank_does_not_use_is_tied_in_by_a_zero(found: list[list[dict[str, Any]]]) -> None:
    everywhere(found, "unused here")


def test_gradients_of_views_and_through_views_come_back_to_their_own_elements(
    found: list[list[dict[str, Any]]],
) -> None:
    for seen in (seen for shapes in found for seen in shapes):
        for name, difference in seen["views"].items():
            assert (difference == 0).all(), name


def alone() -> tuple[Tensor, ShardLayout, Group]:
    return torch.randn(5, 4, 3), ShardLayout([5], 1, 1, 0), GroupRegistry().group(0, 1)


def test_a_rank_alone_copies_and_sends_nothing() -> None:
    x, layout, group = alone()
    y = start_exchange(x.requires_grad_(), layout, group, gradient_anchor(x)).wait()
    assert y.data_ptr() == x.data_ptr()
    back = start_exchange(y, layout, group, gradient_anchor(x), to="slots").wait()
    (2 * back).sum().backward()
    assert x.grad is not None
    assert (x.grad == 2).all()
    assert group.counters.snapshot() == {}


def test_what_cannot_be_exchanged_is_refused_by_name() -> None:
    x, layout, group = alone()
    anchor = gradient_anchor(x)
    with pytest.raises(InvalidInputError, match=r"needs no gradient.*give gradient_anchor"):
        start_exchange(x, layout, group, torch.zeros(()))
    with pytest.raises(InvalidInputError, match=r"expected \(t, heads, width\) with t = 5"):
        start_exchange(x[:4], layout, group, anchor)
    with pytest.raises(InvalidInputError, match=r"expected \(t, width\) with t = 5"):
        start_gather(x, layout, group, anchor)
    with pytest.raises(InvalidInputError, match="the group that of rank 0 of 1 × 1"):
        start_exchange(x, ShardLayout([5], 2, 1, 0), group, anchor)
    with pytest.raises(InvalidInputError, match="6 query heads over 4 KV heads"):
        start_exchange(x, layout, group, anchor, query_heads=6)
    pending = start_exchange(x, layout, group, anchor)
    pending.wait()
    with pytest.raises(HydraCpError, match="was waited for already"):
        pending.wait()
