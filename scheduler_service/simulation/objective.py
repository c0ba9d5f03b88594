"""What a searching planner minimises, and the simple cost model as that.

A planner packs groups into microbatches, asks how long these take, and then how long the iteration is with the
microbatches in one order or another. `ClusterObjective` of `job` answers by the model of operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import CostModel, Pool
from scheduler_service.simulation.iteration import microbatch_times
from scheduler_service.simulation.loads import GroupLoads
from scheduler_service.simulation.spans import pipeline_spans

Seconds = npt.NDArray[np.float64]
Order = npt.NDArray[np.int64]


class MicrobatchTimes(Protocol):
    """How long the microbatches of one packing take."""

    def mean(self) -> tuple[Seconds, Seconds]:
        """Forward and backward seconds of each microbatch, (microbatches,): the mean over pipelines and stages."""
        ...

    def iteration_s(self, order: Order) -> float:
        """Seconds of the iteration in which microbatch order[0] runs first. `order`: all of them, (microbatches,)."""
        ...


class Objective(Protocol):
    """A model of the iteration: the same answer to the same question, always."""

    def times(self, groups: GroupLoads, microbatches: int) -> MicrobatchTimes:
        """Times of `microbatches`, of which the last may be empty. No group may hold an excluded rank."""
        ...


@dataclass(frozen=True)
class SimpleObjective:
    """The iteration by the simple cost model: `forecast`'s, to the last bit."""

    pool: Pool
    cost: CostModel

    def times(self, groups: GroupLoads, microbatches: int) -> SimpleTimes:
        """See `Objective`."""
        return SimpleTimes(*microbatch_times(groups, self.pool, self.cost, microbatches), self.pool.stages)


@dataclass(frozen=True, eq=False)
class SimpleTimes:
    """Seconds on every stage, (pipelines, microbatches)."""

    forward: Seconds
    backward: Seconds
    stages: int

    def mean(self) -> tuple[Seconds, Seconds]:
        """See `MicrobatchTimes`."""
        return self.forward.mean(axis=0), self.backward.mean(axis=0)

    def iteration_s(self, order: Order) -> float:
        """See `MicrobatchTimes`."""
        return float(pipeline_spans(self.forward[:, order], self.backward[:, order], self.stages).max())
