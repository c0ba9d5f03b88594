from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import Batch, CostModel, Plan, Pool, Reason
from scheduler_service.planning import InvalidPlanError, PlanningConfig, new_plan, plan_iteration, verify_plan
from tests.support.strategies import batches, pools, random_plan, slowed

BATCH = Batch([30, 12, 9, 8, 7, 6, 5, 4, 3, 2, 1, 1])
POOL = Pool(ranks=8, token_budget=10, stages=3)


def valid() -> Plan:
    return plan_iteration(BATCH, POOL, policy="hydra", cost=CostModel(theta=1e-3, overhead=1e-3))


def changed(sequence: int, **values: int) -> Plan:
    """The valid plan with other values for one sequence."""
    plan = valid()
    columns = {name: getattr(plan, name).copy() for name in ("microbatch", "start", "degree")}
    for name, value in values.items():
        columns[name][sequence] = value
    return replace(plan, **columns)


def other_header(**values: object) -> Plan:
    plan = valid()
    return replace(plan, header=replace(plan.header, **values))


def placed(rows: list[tuple[int, int, int]], lengths: list[int], pool: Pool) -> tuple[Plan, Batch]:
    """A plan from (microbatch, start, degree) of each sequence."""
    batch = Batch(lengths)
    return new_plan("by hand", batch, pool, PlanningConfig(), tuple(np.array(rows).T)), batch


def test_accepts_a_valid_plan() -> None:
    verify_plan(valid(), BATCH)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (lambda: changed(3, degree=3), "sequence 3 has a degree that is none of 1, 2, 4, 8: 3"),
        (lambda: changed(3, degree=0), "sequence 3 has a degree"),
        (lambda: changed(3, degree=-1), "sequence 3 has a degree"),
        (lambda: changed(3, degree=16), "sequence 3 has a degree"),
        (lambda: changed(3, degree=2, start=5), "sequence 3 has a start that is no multiple of its degree: 5"),
        (lambda: changed(3, degree=1, start=8), "sequence 3 has a start that leaves the pool: 8"),
        (lambda: changed(3, degree=1, start=-1), "sequence 3 has a start that leaves the pool: -1"),
        (lambda: changed(3, degree=8, start=4), "sequence 3 has a start that leaves the pool: 4"),
        (lambda: changed(3, microbatch=-1), "sequence 3 has a microbatch outside"),
        (lambda: changed(3, microbatch=99), "sequence 3 has a microbatch outside"),
        (lambda: other_header(microbatches=99), "are empty"),
        (lambda: other_header(batch_digest="00" * 16), "it is for batch 0000"),
        (lambda: other_header(pool=replace(POOL, token_budget=7)), "over the budget of 7"),
        (lambda: other_header(pool=replace(POOL, microbatch_multiple=64)), "are no multiple of 64"),
        (lambda: other_header(pool=replace(POOL, ranks=4)), "sequence 0 has"),
        (lambda: other_header(pool=replace(POOL, max_degree=2)), "sequence 0 has a degree"),
    ],
)
def test_rejects_each_kind_of_broken_plan(broken: Callable[[], Plan], rule: str) -> None:
    with pytest.raises(InvalidPlanError, match=rule) as caught:
        verify_plan(broken(), BATCH)
    assert caught.value.reason == Reason.INVALID_PLAN


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 0, 4), (0, 2, 2)],  # inside another
        [(0, 2, 2), (0, 0, 4)],
        [(0, 0, 4), (0, 0, 2)],  # same start
        [(0, 0, 8), (0, 7, 1)],
        [(0, 0, 4), (0, 0, 2), (0, 0, 4)],
    ],
)
def test_rejects_groups_that_overlap(rows: list[tuple[int, int, int]]) -> None:
    with pytest.raises(InvalidPlanError, match=r"in microbatch 0, the groups on ranks .* overlap"):
        verify_plan(*placed(rows, [1] * len(rows), POOL))


@pytest.mark.parametrize(("start", "degree", "held"), [(3, 1, True), (2, 2, True), (2, 1, False), (4, 4, False)])
def test_rejects_a_group_with_an_excluded_rank(start: int, degree: int, held: bool) -> None:
    plan, batch = placed([(0, start, degree)], [1], replace(POOL, speeds={3: 0, 4: 0.5}))
    if held:
        with pytest.raises(InvalidPlanError, match="sequence 0 has an excluded rank in its group, which starts at"):
            verify_plan(plan, batch)
    else:
        verify_plan(plan, batch)


def test_accepts_the_same_ranks_in_other_microbatches() -> None:
    verify_plan(*placed([(0, 0, 4), (1, 0, 2), (1, 2, 2), (0, 4, 1)], [1] * 4, POOL))


def test_rejects_an_empty_microbatch_before_the_last() -> None:
    with pytest.raises(InvalidPlanError, match="microbatch 1 of 3 is empty"):
        verify_plan(*placed([(0, 0, 1), (2, 0, 1)], [1, 1], POOL))


