"""The process groups that plans run on: every aligned group of a pool, made once, in one order, by every rank.

A plan may put any aligned group of ranks to work in any microbatch, and the ranks of a job have different group
histories. Handles are therefore made up front, for all groups of two ranks and more, by all ranks of the job in the
same order; afterwards `group` is a local lookup that cannot hang. `use_local_synchronization` is never used: its
names hash a count per process, and ranks with different histories wait for different names. In a very large pool a
rank makes the handles that it is part of and no others, under explicit names (see `named_groups`).

A handle is cheap. With NCCL its communicator is built when the group first exchanges something (so long as the default
process group is not bound to a device); gloo connects at once. A rank is in at most log2(G) + 1 of the handles: the
aligned powers of two around it, and the full pool. That bounds its communicators, whatever is planned. `warm` builds
those of a plan when it is adopted, in the order of its microbatches, so that none is built inside a pipeline schedule.

Does not: decide which groups are used (the plan does).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from scheduler_service.domain import HydraCpError, InvalidInputError, Reason
from worker_agent.communication import ByteCounters
from worker_agent.named_groups import new_named_group

NAMED_ABOVE = 512
"""Most handles that all ranks make together, at about 2 ms each: with more, each rank makes only its own, by name."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """The ranks that share the sequences of one group in one microbatch, as one of them sees it.

    Rank p of the group is inner rank p % ulysses of ring index p // ulysses.
    """

    start: int
    """First pool rank."""
    degree: int
    """Number of ranks, P = ulysses × ring."""
    ulysses: int
    """Consecutive ranks that exchange heads, P_u."""
    rank: int
    """This rank inside the group, 0 … degree − 1."""
    ranks: tuple[int, ...] = field(repr=False)
    """Global ranks, as torch.distributed numbers them, by rank inside the group."""
    process_group: dist.ProcessGroup | None = field(repr=False)
    """All ranks of the group; None for a group of one."""
    ulysses_group: dist.ProcessGroup | None = field(repr=False)
    """The inner ranks around this one; None for `ulysses` = 1."""
    counters: ByteCounters = field(repr=False, compare=False)
    """Where the bytes that this rank sends are counted."""

    @property
    def ring(self) -> int:
        """Ring size, P_r."""
        return self.degree // self.ulysses

    @property
    def ulysses_index(self) -> int:
        """This rank's place among the inner ranks."""
        return self.rank % self.ulysses

    @property
    def ring_index(self) -> int:
        """This rank's place on the ring."""
        return self.rank // self.ulysses

    def ring_peer(self, hops: int) -> int:
        """Global rank of the peer `hops` further along the ring, at the same inner place."""
        ring_index = (self.ring_index + hops) % self.ring
        return self.ranks[ring_index * self.ulysses + self.ulysses_index]


@dataclass(frozen=True)
class GroupReport:
    """How many handles and communicators a rank holds, and what they cost."""

    created: int
    """Handles that this rank took part in making, over all pools of the job."""
    member: int
    """Handles that this rank is part of: the most communicators it can ever hold, at most log2(G) + 1."""
    used: int
    """Handles that this rank has warmed or looked up: the communicators that it holds once it has run on them."""
    warm: tuple[tuple[int, int], ...]
    """(start, degree) of the groups that were warmed, in that order: the same on all ranks of a group."""
    device_bytes: int
    """Device memory that went while communicators were warmed; 0 without an accelerator."""


