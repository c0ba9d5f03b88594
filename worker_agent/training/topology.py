"""The process groups of a training rank, created once, in one order on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from scheduler_service.domain import InvalidInputError, Pool, Reason
from worker_agent.communication import ByteCounters
from worker_agent.groups import GroupRegistry
from worker_agent.training.mixture import ExpertGroup
from worker_agent.training.pipeline import Pipeline


@dataclass(frozen=True)
class Topology:
    """Who this rank talks to. Rank s·G + r of the job is pool rank r of pipeline stage s; each stage is a pool."""

    rank: int
    """In the pool."""
    counters: ByteCounters
    """Bytes that this rank has sent, by kind."""
    job: dist.ProcessGroup
    """All ranks of all stages: what is reported."""
    pool: dist.ProcessGroup
    """The ranks of this stage: gradients of dense parameters, counts, rerouting. The job, if there is one stage."""
    context: GroupRegistry
    """The groups that sequences run on."""
    experts: ExpertGroup
    """The ranks that hold one copy of every expert of the stage."""
    replicas: dist.ProcessGroup | None
    """The ranks that hold the same experts, one in each EP group; None if there is one EP group."""
    pipeline: Pipeline
    """The same pool rank in every stage."""
    agent: dist.ProcessGroup
    """All ranks of all stages again, for the plan agent's own thread alone."""


def build_topology(pool: Pool) -> Topology:
    """Create every group of the job. A collective: all ranks call it with the same pool.

    Raises `InvalidInputError` when the job has another size than `pool.ranks` × `pool.stages`.
    """
    global_rank, size = dist.get_rank(), dist.get_world_size()
    if size != pool.ranks * pool.stages:
        raise InvalidInputError(
            Reason.INVALID_POOL,
            f"pool: {pool.ranks} ranks × {pool.stages} stages, but {size} processes run; start as many as ranks",
        )
    counters = ByteCounters()
    stage, rank = divmod(global_rank, pool.ranks)
    by_stage = [range(first, first + pool.ranks) for first in range(0, size, pool.ranks)]
    by_experts = [ranks[i : i + pool.ep] for ranks in by_stage for i in range(0, pool.ranks, pool.ep)]
    by_copy = [ranks[i :: pool.ep] for ranks in by_stage for i in range(pool.ep)]
    by_pool_rank = [range(first, size, pool.ranks) for first in range(pool.ranks)]
    job = dist.group.WORLD
    own_pool = job if pool.stages == 1 else _own_group(global_rank, by_stage, alone=True)
    context = GroupRegistry(None if pool.stages == 1 else own_pool, counters=counters)
    experts = _own_group(global_rank, by_experts)
    replicas = _own_group(global_rank, by_copy)
    line = _own_group(global_rank, by_pool_rank)
    agent = dist.new_group(backend="gloo")
    assert job is not None
    assert own_pool is not None
    return Topology(
        rank=rank,
        counters=counters,
        job=job,
        pool=own_pool,
        context=context,
        experts=ExpertGroup(pool.ep, rank % pool.ep, experts, counters),
        replicas=replicas,
        pipeline=Pipeline(stage, pool.stages, line, counters),
        agent=agent,
    )


def _own_group(rank: int, partition: Sequence[Sequence[int]], *, alone: bool = False) -> dist.ProcessGroup | None:
    """Create all groups of a partition of the ranks; the one that holds `rank`.

    Groups of one rank are made only if `alone`; without, None stands for them.
    """
    own = None
    for ranks in partition:
        if alone or len(ranks) > 1:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                own = group
    return own
