"""Which token of which sequence lies in which slot of which rank, and what each ring step computes.

The packed stream of a group holds its sequences one after the other, each padded at its end to a multiple of the
number of chunks n (1 without a ring, else 2·P_r), and one more sequence that is all padding, so that the total is a
multiple of lcm(n, P·t). Ring index r holds chunks r and n−1−r of every sequence: one of the short causal rows and one
of the long ones, so that all ring ranks have the same work. That ring shard, as a stream, is cut into P_u equal parts,
one per inner rank.

    P_r = 2, n = 4, one sequence     chunk   0   1   2   3
                                     ring    0   1   1   0

Everything is computed from lengths on the host, with numpy, when it is first asked for, and then kept: one layout per
group and microbatch serves all layers, forward and backward. Padding is in no table that attention reads by, so it is
never read. Does not touch tensors of the model, and knows no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler_service.domain import InvalidInputError, Reason

LongColumn = npt.NDArray[np.int64]


class Rows:
    """Numbers of some rows of a tensor, each at most once, ascending; a run of neighbours is taken as a view."""

    def __init__(self, numbers: LongColumn) -> None:
        self._numbers = torch.from_numpy(numbers)
        self._count = numbers.size
        self._first = int(numbers[0]) if numbers.size else 0
        self._is_run = numbers.size == 0 or int(numbers[-1]) - self._first + 1 == numbers.size
        self._on: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def numbers(self) -> Tensor:
        """The row numbers, int64, on the host."""
        return self._numbers

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """These rows of `x` along `dim`: a view where they are neighbours, else a copy."""
        if self._is_run:
            return x.narrow(dim, self._first, self._count)
        return x.index_select(dim, self._index(x.device))

    def put(self, x: Tensor, values: Tensor, dim: int = 0) -> None:
        """Write `values` to these rows of `x` along `dim`."""
        if self._is_run:
            x.narrow(dim, self._first, self._count).copy_(values)
        else:
            x.index_copy_(dim, self._index(x.device), values.to(x.dtype))

    def add(self, x: Tensor, values: Tensor) -> None:
        """Add `values` to these rows of `x`, in the dtype of `x`."""
        if self._is_run:
            x.narrow(0, self._first, self._count).add_(values)
        else:
            self.put(x, self.take(x) + values)

    def _index(self, device: torch.device) -> Tensor:
        if device not in self._on:
            self._on[device] = _copied(self._numbers, device)
        return self._on[device]


class Segments:
    """Boundaries of the sequences in a stream of queries and in a stream of keys: what a varlen kernel is given.

    Segment i attends from queries cu_q[i] … cu_q[i+1] to keys cu_k[i] … cu_k[i+1]. int32 on the host; a kernel on an
    accelerator asks for its copy once.
    """

    def __init__(self, query_counts: LongColumn, key_counts: LongColumn) -> None:
        self.cu_q = _cumulative(query_counts)
        self.cu_k = _cumulative(key_counts)
        self.longest_q = int(query_counts.max(initial=0))
        self.longest_k = int(key_counts.max(initial=0))
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.cu_q) - 1

    def bounds(self) -> list[tuple[int, int, int, int]]:
        """(first query, end of queries, first key, end of keys) of each segment."""
        q, k = self.cu_q.tolist(), self.cu_k.tolist()
        return list(zip(q[:-1], q[1:], k[:-1], k[1:], strict=True))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cu_q and cu_k on `device`, copied once."""
        if device not in self._on:
            cu_q, cu_k = (_copied(torch.from_numpy(column), device) for column in (self.cu_q, self.cu_k))
            self._on[device] = cu_q, cu_k
        return self._on[device]

    @cached_property
    def are_square(self) -> bool:
        """Whether every segment has as many keys as queries, as a causal mask needs."""
        return np.array_equal(self.cu_q, self.cu_k)

    @cached_property
    def nonempty(self) -> tuple[Rows, Rows, Segments]:
        """Rows of queries and of keys that meet any of the other, and the segments of the streams of those alone."""
        cu_q, cu_k = self.cu_q.astype(np.int64), self.cu_k.astype(np.int64)
        queries, keys = np.diff(cu_q), np.diff(cu_k)
        alive = (queries > 0) & (keys > 0)
        return (
            Rows(_runs(cu_q[:-1][alive], queries[alive])),
            Rows(_runs(cu_k[:-1][alive], keys[alive])),
            self if alive.all() else Segments(queries[alive], keys[alive]),
        )