class GroupRegistry:
    """All groups of the pool whose ranks are those of `process_group` (None: of the whole job).

    Constructing one is collective over *all* ranks of the job, in the same place of the program, and each passes the
    process group of its own pool, or what `dist.new_group` gave it as a non-member. Without torch.distributed the
    pool is this process alone. `timeout` bounds every collective on the groups (None: the backend's default). `named`:
    whether handles are made by name; None decides by their number. All ranks pass the same.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        counters: ByteCounters | None = None,
        timeout: timedelta | None = None,
        named: bool | None = None,
    ) -> None:
        self.counters = counters or ByteCounters()
        self._pool = _pool_ranks(process_group)
        self._rank = self._pool.index(dist.get_rank()) if dist.is_initialized() and self._pool else 0
        self._handles: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._used: set[tuple[int, int]] = set()
        self._warm: dict[tuple[int, int], None] = {}  # in order
        self._device_bytes = 0
        self._created = 0
        pools = _all_pools(process_group, self._pool)
        if named is None:
            named = sum(len(aligned_groups(len(pool))) for pool in pools) > NAMED_ABOVE
        for pool in [self._pool] if named else pools:
            for start, degree in aligned_groups(len(pool)):
                if named and not start <= self._rank < start + degree:
                    continue
                ranks = pool[start : start + degree]
                make = new_named_group if named else dist.new_group
                handle = make(list(ranks), timeout=timeout)
                self._created += 1
                if pool == self._pool:
                    self._handles[start, degree] = handle

    @property
    def size(self) -> int:
        """Number of ranks of the pool, G; 0 on a rank outside every pool."""
        return len(self._pool)

    @property
    def rank(self) -> int:
        """This rank's number in the pool."""
        return self._rank

    def group(self, start: int, degree: int, ulysses: int | None = None) -> Group:
        """The group of pool ranks start … start + degree − 1, cut into `ulysses` × ring; None means all Ulysses.

        Local: no communication. Raises `InvalidInputError` for a group that is not aligned or a cut that has no
        process group, `HydraCpError` if this rank is not in the group.
        """
        ulysses = degree if ulysses is None else ulysses
        self._check(start, degree, ulysses)
        rank = self._rank - start
        inner_start = start + rank // ulysses * ulysses
        return Group(
            start=start,
            degree=degree,
            ulysses=ulysses,
            rank=rank,
            ranks=self._pool[start : start + degree],
            process_group=self._handle(start, degree),
            ulysses_group=self._handle(inner_start, ulysses),
            counters=self.counters,
        )

    def warm(self, groups: Iterable[tuple[int, int, int]]) -> None:
        """Build the communicators of (start, degree, ulysses) groups, those of a plan in the order of its microbatches.

        This rank gives the groups that it is in, one for each microbatch. Collective over their members, who meet:
        each has the same microbatches in the same order. A communicator is built once, on all its ranks alike. Raises
        as `group` does.
        """
        before = len(self._warm)
        for start, degree, ulysses in groups:
            self._check(start, degree, ulysses)
            inner_start = start + (self._rank - start) // ulysses * ulysses
            for key in ((start, degree), (inner_start, ulysses)):
                if key[1] > 1 and key not in self._warm:
                    self._warm[key] = None
                    self._device_bytes += _build(self._handle(*key))
        if len(self._warm) > before:
            told = self.report()
            _log.info(
                "rank %d holds %d communicators of at most %d, %d bytes of device memory",
                self._rank, len(self._warm), told.member, told.device_bytes,
            )  # fmt: skip

    def report(self) -> GroupReport:
        """Handles made, held and used so far."""
        member = sum(start <= self._rank < start + degree for start, degree in self._handles)
        return GroupReport(self._created, member, len(self._used), tuple(self._warm), self._device_bytes)

    def _handle(self, start: int, degree: int) -> dist.ProcessGroup | None:
        if degree == 1:
            return None
        self._used.add((start, degree))
        return self._handles[start, degree]

    def _check(self, start: int, degree: int, ulysses: int) -> None:
        if not _is_group(start, degree, self.size):
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT,
                f"no group of {degree} ranks starts at rank {start} of a pool of {self.size}: a group is a power of "
                "two with start % degree == 0, or the full pool",
            )
        if ulysses < 1 or degree % ulysses or not (ulysses == degree or ulysses & (ulysses - 1) == 0):
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT,
                f"a group of {degree} ranks cannot be cut into Ulysses groups of {ulysses}: give a power of two that "
                f"divides {degree}, or {degree} itself",
            )
        if not start <= self._rank < start + degree:
            raise HydraCpError(
                Reason.INVALID_ARGUMENT,
                f"pool rank {self._rank} is not in the group of ranks {start} … {start + degree - 1}; "
                "a rank may only ask for groups that the plan put it in",
            )


def _is_group(start: int, degree: int, size: int) -> bool:
    if degree < 1 or start < 0 or start + degree > size:
        return False
    return degree == size or (degree & (degree - 1) == 0 and start % degree == 0)


def aligned_groups(size: int) -> list[tuple[int, int]]:
    """(start, degree) of every group of two ranks and more, small degrees first, the full pool last."""
    degrees = [1 << e for e in range(1, size.bit_length())]
    aligned = [(start, degree) for degree in degrees for start in range(0, size - degree + 1, degree)]
    return aligned if size < 2 or size in degrees else [*aligned, (0, size)]


def _build(handle: dist.ProcessGroup | None) -> int:
    """The first exchange of a process group; bytes of device memory that it took."""
    if dist.get_backend(handle) != dist.Backend.NCCL:
        dist.all_reduce(torch.zeros(1), group=handle)
        return 0
    before, _ = torch.cuda.mem_get_info()
    dist.all_reduce(torch.zeros(1, device="cuda"), group=handle)
    torch.cuda.synchronize()
    return max(0, before - torch.cuda.mem_get_info()[0])


def _pool_ranks(process_group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Global ranks of this rank's pool, in pool order; empty outside every pool."""
    if not dist.is_initialized():
        return (0,)
    if process_group is None:
        return tuple(range(dist.get_world_size()))
    if not isinstance(process_group, dist.ProcessGroup):  # dist.GroupMember.NON_GROUP_MEMBER
        return ()
    ranks = tuple(dist.get_process_group_ranks(process_group))
    if list(ranks) != sorted(ranks):
        raise InvalidInputError(
            Reason.INVALID_POOL, f"the pool's process group lists ranks {ranks}; make it with ascending ranks"
        )
    return ranks


def _all_pools(process_group: dist.ProcessGroup | None, pool: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every pool of the job, in one order: `new_group` wants all ranks of the job, members or not."""
    if process_group is None:
        return [pool]
    pools: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(pools, pool)
    return sorted({other for other in pools if other})
