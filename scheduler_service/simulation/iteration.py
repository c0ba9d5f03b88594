"""How long an iteration takes by the simple cost model: three constants per stage, one pipeline per EP group.

The ranks of an EP group wait for each other in every MoE layer, so they share one timeline, paced by the largest
attention and the largest linear work among them (design of the simulation, section 4). Gradient exchange, the
optimizer and point-to-point latency are not in this model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, CostModel, Plan, Pool
from scheduler_service.domain.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR
from scheduler_service.simulation.coupling import coupling_of
from scheduler_service.simulation.loads import GroupLoads, group_loads
from scheduler_service.simulation.pipeline import PipelineReplay, replay_pipeline
from scheduler_service.simulation.spans import pipeline_spans

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Forecast:
    """A plan's predicted iteration."""

    iteration_s: float
    """Seconds until the slowest pipeline has ended."""
    pp_bubble: float
    """Share of stage time in which a pipeline waits, mean over pipelines."""
    dp_bubble: float
    """Share of the iteration in which a replica waits for the slowest, mean over replicas."""
    forward_s: Seconds = field(repr=False)
    """Forward seconds of each microbatch on each stage, (pipelines, microbatches)."""
    backward_s: Seconds = field(repr=False)
    """Backward seconds, likewise."""
    stages: int

    @cached_property
    def replay(self) -> PipelineReplay:
        """The whole schedule; replica e of it is EP group e. Made when asked for: 16·p·M bytes a pipeline."""
        pipelines, microbatches = self.forward_s.shape
        shape = (pipelines, self.stages, microbatches)
        return replay_pipeline(
            np.broadcast_to(self.forward_s[:, None, :], shape), np.broadcast_to(self.backward_s[:, None, :], shape)
        )


@lru_cache(maxsize=1)
def forecast(plan: Plan, batch: Batch) -> Forecast:
    """Predict `plan` by the pool and the cost model in its header.

    Of each microbatch and EP group, forward = max θ·load + max τ·tokens + overhead over its ranks, the two maxima
    apart, and backward = 2.5 × the first + 2 × the second + overhead; the same on every stage. Linear work is done
    on padded tokens, attention on real ones. A CP group that reaches into several EP groups makes them share their
    maxima, and so on through all groups that hang together. A rank without a sequence still pays the overhead. On a
    slow rank, load and tokens take 1/speed of the time, and so they do on all ranks of its group.

    Cost: O(N log N + M·G/E·p), memory O(N + M·G/E). The last answer is kept: who plans, who describes the plan and
    who shows it ask one after the other.
    """
    pool = plan.header.pool
    forward, backward = microbatch_times(group_loads(plan, batch), pool, plan.header.cost, plan.header.microbatches)
    spans = pipeline_spans(forward, backward, pool.stages)
    busy = forward.sum(axis=1) + backward.sum(axis=1)
    slowest, waits = float(spans.max()), np.maximum(spans - busy, 0.0)
    return Forecast(
        iteration_s=slowest,
        # Every stage is as busy as the others, so the share of one is the share of all.
        # Both are sums of the same durations, in another order: without waits, either may be the larger by rounding.
        pp_bubble=float(np.divide(waits, spans, out=np.zeros_like(spans), where=spans > 0).mean()),
        dp_bubble=float(((slowest - spans) / slowest).mean()) if slowest > 0 else 0.0,
        forward_s=forward,
        backward_s=backward,
        stages=pool.stages,
    )


def microbatch_times(groups: GroupLoads, pool: Pool, cost: CostModel, microbatches: int) -> tuple[Seconds, Seconds]:
    """Forward and backward seconds of every microbatch on a stage, each (pipelines, microbatches).

    No group may hold an excluded rank.
    """
    attention, linear = _maxima_of_ep_groups(groups, pool, microbatches)
    attention, linear = cost.theta * attention, cost.tau * linear
    return (
        attention + linear + cost.overhead,
        BACKWARD_ATTENTION * attention + BACKWARD_LINEAR * linear + cost.overhead,
    )


def _maxima_of_ep_groups(groups: GroupLoads, pool: Pool, microbatches: int) -> tuple[Seconds, Seconds]:
    """Largest load and largest tokens of any rank that an EP group waits for, each (pipelines, microbatches).

    As a rank of full speed would need for them: over the speed of the group.
    """
    coupling = coupling_of(groups, microbatches, pool.ranks, pool.ep)
    slots = (groups.microbatch, groups.start // pool.ep)  # a group is in the first EP group that it reaches into

    def spread(values: Seconds) -> Seconds:
        cells = np.zeros(coupling.shape)
        np.maximum.at(cells, slots, values)
        return coupling.maximum(cells).T

    speed = pool.speeds_of(groups.start, groups.degree)
    return spread(groups.load / speed), spread(groups.tokens / speed)
