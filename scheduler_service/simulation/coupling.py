"""EP groups that wait for each other in a microbatch, because a CP group reaches into several of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_service.simulation.loads import GroupLoads


@dataclass(frozen=True, eq=False)
class Coupling:
    """Which EP groups hang together, in each microbatch.

    CP groups are runs of neighbouring ranks, so what hangs together is a run of EP groups.
    """

    heads: npt.NDArray[np.int64]
    """Cells (microbatch · EP groups + EP group) that are not tied to the one before, ascending."""
    shape: tuple[int, int]
    """Microbatches, EP groups."""

    def maximum(self, seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Of each cell, the largest value of all that hang together with it; (…, microbatches, EP groups)."""
        cells = seconds.reshape(*seconds.shape[:-2], -1)
        sizes = np.diff(self.heads, append=cells.shape[-1])
        largest = np.repeat(np.maximum.reduceat(cells, self.heads, axis=-1), sizes, axis=-1)
        return largest.reshape(seconds.shape)


def coupling_of(groups: GroupLoads, microbatches: int, ranks: int, ep: int) -> Coupling:
    """What the groups of a plan tie together."""
    shape = microbatches, ranks // ep
    first, last = groups.start // ep, (groups.start + groups.degree - 1) // ep
    ties = np.zeros((microbatches, shape[1] + 1), np.int32)
    np.add.at(ties, (groups.microbatch, first + 1), 1)
    np.add.at(ties, (groups.microbatch, last + 1), -1)
    tied = np.cumsum(ties, axis=1)[:, :-1] > 0
    return Coupling(np.flatnonzero(~tied), shape)
