"""A lower bound on the iteration time of any valid plan, in closed form, by the simple cost model."""

from __future__ import annotations

from scheduler_service.domain import Batch, CostModel, Pool
from scheduler_service.domain.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR

ROUNDING = 1e-9
"""Share by which the bound is lowered: a forecast adds thousands of durations, each rounded, in another order."""


def lower_bound_s(batch: Batch, pool: Pool, cost: CostModel) -> float:
    """Seconds that no valid plan's forecast is below.

    Let x = f + b be the time of a microbatch on one stage, o the overhead, p the stages, and M₀ the fewest
    microbatches: ⌈Σs/(G·B)⌉ for the tokens, rounded up to the pool's multiple. Every microbatch has f ≥ o, b ≥ o,
    and every plan has M ≥ M₀. Of any one pipeline, the replay waits at least for:

    * *all of its work, then the way in and out*: its last stage starts after p−1 forwards of the first microbatch,
      works Σx, and the last microbatch then has p−1 backwards to go: T ≥ Σx + 2(p−1)·o. The slowest pipeline has
      at least the mean of Σx over all ranks, since an EP group's maximum is at least its mean; a sequence's load
      and tokens over its ranks add up to s² and at least s, whatever its degree:
      mean Σx ≥ (3.5·θ·Σs² + 3·τ·Σs)/G + 2·M₀·o.
    * *the longest sequence, down and up*: at the largest degree g its microbatch takes
      x₁ ≥ 3.5·θ·s_max²/g + 3·τ·s_max/g + 2·o, and passes p stages forward and p back, one after the other. On the
      first stage at most p−1 forwards and p−1 backwards of others run meanwhile (1F1B); the other 2(M−1) − 2(p−1)
      or more operations run before or after: T ≥ p·x₁ + 2·max(0, M₀−p)·o.

    The greater of the two holds. Where the pipeline's bubble dominates it is loose: microbatches that grow and
    shrink would need a linear program.
    """
    attention, linear = (1 + BACKWARD_ATTENTION) * cost.theta, (1 + BACKWARD_LINEAR) * cost.tau
    both_overheads = 2 * cost.overhead
    multiple = pool.microbatch_multiple
    fewest = -(-batch.tokens // (pool.ranks * pool.token_budget))
    fewest = -(-fewest // multiple) * multiple

    work = (attention * batch.sum_of_squares + linear * batch.tokens) / pool.ranks
    all_work = work + both_overheads * (fewest + pool.stages - 1)

    degree = pool.degrees[-1]
    longest = attention * batch.longest**2 / degree + linear * batch.longest / degree + both_overheads
    longest_sequence = pool.stages * longest + both_overheads * max(0, fewest - pool.stages)
    return max(all_work, longest_sequence) * (1 - ROUNDING)
