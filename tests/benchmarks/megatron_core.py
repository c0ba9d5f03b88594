"""Our two Megatron policies against the schedulers that they follow, on random batches.

megatron_hybrid is compared with `BalancedCPScheduler` as released (megatron-core 0.16), megatron with
`DefaultDynamicCPScheduler` of the development branch: each where the installed package has it. Says how many
batches agree sequence by sequence, and in how many the numbers of microbatches and of micro-steps are equal and the
sums of the largest rank load within 1 %.

Nothing of ours depends on that package. `make bench` installs it into a folder of its own and puts that on the path;
`make bench ARGS=megatron_core` runs this comparison alone. For the development branch put the folder that holds a
checkout's `megatron` on the path instead (its import needs triton as well).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from scheduler_service.domain import Batch, Plan, Pool
from scheduler_service.planning import PlanningConfig, new_plan, verify_plan
from scheduler_service.planning.policies import megatron, megatron_hybrid
from tests.benchmarks.reporting import table, write_json

TOLERANCE = 0.01
SIZES = ((8, 200), (32, 1000), (64, 2000))
BUDGET = 8192
Microbatches = list[list[tuple[int, list[int]]]]
"""Groups of each microbatch: ranks and ids, in the order in which they run."""


class Comparison(NamedTuple):
    """Theirs and ours on one batch."""

    same: bool
    microbatches: tuple[int, int]
    steps: tuple[int, int]
    """Micro-steps, one sequence of each group at a time."""
    load: tuple[float, float]
    """Σ over microbatches of the largest rank load."""
    step_load: tuple[float, float]
    """Σ over micro-steps of the largest rank load."""
    seconds: tuple[float, float]

    @property
    def agrees(self) -> bool:
        """Whether the counts are equal and the sums within 1 %."""
        counts = self.microbatches[0] == self.microbatches[1] and self.steps[0] == self.steps[1]
        return counts and all(abs(b / a - 1) <= TOLERANCE for a, b in (self.load, self.step_load))


def random_batch(random: np.random.Generator, count: int, longest: int) -> Batch:
    """A mass of short documents and a long tail."""
    return Batch(np.clip(random.lognormal(6.5, 1.6, count), 16, longest).astype(np.int64))


def groups_of_ranks(per_rank: list[list[int]]) -> list[tuple[int, list[int]]]:
    """The groups of one microbatch from what each rank runs: no sequence is in two groups."""
    sizes: dict[tuple[int, ...], int] = {}
    for members in per_rank:
        sizes[tuple(members)] = sizes.get(tuple(members), 0) + 1
    return [(size, list(members)) for members, size in sizes.items()]


def groups_of_plan(plan: Plan) -> Microbatches:
    """The groups of a plan, whose sequences run together."""
    found: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(plan.header.microbatches)]
    for i, (m, start, degree) in enumerate(zip(plan.microbatch, plan.start, plan.degree, strict=True)):
        found[m].setdefault((int(start), int(degree)), []).append(i)
    return [[(degree, members) for (_, degree), members in groups.items()] for groups in found]


def plan_of_groups(microbatches: Microbatches, batch: Batch, pool: Pool) -> Plan:
    """A verified plan with one microbatch for each micro-step: the k-th sequence of every group (ranks, ids)."""
    columns = np.zeros((3, len(batch)), np.int32)
    step = 0
    for groups in microbatches:
        first_rank = 0
        for ranks, members in sorted(groups, key=lambda group: -group[0]):
            columns[0, members] = np.arange(step, step + len(members))
            columns[1:, members] = [[first_rank], [ranks]]
            first_rank += ranks
        step += max(len(members) for _, members in groups)
    microbatch, start, degree = columns
    plan = new_plan("megatron_hybrid", batch, pool, PlanningConfig(), (microbatch, start, degree))
    verify_plan(plan, batch)
    return plan


def compare(batch: Batch, theirs: Microbatches, ours: Microbatches, seconds: tuple[float, float]) -> Comparison:
    """Counts and sums of both."""
    squares = [length * length for length in batch.lengths.tolist()]

    def figures(found: Microbatches) -> tuple[int, int, float, float]:
        steps = [max(len(members) for _, members in groups) for groups in found]
        load = sum(max(sum(squares[i] for i in members) / size for size, members in groups) for groups in found)
        step_load = sum(
            max(squares[members[k]] / size for size, members in groups if k < len(members))
            for groups, count in zip(found, steps, strict=True)
            for k in range(count)
        )
        return len(found), sum(steps), load, step_load

    def canonical(found: Microbatches) -> list[list[tuple[int, list[int]]]]:
        return [sorted((size, sorted(members)) for size, members in groups) for groups in found]

    pairs = zip(figures(theirs), figures(ours), strict=True)
    return Comparison(canonical(theirs) == canonical(ours), *pairs, seconds)


def timed(action: Callable[[], Microbatches]) -> tuple[Microbatches, float]:
    """What it returns, and CPU seconds."""
    began = time.process_time()
    return action(), time.process_time() - began


def balanced_scheduler(pool: Pool) -> Any:
    """The released scheduler for the pool; ImportError without the package."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    return BalancedCPScheduler(pool.token_budget, SimpleNamespace(size=lambda: pool.ranks, rank=lambda: 0))


