"""What each scheduling system would do with the same batch on the same cluster.

Every system plans with the simple cost model that comes closest to the cluster, runs its plan on an engine that it
comes with, and is judged by the model of operators, which `hydra_search` also chooses among its candidates with. The
simple model knows nothing of exchanges, so systems that choose wide groups would pay for what they cannot see;
therefore each may lower its largest degree as long as that makes its iteration shorter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from scheduler_service.domain import Batch, HydraCpError, Plan
from scheduler_service.planning.feasibility import require_fit
from scheduler_service.planning.iteration import POLICIES_FOR_SLOW_RANKS, plan_iteration
from scheduler_service.simulation.cluster import Cluster, Engine
from scheduler_service.simulation.job import ClusterObjective, Simulation, simulate
from scheduler_service.simulation.simple_cost import simple_cost

OURS, MEGATRON_CORE = (Engine.HYBRID,), (Engine.RING, Engine.ULYSSES)

ENGINES: Mapping[str, tuple[Engine, ...]] = MappingProxyType(
    {
        "hydra": OURS,
        "hydra_search": OURS,
        "static_cp": MEGATRON_CORE,
        "megatron": MEGATRON_CORE,
        "megatron_hybrid": MEGATRON_CORE,
        "bytescale": MEGATRON_CORE,  # its own is a ring; here it may have the faster of the two, like the others
        "wlb_llm": MEGATRON_CORE,  # its gathering of keys sends what a ring sends, but in the open
        "flexsp": (Engine.ULYSSES,),
    }
)
"""The engines that each system can run on; a plan is made for the first (padding is a ring's), and runs on the fastest.

Megatron-Core offers both of its kinds for any model, and pads for a ring in either case.
"""


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
    """One outcome after the other, as they come. `engine`: run all plans on this one instead of each on its own.

    What systems that take all ranks for equally fast plan so, runs on the ranks there are. Such systems have no plan
    where ranks are excluded.
    """
    even = replace(cluster, speeds=cluster.pool.evened.speeds)
    for policy in policies:
        knows = even == cluster or policy in POLICIES_FOR_SLOW_RANKS
        jobs = [(cluster if knows else even).with_engine(each) for each in ((engine,) if engine else ENGINES[policy])]
        outcome = _outcome(batch, jobs, policy, clock)
        if not knows and outcome.plan is not None:
            job = cluster.with_engine(outcome.engine)
            outcome = replace(outcome, simulation=simulate(outcome.plan, batch, job))
        yield outcome


def _outcome(batch: Batch, jobs: list[Cluster], policy: str, clock: Callable[[], float]) -> Outcome:
    cluster = jobs[0]
    cost, objective = simple_cost(cluster), ClusterObjective(cluster)
    best: Outcome | None = None
    limit: int | None = None
    while True:
        try:
            pool = replace(cluster.pool, max_degree=limit)
            plan = plan_iteration(batch, pool, policy=policy, cost=cost, objective=objective, clock=clock)
        except HydraCpError as error:
            return best or Outcome(policy, cluster.engine, plan_s=0.0, error=error)
        runs = [Outcome(policy, job.engine, plan.header.plan_s, plan, simulate(plan, batch, job)) for job in jobs]
        found = min(runs, key=_iteration_s)
        if best is not None and _iteration_s(best) <= _iteration_s(found):
            return best
        best, used = found, int(plan.degree.max())
        limit = 1 << (used - 1).bit_length() - 1 if used > 1 else 0  # the power of two below
        if limit < require_fit(batch, cluster.pool):
            return best


def _iteration_s(outcome: Outcome) -> float:
    assert outcome.simulation is not None
    return outcome.simulation.iteration_s
