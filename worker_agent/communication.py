"""Exchanges of rows between the ranks of a process group, with the bytes that were sent counted.

Guarantees: `exchange` is the transpose of itself with the row counts swapped, so its backward sends exactly as many
bytes as its forward; only bytes that leave the rank are counted; what a rank keeps costs nothing. A process group of
None is this rank alone, so callers need no case of their own for a group of one.

Does not: create process groups (see `groups`), overlap an exchange with computation, or agree on row counts: both
ends know them from the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
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


def all_to_all(
    x: Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
    group: dist.ProcessGroup | None,
    counters: ByteCounters,
    kind: str,
) -> Tensor:
    """Send `input_rows[j]` rows of `x` to rank j of `group`, and return the rows that the others sent to this rank.

    `x` (Σ input_rows, …) holds the rows in the order of their receivers; the result (Σ output_rows, …) holds them in
    the order of their senders, `output_rows[j]` from rank j. Collective over `group`; not differentiable. Raises
    `InvalidInputError` where the counts fit neither the group nor `x`.
    """
    size = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    _check_rows(x, output_rows, input_rows, size, rank, kind)
    if group is None:
        return x.clone()
    row_bytes = x.element_size() * prod(x.shape[1:])
    counters.add(kind, (sum(input_rows) - input_rows[rank]) * row_bytes)
    received = x.new_empty((sum(output_rows), *x.shape[1:]))
    dist.all_to_all_single(received, x.contiguous(), list(output_rows), list(input_rows), group=group)
    return received


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
