"""The microbatches of one rank, from its slice of the plan.

Every rank gets the same number of them: where the plan gives it no sequence it runs a dummy, whose slots are all
padding, so that each rank takes part in every collective of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import InvalidInputError, PlanSlice, Pool, Reason
from worker_agent.attention.layout import ShardLayout


@dataclass(frozen=True, eq=False)
class Microbatch:
    """What one rank runs in one microbatch: its group, the group's sequences, and this rank's shard of them."""

    start: int
    """First pool rank of the group."""
    degree: int
    """Ranks of the group."""
    ulysses: int
    ring: int
    members: npt.NDArray[np.int32] = field(repr=False)
    """Ids of the sequences, ascending: their order in the packed stream."""
    lengths: npt.NDArray[np.int32] = field(repr=False)
    """Their tokens, beside `members`."""
    layout: ShardLayout = field(repr=False)

    @property
    def is_dummy(self) -> bool:
        """Whether the plan gives this rank nothing to do here: all its slots are padding, of weight 0."""
        return len(self.members) == 0


def microbatches(slice: PlanSlice, pool: Pool, rank: int) -> list[Microbatch]:
    """The `slice.microbatches` microbatches of `rank`, in order.

    Raises `InvalidInputError` for a slice that is not for this rank, or that has it in two groups at once.
    """
    if rank not in slice.ranks:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT, f"plan {slice.digest} was cut for ranks {slice.ranks.tolist()[:8]}, not for {rank}"
        )
    mine = np.flatnonzero((slice.group_start <= rank) & (rank < slice.group_start + slice.group_degree))
    group_of: dict[int, int] = {}
    for group in mine.tolist():
        microbatch = int(slice.group_microbatch[group])
        if microbatch in group_of or not 0 <= microbatch < slice.microbatches:
            raise InvalidInputError(
                Reason.INVALID_PLAN,
                f"plan {slice.digest}: microbatch {microbatch} of {slice.microbatches} puts rank {rank} in a group "
                "twice, or does not exist",
            )
        group_of[microbatch] = group
    return [
        _of_group(slice, pool, rank, group_of[index]) if index in group_of else _dummy(pool, rank)
        for index in range(slice.microbatches)
    ]


def _of_group(slice: PlanSlice, pool: Pool, rank: int, group: int) -> Microbatch:
    first, last = slice.group_offset[group], slice.group_offset[group + 1]
    start, degree = int(slice.group_start[group]), int(slice.group_degree[group])
    shape = pool.shape(degree)
    lengths = slice.member_lengths[first:last]
    return Microbatch(
        start=start,
        degree=degree,
        ulysses=shape.ulysses,
        ring=shape.ring,
        members=slice.members[first:last],
        lengths=lengths,
        layout=ShardLayout(lengths, shape.ulysses, shape.ring, rank - start, pool.sequence_parallel),
    )


def _dummy(pool: Pool, rank: int) -> Microbatch:
    nothing = np.empty(0, np.int32)
    return Microbatch(
        start=rank,
        degree=1,
        ulysses=1,
        ring=1,
        members=nothing,
        lengths=nothing,
        layout=ShardLayout(nothing, 1, 1, 0, pool.sequence_parallel),
    )
