"""What each scheduling system would do with the same batch on the same cluster.

Every system plans with the simple cost model that comes closest to the cluster, runs its plan on its own engine, and is
judged by the model of operators. The simple model knows nothing of exchanges, so systems that choose wide groups would
pay for what they cannot see; therefore each may lower its largest degree as long as that makes its iteration shorter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from scheduler_service.domain import Batch, HydraCpError, Plan
from scheduler_service.planning.feasibility import require_fit
from scheduler_service.planning.iteration import plan_iteration
from scheduler_service.simulation.cluster import Cluster, Engine
from scheduler_service.simulation.job import Simulation, simulate
from scheduler_service.simulation.simple_cost import simple_cost

ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "hydra": Engine.HYBRID,
        "hydra_search": Engine.HYBRID,
        "flexsp": Engine.HYBRID,  # Ulysses alone, up to the heads
        "static_cp": Engine.RING,
        "megatron": Engine.RING,
        "megatron_hybrid": Engine.RING,
        "bytescale": Engine.RING,
        "wlb_llm": Engine.RING,  # gathers all keys instead: as many bytes, but in the open
    }
)
"""The engine that each system comes with."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of one system."""

    policy: str
    engine: Engine
    plan_s: float
    """Seconds of planning, of the plan that was kept."""
    plan: Plan | None = None
    simulation: Simulation | None = None
    error: HydraCpError | None = None
    """Why there is no plan."""


def compare(
    batch: Batch,
    cluster: Cluster,
    policies: Iterable[str],
    *,
    engine: Engine | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Outcome]:
    """One outcome after the other, as they come. `engine`: run all plans on this one instead of each on its own."""
    for policy in policies:
        yield _outcome(batch, cluster.with_engine(engine or ENGINES[policy]), policy, clock)


def _outcome(batch: Batch, cluster: Cluster, policy: str, clock: Callable[[], float]) -> Outcome:
    cost = simple_cost(cluster)
    best: Outcome | None = None
    limit: int | None = None
    while True:
        try:
            plan = plan_iteration(batch, replace(cluster.pool, max_degree=limit), policy=policy, cost=cost, clock=clock)
        except HydraCpError as error:
            return best or Outcome(policy, cluster.engine, plan_s=0.0, error=error)
        found = Outcome(policy, cluster.engine, plan.header.plan_s, plan, simulate(plan, batch, cluster))
        if best is not None and _iteration_s(best) <= _iteration_s(found):
            return best
        best, used = found, int(plan.degree.max())
        limit = 1 << (used - 1).bit_length() - 1 if used > 1 else 0  # the power of two below
        if limit < require_fit(batch, cluster.pool):
            return best


def _iteration_s(outcome: Outcome) -> float:
    assert outcome.simulation is not None
    return outcome.simulation.iteration_s
