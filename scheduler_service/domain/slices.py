"""What a set of ranks has to know of one plan: their groups, and where the sequences that they loaded go.

A rank carries out its groups and sends away what it loaded; it needs no other part of the plan. The service
slices a plan for an agent, and an agent that planned locally slices its own: by the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_service.domain.batch import Batch
from scheduler_service.domain.errors import InvalidInputError, Reason
from scheduler_service.domain.plan import Plan

Column = npt.NDArray[np.int32]
LongColumn = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PlanSlice:
    """One plan as some ranks see it: the columns of hydracp.v1.PlanSlice, int32 but where said.

    Groups are ordered by (microbatch, start). `members[group_offset[k]:group_offset[k + 1]]` are the ids of
    group k, ascending, which is their order in the packed stream.
    """

    digest: str
    policy: str
    microbatches: int
    target: float
    cap: int
    predicted_s: float
    ranks: Column
    group_microbatch: Column
    group_start: Column
    group_degree: Column
    group_offset: Column
    members: Column
    member_lengths: Column
    shard_offset: Column
    """Sequences [shard_offset[j], shard_offset[j + 1]) were loaded by shard j, on pool rank j."""
    loaded: Column
    """Ids of the sequences that these ranks loaded, ascending; the columns below lie beside it."""
    loaded_lengths: Column
    loaded_microbatch: Column
    loaded_start: Column
    loaded_degree: Column
    loaded_stream_offset: LongColumn
    """Padded tokens before the sequence in its group's stream, int64."""
    loaded_stream_tokens: LongColumn
    """Padded tokens of its group's whole stream, int64."""


def slice_plan(plan: Plan, batch: Batch, shard_sizes: Sequence[int], ranks: Sequence[int]) -> PlanSlice:
    """Cut `plan` down to what `ranks` need, when shard j of the batch holds `shard_sizes[j]` sequences.

    Cost: O(N log N) for N sequences. Raises `InvalidInputError` for ranks outside the pool and for shards
    that do not add up to the batch.
    """
    pool = plan.header.pool
    wanted = np.unique(np.asarray(ranks, np.int64))
    if wanted.size == 0 or wanted[0] < 0 or wanted[-1] >= pool.ranks:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT, f"ranks {list(ranks)[:8]} are not all in 0 … {pool.ranks - 1} of the pool"
        )
    if sum(shard_sizes) != len(batch) or len(batch) != len(plan) or len(shard_sizes) > pool.ranks:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"{len(shard_sizes)} shards of {sum(shard_sizes)} sequences do not make a batch of {len(batch)} "
            f"for a plan of {len(plan)} on {pool.ranks} ranks",
        )
    shard_offset = np.concatenate(([0], np.cumsum(np.asarray(shard_sizes, np.int64))))

    order = plan.group_order
    key = plan.microbatch[order].astype(np.int64) * pool.ranks + plan.start[order]
    begins = np.diff(key, prepend=-1) != 0
    first = np.flatnonzero(begins)
    group_of = np.cumsum(begins) - 1
    group_degree = plan.degree[order][first]

    padded = _padded_lengths(plan, batch)[order]
    before = np.cumsum(padded) - padded
    stream_offset = np.empty(len(batch), np.int64)
    stream_offset[order] = before - before[first][group_of]
    multiple = _per_degree(plan, pool.stream_multiple)[order][first]
    used = np.add.reduceat(padded, first)
    group_tokens = -(-used // multiple) * multiple
    stream_tokens = np.empty(len(batch), np.int64)
    stream_tokens[order] = group_tokens[group_of]

    group_start = plan.start[order][first].astype(np.int64)
    # A group holds one of the wanted ranks if the count of wanted ranks rises inside it.
    touched = np.searchsorted(wanted, group_start + group_degree) > np.searchsorted(wanted, group_start)
    mine = touched[group_of]
    members = order[mine]
    sizes = np.bincount(group_of, minlength=len(first))[touched]
    loaded = _loaded(shard_offset, wanted)
    return PlanSlice(
        digest=plan.digest,
        policy=plan.header.policy,
        microbatches=plan.header.microbatches,
        target=plan.header.target,
        cap=plan.header.cap,
        predicted_s=plan.header.predicted_s,
        ranks=wanted.astype(np.int32),
        group_microbatch=plan.microbatch[order][first][touched],
        group_start=group_start[touched].astype(np.int32),
        group_degree=group_degree[touched],
        group_offset=np.concatenate(([0], np.cumsum(sizes))).astype(np.int32),
        members=members.astype(np.int32),
        member_lengths=batch.lengths[members].astype(np.int32),
        shard_offset=shard_offset.astype(np.int32),
        loaded=loaded.astype(np.int32),
        loaded_lengths=batch.lengths[loaded].astype(np.int32),
        loaded_microbatch=plan.microbatch[loaded],
        loaded_start=plan.start[loaded],
        loaded_degree=plan.degree[loaded],
        loaded_stream_offset=stream_offset[loaded],
        loaded_stream_tokens=stream_tokens[loaded],
    )


def _per_degree(plan: Plan, value: Callable[[int], int]) -> LongColumn:
    """`value(degree)` for every sequence, evaluated once per degree that occurs."""
    degrees, where = np.unique(plan.degree, return_inverse=True)
    return np.array([value(int(degree)) for degree in degrees], np.int64)[where]


def _padded_lengths(plan: Plan, batch: Batch) -> LongColumn:
    chunks = _per_degree(plan, plan.header.pool.chunks)
    return -(-batch.lengths // chunks) * chunks


def _loaded(shard_offset: LongColumn, ranks: LongColumn) -> LongColumn:
    """Ids that the shards on `ranks` loaded, ascending."""
    shards = ranks[ranks < len(shard_offset) - 1]
    pieces = [np.arange(shard_offset[j], shard_offset[j + 1]) for j in shards]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)
