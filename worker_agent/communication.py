"""Exchanges of rows between the ranks of a process group, with the bytes that were sent counted.

Guarantees: `exchange` is the transpose of itself with the row counts swapped, so its backward sends exactly as many
bytes as its forward; only bytes that leave the rank are counted; what a rank keeps costs nothing. A process group of
None is this rank alone, so callers need no case of their own for a group of one. What is started runs beside what the
caller computes until it is waited for; on an accelerator all of it runs on one stream, in the order in which it was
started, whatever the process groups: two communicators cannot wait for each other in different orders.

Does not: create process groups (see `groups`), or agree on row counts: both ends know them from the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from scheduler_service.domain import InvalidInputError, Reason


class ByteCounters:
    """Bytes that this rank sent to others, by kind: "ulysses", "ring", "ep", "reroute".

    Safe to use from several threads: backward passes and the agent run on threads of their own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}

    def add(self, kind: str, n: int) -> None:
        """Count `n` more bytes of `kind`."""
        with self._lock:
            self._bytes[kind] = self._bytes.get(kind, 0) + n

    def snapshot(self) -> dict[str, int]:
        """Totals since construction, by kind. The difference of two snapshots belongs to what ran in between."""
        with self._lock:
            return dict(self._bytes)


class Transfer:
    """Rows on their way to this rank; `wait`, once, returns them.

    Until then it keeps both buffers alive, and nobody may write what is being sent.
    """

    def __init__(
        self, received: Tensor, sent: Tensor | None = None, arrival: Callable[[], object] | None = None
    ) -> None:
        self._received, self._sent, self._arrival = received, sent, arrival
        self._finish: Callable[[Tensor], Tensor] | None = None

    def then(self, finish: Callable[[Tensor], Tensor]) -> Transfer:
        """This transfer, with `finish` applied to the rows once they are here."""
        self._finish = finish
        return self

    def wait(self) -> Tensor:
        """The rows, once they are here. On an accelerator the current stream waits, not the host."""
        if self._arrival is not None:
            self._arrival()
        self._sent = None
        return self._received if self._finish is None else self._finish(self._received)


def start_all_to_all(
    x: Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
    group: dist.ProcessGroup | None,
    counters: ByteCounters,
    kind: str,
) -> Transfer:
    """Begin to send `input_rows[j]` rows of `x` to rank j of `group`, and to receive what the others send to this one.

    `x` (Σ input_rows, …) holds the rows in the order of their receivers; what arrives (Σ output_rows, …) holds them in
    the order of their senders, `output_rows[j]` from rank j; it is `x` itself on a rank alone. Collective over
    `group`; not differentiable. Raises `InvalidInputError` where the counts fit neither the group nor `x`.
    """
    size, rank = _size_and_rank(group)
    _check_rows(x, output_rows, input_rows, size, rank, kind)
    if group is None:
        return Transfer(x)
    row_bytes = x.element_size() * prod(x.shape[1:])
    counters.add(kind, (sum(input_rows) - input_rows[rank]) * row_bytes)
    sent, received = x.contiguous(), x.new_empty((sum(output_rows), *x.shape[1:]))
    return _started(
        received,
        sent,
        partial(
            dist.all_to_all_single, received, sent, list(output_rows), list(input_rows), group=group, async_op=True
        ),
    )


def start_all_gather(x: Tensor, group: dist.ProcessGroup | None, counters: ByteCounters, kind: str) -> Transfer:
    """Begin to collect the rows of all ranks: `x` (t, …), of one shape on every rank, arrives as (ranks·t, …), by rank.

    Collective over `group`; not differentiable; on a rank alone `x` itself.
    """
    size, _ = _size_and_rank(group)
    if group is None:
        return Transfer(x)
    counters.add(kind, (size - 1) * x.element_size() * x.numel())
    sent, received = x.contiguous(), x.new_empty((size * x.shape[0], *x.shape[1:]))
    return _started(received, sent, partial(_all_gather(), received, sent, group=group, async_op=True))


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup | None, counters: ByteCounters, kind: str) -> Transfer:
    """Begin to sum rows over the ranks: block r of `x` (ranks·t, …) goes to rank r, where a sum (t, …) arrives.

    The transpose of `start_all_gather`, of as many bytes. Blocks travel as they are and are summed in the order of the
    ranks, in fp32 (fp64 for fp64), then rounded once: bit-equal from run to run. Collective over `group`.
    """
    size, _ = _size_and_rank(group)
    rows = [x.shape[0] // size] * size
    transfer = start_all_to_all(x, rows, rows, group, counters, kind)
    return transfer if group is None else transfer.then(partial(_sum_of_blocks, blocks=size))


def all_to_all(
    x: Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
    group: dist.ProcessGroup | None,
    counters: ByteCounters,
    kind: str,
) -> Tensor:
    """`start_all_to_all`, waited for at once."""
    return start_all_to_all(x, output_rows, input_rows, group, counters, kind).wait()


def exchange(
    x: Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
    group: dist.ProcessGroup | None,
    counters: ByteCounters,
    kind: str,
) -> Tensor:
    """`all_to_all` that carries gradients: the backward is the reverse exchange.

    Backward is collective too: if the result needs a gradient on one rank of the group it must on all of them.
    """
    return cast(Tensor, _Exchange.apply(x, tuple(output_rows), tuple(input_rows), group, counters, kind))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        output_rows: tuple[int, ...],
        input_rows: tuple[int, ...],
        group: dist.ProcessGroup | None,
        counters: ByteCounters,
        kind: str,
    ) -> Tensor:
        ctx.reverse = (input_rows, output_rows, group, counters, kind)
        return all_to_all(x, output_rows, input_rows, group, counters, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return all_to_all(gradient, *ctx.reverse), None, None, None, None, None


def _all_gather() -> Callable[..., dist.Work]:
    """The operation has this name since torch 2.13, where the older one is deprecated."""
    return cast(Any, getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)


def _started(received: Tensor, sent: Tensor, collective: Callable[[], dist.Work]) -> Transfer:
    """Run `collective` behind all that the current stream has to do and behind earlier exchanges."""
    if not received.is_cuda:
        return Transfer(received, sent, collective().wait)
    stream = _exchange_stream(received.device)
    stream.wait_stream(torch.cuda.current_stream(received.device))
    with torch.cuda.stream(stream):
        collective().wait()  # lets this stream wait for that of the communicator
        arrived = stream.record_event()
    return Transfer(received, sent, lambda: torch.cuda.current_stream(received.device).wait_event(arrived))


@cache
def _exchange_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _sum_of_blocks(x: Tensor, blocks: int) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.unflatten(0, (blocks, -1)).sum(0, dtype=wide).to(x.dtype)


def _size_and_rank(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))


def _check_rows(
    x: Tensor, output_rows: Sequence[int], input_rows: Sequence[int], size: int, rank: int, kind: str
) -> None:
    if len(output_rows) != size or len(input_rows) != size:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"{kind} exchange: {len(input_rows)} counts to send and {len(output_rows)} to receive for a process group "
            f"of {size} ranks; give one count per rank",
        )
    if x.dim() == 0 or x.shape[0] != sum(input_rows) or min(*input_rows, *output_rows) < 0:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"{kind} exchange: a tensor of shape {tuple(x.shape)} cannot be cut into rows {list(input_rows)}",
        )
    if output_rows[rank] != input_rows[rank]:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"{kind} exchange: rank {rank} sends itself {input_rows[rank]} rows and expects {output_rows[rank]}",
        )
