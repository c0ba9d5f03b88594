"""What the token budget alone demands: the smallest degree that holds a sequence, and a clear no if none does.

Padding counts: a sequence fits a group when its padded length is at most the group's capacity. It knows nothing
of attention load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import MAX_RANKS, Batch, InfeasibleError, Pool, Reason
from scheduler_service.domain.pool import MAX_TOKEN_BUDGET

Degrees = Callable[[Pool], Sequence[int]]
"""Degrees that a scheduling system gives on a pool, ascending."""


def every_degree(pool: Pool) -> Sequence[int]:
    """What the pool allows: powers of two, and the full pool where it is none."""
    return pool.degrees


def powers_of_two(pool: Pool) -> Sequence[int]:
    """For systems that have no group of a full pool that is no power of two."""
    return [degree for degree in pool.degrees if degree & (degree - 1) == 0]


def fits(length: int, degree: int, pool: Pool) -> bool:
    """Whether a group of `degree` ranks can hold a sequence of `length` tokens: s̃ ≤ its capacity."""
    return pool.padded(length, degree) <= pool.capacity(degree)


def memory_degree(length: int, pool: Pool, degrees: Degrees = every_degree) -> int | None:
    """Smallest degree of the pool whose token budget holds a sequence of `length` tokens; None if none does."""
    return next((degree for degree in degrees(pool) if fits(length, degree, pool)), None)


def memory_degrees(lengths: npt.NDArray[np.int64], pool: Pool) -> npt.NDArray[np.int32]:
    """`memory_degree` of every length, int32; 0 where no degree holds it."""
    # A capacity is a multiple of the chunks, so s̃ ≤ capacity exactly when s ≤ capacity.
    longest = np.maximum.accumulate([pool.capacity(degree) for degree in pool.degrees])
    return np.array((*pool.degrees, 0), np.int32)[np.searchsorted(longest, lengths)]


def pools_to_plan_for(batch: Batch, pool: Pool, cap: int | None) -> list[Pool]:
    """The pool; and where ranks are slow, also taken for equally fast, and without them.

    The last only where that holds the batch, and has groups of `cap` ranks if a cap is given. Which of the plans is
    best, a forecast says that knows the speeds.
    """
    pools, without = [pool, pool.evened], pool.without_slow
    if memory_degree(batch.longest, without) is not None and (cap is None or cap in without.degrees):
        pools.append(without)
    return list(dict.fromkeys(pools))


def require_fit(batch: Batch, pool: Pool) -> int:
    """The memory degree of the longest sequence.

    Raises `InfeasibleError` (SEQUENCE_TOO_LONG) that names the sequence, what the pool holds, and the smallest
    budget and pool that would do.
    """
    degree = memory_degree(batch.longest, pool)
    if degree is not None:
        return degree
    most = max(pool.degrees, key=pool.capacity)
    held = f"pool {pool.ranks} × budget {pool.token_budget} holds {pool.capacity(most):,}"
    if pool.excluded:
        excluded = ", ".join(map(str, pool.excluded[:8])) + (", …" if len(pool.excluded) > 8 else "")
        held = f"the largest group ({most}) without an excluded rank ({excluded}) in {held}"
    elif most < pool.ranks:
        held = f"max_degree {most} of {held}"
    raise _too_long(batch, held, _remedies(batch.longest, pool, every_degree))


def power_of_two_degrees(batch: Batch, pool: Pool, policy: str) -> npt.NDArray[np.int32]:
    """Smallest power of two of ranks whose budget holds each sequence, int32: for systems without other groups.

    Raises `InfeasibleError` (SEQUENCE_TOO_LONG) where none does, like `require_fit`; it names `policy`, for others may.
    """
    powers = powers_of_two(pool)
    longest = np.maximum.accumulate([pool.capacity(degree) for degree in powers])
    if batch.longest > longest[-1]:
        held = (
            f"the largest power-of-two group of pool {pool.ranks} × budget {pool.token_budget} holds {longest[-1]:,}, "
            f"and policy {policy} has no other groups"
        )
        remedies = _remedies(batch.longest, pool, powers_of_two)
        if memory_degree(batch.longest, pool) is not None:
            remedies += ", or choose another policy"
        raise _too_long(batch, held, remedies)
    return np.array(powers, np.int32)[np.searchsorted(longest, batch.lengths)]


def smallest_budget(length: int, pool: Pool, degrees: Degrees = every_degree) -> int:
    """Smallest token budget with which this pool holds a sequence of `length` tokens."""
    # A whole group's stream is padded to a multiple of degree·t, so the quotient is a whole number of t tokens.
    return min(-(-length // pool.stream_multiple(d)) * pool.stream_multiple(d) // d for d in degrees(pool))


def smallest_pool(length: int, pool: Pool, degrees: Degrees = every_degree) -> int | None:
    """Fewest ranks, a multiple of ep, with which a pool of this budget holds a sequence of `length` tokens.

    With excluded ranks, the fewest of the powers of two: looking for free groups in thousands of pools takes long.
    """
    least = -(-length // pool.token_budget)
    # At four times the least, a power of two of twice the least is a degree, and padding takes at most half of its
    # budget: if that does not do, the budget is too small for a single padded token, on any pool.
    enough = -(-4 * least // pool.ep) * pool.ep
    most = min(enough, pool.max_degree or MAX_RANKS, MAX_RANKS)
    first = -(-max(pool.ranks + 1, least) // pool.ep) * pool.ep

    if most == enough and memory_degree(length, replace(pool, ranks=most, speeds=()), degrees) is None:
        return None
    sizes: Iterable[int] = range(first, most + 1, pool.ep)
    if pool.excluded:
        powers = (1 << e for e in range(first.bit_length() - 1, MAX_RANKS.bit_length()))
        sizes = [ranks for ranks in powers if ranks >= first and ranks % pool.ep == 0]
    return next((n for n in sizes if memory_degree(length, replace(pool, ranks=n), degrees) is not None), None)


def _too_long(batch: Batch, held: str, remedies: str) -> InfeasibleError:
    sequence = int(batch.lengths.argmax())
    return InfeasibleError(
        Reason.SEQUENCE_TOO_LONG,
        f"sequence {sequence} has {batch.longest:,} tokens; {held}: {remedies}, or drop the sequence",
        sequence=sequence,
    )


def _remedies(length: int, pool: Pool, degrees: Degrees) -> str:
    remedies = []
    budget = smallest_budget(length, pool, degrees)
    if budget <= MAX_TOKEN_BUDGET:
        remedies.append(f"raise the budget to {budget:,} tokens")
    whole = replace(pool, speeds=())
    if pool.excluded and memory_degree(length, whole, degrees) is not None:
        remedies.append("take the excluded ranks back")
    elif (ranks := smallest_pool(length, pool, degrees)) is not None:
        remedies.append(f"the pool to {ranks:,} ranks")
    if pool.max_degree is not None:
        degree = memory_degree(length, replace(pool, max_degree=None), degrees)
        if degree is not None:
            remedies.append(f"max_degree to {degree:,}")
    return " or ".join(remedies) or "neither a larger budget nor a larger pool within the limits holds it"
