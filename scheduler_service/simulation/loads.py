"""What a plan puts on its groups and ranks: attention load and tokens.

Works from the columns of a plan alone and trusts them: whether they are a valid plan is the verifier's question.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, InvalidInputError, Plan, Reason


@dataclass(frozen=True, eq=False)
class GroupLoads:
    """The groups of a plan, ordered by (microbatch, start): columns (groups,)."""

    microbatch: npt.NDArray[np.int32]
    start: npt.NDArray[np.int32]
    degree: npt.NDArray[np.int32]
    load: npt.NDArray[np.float64]
    """Σ s²/degree on each rank of the group, token²/degree."""
    tokens: npt.NDArray[np.int64]
    """Tokens on each rank of the group, padding included."""


@dataclass(frozen=True, eq=False)
class RankLoads:
    """The same for every rank and microbatch: matrices (ranks, microbatches)."""

    load: npt.NDArray[np.float64]
    """Attention load, token²/degree."""
    tokens: npt.NDArray[np.int64]
    """Padded tokens."""
    degree: npt.NDArray[np.int32]
    """Degree of the rank's group; 0 without a sequence."""
    start: npt.NDArray[np.int32]
    """First rank of the rank's group; −1 without a sequence."""


def group_loads(plan: Plan, batch: Batch) -> GroupLoads:
    """Sum the sequences of each group; a group's tokens are padded as the pool says.

    Raises `InvalidInputError` where plan and batch differ in size. Cost: O(N log N), memory O(N).
    """
    if len(plan) != len(batch):
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT, f"the plan places {len(plan)} sequences, the batch has {len(batch)}"
        )
    pool = plan.header.pool
    order = plan.group_order
    microbatch, start = plan.microbatch[order], plan.start[order]
    begins = np.ones(len(plan), bool)
    begins[1:] = (microbatch[1:] != microbatch[:-1]) | (start[1:] != start[:-1])
    first = np.flatnonzero(begins)
    degree = plan.degree[order[first]]

    occurring = np.flatnonzero(np.bincount(degree))
    chunks, multiple = np.ones((2, int(degree.max()) + 1), np.int64)
    chunks[occurring] = [pool.chunks(int(d)) for d in occurring]
    multiple[occurring] = [pool.stream_multiple(int(d)) for d in occurring]
    lengths = batch.lengths[order]
    squares = np.add.reduceat(np.square(lengths, dtype=np.float64), first)
    if chunks.max() > 1:
        each = chunks[plan.degree[order]]
        lengths = -(-lengths // each) * each
    padded = np.add.reduceat(lengths, first)
    multiple = multiple[degree]
    return GroupLoads(
        microbatch=microbatch[first],
        start=start[first],
        degree=degree,
        load=squares / degree,
        tokens=-(-padded // multiple) * multiple // degree,
    )


def rank_loads(plan: Plan, batch: Batch) -> RankLoads:
    """Spread the groups over their ranks. Memory: 24 bytes per rank and microbatch, so ask for it on demand only."""
    groups = group_loads(plan, batch)
    shape = (plan.header.pool.ranks, plan.header.microbatches)
    group = np.repeat(np.arange(len(groups.start)), groups.degree)
    first_slot = np.cumsum(groups.degree) - groups.degree
    rank = groups.start[group] + np.arange(len(group)) - first_slot[group]
    slots = (rank, groups.microbatch[group])

    loads = RankLoads(
        load=np.zeros(shape), tokens=np.zeros(shape, np.int64), degree=np.zeros(shape, np.int32),
        start=np.full(shape, -1, np.int32),
    )  # fmt: skip
    for name in ("load", "tokens", "degree", "start"):
        getattr(loads, name)[slots] = getattr(groups, name)[group]
    return loads
