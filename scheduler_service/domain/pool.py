"""The ranks that share a global batch, and how a group of them is cut into Ulysses and ring."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import NamedTuple

from scheduler_service.domain.errors import InvalidInputError, Reason

MAX_RANKS = 1 << 16
"""Most ranks of a pool."""

MAX_TOKEN_BUDGET = 1 << 30
"""Most tokens per rank and microbatch."""


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

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Degrees that a group may have, ascending: powers of two, and the full pool where it is none."""
        most = min(self.ranks, self.max_degree or self.ranks)
        powers = tuple(1 << e for e in range(most.bit_length()))
        return powers if self.ranks in powers or most < self.ranks else (*powers, self.ranks)

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
