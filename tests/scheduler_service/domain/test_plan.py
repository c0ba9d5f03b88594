import hashlib
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import Batch, CostModel, InvalidInputError, Plan, PlanHeader, Pool, Reason

BATCH = Batch([5, 3, 2])
POOL = Pool(ranks=4, token_budget=10, stages=2)
HEADER = PlanHeader("by hand", POOL, CostModel(), 2, 3, BATCH.digest, target=25.0, cap=1)

GOLDEN_DIGEST = "170cbbaaf4e814fa8eab60bc75c8f9a1"
"""Changes only with the canonical form, and then PLAN_FORMAT must rise."""


def plan() -> Plan:
    return Plan(np.array([0, 0, 1]), np.array([0, 1, 2]), np.array([1, 1, 2]), HEADER)


def test_the_digest_is_blake2b_of_the_canonical_bytes_and_stable() -> None:
    digest = hashlib.blake2b(plan().canonical_bytes(), digest_size=16).hexdigest()
    assert plan().digest == digest == GOLDEN_DIGEST


def test_the_canonical_form_ends_with_the_columns_little_endian() -> None:
    assert plan().canonical_bytes().endswith(np.array([0, 0, 1, 0, 1, 2, 1, 1, 2], "<i4").tobytes())


def test_columns_are_read_only_copies_in_int32() -> None:
    microbatch = np.array([0, 0, 1])
    made = Plan(microbatch, np.zeros(3, int), np.ones(3, int), HEADER)
    microbatch[0] = 7
    assert made.microbatch.tolist() == [0, 0, 1]
    assert made.microbatch.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        made.start[0] = 1
    with pytest.raises(FrozenInstanceError):
        made.header = HEADER  # type: ignore[misc]


def test_a_column_of_the_wrong_length_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="column degree has shape") as caught:
        replace(plan(), degree=np.ones(2, np.int32))
    assert caught.value.reason == Reason.INVALID_PLAN


def test_plans_are_equal_when_their_digests_are() -> None:
    assert plan() == plan()
    assert hash(plan()) == hash(plan())
    assert plan() != replace(plan(), start=np.array([0, 2, 2]))


def test_the_header_as_plain_values() -> None:
    described = plan().with_predictions(predicted_s=2.0, lower_bound_s=1.0, plan_s=0.5).header_json()
    assert described == {
        "policy": "by hand", "pool": 4, "budget": 10, "target": 25.0, "cap": 1, "microbatches": 2, "sequences": 3,
        "digest": plan().digest, "lower_bound_s": 1.0, "predicted_s": 2.0, "plan_s": 0.5,
    }  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3) | st.integers(0, 2**26), st.integers(0, 65_535)), min_size=1, max_size=30))
def test_group_order_sorts_by_microbatch_start_and_id(rows: list[tuple[int, int]]) -> None:
    microbatch, start = np.array(rows).T
    header = replace(HEADER, sequences=len(rows))
    ordered = Plan(microbatch, start, np.ones(len(rows), int), header).group_order
    assert ordered.tolist() == sorted(range(len(rows)), key=lambda i: (rows[i], i))
