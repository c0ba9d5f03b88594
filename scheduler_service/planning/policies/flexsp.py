"""FlexSP: sequences sorted into microbatches, and in each a mixed-integer program that chooses groups of any degree.

Follows: the *blaster* sorts the sequences and cuts them into M chunks of about equal tokens, for M from the fewest
that the budget allows to four more. In each chunk, sequences are put into at most 16 buckets that count as their
longest member, and a program assigns them to groups of each degree so that the slowest group is fastest, within the
token capacity of each group and the ranks of the pool. The M with the shortest forecast wins. The search starts from
the best plan of one degree (static_cp), and returns that when it finds nothing better. Source: the project's
description of that system (design of planning, section 5), written anew from it. Solver: HiGHS, by scipy.

Departs: the cut minimises the largest chunk, by bisection instead of dynamic programming; buckets are cut likewise, by
the tokens that the longest member adds. Padding counts as tokens. The all-to-all is a share of tau per token that
leaves its rank (below), since the cost model has none; forecasts, which choose among the plans in the end, leave it
out. Ranks may stay idle where the degrees do not add up to the pool. The solver stops at a relative gap or after its
nodes, never by the clock, so that plans are deterministic; it may then have found nothing, and that M is left out. So
are programs beyond the limits below: with many groups there are fewer buckets, and on pools of a few hundred ranks, or
for very many microbatches, this is the plan of one degree. It takes no degree cap.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, CostModel, InvalidInputError, Plan, Pool, Reason
from scheduler_service.domain.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR
from scheduler_service.planning.policies import static_cp
from scheduler_service.planning.policy import PlanningConfig, new_plan
from scheduler_service.simulation import forecast

MORE_MICROBATCHES = 4
"""How many more microbatches than the fewest are tried."""

MOST_BUCKETS, FEWEST_BUCKETS = 16, 4
"""Buckets of one program; with fewer, it is not tried."""

MOST_VARIABLES = 1200
"""Integer variables of one program, about a second of the solver at its root."""

MOST_PROGRAMS = 100
"""Programs of one plan: numbers of microbatches that would need more in all are not tried."""

NODES = 1
"""Nodes of the solver's search: the root, with its cuts and heuristics; a node more may take seconds."""

GAP = 0.05
"""Relative gap to its bound at which the solver stops."""

INSIDE_NODE, OUTSIDE_NODE = 0.146, 0.494
"""Forward seconds of the all-to-alls for one token sent inside a node, or to another, over tau.

For the job of the default cost model: 12 layers on a stage, 64 heads, q and k of 192, v and output of 128 in two bytes
are 983,040 bytes per token; at 164.8 and 48.5 GB/s (H800, design of the simulation, section 2) 6.0 and 20.3 µs, and
tau is 41 µs. Scaled with tau for others.
"""

Column = npt.NDArray[np.int64]


class Group(NamedTuple):
    """`degree` ranks and the ids that run on them."""

    degree: int
    members: list[int]


