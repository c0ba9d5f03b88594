"""Brings tokens from the ranks that loaded them to the ranks that work on them, and results back.

A rank sends each other rank just the shards that this one works on, for all microbatches in one all-to-all per field.
Who sends what is computed on the host from the plan's slice alone: sender and receiver list the rows of one message
in the same order, (microbatch, local slot), and never talk about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from scheduler_service.domain import InvalidInputError, PlanSlice, Pool, Reason
from worker_agent.communication import ByteCounters, all_to_all
from worker_agent.data.microbatches import Microbatch, microbatches

LongColumn = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Routes:
    """One rank's part of the exchange, int64 columns. Loaded tokens count through the loaded sequences end to end,
    slots through the microbatches end to end.
    """

    send_token: LongColumn
    """Loaded tokens in the order in which they leave: by receiver, then (microbatch, slot there)."""
    send_rows: LongColumn
    """Tokens that leave for each rank of the pool."""
    receive_slot: LongColumn
    """Slots in the order in which their tokens arrive: by sender, then (microbatch, slot)."""
    receive_rows: LongColumn
    """Tokens that arrive from each rank of the pool."""


def routes(slice: PlanSlice, pool: Pool, rank: int, own: Sequence[Microbatch]) -> Routes:
    """What `rank` sends and receives, when its microbatches are `own`. Pure; O(n log n) in its tokens."""
    token, receiver = _departures(slice, pool)
    slot, sender = _arrivals(slice, own)
    return Routes(
        send_token=token,
        send_rows=np.bincount(receiver, minlength=pool.ranks),
        receive_slot=slot,
        receive_rows=np.bincount(sender, minlength=pool.ranks),
    )


def _departures(slice: PlanSlice, pool: Pool) -> tuple[LongColumn, LongColumn]:
    """Loaded tokens in the order in which they leave, and the receiver of each loaded token.

    A sequence is cut into n chunks; ring index r holds chunks r and n−1−r. Its part of the ring shard begins at
    (padded tokens before it) / P_r, and the shard is cut into P_u equal parts of total / P slots (03, section 1).
    """
    degree = slice.loaded_degree.astype(np.int64)
    shapes = {int(d): pool.shape(int(d)) for d in np.unique(degree)}
    ulysses = np.array([shapes[d].ulysses for d in degree.tolist()], np.int64)
    chunks = np.array([pool.chunks(d) for d in degree.tolist()], np.int64)
    ring = degree // ulysses
    lengths = slice.loaded_lengths.astype(np.int64)
    chunk_tokens = -(-lengths // chunks)

    # From here on one row per token.
    of = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(int(lengths.sum())) - (np.cumsum(lengths) - lengths)[of]
    chunk = position // chunk_tokens[of]
    within = position - chunk * chunk_tokens[of]
    late = chunk >= ring[of]
    ring_index = np.where(late, chunks[of] - 1 - chunk, chunk)
    shard_position = (slice.loaded_stream_offset // ring)[of] + within + late * chunk_tokens[of]
    slots = (slice.loaded_stream_tokens // degree)[of]
    inner = shard_position // slots
    slot = shard_position - inner * slots
    receiver: LongColumn = slice.loaded_start.astype(np.int64)[of] + ring_index * ulysses[of] + inner
    turn = receiver * slice.microbatches + slice.loaded_microbatch.astype(np.int64)[of]
    # One key instead of three: it is made of few ascending runs, which a stable sort merges in linear time.
    return np.argsort(turn * (int(slot.max(initial=0)) + 1) + slot, kind="stable"), receiver


def _arrivals(slice: PlanSlice, own: Sequence[Microbatch]) -> tuple[LongColumn, LongColumn]:
    """Slots in the order in which their tokens arrive, and the sender of each slot that holds a token."""
    slots, senders, before = [], [], 0
    for microbatch in own:
        sequence = microbatch.layout.sequence.numpy()
        real = np.flatnonzero(sequence >= 0)
        slots.append(before + real)
        shard = np.searchsorted(slice.shard_offset, microbatch.members, side="right") - 1
        senders.append(shard[sequence[real]])
        before += len(sequence)
    sender = np.concatenate(senders).astype(np.int64)
    return np.concatenate(slots)[np.argsort(sender, kind="stable")], sender


class Rerouter:
    """Moves the fields of one iteration by its plan. Every rank of the pool calls each method, for the same fields."""

    def __init__(
        self,
        slice: PlanSlice,
        pool: Pool,
        rank: int,
        process_group: ProcessGroup | None,
        counters: ByteCounters,
    ) -> None:
        self.microbatches = microbatches(slice, pool, rank)
        """What this rank runs."""
        found = routes(slice, pool, rank, self.microbatches)
        self._lengths: list[int] = slice.loaded_lengths.tolist()
        self._ids: list[int] = slice.loaded.tolist()
        self._tokens = [microbatch.layout.tokens for microbatch in self.microbatches]
        self._send_token = torch.from_numpy(found.send_token)
        self._receive_slot = torch.from_numpy(found.receive_slot)
        self._send_rows: list[int] = found.send_rows.tolist()
        self._receive_rows: list[int] = found.receive_rows.tolist()
        self._group = process_group
        self._counters = counters

    def route(
        self, per_loaded_sequence: Sequence[Tensor], pad_value: int | float, *, like: Tensor | None = None
    ) -> list[Tensor]:
        """From one tensor (s, …) per loaded sequence, in the order of their ids, to one (slots, …) per microbatch.

        Pads hold `pad_value`. Not differentiable. A rank that loaded nothing knows the field's type and trailing
        dimensions from `like`; without it they are those of a flat column of `pad_value`'s type (int64, or torch's
        default float). Raises `InvalidInputError` where the tensors are not the loaded sequences.
        """
        self._check_sequences(per_loaded_sequence)
        field = torch.cat(list(per_loaded_sequence)) if per_loaded_sequence else _empty(like, pad_value)
        sent = field.index_select(0, self._send_token.to(field.device))
        arrived = all_to_all(sent, self._receive_rows, self._send_rows, self._group, self._counters, "reroute")
        slots = field.new_full((sum(self._tokens), *field.shape[1:]), pad_value)
        slots.index_copy_(0, self._receive_slot.to(field.device), arrived)
        return list(slots.split(self._tokens))

    def restore(self, per_microbatch: Sequence[Tensor]) -> list[Tensor]:
        """The way back: from one tensor (slots, …) per microbatch to one (s, …) per loaded sequence, pads dropped.

        For what is kept per sample: log-probabilities, per-token losses. Not differentiable.
        """
        if [len(field) for field in per_microbatch] != self._tokens:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT,
                f"restore got tensors of {[len(field) for field in per_microbatch]} rows; the microbatches have "
                f"{self._tokens} slots",
            )
        slots = torch.cat(list(per_microbatch))
        sent = slots.index_select(0, self._receive_slot.to(slots.device))
        arrived = all_to_all(sent, self._send_rows, self._receive_rows, self._group, self._counters, "reroute")
        field = torch.empty_like(arrived)
        field.index_copy_(0, self._send_token.to(field.device), arrived)
        return list(field.split(self._lengths))

    def _check_sequences(self, per_loaded_sequence: Sequence[Tensor]) -> None:
        given = [len(field) for field in per_loaded_sequence]
        if given == self._lengths:
            return
        if len(given) != len(self._lengths):
            told = f"{len(given)} sequences, but this rank loaded {len(self._lengths)}"
        else:
            at = next(i for i, (a, b) in enumerate(zip(given, self._lengths, strict=True)) if a != b)
            told = f"{given[at]} rows for sequence {self._ids[at]}, which was planned with {self._lengths[at]} tokens"
        raise InvalidInputError(Reason.INVALID_ARGUMENT, f"route got {told}; give them as they were submitted")


def _empty(like: Tensor | None, pad_value: int | float) -> Tensor:
    if like is not None:
        return like.new_empty((0, *like.shape[1:]))
    return torch.empty(0, dtype=torch.int64 if isinstance(pad_value, int) else torch.get_default_dtype())
