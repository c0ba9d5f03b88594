"""The ranks that share a global batch, and how a group of them is cut into Ulysses and ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum, lcm
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.domain.errors import InvalidInputError, Reason

MAX_RANKS = 1 << 16
"""Most ranks of a pool."""

MAX_TOKEN_BUDGET = 1 << 30
"""Most tokens per rank and microbatch."""

MIN_SPEED = 0.01
"""Slowest rank that is worth a sequence; below, it is better excluded. Keeps every prediction finite."""

Speeds = Mapping[int, float] | Sequence[tuple[int, float]]
"""Speed of some ranks."""


class GroupShape(NamedTuple):
    """How a group is cut: `ulysses` consecutive ranks inside, `ring` of those outside."""

    ulysses: int
    ring: int


@dataclass(frozen=True)
class Pool:
    """The DP×CP ranks that share one global batch, and the limits that a plan must keep.

    Raises `InvalidInputError` (reason INVALID_POOL) that names the field, its value and what it may be.
    """

    ranks: int
    """Number of ranks, G."""

    token_budget: int
    """Most padded tokens that a rank may hold in one microbatch, B."""

    stages: int = 1
    """Pipeline stages, p."""

    ep: int = 1
    """Consecutive ranks that exchange tokens in each MoE layer, E; divides `ranks`."""

    heads: int | None = None
    """Query heads on one TP rank, h. None: any number, a multiple of `max_ulysses`."""

    max_ulysses: int | None = None
    """Most ranks of an inner Ulysses group, U. None: the pool."""

    node: int | None = None
    """Ranks of one node, D. None: not known."""

    max_degree: int | None = None
    """Largest degree that a sequence may get. None: the pool."""

    microbatch_multiple: int = 1
    """The number of microbatches is a multiple of this (interleaved pipelines)."""

    sequence_parallel: int = 1
    """TP size under sequence parallelism, t; divides `token_budget`."""

    speeds: Speeds = ()
    """Ranks that are slower than the fastest: rank → speed. 1 is the speed of all others; a rank of speed 0 is
    excluded: it gets no sequence, and still takes part in every collective. Kept as a tuple of pairs in the order
    of the ranks, without those of speed 1."""

    def __post_init__(self) -> None:
        limits = {
            "ranks": MAX_RANKS,
            "token_budget": MAX_TOKEN_BUDGET,
            "stages": 4096,
            "ep": self.ranks,
            "heads": 1 << 16,
            "max_ulysses": MAX_RANKS,
            "node": MAX_RANKS,
            "max_degree": MAX_RANKS,
            "microbatch_multiple": 4096,
            "sequence_parallel": 4096,
        }
        optional = {"heads", "max_ulysses", "node", "max_degree"}
        for name, limit in limits.items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                raise InvalidInputError(
                    Reason.INVALID_POOL, f"pool: {name} is {value!r}; give a whole number from 1 to {limit:,}"
                )
        if self.ranks % self.ep:
            raise InvalidInputError(
                Reason.INVALID_POOL,
                f"pool: ep {self.ep} does not divide {self.ranks} ranks; every rank belongs to one EP group",
            )
        if self.token_budget % self.sequence_parallel:
            raise InvalidInputError(
                Reason.INVALID_POOL,
                f"pool: token_budget {self.token_budget} is no multiple of sequence_parallel "
                f"{self.sequence_parallel}; the nearest below is "
                f"{self.token_budget // self.sequence_parallel * self.sequence_parallel}",
            )
        object.__setattr__(self, "speeds", _validated_speeds(self.speeds, self.ranks))

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Degrees that a group may have, ascending: powers of two, and the full pool where it is none.

        Only those for which some group holds no excluded rank.
        """
        most = min(self.ranks, self.max_degree or self.ranks)
        powers = tuple(1 << e for e in range(most.bit_length()))
        degrees = powers if self.ranks in powers or most < self.ranks else (*powers, self.ranks)
        return tuple(degree for degree in degrees if self.fastest(degree) > 0) if self.excluded else degrees

    @cached_property
    def excluded(self) -> tuple[int, ...]:
        """Ranks that get no sequence, ascending."""
        return tuple(rank for rank, speed in dict(self.speeds).items() if speed == 0)

    @cached_property
    def total_speed(self) -> float:
        """Σ of the speeds of all ranks: G where none is slow."""
        slow = dict(self.speeds).values()
        return self.ranks - len(slow) + fsum(slow)

    def group_speeds(self, degree: int) -> npt.NDArray[np.float64]:
        """Speed of the groups on ranks 0 … degree − 1, degree … 2·degree − 1, and so on, (ranks // degree,).

        A group is as fast as its slowest rank, and one with an excluded rank has speed 0: it must not be opened.
        """
        speeds = np.ones(self.ranks)
        for rank, speed in dict(self.speeds).items():
            speeds[rank] = speed
        groups = self.ranks // degree
        return speeds[: groups * degree].reshape(groups, degree).min(axis=1)

    def speeds_of(self, start: npt.NDArray[np.int32], degree: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Speed of each of the groups whose first ranks and degrees are given, (groups,)."""
        speed = np.ones(len(start))
        for size in np.flatnonzero(np.bincount(degree)).tolist() if self.speeds else ():
            same = degree == size
            speed[same] = self.group_speeds(size)[start[same] // size]
        return speed

    @property
    def evened(self) -> Pool:
        """The same pool with its slow ranks taken for fast; excluded ones stay excluded."""
        if not self.speeds:
            return self
        return replace(self, speeds=tuple((rank, 0.0) for rank in self.excluded))

    @property
    def without_slow(self) -> Pool:
        """The same pool with its slow ranks excluded; where none would be left to work, the same pool."""
        if len(self.speeds) == self.ranks:
            return self
        return replace(self, speeds=tuple((rank, 0.0) for rank in dict(self.speeds)))

    def fastest(self, degree: int) -> float:
        """Speed of the fastest group of `degree` ranks."""
        return float(self.group_speeds(degree).max()) if self.speeds else 1.0

    def pace(self, degree: int) -> float:
        """How many ranks of full speed the fastest group of `degree` ranks is worth."""
        return degree * self.fastest(degree)

    def shape(self, degree: int) -> GroupShape:
        """P_u × P_r of a group: P_u is the largest power of two that divides degree and h and is ≤ U."""
        ulysses = 1
        most = min(self.max_ulysses or self.ranks, degree)
        while 2 * ulysses <= most and degree % (2 * ulysses) == 0 and (self.heads or 0) % (2 * ulysses) == 0:
            ulysses *= 2
        return GroupShape(ulysses, degree // ulysses)

    def chunks(self, degree: int) -> int:
        """Chunks n that each sequence of a group is cut into: 1 without a ring, else 2·P_r."""
        ring = self.shape(degree).ring
        return 1 if ring == 1 else 2 * ring

    def stream_multiple(self, degree: int) -> int:
        """What the padded tokens of a whole group are a multiple of: lcm(n, degree·t)."""
        return lcm(self.chunks(degree), degree * self.sequence_parallel)

    def padded(self, length: int, degree: int) -> int:
        """s̃: tokens of a sequence padded to the chunks of a group of this degree."""
        chunks = self.chunks(degree)
        return -(-length // chunks) * chunks

    def capacity(self, degree: int) -> int:
        """Most tokens Σ s̃ that a group may hold, so that its padded total is at most degree·B."""
        multiple = self.stream_multiple(degree)
        return degree * self.token_budget // multiple * multiple


def _validated_speeds(speeds: Any, ranks: int) -> tuple[tuple[int, float], ...]:
    """Pairs of rank and speed by rank, those of speed 1 left out, or what is wrong with them."""
    try:
        pairs = [(rank, speed) for rank, speed in (speeds.items() if isinstance(speeds, Mapping) else speeds)]
    except (TypeError, ValueError):
        raise _invalid_speeds(f"speeds is {speeds!r}; give pairs of a rank and its speed") from None
    kept: dict[int, float] = {}
    for rank, speed in pairs:
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 0 <= rank < ranks:
            raise _invalid_speeds(f"speeds names rank {rank!r}; the pool has ranks 0 … {ranks - 1}")
        if rank in kept:
            raise _invalid_speeds(f"speeds names rank {rank} twice ({kept[int(rank)]} and {speed}); give it one speed")
        number = isinstance(speed, int | float | np.integer | np.floating) and not isinstance(speed, bool)
        if not number or not (speed == 0 or MIN_SPEED <= speed <= 1):
            raise _invalid_speeds(
                f"rank {rank} has speed {speed!r}; give {MIN_SPEED} to 1, the speed of the fastest, or 0 to exclude it"
            )
        kept[int(rank)] = float(speed) + 0.0  # −0.0 is another number in the digest
    if len(kept) == ranks and not any(kept.values()):
        raise _invalid_speeds(f"all {ranks} ranks are excluded; leave at least one to work")
    return tuple((rank, speed) for rank, speed in sorted(kept.items()) if speed != 1)


def _invalid_speeds(complaint: str) -> InvalidInputError:
    return InvalidInputError(Reason.INVALID_POOL, f"pool: {complaint}")
