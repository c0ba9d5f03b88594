"""Why a sequence got its degree and its group, and what was rejected, in words.

The packing keeps no log. It need not: what was open when a sequence's turn came is what the longer sequences of its
microbatch had opened and filled, so the state is rebuilt from the plan alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, InvalidInputError, Plan, Pool, Reason
from scheduler_service.planning.degrees import own_degrees
from scheduler_service.planning.feasibility import fits, memory_degree
from scheduler_service.planning.load_target import LoadTarget, target_at


def explain(plan: Plan, batch: Batch, sequence: int) -> str:
    """A few sentences on `sequence` in a valid `plan` of `batch`. Raises `InvalidInputError` for an unknown id."""
    if not 0 <= sequence < len(plan):
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT, f"sequence {sequence} is not in this plan; ids run from 0 to {len(plan) - 1}"
        )
    pool = plan.header.pool
    if plan.header.target == 0 or pool != pool.evened:  # for slow ranks there are several packings: which, is not said
        return _explain_placement(plan, batch, sequence)
    target = target_at(plan.header.cap, batch, pool)
    own = int(own_degrees(batch.lengths[sequence : sequence + 1], pool, target)[0])
    return " ".join(
        (
            _why_degree(int(batch.lengths[sequence]), own, pool, target),
            _why_group(plan, batch, sequence, own, target),
            _why_not_earlier(int(plan.microbatch[sequence])),
        )
    ).strip()


def _explain_placement(plan: Plan, batch: Batch, sequence: int) -> str:
    """Where there is no load target for all microbatches: what can be seen."""
    length, degree = int(batch.lengths[sequence]), int(plan.degree[sequence])
    memory = memory_degree(length, plan.header.pool)
    same = np.flatnonzero(plan.microbatch == plan.microbatch[sequence])
    loads = np.bincount(plan.start[same], np.square(batch.lengths[same], dtype=np.float64) / plan.degree[same])
    return (
        f"Policy {plan.header.policy} runs its {_tokens(length)} on {_ranks(plan, sequence)} in microbatch "
        f"{plan.microbatch[sequence]}; the token budget alone asks for degree {memory}, and at degree {degree} its "
        f"attention load is {length**2 / degree:.3g}. With what it shares them with, its ranks have "
        f"{loads[plan.start[sequence]]:.3g}; the fullest ranks of the microbatch have {loads.max():.3g}."
    )


def _why_degree(length: int, own: int, pool: Pool, target: LoadTarget) -> str:
    load = f"attention load of {length**2 / own:.3g} is within the target of {target.load:.3g}"
    smaller = [degree for degree in pool.degrees if degree < own]
    if not smaller:
        return f"One rank holds its {_tokens(length)}, and its {load}."
    faults = []
    if not fits(length, smaller[-1], pool):
        faults.append(f"pass the budget of {pool.token_budget:,} per rank")
    if length**2 > target.limit(smaller[-1]):
        faults.append(f"make an attention load of {length**2 / smaller[-1]:.3g}, over the target of {target.load:.3g}")
    ranks = "one rank" if smaller[-1] == 1 else f"{smaller[-1]} ranks"
    return f"On {ranks} its {_tokens(length)} {' and '.join(faults)}; at degree {own} its {load}."


def _why_group(plan: Plan, batch: Batch, sequence: int, own: int, target: LoadTarget) -> str:
    pool, length, degree = plan.header.pool, int(batch.lengths[sequence]), int(plan.degree[sequence])
    where = f"on {_ranks(plan, sequence)} of microbatch {plan.microbatch[sequence]}"
    same = np.flatnonzero(plan.microbatch == plan.microbatch[sequence])
    before = same[(batch.lengths[same] > length) | ((batch.lengths[same] == length) & (same < sequence))]
    beside = before[plan.start[before] == plan.start[sequence]]
    if len(beside) == 0:
        free = "A free rank was" if own == 1 else f"{own} free ranks were"
        return f"{free} left, so it opened the group {where}."
    opener = beside[np.lexsort((beside, -batch.lengths[beside]))[0]]
    free = "No free rank was" if own == 1 else f"Fewer than {own} free ranks were"
    if pool.excluded:
        free = "No free rank was" if own == 1 else f"No free group of {own} ranks was"
    rejected = "".join(_rejected(plan, batch, before, length, d, target) for d in pool.degrees if own <= d < degree)
    return (
        f"{free} left.{rejected} Of the groups of degree {degree} with room, the one {where}, opened by sequence "
        f"{opener} ({_tokens(int(batch.lengths[opener]))}), had the least load: it joined "
        "that."
    )


def _rejected(
    plan: Plan, batch: Batch, before: npt.NDArray[np.intp], length: int, degree: int, target: LoadTarget
) -> str:
    """How many groups of `degree` were open, and what they lacked."""
    pool = plan.header.pool
    members = before[plan.degree[before] == degree]
    if len(members) == 0:
        return f" No group of degree {degree} was open."
    group = np.unique(plan.start[members], return_inverse=True)[1]
    tokens = np.zeros(int(group.max()) + 1, np.int64)
    squares = np.zeros_like(tokens)
    np.add.at(tokens, group, [pool.padded(int(s), degree) for s in batch.lengths[members]])
    np.add.at(squares, group, batch.lengths[members] ** 2)
    full = tokens + pool.padded(length, degree) > pool.capacity(degree)
    loaded = squares + length**2 > target.limit(degree)
    return (
        f" Groups of degree {degree}: {len(tokens)} open, of which {int(full.sum())} lacked tokens and "
        f"{int((loaded & ~full).sum())} would have passed the load target."
    )


def _why_not_earlier(microbatch: int) -> str:
    if microbatch == 0:
        return ""
    earlier = "microbatch 0" if microbatch == 1 else f"microbatches 0 … {microbatch - 1}"
    return f"In {earlier}, neither free ranks nor a group with room was left when its turn came."


def _ranks(plan: Plan, sequence: int) -> str:
    first, degree = int(plan.start[sequence]), int(plan.degree[sequence])
    return f"rank {first}" if degree == 1 else f"ranks {first} … {first + degree - 1}"


def _tokens(length: int) -> str:
    return "1 token" if length == 1 else f"{length:,} tokens"
