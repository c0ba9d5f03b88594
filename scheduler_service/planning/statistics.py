"""What a plan looks like, in numbers: loads, padding, degrees, bubbles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler_service.domain import Batch, Plan
from scheduler_service.simulation import forecast, group_loads


@dataclass(frozen=True)
class PlanStatistics:
    """Figures of one plan; `load` is attention load per rank and microbatch, token²/degree."""

    sequences: int
    tokens: int
    longest_tokens: int
    sum_of_squares: float
    load_max: float
    load_mean: float
    """Over all ranks and microbatches, the idle ones included."""
    load_min: float
    peak_min: float
    """Load of the fullest rank in the microbatch where that is least; where it is most, it is `load_max`."""
    padding: float
    """Padded tokens over tokens, 1 or more."""
    degree_sequences: dict[int, int]
    """Number of sequences at each degree that occurs, ascending."""
    degree_share: dict[int, float]
    """Share of the occupied rank × microbatch slots at each degree."""
    idle_share: float
    """Share of the rank × microbatch slots without a sequence."""
    pp_bubble: float
    """Pipeline bubble of the replay, mean over pipelines."""
    dp_bubble: float
    """Waiting for the slowest replica, mean over replicas."""

    @property
    def imbalance(self) -> float:
        """Largest over mean attention load of ranks and microbatches."""
        return self.load_max / self.load_mean

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees that occur, ascending."""
        return tuple(self.degree_sequences)


def plan_statistics(plan: Plan, batch: Batch) -> PlanStatistics:
    """Figures of a valid plan of `batch`. Cost: O(N log N) for N sequences, and one replay."""
    groups = group_loads(plan, batch)
    peaks = np.zeros(int(groups.microbatch[-1]) + 1)
    np.maximum.at(peaks, groups.microbatch, groups.load)
    predicted = forecast(plan, batch)
    slots = plan.header.pool.ranks * plan.header.microbatches
    occupied = int(groups.degree.sum())
    sequences = np.bincount(plan.degree)
    ranks = np.bincount(groups.degree, groups.degree)
    degrees = [int(degree) for degree in np.flatnonzero(ranks)]
    return PlanStatistics(
        sequences=len(batch),
        tokens=batch.tokens,
        longest_tokens=batch.longest,
        sum_of_squares=batch.sum_of_squares,
        load_max=float(groups.load.max()),
        load_mean=batch.sum_of_squares / slots,
        load_min=float(groups.load.min()) if occupied == slots else 0.0,
        peak_min=float(peaks.min()),
        padding=int(groups.tokens @ groups.degree) / batch.tokens,
        degree_sequences={degree: int(sequences[degree]) for degree in degrees},
        degree_share={degree: float(ranks[degree]) / occupied for degree in degrees},
        idle_share=1 - occupied / slots,
        pp_bubble=predicted.pp_bubble,
        dp_bubble=predicted.dp_bubble,
    )
