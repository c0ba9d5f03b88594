"""The degree of each sequence: the smallest that keeps both the load target and the token budget.

    k(s) = the smallest degree g with  s² ≤ limit(g) = ⌊s_max²·g/C⌋  and  s̃(s, g) ≤ capacity(g)

Where ranks are slow, a group of speed v may take v·limit(g) only, and k(s) counts on the fastest group of each degree.

All comparisons are between integers, so no rounding changes a plan. Only degrees up to C exist here: at C the
longest sequence keeps both conditions, hence so does every other. That also keeps numbers small: a group's Σ s²
is at most limit(C) = s_max² ≤ 2⁴⁸, far inside 64 bits.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Pool
from scheduler_service.planning.load_target import LoadTarget

LongColumn = npt.NDArray[np.int64]

MOST_LOAD = 1 << 48
"""Largest limit of a group's Σ w(s), so that heap keys hold it."""


class DegreeClasses(NamedTuple):
    """The degrees that groups of one plan may have, ascending, one row each; int64 columns.

    The longest sequence of a class is exact: s² ≤ limit means s ≤ isqrt(limit), and since a capacity is a multiple
    of the chunks, s̃ ≤ capacity means s ≤ capacity.
    """

    degree: LongColumn
    limit: LongColumn
    """Most Σ s² of a group."""
    capacity: LongColumn
    """Most Σ s̃ of a group."""
    chunks: LongColumn
    """What each sequence is padded to a multiple of."""
    longest: LongColumn
    """Longest sequence whose degree is this one or a smaller one."""


def degree_classes(pool: Pool, target: LoadTarget) -> DegreeClasses:
    """The degrees of `pool` up to the cap, with their limits."""
    degrees = [degree for degree in pool.degrees if degree <= target.cap]
    limit = [min(MOST_LOAD, target.limit(degree)) for degree in degrees]
    capacity = [pool.capacity(degree) for degree in degrees]
    allowed = [int(pool.fastest(degree) * most) for degree, most in zip(degrees, limit, strict=True)]
    longest = [min(isqrt(most), tokens) for most, tokens in zip(allowed, capacity, strict=True)]
    longest[-1] = max(longest[-1], target.longest)  # where even the fastest group is slow, the limit was cut off
    return DegreeClasses(
        degree=np.array(degrees, np.int64),
        limit=np.array(limit, np.int64),
        capacity=np.array(capacity, np.int64),
        chunks=np.array([pool.chunks(degree) for degree in degrees], np.int64),
        # Padding can make a degree hold less than a smaller one; such a degree is nobody's smallest.
        longest=np.maximum.accumulate(np.array(longest, np.int64)),
    )


def own_degrees(lengths: LongColumn, pool: Pool, target: LoadTarget) -> LongColumn:
    """k(s) of every length up to s_max, int64."""
    classes = degree_classes(pool, target)
    return classes.degree[np.searchsorted(classes.longest, lengths)]
