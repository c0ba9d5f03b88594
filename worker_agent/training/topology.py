"""The process groups of a training rank, created once, in one order on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from scheduler_service.domain import InvalidInputError, Pool, Reason
from worker_agent.communication import ByteCounters
from worker_agent.groups import GroupRegistry
from worker_agent.training.mixture import ExpertGroup


@dataclass(frozen=True)
class Topology:
    """Who this rank talks to. The default process group holds exactly the ranks of the pool."""

    rank: int
    counters: ByteCounters
    """Bytes that this rank has sent, by kind."""
    world: dist.ProcessGroup
    """All ranks: gradients of dense parameters, counts, rerouting."""
    context: GroupRegistry
    """The groups that sequences run on."""
    experts: ExpertGroup
    """The ranks that hold one copy of every expert."""
    replicas: dist.ProcessGroup | None
    """The ranks that hold the same experts, one in each EP group; None if there is one EP group."""
    agent: dist.ProcessGroup
    """All ranks again, for the plan agent's own thread alone."""


def build_topology(pool: Pool) -> Topology:
    """Create every group of `pool`. A collective: all ranks call it with the same pool.

    Raises `InvalidInputError` when the process group has another size than the pool.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size != pool.ranks:
        raise InvalidInputError(
            Reason.INVALID_POOL, f"pool: ranks is {pool.ranks}, but {size} processes run; start as many as ranks"
        )
    counters = ByteCounters()
    context = GroupRegistry(counters=counters)
    by_experts = [list(range(first, first + pool.ep)) for first in range(0, size, pool.ep)]
    by_copy = [list(range(first, size, pool.ep)) for first in range(pool.ep)]
    experts = _own_group(rank, by_experts)
    replicas = _own_group(rank, by_copy)
    agent = dist.new_group(list(range(size)), backend="gloo")
    assert dist.group.WORLD is not None
    return Topology(
        rank=rank,
        counters=counters,
        world=dist.group.WORLD,
        context=context,
        experts=ExpertGroup(pool.ep, rank % pool.ep, experts, counters),
        replicas=replicas,
        agent=agent,
    )


def _own_group(rank: int, partition: list[list[int]]) -> dist.ProcessGroup | None:
    """Create all groups of a partition of the ranks; the one that holds `rank`, None where groups have one rank."""
    own = None
    for ranks in partition:
        if len(ranks) > 1:
            group = dist.new_group(ranks)
            if rank in ranks:
                own = group
    return own
