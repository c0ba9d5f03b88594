"""A plan: three columns over the sequences, a header, and the canonical bytes whose digest the ranks compare."""

from __future__ import annotations

import copy
import hashlib
import struct
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler_service.domain.cost import CostModel
from scheduler_service.domain.errors import InvalidInputError, Reason
from scheduler_service.domain.pool import Pool

PLAN_FORMAT = 1
"""Version of the canonical form; a change of the bytes changes it."""


@dataclass(frozen=True)
class PlanHeader:
    """What a plan says of itself. The last three fields describe the plan and are no part of its digest."""

    policy: str
    pool: Pool
    cost: CostModel
    microbatches: int
    """Number of microbatches, M."""
    sequences: int
    """Number of sequences, N."""
    batch_digest: str
    """Digest of the lengths that were planned."""
    target: float = 0.0
    """Load target Λ in token²; 0 where the policy has none."""
    cap: int = 0
    """Degree cap C; 0 where the policy has none."""
    predicted_s: float = 0.0
    """Predicted iteration time in seconds, by `cost`."""
    lower_bound_s: float = 0.0
    """No valid plan for this batch is faster, by `cost`; seconds."""
    plan_s: float = 0.0
    """Seconds that planning took."""

    def canonical_bytes(self) -> bytes:
        """The header's part of the canonical form. Little-endian, fixed width, policy name length-prefixed."""
        pool = self.pool
        name = self.policy.encode()
        # Nothing where all ranks are equally fast: the total length tells the two forms apart.
        speeds = [struct.pack("<qd", rank, speed) for rank, speed in dict(pool.speeds).items()]
        return b"".join(
            (
                b"hydracp-plan",
                struct.pack("<iH", PLAN_FORMAT, len(name)) + name,
                struct.pack(
                    "<10q",
                    pool.ranks, pool.token_budget, pool.stages, pool.ep, pool.heads or 0, pool.max_ulysses or 0,
                    pool.node or 0, pool.max_degree or 0, pool.microbatch_multiple, pool.sequence_parallel,
                ),
                struct.pack("<dqqq", self.target, self.cap, self.microbatches, self.sequences),
                bytes.fromhex(self.batch_digest),
                self.cost.digest,
                *speeds,
            )
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Plan:
    """Where each sequence runs: int32 columns in the order of the ids, read-only.

    Sequence i runs in microbatch `microbatch[i]` on ranks start[i] … start[i] + degree[i] − 1. Inside a group
    the sequences are packed in the order of their ids.
    """

    microbatch: npt.NDArray[np.int32] = field(repr=False)
    start: npt.NDArray[np.int32] = field(repr=False)
    degree: npt.NDArray[np.int32] = field(repr=False)
    header: PlanHeader

    def __post_init__(self) -> None:
        for name in ("microbatch", "start", "degree"):
            column = np.array(getattr(self, name), np.int32)
            if column.shape != (self.header.sequences,):
                raise InvalidInputError(
                    Reason.INVALID_PLAN,
                    f"plan: column {name} has shape {column.shape}, the header says {self.header.sequences} sequences",
                )
            column.flags.writeable = False
            object.__setattr__(self, name, column)

    def __len__(self) -> int:
        return self.header.sequences

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def canonical_bytes(self) -> bytes:
        """Header and columns, byte for byte the same on every machine."""
        columns = (self.microbatch, self.start, self.degree)
        return self.header.canonical_bytes() + b"".join(
            column.astype("<i4", copy=False).tobytes() for column in columns
        )

    @cached_property
    def digest(self) -> str:
        """BLAKE2b-128 of the canonical bytes, in hexadecimal."""
        return hashlib.blake2b(self.canonical_bytes(), digest_size=16).hexdigest()

    @cached_property
    def group_order(self) -> npt.NDArray[np.int64]:
        """Ids of the sequences by (microbatch, start), ascending inside a group: the order of the packed streams."""
        key = self.microbatch.astype(np.int64)
        key *= int(self.start.max()) + 1
        key += self.start
        # Sorting integers that hold key and id is several times faster than an argsort. Both together stay inside
        # 63 bits for all but absurd plans: a million microbatches on 65,536 ranks leave 27 bits for the ids.
        id_bits = len(self).bit_length()
        if int(key.min()) < 0 or int(key.max()).bit_length() + id_bits > 63:
            return key.argsort(kind="stable")
        key <<= id_bits
        key += np.arange(len(self))
        key.sort()
        key &= (1 << id_bits) - 1
        return key

    def with_predictions(self, *, predicted_s: float = 0.0, lower_bound_s: float = 0.0, plan_s: float = 0.0) -> Plan:
        """The same plan, described by these seconds. Columns and digest are shared, not made again."""
        described = copy.copy(self)
        header = replace(self.header, predicted_s=predicted_s, lower_bound_s=lower_bound_s, plan_s=plan_s)
        object.__setattr__(described, "header", header)
        return described

    def header_json(self) -> dict[str, Any]:
        """The header as plain values, as `hydra-cp plan --out` writes it."""
        header = self.header
        return {
            "policy": header.policy,
            "pool": header.pool.ranks,
            "budget": header.pool.token_budget,
            "target": header.target,
            "cap": header.cap,
            "microbatches": header.microbatches,
            "sequences": header.sequences,
            "digest": self.digest,
            "lower_bound_s": header.lower_bound_s,
            "predicted_s": header.predicted_s,
            "plan_s": header.plan_s,
            **({"speeds": dict(header.pool.speeds)} if header.pool.speeds else {}),
        }