def compare_hybrid(batch: Batch, pool: Pool) -> Comparison:
    """megatron_hybrid and the released scheduler."""
    scheduler = balanced_scheduler(pool)
    sequences = list(enumerate(batch.lengths.tolist()))
    theirs, their_s = timed(
        lambda: [groups_of_ranks(ranks) for ranks in scheduler.get_groups_and_subsamples(sequences, None)[1]]
    )
    ours, our_s = timed(
        lambda: [[(g.size, g.members) for g in groups] for groups in megatron_hybrid.microbatches(batch, pool)]
    )
    result = compare(batch, theirs, ours, (their_s, our_s))
    planned = megatron_hybrid.plan(batch, pool, PlanningConfig()).header.microbatches
    assert planned == result.steps[1], "the plan has one microbatch for each micro-step"
    return result


def compare_packing_aware(batch: Batch, pool: Pool) -> Comparison:
    """megatron and the development branch's scheduler; sequences of a group are packed, in the order of their ids."""
    from megatron.core.datasets.data_schedule import DefaultDynamicCPScheduler

    scheduler = DefaultDynamicCPScheduler(
        max_seqlen_per_dp_cp_rank=pool.token_budget,
        cp_size=1,
        dp_size=pool.ranks,
        microbatch_group_size_per_vp_stage=None,
    )
    sequences = list(enumerate(batch.lengths.tolist()))
    theirs, their_s = timed(
        lambda: [
            [(size, sorted(members)) for size, members in groups_of_ranks(ranks)]
            for ranks in scheduler.get_groups_and_subsamples(sequences)
        ]
    )
    ours, our_s = timed(lambda: groups_of_plan(megatron.plan(batch, pool, PlanningConfig())))
    return compare(batch, theirs, ours, (their_s, our_s))


def report(compared: Callable[[Batch, Pool], Comparison], batches: int = 5) -> dict[str, Any]:
    """Ratios ours / theirs over `batches` random batches of each size; the worst one for sums."""
    random = np.random.default_rng(0)
    found = [
        compared(random_batch(random, count, ranks * BUDGET), Pool(ranks, BUDGET))
        for ranks, count in SIZES
        for _ in range(batches)
    ]
    return {
        "batches": len(found),
        "identical": sum(c.same for c in found),
        "agreeing": sum(c.agrees for c in found),
        "microbatches": [sum(c.microbatches[side] for c in found) for side in (0, 1)],
        "steps": [sum(c.steps[side] for c in found) for side in (0, 1)],
        "largest_difference_of_load": max(abs(c.load[1] / c.load[0] - 1) for c in found),
        "largest_difference_of_step_load": max(abs(c.step_load[1] / c.step_load[0] - 1) for c in found),
        "seconds": [sum(c.seconds[side] for c in found) for side in (0, 1)],
    }


def run() -> dict[str, str]:
    """Compare what can be imported; write JSON; the table by name."""
    document: dict[str, dict[str, Any]] = {}
    for name, compared in (("megatron_hybrid", compare_hybrid), ("megatron", compare_packing_aware)):
        print(f"megatron-core: {name}", file=sys.stderr, flush=True)
        try:
            document[name] = report(compared)
        except ImportError as error:
            print(f"megatron-core: {name} is not compared, {error}", file=sys.stderr)
    write_json("megatron_core", document)
    head = ("policy", ">batches", ">the same plan", ">within 1 %", ">largest difference of Σ of the largest loads")
    lines = (
        (
            f"`{name}`",
            found["batches"],
            found["identical"],
            found["agreeing"],
            f"{found['largest_difference_of_load']:.1e}",
        )
        for name, found in document.items()
    )
    return {"megatron-core": table(head, lines)}