def test_accepts_the_empty_microbatches_that_a_multiple_asks_for() -> None:
    plan, batch = placed([(0, 0, 1)], [1], replace(POOL, microbatch_multiple=4))
    assert plan.header.microbatches == 4
    verify_plan(plan, batch)


def test_padding_counts_against_the_budget() -> None:
    ring = Pool(ranks=2, token_budget=10, heads=1)  # 4 chunks: 17 pads to 20 = 2·10, and 1 more to 24
    verify_plan(*placed([(0, 0, 2)], [17], ring))
    with pytest.raises(InvalidPlanError, match="hold 12 padded tokens each, over the budget of 10"):
        verify_plan(*placed([(0, 0, 2), (0, 0, 2)], [17, 1], ring))


def test_the_tail_of_a_group_counts_against_the_budget() -> None:
    sequence_parallel = Pool(ranks=3, token_budget=4, sequence_parallel=4, heads=1)  # a stream of lcm(6, 12) tokens
    verify_plan(*placed([(0, 0, 3)], [12], sequence_parallel))
    with pytest.raises(InvalidPlanError, match="hold 8 padded tokens"):
        verify_plan(*placed([(0, 0, 3), (0, 0, 3)], [12, 1], sequence_parallel))


def test_the_full_pool_may_be_a_group_but_not_a_degree_between() -> None:
    pool = Pool(ranks=6, token_budget=10)
    verify_plan(*placed([(0, 0, 6)], [60], pool))
    with pytest.raises(InvalidPlanError, match="a degree that is none of 1, 2, 4, 6"):
        verify_plan(*placed([(0, 0, 5)], [50], pool))


def test_rejects_a_plan_of_another_batch() -> None:
    with pytest.raises(InvalidPlanError, match="places 12 sequences, the batch has 2"):
        verify_plan(valid(), Batch([1, 2]))


def test_rejects_a_plan_that_changed_after_it_was_signed() -> None:
    plan, batch = placed([(0, 0, 1), (0, 1, 1)], [1, 1], POOL)
    changed, _ = placed([(0, 0, 1), (0, 2, 1)], [1, 1], POOL)
    verify_plan(changed, batch)
    changed.__dict__["digest"] = plan.digest
    with pytest.raises(InvalidPlanError, match="does not match its canonical bytes"):
        verify_plan(changed, batch)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_accepts_any_valid_plan_and_judges_a_moved_sequence_like_a_direct_count(data: st.DataObject) -> None:
    pool = data.draw(pools(most_ranks=8, most_budget=20))
    if data.draw(st.booleans()):
        pool = slowed(pool, Random(data.draw(st.integers(0, 999))))
    if max(pool.capacity(degree) for degree in pool.degrees) == 0:
        return
    batch = data.draw(batches(pool, most_sequences=8))
    plan = random_plan(batch, pool, Random(data.draw(st.integers(0, 999))), PlanningConfig())
    verify_plan(plan, batch)

    moved = data.draw(st.integers(0, len(batch) - 1))
    columns = {name: getattr(plan, name).copy() for name in ("microbatch", "start", "degree")}
    columns["microbatch"][moved] = data.draw(st.integers(-1, plan.header.microbatches))
    columns["start"][moved] = data.draw(st.integers(-1, pool.ranks))
    columns["degree"][moved] = data.draw(st.integers(0, pool.ranks + 1))
    broken = replace(plan, **columns)
    try:
        verify_plan(broken, batch)
        accepted = True
    except InvalidPlanError:
        accepted = False
    assert accepted == is_valid(broken, batch)


def is_valid(plan: Plan, batch: Batch) -> bool:
    """The rules, counted rank by rank."""
    pool = plan.header.pool
    rows = list(zip(plan.microbatch.tolist(), plan.start.tolist(), plan.degree.tolist(), strict=True))
    used = {m for m, _, _ in rows}
    last = max(used) + 1
    if (
        used != set(range(last))
        or plan.header.microbatches != -(-last // pool.microbatch_multiple) * pool.microbatch_multiple
    ):
        return False
    owner: dict[tuple[int, int], tuple[int, int]] = {}
    tokens: dict[tuple[int, int, int], int] = {}
    for length, (m, start, degree) in zip(batch.lengths.tolist(), rows, strict=True):
        if degree not in pool.degrees or start < 0 or start % degree or start + degree > pool.ranks:
            return False
        if not set(pool.excluded).isdisjoint(range(start, start + degree)):
            return False
        for rank in range(start, start + degree):
            if owner.setdefault((m, rank), (start, degree)) != (start, degree):
                return False
        tokens[m, start, degree] = tokens.get((m, start, degree), 0) + pool.padded(length, degree)
    return all(
        -(-total // pool.stream_multiple(d)) * pool.stream_multiple(d) <= d * pool.token_budget
        for (_, _, d), total in tokens.items()
    )
