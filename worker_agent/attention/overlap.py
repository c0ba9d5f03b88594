"""Exchanges among the inner ranks that run beside what is computed between their launch and their wait.

Launch and wait are two autograd functions. Launch.forward starts the collective, Wait.forward waits for it;
Wait.backward starts the reverse collective, Launch.backward waits for that. Autograd runs nodes that were created
later first, so whatever stands between launch and wait in the program also hides the reverse exchange:

    forward    launch ─▶ compute ─▶ wait            backward    wait: start ─▶ compute ─▶ launch: wait

Between the two goes a scalar, no buffer: nothing can read a gradient before it has arrived. The wait saves that scalar
and reads it in backward, so that a checkpoint that stops its recomputation early does not stop between a launch and
its wait, and so that every rank recomputes before it sends a gradient. The launch takes an anchor, a scalar that needs
a gradient: ranks whose inputs need none take part in the reverse exchange all the same.

The order of collectives is that of the program, on every rank. Does not: notice that a result is used on some ranks
only. The caller ties it in (`loss + 0 · out.sum()`), or those that do use it wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scheduler_service.domain import HydraCpError, InvalidInputError, Reason
from worker_agent.attention.inputs import check_layout, check_rows, described
from worker_agent.attention.layout import ShardLayout
from worker_agent.attention.ulysses import heads_by_slot, kv_heads_sent, rows_by_receiver
from worker_agent.communication import Transfer, start_all_gather, start_all_to_all, start_reduce_scatter
from worker_agent.groups import Group


def gradient_anchor(x: Tensor) -> Tensor:
    """A scalar beside `x` that needs a gradient; one serves all exchanges of a layer. It gets none."""
    return torch.zeros((), device=x.device, requires_grad=True)


def start_exchange(
    x: Tensor,
    layout: ShardLayout,
    group: Group,
    anchor: Tensor,
    *,
    to: Literal["heads", "slots"] = "heads",
    query_heads: int | None = None,
) -> PendingExchange:
    """Launch one Ulysses exchange; `wait` on the result gives the tensor.

    `to="heads"`: queries, keys or values (t, h, d) of this rank's t = `layout.tokens` slots → (t·P_u, h'/P_u, d), this
    rank's heads of all `layout.ring_tokens` slots of the ring shard. Keys and values say how many query heads read them
    (`query_heads`; None: as many as `x` has): h' is then `kv_heads_sent`, and head i of the result belongs to an equal
    run of this rank's query heads. `to="slots"`: outputs (t·P_u, h/P_u, d) → (t, h, d), the inverse.

    `x` must not be written before the wait. `anchor`: see `gradient_anchor`. Collective over the inner ranks, in
    backward too, on every rank. Sends (P_u − 1)/P_u of what leaves or arrives as `to="slots"`, each way. Raises
    `InvalidInputError`.
    """
    check_layout(layout, group)
    _check_anchor(anchor)
    check_rows(x, layout.tokens if to == "heads" else layout.ring_tokens, dims=3)
    if to == "heads":
        heads = x.shape[1]
        copies = kv_heads_sent(query_heads or heads, heads, group.ulysses) // heads
        x, finish = rows_by_receiver(x, copies, group.ulysses), None
    else:
        finish = partial(heads_by_slot, ulysses=group.ulysses)
    rows = [layout.tokens] * group.ulysses
    swap = partial(
        start_all_to_all,
        output_rows=rows,
        input_rows=rows,
        group=group.ulysses_group,
        counters=group.counters,
        kind="ulysses",
    )
    return PendingExchange(x, anchor, _Route(swap, swap), finish)


def start_gather(x: Tensor, layout: ShardLayout, group: Group, anchor: Tensor) -> PendingExchange:
    """Launch an all-gather over the inner ranks: (t, d) of this rank's slots → (t·P_u, d) of the ring shard.

    Gradients are reduce-scattered: what arrives for a row is the sum over the inner ranks, in fp32 (fp64 for fp64).
    Sends (P_u − 1)·t·d elements, each way. Otherwise like `start_exchange`.
    """
    check_layout(layout, group)
    _check_anchor(anchor)
    check_rows(x, layout.tokens, dims=2)
    there = partial(start_all_gather, group=group.ulysses_group, counters=group.counters, kind="ulysses")
    back = partial(start_reduce_scatter, group=group.ulysses_group, counters=group.counters, kind="ulysses")
    return PendingExchange(x, anchor, _Route(there, back))


class PendingExchange:
    """An exchange that was launched. Wait for each, once, in the order of the launches."""

    def __init__(
        self, x: Tensor, anchor: Tensor, route: _Route, finish: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._route, self._finish = route, finish
        self._token = cast(Tensor, _Launch.apply(x, anchor, route))

    def wait(self) -> Tensor:
        """The result, differentiable. On an accelerator the current stream waits, not the host."""
        arrived = cast(Tensor, _Wait.apply(self._token, self._route))
        return arrived if self._finish is None else self._finish(arrived)


class _Route:
    """One exchange, there and back: what was started and is not yet waited for."""

    def __init__(self, there: Callable[[Tensor], Transfer], back: Callable[[Tensor], Transfer]) -> None:
        self._there, self._back = there, back
        self._under_way: Transfer | None = None

    def launch(self, x: Tensor) -> None:
        self._under_way = self._there(x)

    def launch_back(self, gradient: Tensor) -> None:
        self._under_way = self._back(gradient)

    def arrive(self) -> Tensor:
        transfer, self._under_way = self._under_way, None
        if transfer is None:
            raise HydraCpError(
                Reason.INVALID_ARGUMENT, "this exchange was waited for already: keep what its wait() returned"
            )
        return transfer.wait()


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        route.launch(x)
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        gradient = ctx.route.arrive()
        return gradient if ctx.needs_input_grad[0] else None, None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, route: _Route) -> Tensor:
        ctx.save_for_backward(token)
        ctx.route = route
        return route.arrive().detach()  # on a rank alone what arrives is what was sent, with a history of its own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors  # before anything is sent: a checkpoint recomputes here
        ctx.route.launch_back(gradient)
        return token.detach(), None


def _check_anchor(anchor: Tensor) -> None:
    if torch.is_grad_enabled() and not anchor.requires_grad:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"the anchor of an exchange is {described(anchor)} and needs no gradient: a rank whose input needs none "
            "would not send gradients back while others wait for them; give gradient_anchor(x)",
        )
