"""What the token budget alone demands: the smallest degree that holds a sequence, and a clear no if none does.

Padding counts: a sequence fits a group when its padded length is at most the group's capacity. It knows nothing
of attention load.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import MAX_RANKS, Batch, InfeasibleError, Pool, Reason
from scheduler_service.domain.pool import MAX_TOKEN_BUDGET


def fits(length: int, degree: int, pool: Pool) -> bool:
    """Whether a group of `degree` ranks can hold a sequence of `length` tokens: s̃ ≤ its capacity."""
    return pool.padded(length, degree) <= pool.capacity(degree)


def memory_degree(length: int, pool: Pool) -> int | None:
    """Smallest degree of the pool whose token budget holds a sequence of `length` tokens; None if none does."""
    return next((degree for degree in pool.degrees if fits(length, degree, pool)), None)


def memory_degrees(lengths: npt.NDArray[np.int64], pool: Pool) -> npt.NDArray[np.int32]:
    """`memory_degree` of every length, int32; 0 where no degree holds it."""
    # A capacity is a multiple of the chunks, so s̃ ≤ capacity exactly when s ≤ capacity.
    longest = np.maximum.accumulate([pool.capacity(degree) for degree in pool.degrees])
    return np.array((*pool.degrees, 0), np.int32)[np.searchsorted(longest, lengths)]


def require_fit(batch: Batch, pool: Pool) -> int:
    """The memory degree of the longest sequence.

    Raises `InfeasibleError` (SEQUENCE_TOO_LONG) that names the sequence, what the pool holds, and the smallest
    budget and pool that would do.
    """
    degree = memory_degree(batch.longest, pool)
    if degree is not None:
        return degree
    sequence = int(batch.lengths.argmax())
    most = max(pool.degrees, key=pool.capacity)
    held = f"pool {pool.ranks} × budget {pool.token_budget}"
    if most < pool.ranks:
        held = f"max_degree {most} of {held}"
    raise InfeasibleError(
        Reason.SEQUENCE_TOO_LONG,
        f"sequence {sequence} has {batch.longest:,} tokens; {held} holds {pool.capacity(most):,}: "
        f"{_remedies(batch.longest, pool)}, or drop the sequence",
        sequence=sequence,
    )


def power_of_two_degrees(batch: Batch, pool: Pool, policy: str) -> npt.NDArray[np.int32]:
    """Smallest power of two of ranks whose budget holds each sequence, int32: for systems without other groups.

    Raises `InfeasibleError` (SEQUENCE_TOO_LONG) where none does; it names `policy` where the full pool would.
    """
    require_fit(batch, pool)
    powers = [degree for degree in pool.degrees if degree & (degree - 1) == 0]
    longest = np.maximum.accumulate([pool.capacity(degree) for degree in powers])
    if batch.longest > longest[-1]:
        sequence = int(batch.lengths.argmax())
        raise InfeasibleError(
            Reason.SEQUENCE_TOO_LONG,
            f"sequence {sequence} has {batch.longest:,} tokens; the largest power-of-two group of pool {pool.ranks} "
            f"× budget {pool.token_budget} holds {longest[-1]:,}, and the policy {policy} has no other groups: raise "
            "the budget, choose a pool that is a power of two, or another policy",
            sequence=sequence,
        )
    return np.array(powers, np.int32)[np.searchsorted(longest, batch.lengths)]


def smallest_budget(length: int, pool: Pool) -> int:
    """Smallest token budget with which this pool holds a sequence of `length` tokens."""
    # A whole group's stream is padded to a multiple of degree·t, so the quotient is a whole number of t tokens.
    return min(-(-length // pool.stream_multiple(d)) * pool.stream_multiple(d) // d for d in pool.degrees)


def smallest_pool(length: int, pool: Pool) -> int | None:
    """Fewest ranks, a multiple of ep, with which a pool of this budget holds a sequence of `length` tokens."""
    least = -(-length // pool.token_budget)
    # At four times the least, a power of two of twice the least is a degree, and padding takes at most half of its
    # budget: if that does not do, the budget is too small for a single padded token, on any pool.
    most = min(4 * least + pool.ep, pool.max_degree or MAX_RANKS, MAX_RANKS)
    first = -(-max(pool.ranks + 1, least) // pool.ep) * pool.ep
    candidates = range(first, most + 1, pool.ep)
    return next((n for n in candidates if memory_degree(length, replace(pool, ranks=n)) is not None), None)


def _remedies(length: int, pool: Pool) -> str:
    remedies = []
    budget = smallest_budget(length, pool)
    if budget <= MAX_TOKEN_BUDGET:
        remedies.append(f"raise the budget to {budget:,} tokens")
    ranks = smallest_pool(length, pool)
    if ranks is not None:
        remedies.append(f"the pool to {ranks:,} ranks")
    if pool.max_degree is not None:
        degree = memory_degree(length, replace(pool, max_degree=None))
        if degree is not None:
            remedies.append(f"max_degree to {degree:,}")
    return " or ".join(remedies) or "neither a larger budget nor a larger pool within the limits holds it"