@dataclass(frozen=True, eq=False)
class RingStep:
    """One block of attention: this rank's queries against the keys that ring index `source` holds.

    Rows are numbered in the stream of real tokens (no padding) of the ring shard. Every segment has at least one query
    and one key: kernels are never called on empty ones.
    """

    source: int
    """Ring index whose keys these are."""
    queries: Rows
    """Rows of this rank's queries that take part."""
    keys: Rows
    """Rows of the source's keys that take part."""
    segments: Segments
    causal: bool
    """Row j of a segment's queries sees the keys 0 … j only; otherwise all."""


class ShardLayout:
    """Where the tokens of a group's packed stream lie on one of its ranks.

    `lengths`: unpadded lengths of the group's sequences in stream order; none at all still gives every rank
    `sequence_parallel` slots or more, all padding. `rank` is the rank inside the group. Raises `InvalidInputError`.
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[Any],
        ulysses: int,
        ring: int,
        rank: int,
        sequence_parallel: int = 1,
    ) -> None:
        self.lengths: LongColumn = _validated(lengths, ulysses, ring, rank, sequence_parallel)
        self.ulysses, self.ring, self.rank = ulysses, ring, rank
        self.sequence_parallel = sequence_parallel
        chunks = self.chunks
        padded = -(-self.lengths // chunks) * chunks
        multiple = lcm(chunks, self.degree * sequence_parallel)
        used = int(padded.sum())
        self.total = max(1, -(-used // multiple)) * multiple
        """Padded tokens of the whole group's stream."""
        self._chunk_tokens: LongColumn = np.append(padded, self.total - used) // chunks
        """Tokens of one chunk of each sequence, the tail last."""

    @property
    def degree(self) -> int:
        """Ranks of the group, P."""
        return self.ulysses * self.ring

    @property
    def chunks(self) -> int:
        """Chunks per sequence, n."""
        return 1 if self.ring == 1 else 2 * self.ring

    @property
    def ring_index(self) -> int:
        """This rank's place on the ring."""
        return self.rank // self.ulysses

    @property
    def tokens(self) -> int:
        """Local slots, padding included; the same on every rank of the group."""
        return self.total // self.degree

    @property
    def ring_tokens(self) -> int:
        """Slots of the ring shard, which the inner ranks hold together."""
        return self.total // self.ring

    @property
    def token_index(self) -> Tensor:
        """int64 (tokens,): for each local slot the position in the unpadded packed stream, −1 for padding."""
        return self._slots[0]

    @property
    def positions(self) -> Tensor:
        """int64 (tokens,): position inside its own sequence, as RoPE needs it; 0 for padding."""
        return self._slots[1]

    @property
    def sequence(self) -> Tensor:
        """int64 (tokens,): index of the slot's sequence in `lengths`; −1 for padding."""
        return self._slots[2]

    @cached_property
    def _slots(self) -> tuple[Tensor, Tensor, Tensor]:
        per_sequence = self._chunk_tokens * (self.chunks // self.ring)
        end = np.cumsum(per_sequence)
        slot = np.arange(self.tokens) + self.rank % self.ulysses * self.tokens
        sequence = np.searchsorted(end, slot, side="right")
        offset = slot - (end - per_sequence)[sequence]
        chunk_tokens = self._chunk_tokens[sequence]
        early, late = self._held_chunks(self.ring_index)
        in_late = offset >= chunk_tokens
        position = offset + np.where(in_late, late - 1, early) * chunk_tokens
        real = position < np.append(self.lengths, 0)[sequence]
        stream_start = np.append(np.cumsum(self.lengths) - self.lengths, 0)
        return (
            torch.from_numpy(np.where(real, stream_start[sequence] + position, -1)),
            torch.from_numpy(np.where(real, position, 0)),
            torch.from_numpy(np.where(real, sequence, -1)),
        )

    @cached_property
    def real_rows(self) -> Rows:
        """Slots of the ring shard that hold a token. Padding ends a sequence, so each sequence's tokens are a run."""
        early, late = self._counts(self.ring_index)
        per_sequence = self._chunk_tokens[:-1] * (self.chunks // self.ring)
        return Rows(_runs(np.cumsum(per_sequence) - per_sequence, early + late))

    def real_tokens(self, ring_index: int) -> int:
        """Tokens, padding left out, in the ring shard of `ring_index`."""
        return self._real_tokens[ring_index]

    @cached_property
    def _real_tokens(self) -> list[int]:
        counts = [self._counts(index) for index in range(self.ring)]
        return [int(early.sum() + late.sum()) for early, late in counts]

    def steps(self, causal: bool) -> tuple[RingStep, ...]:
        """The blocks of this rank in the order of the forward ring: own keys first, then one ring index back each."""
        return self._causal_steps if causal else self._full_steps

    @cached_property
    def _causal_steps(self) -> tuple[RingStep, ...]:
        return tuple(self._step(hop, causal=True) for hop in range(self.ring))

    @cached_property
    def _full_steps(self) -> tuple[RingStep, ...]:
        return tuple(self._step(hop, causal=False) for hop in range(self.ring))

    def _step(self, hop: int, causal: bool) -> RingStep:
        """Chunks of an earlier source lie before both of ours or after both: no mask is needed but for our own."""
        source = (self.ring_index - hop) % self.ring
        early_q, late_q = self._counts(self.ring_index)
        early_k, late_k = self._counts(source)
        first_q = np.cumsum(early_q + late_q) - early_q - late_q
        first_k = np.cumsum(early_k + late_k) - early_k - late_k
        queries, keys = early_q + late_q, early_k + late_k
        if causal and source < self.ring_index:
            keys = early_k
        elif causal and source > self.ring_index:
            queries, first_q = late_q, first_q + early_q
        alive = (queries > 0) & (keys > 0)
        return RingStep(
            source=source,
            queries=Rows(_runs(first_q[alive], queries[alive])),
            keys=Rows(_runs(first_k[alive], keys[alive])),
            segments=Segments(queries[alive], keys[alive]),
            causal=causal and source == self.ring_index,
        )

    def _counts(self, ring_index: int) -> tuple[LongColumn, LongColumn]:
        """Tokens of each sequence in the early and in the late chunk of a ring index."""
        early, late = self._held_chunks(ring_index)
        size = self._chunk_tokens[:-1]
        if self.ring == 1:
            return self.lengths, np.zeros_like(self.lengths)
        return np.clip(self.lengths - early * size, 0, size), np.clip(self.lengths - late * size, 0, size)

    def _held_chunks(self, ring_index: int) -> tuple[int, int]:
        return ring_index, self.chunks - 1 - ring_index


def _runs(starts: LongColumn, counts: LongColumn) -> LongColumn:
    """Row numbers start, start + 1, … (count of them) of every run, one after the other."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def _copied(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`. From pinned memory: a copy from pageable memory may wait for the device."""
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def _cumulative(counts: LongColumn) -> npt.NDArray[np.int32]:
    return np.append(0, np.cumsum(counts)).astype(np.int32)


def _validated(
    lengths: Sequence[int] | npt.NDArray[Any], ulysses: int, ring: int, rank: int, sequence_parallel: int
) -> LongColumn:
    if min(ulysses, ring, sequence_parallel) < 1 or not 0 <= rank < ulysses * ring:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"layout: rank {rank} of {ulysses} × {ring} ranks with sequence parallelism {sequence_parallel}: sizes "
            f"are 1 or more, and the rank inside the group is 0 … {ulysses * ring - 1}",
        )
    given = np.asarray(lengths)
    if given.size and given.dtype.kind not in "iu":
        raise InvalidInputError(
            Reason.INVALID_LENGTH, f"layout: lengths are {given.dtype} values; give whole numbers of tokens"
        )
    column = given.astype(np.int64).reshape(-1)
    if column.size and column.min() < 1:
        sequence = int(column.argmin())
        raise InvalidInputError(
            Reason.INVALID_LENGTH,
            f"layout: sequence {sequence} of the group has {column[sequence]} tokens; a length is 1 or more",
            sequence=sequence,
        )
    return column
