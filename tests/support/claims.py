"""What must be true of every answer of every policy, whatever it is asked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

import pytest

from scheduler_service.domain import Batch, InfeasibleError, Plan, Pool, Reason
from scheduler_service.planning import plan_iteration
from scheduler_service.simulation import rank_loads
from tests.support.problems import Problem

POWERS_ONLY = frozenset({"megatron", "megatron_hybrid"})
"""Policies without the group of the full pool where that is no power of two."""

CAPPED = frozenset({"hydra", "hydra_search"})
"""Policies that the cap limits; others take it as their one degree, or not at all."""

_WAYS_OUT = {
    "token_budget": re.compile(r"the budget to ([\d,]+) tokens"),
    "ranks": re.compile(r"the pool to ([\d,]+) ranks"),
    "max_degree": re.compile(r"max_degree to ([\d,]+)"),
}


def planned(posed: Problem, policy: str, *, twice: bool = False) -> Plan | None:
    """The policy's plan, or None if it rightly refuses. Raises `AssertionError` for an answer that is wrong.

    A plan is verified, bounded by the certificate and, if made `twice`, the same to the byte. A refusal names the
    longest sequence, and what it says would help does.
    """
    batch, pool, cost, cap = posed
    if not is_held(batch.longest, pool, policy):
        with pytest.raises(InfeasibleError) as refused:
            plan_iteration(batch, pool, policy=policy, cost=cost, cap=cap)
        check_refusal(refused.value, batch, pool, policy)
        return None
    plan = plan_iteration(batch, pool, policy=policy, cost=cost, cap=cap)  # verifies it
    header = plan.header
    assert (header.policy, header.pool, header.cost) == (policy, pool, cost)
    if pool.ranks * header.microbatches <= 100_000:
        tokens = rank_loads(plan, batch).tokens
        assert tokens.max() <= pool.token_budget
        assert not tokens[list(pool.excluded)].any()
    assert 0 <= header.lower_bound_s <= header.predicted_s < math.inf
    if policy in CAPPED and cap is not None and pool.padded(batch.longest, cap) <= pool.capacity(cap):
        assert plan.degree.max() <= cap
    if twice:
        again = plan_iteration(Batch(batch.lengths.tolist()), pool, policy=policy, cost=cost, cap=cap)
        assert again.canonical_bytes() == plan.canonical_bytes()
        assert again.header.predicted_s == header.predicted_s
    return plan


def check_refusal(error: InfeasibleError, batch: Batch, pool: Pool, policy: str) -> None:
    """It names the first of the longest sequences and what is held, and every number that it offers would do."""
    sequence = int(batch.lengths.argmax())
    assert (error.reason, error.sequence) == (Reason.SEQUENCE_TOO_LONG, sequence)
    assert f"sequence {sequence} has {batch.longest:,} tokens; " in str(error)
    assert f"pool {pool.ranks} × budget {pool.token_budget} holds " in str(error)
    ways_out = {
        name: int(found[1].replace(",", ""))
        for name, pattern in _WAYS_OUT.items()
        if (found := pattern.search(str(error)))
    }
    if not ways_out:
        assert "neither a larger budget nor a larger pool" in str(error)
    for name, value in ways_out.items():
        plan_iteration(Batch([batch.longest]), replace(pool, **{name: value}), policy=policy)
    if "token_budget" in ways_out:
        less = ways_out["token_budget"] - pool.sequence_parallel
        assert less == 0 or not is_held(batch.longest, replace(pool, token_budget=less), policy), "it is the smallest"


def is_held(length: int, pool: Pool, policy: str) -> bool:
    """Whether the budget of any group that the policy has holds a sequence of `length` tokens."""
    return any(pool.padded(length, degree) <= pool.capacity(degree) for degree in degrees_of(pool, policy))


def degrees_of(pool: Pool, policy: str) -> Iterable[int]:
    """Degrees that the policy may give."""
    return (degree for degree in pool.degrees if policy not in POWERS_ONLY or degree & (degree - 1) == 0)
