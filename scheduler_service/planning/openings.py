"""Where groups may open: for each degree, its groups of consecutive ranks, the fastest first.

Microbatches are filled from the longest sequence to the shortest, and degrees only fall along that order. So each
group is opened where it runs fastest, and what is left for the short sequences at the end are the slow ranks: there is
always a short one that fits their share. No space is lost by that, since groups of a smaller degree lie inside or
beside those of a larger one. A group with an excluded rank is not listed; its other ranks are, in smaller groups.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Pool


class Openings(NamedTuple):
    """The groups of all degrees of a pool; those of its i-th degree are rows first[i] … first[i + 1] − 1."""

    first: npt.NDArray[np.int64]
    fast: npt.NDArray[np.int64]
    """Of each degree, the first row after those that are as fast as its fastest."""
    start: npt.NDArray[np.int32]
    """First rank. Of equally fast groups, the lowest comes first."""
    speed: npt.NDArray[np.float64]
    """Speed of the slowest rank."""


@lru_cache(maxsize=8)
def openings(pool: Pool) -> Openings:
    """The groups that may open in `pool`; about 2·G rows."""
    starts, speeds, fast = [], [], []
    for degree in pool.degrees:
        speed = pool.group_speeds(degree)
        order = np.argsort(-speed, kind="stable")[: np.count_nonzero(speed)]
        starts.append(order * degree)
        speeds.append(speed[order])
        fast.append(np.count_nonzero(speed == speed.max()))
    first = np.cumsum([0, *map(len, starts)])
    return Openings(
        first=first,
        fast=first[:-1] + fast,
        start=np.concatenate(starts).astype(np.int32),
        speed=np.concatenate(speeds),
    )
