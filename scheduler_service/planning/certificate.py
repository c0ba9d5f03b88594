"""A lower bound on the iteration time of any valid plan, by the simple cost model.

The span of 1F1B is monotone and convex in the times of the microbatches, so the slowest pipeline takes at least the
span of the mean times over all pipelines, whose sums are known: a sequence's load and tokens over its ranks add up to
s² and at least s, whatever its degree. What remains is how M microbatches of those sums can be shaped, and that is
bounded for every M.

Where ranks are slow, means are taken with the speeds as weights: a group of speed v needs s²/(g·v) on each of its
ranks, whose speeds are at least v, so the weighted sum is s² or more again, over Σ speeds instead of G.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.compiled import compiled
from scheduler_service.domain import Batch, CostModel, Pool
from scheduler_service.domain.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR

Seconds = npt.NDArray[np.float64]

ROUNDING = 1e-9
"""Share by which the bound is lowered: a forecast adds thousands of durations, each rounded, in another order."""

MOST_MICROBATCHES = 2048
"""Up to so many, every number of microbatches is looked at; beyond, their overheads alone are counted."""

_CUTS_PER_STAGE = 8


def lower_bound_s(batch: Batch, pool: Pool, cost: CostModel) -> float:
    """Seconds that no valid plan's forecast is below: the greater of two bounds.

    Let x = f + b be the time of a microbatch on one stage, W the mean over ranks of all work without overheads, o the
    overhead, p the stages. Every microbatch has f ≥ o and b ≥ o, and every plan has M ≥ M₀ microbatches: ⌈Σs/(G·B)⌉
    for the tokens, G without excluded ranks, rounded up to the pool's multiple.

    * *The longest sequence, down and up*: on the best group, worth g ranks of full speed, its microbatch takes
      x₁ ≥ 3.5·θ·s_max²/g + 3·τ·s_max/g + 2·o, and passes p stages forward and p back, one after the other. On the
      first stage at most p−1 forwards and p−1 backwards of others run meanwhile (1F1B); the other 2(M−1) − 2(p−1)
      or more operations run before or after: T ≥ p·x₁ + 2·max(0, M₀−p)·o.
    * *All work, and what it takes to get it in and out*: see `_Ramps`.
    """
    attention, linear = (1 + BACKWARD_ATTENTION) * cost.theta, (1 + BACKWARD_LINEAR) * cost.tau
    both_overheads = 2 * cost.overhead
    multiple = pool.microbatch_multiple
    fewest = -(-batch.tokens // ((pool.ranks - len(pool.excluded)) * pool.token_budget))
    fewest = -(-fewest // multiple) * multiple

    pace = max(pool.pace(degree) for degree in pool.degrees)
    longest = attention * batch.longest**2 / pace + linear * batch.longest / pace + both_overheads
    longest_sequence = pool.stages * longest + both_overheads * max(0, fewest - pool.stages)

    # Later microbatches than these are of no use to anyone; were they, their overheads would be counted.
    most = min(max(fewest, MOST_MICROBATCHES), -(-len(batch) // multiple) * multiple)
    microbatches = np.arange(fewest, max(fewest, most) + 1, multiple)
    work = (attention * batch.sum_of_squares + linear * batch.tokens) / pool.total_speed
    all_work = np.asarray(work + both_overheads * (microbatches + pool.stages - 1), np.float64)
    if pool.stages > 1 and work > 0:
        least = _least_with_ramps(all_work, microbatches, _ramps(batch, pool, cost, microbatches), work)
    else:
        least = all_work[0]
    if microbatches[-1] < len(batch):
        least = min(least, work + both_overheads * (microbatches[-1] + multiple + pool.stages - 1))
    return max(float(least), longest_sequence) * (1 - ROUNDING)


class _Ramp(NamedTuple):
    """The largest sizes that a recurrence allows: affine in z, columns over the steps from the end of the pipeline."""

    at_zero: Seconds
    per_z: Seconds

    @property
    def largest(self) -> _Ramp:
        """Sum of the first n sizes, for n = 0 … steps."""
        return _Ramp(*(np.append(0.0, np.cumsum(column)) for column in self))


@lru_cache(maxsize=64)
def _ramp(steps: int, stages: int, overhead: float, ratio: float) -> _Ramp:
    """x_k = (z + Σ_{k−p<j<k} (o + ratio·x_j))/(p−1): never falling with k."""
    at_zero, per_z = np.zeros(steps), np.zeros(steps)
    for k in range(steps):
        window = slice(max(0, k - stages + 1), k)
        waited = overhead * (k - window.start) + ratio * at_zero[window].sum()
        at_zero[k] = waited / (stages - 1)
        per_z[k] = (1 + ratio * per_z[window].sum()) / (stages - 1)
    return _Ramp(at_zero, per_z)


class _Ramps(NamedTuple):
    """How fast microbatches can grow at the start and shrink at the end, and what has to find a place in them.

    Take the path that enters on the first stage, goes down with microbatch k, stays on the last stage until microbatch
    m ≥ k, goes up with it and ends on the first stage. In 1F1B its length is

        Σx + P_k + Q_m      P_k = (p−1)·f_k − Σ_{k−p<j<k} b_j      Q_m = (p−1)·b_m − Σ_{m<j<m+p} f_j

    So for any cut c, T ≥ Σx + S + R with S = max P_k over k ≤ c and R = max Q_m over m > c. Conversely S and R limit
    the sizes u = f − o and v = b − o, since v ≤ 2.5·u and u ≤ v/2:

        u_k ≤ (z + Σ_{k−p<j<k} (o + 2.5·u_j))/(p−1)      z = S − (p−1)·o ≥ 0, for k ≤ c
        v_m ≤ (y + Σ_{m<j<m+p} (o + v_j/2))/(p−1)        y = R − (p−1)·o ≥ 0, for m > c

    and all work must go into such sizes: W ≤ Σ_{k≤c} (u_k + v_k) + Σ_{m>c} (u_m + v_m), where u + v ≤ 1.5·v, and
    ≤ 3.5·u, or, summed, ≤ 3·Σu + A/2 with A all attention. The longest sequence needs its place, too: some u_k or v_m
    is as large as it is on the whole pool. That leaves the smallest z + y under two linear conditions, solved by
    hand; every cut gives a bound, and the best is taken.
    """

    up: _Ramp
    total_up: _Ramp
    down: _Ramp
    total_down: _Ramp
    longest_u: float
    longest_v: float
    sums: tuple[tuple[float, float], ...]
    """(r, d) with Σ_{k≤c} (u_k + v_k) ≤ r·Σ_{k≤c} u_k + d."""


def _ramps(batch: Batch, pool: Pool, cost: CostModel, microbatches: npt.NDArray[np.int64]) -> _Ramps:
    stages, overhead = pool.stages, cost.overhead
    attention = cost.theta * batch.sum_of_squares / pool.total_speed
    longest_u = (cost.theta * batch.longest**2 + cost.tau * batch.longest) / pool.total_speed
    longest_v = (BACKWARD_ATTENTION * cost.theta * batch.longest**2 + BACKWARD_LINEAR * cost.tau * batch.longest) / (
        pool.total_speed
    )
    ratio = BACKWARD_ATTENTION if cost.theta > 0 else BACKWARD_LINEAR
    cuts = min(_CUTS_PER_STAGE * stages, int(microbatches[0]))
    up, down = _ramp(cuts, stages, overhead, ratio), _ramp(int(microbatches[-1]), stages, overhead, 1 / BACKWARD_LINEAR)
    sums = ((1 + ratio, 0.0), (1 + BACKWARD_LINEAR, attention / 2))
    return _Ramps(up, up.largest, down, down.largest, longest_u, longest_v, sums)


@compiled
def _least_with_ramps(all_work: Seconds, microbatches: npt.NDArray[np.int64], ramps: _Ramps, work: float) -> float:
    """Smallest over M of `all_work`, W + 2(M+p−1)·o, and the seconds above it that no plan of M microbatches avoids."""
    up, total_up, down, total_down, longest_u, longest_v, sums = ramps
    least = np.inf
    for i in range(len(microbatches)):
        if all_work[i] >= least:
            break  # more microbatches only add overheads
        unavoidable = 0.0
        for cut in range(len(up.per_z)):
            after = microbatches[i] - cut - 1
            z_longest = max(0.0, (longest_u - up.at_zero[cut]) / up.per_z[cut])
            gain_down = 1.5 * total_down.per_z[after]
            for scale, given in sums:
                gain_up = scale * total_up.per_z[cut + 1]
                missing = work - given - scale * total_up.at_zero[cut + 1] - 1.5 * total_down.at_zero[after]
                gain = max(gain_up, gain_down)
                bound = z_longest + max(0.0, missing - gain_up * z_longest) / gain
                if after > 0:  # else there is no place behind the cut
                    y_longest = max(0.0, (longest_v - down.at_zero[after - 1]) / down.per_z[after - 1])
                    bound = min(bound, y_longest + max(0.0, missing - gain_down * y_longest) / gain)
                unavoidable = max(unavoidable, bound)
        least = min(least, all_work[i] + unavoidable)
    return least
