"""The load target Λ and the degree cap C, in closed form.

The longest sequence at cap C leaves s_max²/C on each of its ranks: the lowest feasible target, and the target
for every rank. A larger cap shortens the pipeline bubble and costs more microbatches, each with its overhead:

    Λ(C) = s_max²/C        M ≈ (Σs²/G)/Λ(C)        T(C) = (M + p − 1)·(θ·Λ(C) + c) = α + β/C + γ·C
    β = (p − 1)·θ·s_max²   γ = c·Σs²/(G·s_max²)    C* = sqrt(β/γ)

(HyDra's planner.) Where ranks are slow, C and G are in ranks of full speed: Λ is what a rank of speed 1 is filled up
to, one of speed v to v·Λ. It looks at attention load alone; that M is also at least what the tokens need, Σs/(G·B), is
left out, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from scheduler_service.domain import Batch, CostModel, InvalidInputError, Pool, Reason
from scheduler_service.planning.feasibility import fits, require_fit


@dataclass(frozen=True)
class LoadTarget:
    """What every rank of every microbatch is filled up to."""

    longest: int
    """Tokens of the longest sequence, s_max."""

    cap: int
    """Degree cap C: the degree of the longest sequence, and the largest of any group."""

    speed: float = 1.0
    """Speed of the fastest group of C ranks."""

    @property
    def load(self) -> float:
        """Λ = s_max²/(C·speed), token², on ranks of full speed."""
        return self.longest**2 / (self.cap * self.speed)

    def limit(self, degree: int) -> int:
        """Most Σ s² of a group of `degree` ≤ C ranks of full speed: ⌊s_max²·degree/C⌋, exact.

        Rounded up where C's fastest group is slow, so that it still holds the longest sequence.
        """
        if self.speed == 1:
            return self.longest**2 * degree // self.cap
        return math.ceil(self.longest**2 * degree / (self.cap * Fraction(self.speed)))


def choose_target(batch: Batch, pool: Pool, cost: CostModel, cap: int | None = None) -> LoadTarget:
    """The power of two in [C_mem, C_max] with the smallest T(C), the smaller on a tie.

    C_mem is the smallest degree whose token budget holds the longest sequence; where only a full pool that is no
    power of two does, C is the pool. `cap` fixes C instead, but not below C_mem: memory is no matter of choice.

    Raises `InfeasibleError` if no degree holds the longest sequence, `InvalidInputError` if the pool has no groups
    of `cap` ranks.
    """
    if cap is not None and cap not in pool.degrees:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"cap {cap} is no degree of this pool; choose one of {', '.join(map(str, pool.degrees))}",
        )
    memory = require_fit(batch, pool)
    if cap is not None:
        held = cap >= memory and fits(batch.longest, cap, pool)
        return target_at(cap if held else memory, batch, pool)
    chosen = memory
    best_squared = squared_best_cap(batch, pool, cost)
    for larger in _larger_powers(memory, batch, pool):
        # T(b) < T(a) for a < b exactly when a·b < β/γ: no sum is rounded, and a tie keeps the smaller cap.
        a, b = pool.pace(chosen), pool.pace(larger)
        if a < b and a * b < best_squared:
            chosen = larger
    return target_at(chosen, batch, pool)


def target_at(cap: int, batch: Batch, pool: Pool) -> LoadTarget:
    """The load target at degree cap `cap`."""
    return LoadTarget(batch.longest, cap, pool.fastest(cap))


def squared_best_cap(batch: Batch, pool: Pool, cost: CostModel) -> float:
    """C*² = β/γ = s_max⁴·(p − 1)·G·(θ/c)/Σs²; infinite where an overhead of zero makes microbatches free."""
    if pool.stages == 1:
        return 0.0  # no pipeline, no bubble: nothing to gain from a larger cap
    if math.isinf(cost.theta_over_c):
        return math.inf
    return float(batch.longest) ** 4 * (pool.stages - 1) * pool.total_speed * cost.theta_over_c / batch.sum_of_squares


def _larger_powers(degree: int, batch: Batch, pool: Pool) -> Iterator[int]:
    """The powers of two after `degree`, which is one or the last, as far as they hold the longest sequence."""
    while degree & (degree - 1) == 0 and 2 * degree in pool.degrees and fits(batch.longest, 2 * degree, pool):
        degree *= 2
        yield degree
