"""Process groups under explicit names, made by their members alone.

`dist.new_group` names a group by a count that all ranks must keep in step, so every rank of the job takes part in
making every group: 2·G calls for the aligned groups of a pool of G. Under a name that says which ranks it holds, only
the members need to know of a group, and each rank of a pool makes at most log2(G) + 1.

torch has no public function for this. What is used of its inside is in this module alone.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d


def new_named_group(ranks: list[int], *, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The group of `ranks`, ascending global ranks with this one among them.

    A collective over `ranks` alone: each member makes the groups that it is in, small ones first. Named
    `hydracp/<first rank>+<size>`, with a hash of ranks that are not consecutive, and with a count behind it where the
    process holds that very group already; members of a group make it equally often.
    """
    default = dist.group.WORLD
    assert default is not None
    backend, store = distributed_c10d._world.pg_map[default]
    name = _unused(_name(ranks))
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        distributed_c10d.Backend(backend),
        store,
        distributed_c10d.GroupName(name),
        timeout=timeout or distributed_c10d._get_default_timeout(distributed_c10d.Backend(backend)),
        group_desc=name,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def _name(ranks: list[int]) -> str:
    name = f"hydracp/{ranks[0]}+{len(ranks)}"
    if ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return name
    return f"{name}/{hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"


def _unused(name: str) -> str:
    taken = set(distributed_c10d._world.pg_names.values())
    candidate, again = name, 1
    while candidate in taken:
        candidate, again = f"{name}#{again}", again + 1
    return candidate