def plan(batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
    """The best of the plan of one degree and one plan for each number of microbatches.

    Raises `InfeasibleError` where no degree holds the longest sequence, and `InvalidInputError` where scipy is not
    installed. Cost: up to 5·M programs of about a second.
    """
    same_degree = static_cp.plan(batch, pool, PlanningConfig(config.cost))
    columns = (same_degree.microbatch, same_degree.start, same_degree.degree)
    found = [new_plan("flexsp", batch, pool, config, columns)]
    order = np.argsort(-batch.lengths, kind="stable")
    fewest = -(-batch.tokens // (pool.ranks * pool.token_budget))
    programs = 0
    for count in range(fewest, min(fewest + MORE_MICROBATCHES, len(batch)) + 1):
        programs += count
        if programs > MOST_PROGRAMS:
            break
        candidate = _in_chunks(_chunks(order, batch.lengths, count), batch, pool, config)
        if candidate is not None:
            found.append(candidate)
    return min(found, key=lambda candidate: forecast(candidate, batch).iteration_s)


def _in_chunks(chunks: list[Column], batch: Batch, pool: Pool, config: PlanningConfig) -> Plan | None:
    """A microbatch for each chunk; None where the solver has no groups for one of them, or would take too long."""
    if any(_most_buckets(_slots(chunk, pool)) < FEWEST_BUCKETS for chunk in chunks):
        return None
    columns = np.zeros((3, len(batch)), np.int32)
    for number, chunk in enumerate(chunks):
        groups = solve(chunk, batch, pool, config.cost)
        if groups is None:
            return None
        first_rank = 0
        for degree, members in sorted(groups, key=lambda group: -group.degree):  # so each start is aligned
            columns[:, members] = [[number], [first_rank], [degree]]
            first_rank += degree
    microbatch, start, degrees = columns
    return new_plan("flexsp", batch, pool, config, (microbatch, start, degrees))


def _chunks(order: Column, lengths: Column, count: int) -> list[Column]:
    """Cut the sequences, in their order, into at most `count` chunks, so that the largest has the fewest tokens."""
    ends = np.cumsum(lengths[order])
    return _cut(order, count, int(lengths[order].max()), lambda begin: ends[begin:] - (ends[begin - 1] if begin else 0))


def _buckets(chunk: Column, lengths: Column, count: int) -> list[Column]:
    """Cut a chunk into at most `count` buckets, so that counting as the longest member adds the fewest tokens."""
    ends = np.cumsum(lengths[chunk])

    def added(begin: int) -> Column:
        tokens = ends[begin:] - (ends[begin - 1] if begin else 0)
        return np.arange(1, len(tokens) + 1) * lengths[chunk[begin]] - tokens

    return _cut(chunk, count, 0, added)


def _cut(order: Column, count: int, least: int, sizes_from: Callable[[int], Column]) -> list[Column]:
    """Cut into at most `count` runs so that the largest is smallest.

    `sizes_from(begin)` are the sizes of the runs that begin there, for each end in turn, never falling; `least` is the
    largest of those of one sequence.
    """

    def begins(most: int) -> list[int]:
        """Where each run begins, if none may be larger than `most`, and the end."""
        found = [0]
        while found[-1] < len(order):
            found.append(found[-1] + int(np.searchsorted(sizes_from(found[-1]), most, side="right")))
        return found

    enough, too_few = int(sizes_from(0)[-1]), least - 1
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if len(begins(middle)) - 1 <= count:
            enough = middle
        else:
            too_few = middle
    return np.split(order, begins(enough)[1:-1])


def solve(chunk: Column, batch: Batch, pool: Pool, cost: CostModel) -> list[Group] | None:
    """Groups for the sequences of one microbatch, longest first; None where none are found within the limits.

    Variables: x[q, j], how many of bucket q run in group j; y[j], whether group j is used; and z, the time of the
    slowest. Minimise z with Σ_j x[q, j] = n_q, Σ_q s̃_q·x[q, j] ≤ capacity·y[j], Σ_q w_q·x[q, j] ≤ z and
    Σ_j degree·y[j] ≤ G.
    """
    milp, constraint, bounds_of, sparse = _solver()
    degrees = _slots(chunk, pool)
    buckets = _buckets(chunk, batch.lengths, _most_buckets(degrees))
    count, groups = len(buckets), len(degrees)
    longest = [int(batch.lengths[bucket].max()) for bucket in buckets]

    capacity = np.array([pool.capacity(int(d)) for d in degrees])
    tokens = np.array([[pool.padded(length, int(d)) for d in degrees] for length in longest])
    attention, linear = (1 + BACKWARD_ATTENTION) * cost.theta, (1 + BACKWARD_LINEAR) * cost.tau
    exchange = cost.tau * np.array([_exchange(int(d), pool.node or pool.ranks) for d in degrees])
    seconds = (attention * np.square(longest)[:, None] + (linear + exchange) * tokens) / degrees
    seconds /= seconds.max() or 1.0

    each_group, none = sparse.eye(groups), sparse.csr_matrix((groups, groups))
    zero, one = sparse.csr_matrix((groups, 1)), np.ones((groups, 1))
    # A token row is divided by its capacity, so that the solver's tolerance means the same everywhere.
    share = tokens / np.maximum(capacity, 1)
    per_bucket = sparse.kron(sparse.eye(count), np.ones((1, groups)))
    matrix = sparse.vstack(
        [
            sparse.hstack([per_bucket, sparse.csr_matrix((count, groups + 1))]),
            sparse.hstack([*(sparse.diags(row) for row in share), -each_group, zero]),
            sparse.hstack([*(sparse.diags(row) for row in seconds), none, -one]),
            sparse.hstack([sparse.csr_matrix((1, count * groups)), degrees[None, :], np.zeros((1, 1))]),
        ]
    )
    sizes = np.array([len(bucket) for bucket in buckets])
    most = np.minimum(sizes[:, None], np.where(capacity > 0, capacity // tokens, 0))
    with _native_output_to_stderr():
        result = milp(
            np.append(np.zeros((count + 1) * groups), 1.0),
            integrality=np.append(np.ones((count + 1) * groups), 0),
            bounds=bounds_of(0, np.concatenate([most.ravel(), np.ones(groups), [np.inf]])),
            constraints=constraint(
                matrix.tocsr(),
                np.concatenate([sizes, np.full(2 * groups + 1, -np.inf)]),
                np.concatenate([sizes, np.zeros(2 * groups), [pool.ranks]]),
            ),
            options={"node_limit": NODES, "mip_rel_gap": GAP},
        )
    if result.x is None:
        return None
    chosen = np.rint(result.x[: count * groups]).astype(np.int64).reshape(count, groups)
    used = chosen.sum(axis=0) > 0
    # The solver keeps its rows within a tolerance; a plan keeps its budget to the token.
    if (
        (chosen.sum(axis=1) != sizes).any()
        or ((chosen * tokens).sum(axis=0) > capacity).any()
        or degrees[used].sum() > pool.ranks
    ):
        return None
    return _filled(chosen, degrees, buckets)


@contextmanager
def _native_output_to_stderr() -> Iterator[None]:
    """HiGHS prints a few of its notes whatever it is told, where a caller may be writing JSON."""
    sys.stdout.flush()
    native, stdout = ctypes.CDLL(None), os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        native.fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


def _slots(chunk: Column, pool: Pool) -> Column:
    """Degrees of all groups that a microbatch could have, falling."""
    return np.array([d for d in pool.degrees[::-1] for _ in range(min(pool.ranks // d, len(chunk)))])


def _most_buckets(slots: Column) -> int:
    """Buckets that keep a program within its limit."""
    return min(MOST_BUCKETS, MOST_VARIABLES // len(slots) - 1)


def _exchange(degree: int, node: int) -> float:
    """Seconds of the all-to-alls for one token of a rank, forward and backward, over tau."""
    inside = min(degree, node) - 1
    outside = max(degree - node, 0)
    return 2 * (INSIDE_NODE * inside + OUTSIDE_NODE * outside) / degree


def _filled(chosen: Column, degrees: Column, buckets: list[Column]) -> list[Group]:
    """Give each group as many sequences of each bucket as were chosen, in their order."""
    groups = [Group(int(degree), []) for degree in degrees]
    for bucket, counts in zip(buckets, chosen, strict=True):
        for group, members in zip(groups, np.split(bucket, np.cumsum(counts)[:-1]), strict=True):
            group.members.extend(members.tolist())
    return [group for group in groups if group.members]


def _solver() -> tuple[Any, Any, Any, Any]:
    """scipy's solver, imported when it is first wanted: the base install has no scipy."""
    try:
        from scipy import sparse
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            "policy flexsp solves its programs with scipy, which is not installed: install hydra-cp[service], or "
            "choose another policy",
        ) from error
    return milp, LinearConstraint, Bounds, sparse
