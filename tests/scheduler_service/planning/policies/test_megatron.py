"""Megatron's packing-aware scheduler: examples worked by hand, and a plain transcription."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import Batch, Plan, Pool
from scheduler_service.planning.policies.megatron import plan
from scheduler_service.planning.policy import PlanningConfig
from tests.support.strategies import batches

ANY = PlanningConfig()


def groups_of(plan: Plan, batch: Batch) -> dict[tuple[int, int, int], list[int]]:
    """Lengths on each (microbatch, start, degree), longest first."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for i in np.argsort(-batch.lengths, kind="stable"):
        key = (int(plan.microbatch[i]), int(plan.start[i]), int(plan.degree[i]))
        groups.setdefault(key, []).append(int(batch.lengths[i]))
    return groups


def test_short_sequences_pile_up_on_one_rank_while_the_largest_load_allows() -> None:
    # 20 needs 2 ranks of 10: load 200 each. The 6 opens rank 2 (load 36). 3 and 1 join it, since that leaves the
    # largest load at 200. Rank 3 is empty: the group of one rank is doubled.
    batch = Batch([3, 20, 1, 6])
    assert groups_of(plan(batch, Pool(4, 10), ANY), batch) == {(0, 0, 2): [20], (0, 2, 2): [6, 3, 1]}


def test_a_new_group_wins_where_joining_would_raise_the_largest_load() -> None:
    # 6 opens rank 0 (load 36). The 5: beside it the largest load is 61, on a rank of its own 36. The 4: beside the
    # 6 it is 52, beside the 5 41, on a new rank 36.
    batch = Batch([4, 6, 5])
    assert groups_of(plan(batch, Pool(3, 10), ANY), batch) == {(0, 0, 1): [6], (0, 1, 1): [5], (0, 2, 1): [4]}


def test_a_short_sequence_joins_a_larger_group_where_no_rank_is_free() -> None:
    # The 13 takes both ranks, budget 12, load 84.5 each. The 8 joins it: 21 tokens of 24, load 116.5.
    batch = Batch([8, 13, 2])
    assert groups_of(plan(batch, Pool(2, 12), ANY), batch) == {(0, 0, 2): [13, 8, 2]}
    # A 12 would make 25 tokens, and waits; the 2 goes first.
    batch = Batch([12, 13, 2])
    assert groups_of(plan(batch, Pool(2, 12), ANY), batch) == {(0, 0, 2): [13, 2], (1, 0, 2): [12]}


def test_empty_ranks_are_filled_by_doubling_the_first_of_the_smallest_groups() -> None:
    # Three ranks taken of eight: 1, 1, 1 → 2, 1, 1 → 2, 2, 1 → 2, 2, 2 → 4, 2, 2.
    batch = Batch([9, 8, 7])
    assert groups_of(plan(batch, Pool(8, 10), ANY), batch) == {(0, 0, 4): [9], (0, 4, 2): [8], (0, 6, 2): [7]}


def test_where_doubling_does_not_come_out_even_the_pool_becomes_one_group() -> None:
    # Six ranks: a group of four leaves two, and four more are not to be had.
    batch = Batch([40])
    assert groups_of(plan(batch, Pool(6, 10), ANY), batch) == {(0, 0, 6): [40]}


def test_a_degree_limit_may_leave_ranks_empty() -> None:
    batch = Batch([9])
    assert groups_of(plan(batch, Pool(8, 10, max_degree=2), ANY), batch) == {(0, 0, 2): [9]}


def test_a_group_is_not_doubled_where_padding_would_overfill_it() -> None:
    # No Ulysses: a group of two pads each sequence to four chunks. The eight single tokens would become 32 of 20.
    batch = Batch([4] + [1] * 8)
    found = plan(batch, Pool(4, 10, heads=1), ANY)
    assert groups_of(found, batch) == {(0, 0, 2): [4], (0, 2, 1): [1] * 8}


def transcribe(batch: Batch, pool: Pool) -> list[list[tuple[int, list[int]]]]:
    """The description with its load cap, one candidate at a time; groups as (size, members) before ranks are filled."""
    powers = [d for d in pool.degrees if d & (d - 1) == 0]
    lengths = batch.lengths.tolist()

    def need(i: int) -> int:
        return next(c for c in powers if pool.padded(lengths[i], c) <= pool.capacity(c))

    def load(size: int, members: list[int]) -> float:
        return sum(lengths[i] ** 2 for i in members) / size

    def holds(size: int, members: list[int]) -> bool:
        return sum(pool.padded(lengths[i], size) for i in members) <= pool.capacity(size)

    waiting = sorted(range(len(batch)), key=lambda i: (-lengths[i], i))
    microbatches = []
    while waiting:
        tall = waiting[0]
        cap = 1.05 * lengths[tall] * pool.token_budget
        groups: list[tuple[int, list[int]]] = [(need(tall), [tall])]
        later = []
        for i in waiting[1:]:
            best, change = cap * (1 + 1e-15), None
            free = pool.ranks - sum(size for size, _ in groups)
            for size in [c for c in powers if c >= need(i)]:
                options = [(g, size, [*m, i]) for g, (s, m) in enumerate(groups) if s == size and holds(s, [*m, i])]
                if size <= free and holds(size, [i]):
                    options.append((len(groups), size, [i]))
                for g, _, members in options:
                    rest = [load(*group) for h, group in enumerate(groups) if h != g]
                    value = max([load(size, members), *rest])
                    if value < best:
                        best, change = value, (g, size, members)
            if change is None:
                later.append(i)
            else:
                groups[change[0] : change[0] + 1] = [change[1:]]
        microbatches.append(groups)
        waiting = later
    return microbatches


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_places_as_the_description_says(data: st.DataObject) -> None:
    """On pools that are powers of two, where filling empty ranks changes sizes but never members."""
    ranks = data.draw(st.sampled_from((1, 2, 4, 8)))
    pool = Pool(ranks, data.draw(st.integers(4, 40)), heads=data.draw(st.sampled_from((None, 2))), max_degree=ranks)
    batch = data.draw(batches(pool, most_sequences=25))
    found = plan(batch, pool, ANY)
    expected = transcribe(batch, pool)
    members = {(m, frozenset(members)) for m, groups in enumerate(expected) for _, members in groups}
    together: dict[tuple[int, int], set[int]] = {}
    for i in range(len(batch)):
        together.setdefault((int(found.microbatch[i]), int(found.start[i])), set()).add(i)
    assert {(m, frozenset(group)) for (m, _), group in together.items()} == members


def test_no_rank_of_a_power_of_two_pool_stays_empty() -> None:
    random = np.random.default_rng(5)
    batch, pool = Batch(np.exp(random.normal(4, 2, 400)).astype(int) + 1), Pool(16, 4096)
    found = plan(batch, pool, ANY)
    for microbatch in range(found.header.microbatches):
        starts = {
            (s, d) for m, s, d in zip(found.microbatch, found.start, found.degree, strict=True) if m == microbatch
        }
        assert sum(degree for _, degree in starts) == 16
