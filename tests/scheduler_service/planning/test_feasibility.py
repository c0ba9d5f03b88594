from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import Batch, InfeasibleError, Pool
from scheduler_service.planning.feasibility import (
    memory_degree,
    memory_degrees,
    power_of_two_degrees,
    require_fit,
    smallest_budget,
    smallest_pool,
)
from tests.support.strategies import pools


@settings(max_examples=200, deadline=None)
@given(pools(), st.lists(st.integers(1, 3000), min_size=1, max_size=20))
def test_degrees_of_many_lengths_equal_those_one_by_one(pool: Pool, lengths: list[int]) -> None:
    expected = [memory_degree(length, pool) or 0 for length in lengths]
    assert memory_degrees(np.array(lengths), pool).tolist() == expected


@settings(max_examples=200, deadline=None)
@given(pools(), st.integers(1, 3000))
def test_the_smallest_budget_holds_the_sequence_and_one_less_does_not(pool: Pool, length: int) -> None:
    budget = smallest_budget(length, pool)
    assert budget % pool.sequence_parallel == 0
    assert memory_degree(length, replace(pool, token_budget=budget)) is not None
    if budget > pool.sequence_parallel:
        less = replace(pool, token_budget=budget - pool.sequence_parallel)
        assert memory_degree(length, less) is None


@settings(max_examples=60, deadline=None)
@given(pools(), st.integers(1, 400))
def test_the_smallest_pool_holds_the_sequence_and_no_smaller_one_does(pool: Pool, length: int) -> None:
    if memory_degree(length, pool) is not None:
        return
    found = smallest_pool(length, pool)
    smaller = range(pool.ranks + pool.ep, found if found is not None else 500, pool.ep)
    assert all(memory_degree(length, replace(pool, ranks=ranks)) is None for ranks in smaller)
    if found is not None:
        assert memory_degree(length, replace(pool, ranks=found)) is not None


def test_a_limit_on_the_degree_is_named_as_a_way_out() -> None:
    pool = Pool(ranks=64, token_budget=100, max_degree=4)
    with pytest.raises(InfeasibleError, match=r"max_degree 4 of pool 64 × budget 100 holds 400: .* max_degree to 8"):
        require_fit(Batch([500]), pool)


def test_excluded_ranks_are_named_where_only_a_group_with_them_would_hold_the_sequence() -> None:
    pool = Pool(ranks=64, token_budget=100, speeds={3: 0, 17: 0, 20: 0.5})
    with pytest.raises(InfeasibleError) as caught:
        require_fit(Batch([1, 4000]), pool)
    assert str(caught.value) == (
        "sequence 1 has 4,000 tokens; the largest group (32) without an excluded rank (3, 17) in pool 64 × budget 100 "
        "holds 3,200: raise the budget to 125 tokens or take the excluded ranks back, or drop the sequence"
    )
    with pytest.raises(InfeasibleError, match="raise the budget to 219 tokens or the pool to 256 ranks"):
        require_fit(Batch([1, 7000]), pool)


def test_a_refusal_beside_excluded_ranks_stands_where_no_larger_pool_would_help_either() -> None:
    """On two ranks and more, the padding of a single token takes the whole budget."""
    pool = Pool(ranks=12, token_budget=3, heads=3, max_ulysses=1, sequence_parallel=3, speeds={0: 0, 8: 0.5, 11: 0})
    with pytest.raises(InfeasibleError, match="raise the budget to 6 tokens, or drop"):
        require_fit(Batch([5]), pool)


def test_a_sequence_that_fits_unpadded_but_not_padded_gets_a_larger_degree_or_is_refused() -> None:
    ring = Pool(ranks=4, token_budget=9, heads=1)  # degree 2: 4 chunks, 4·4 = 16 of 18; degree 4: 8 chunks, 32 of 36
    assert memory_degree(17, ring) == 4
    with pytest.raises(InfeasibleError, match="holds 32"):
        require_fit(Batch([33]), ring)


@settings(max_examples=200, deadline=None)
@given(pools(), st.lists(st.integers(1, 3000), min_size=1, max_size=20))
def test_powers_of_two_are_the_smallest_that_hold_each_sequence(pool: Pool, lengths: list[int]) -> None:
    powers = [degree for degree in pool.degrees if degree & (degree - 1) == 0]
    expected = [next((d for d in powers if pool.padded(s, d) <= pool.capacity(d)), None) for s in lengths]
    if None in expected:
        with pytest.raises(
            InfeasibleError, match=f"sequence {lengths.index(max(lengths))} has {max(lengths):,} tokens"
        ):
            power_of_two_degrees(Batch(lengths), pool, "megatron")
    else:
        assert power_of_two_degrees(Batch(lengths), pool, "megatron").tolist() == expected
