import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import InvalidInputError, Pool
from worker_agent.attention import ShardLayout

shapes = st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3, 4, 5, 8]), st.sampled_from([1, 2, 3]))
some_lengths = st.lists(st.integers(1, 200), max_size=12)


def layouts(lengths: list[int], ulysses: int, ring: int, sequence_parallel: int = 1) -> list[ShardLayout]:
    return [ShardLayout(lengths, ulysses, ring, rank, sequence_parallel) for rank in range(ulysses * ring)]


@given(some_lengths, shapes)
@settings(max_examples=150, deadline=None)
def test_every_token_lies_in_exactly_one_slot(lengths: list[int], shape: tuple[int, int, int]) -> None:
    ranks = layouts(lengths, *shape)
    held = torch.cat([layout.token_index for layout in ranks])
    assert sorted(held[held >= 0].tolist()) == list(range(sum(lengths)))


@given(some_lengths, shapes)
@settings(max_examples=100, deadline=None)
def test_positions_and_sequences_are_those_of_the_token(lengths: list[int], shape: tuple[int, int, int]) -> None:
    position = np.concatenate([np.arange(s) for s in lengths] or [np.empty(0, int)])
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    for layout in layouts(lengths, *shape):
        real = layout.token_index >= 0
        tokens = layout.token_index[real].numpy()
        assert layout.positions[real].tolist() == position[tokens].tolist()
        assert layout.sequence[real].tolist() == sequence[tokens].tolist()
        assert (layout.positions[~real] == 0).all()
        assert (layout.sequence[~real] == -1).all()


@given(some_lengths, shapes)
@settings(max_examples=100, deadline=None)
def test_all_ranks_hold_the_slots_that_the_planner_counted(lengths: list[int], shape: tuple[int, int, int]) -> None:
    ulysses, ring, t = shape
    degree = ulysses * ring
    pool = Pool(ranks=degree, token_budget=10**6 * t, heads=ulysses, max_ulysses=ulysses, sequence_parallel=t)
    if pool.shape(degree) != (ulysses, ring):
        return  # a cut that the planner would not make
    used = sum(pool.padded(s, degree) for s in lengths)
    multiple = pool.stream_multiple(degree)
    planned = max(-(-used // multiple) * multiple, multiple)
    assert {layout.tokens for layout in layouts(lengths, *shape)} == {planned // degree}
    assert planned // degree % t == 0


@given(some_lengths, shapes)
@settings(max_examples=100, deadline=None)
def test_the_steps_of_all_ring_ranks_cover_every_causal_pair_once(
    lengths: list[int], shape: tuple[int, int, int]
) -> None:
    ulysses, ring, t = shape
    pairs = np.zeros((sum(lengths), sum(lengths)), int)
    tokens = [ring_tokens(lengths, ulysses, ring, index, t) for index in range(ring)]
    for index in range(ring):
        for step in ShardLayout(lengths, ulysses, ring, index * ulysses, t).steps(causal=True):
            queries, keys = tokens[index][step.queries.numbers.numpy()], tokens[step.source][step.keys.numbers.numpy()]
            for first_q, end_q, first_k, end_k in step.segments.bounds():
                assert end_q > first_q, "a kernel would be called without queries"
                assert end_k > first_k, "a kernel would be called without keys"
                block = np.ones((end_q - first_q, end_k - first_k), int)
                pairs[np.ix_(queries[first_q:end_q], keys[first_k:end_k])] += np.tril(block) if step.causal else block
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    expected = np.tril((sequence[:, None] == sequence[None, :]).astype(int))
    assert (pairs == expected).all()


def ring_tokens(lengths: list[int], ulysses: int, ring: int, index: int, t: int) -> np.ndarray:
    """Tokens of one ring shard without padding: its inner ranks' slots one after the other."""
    inner = [ShardLayout(lengths, ulysses, ring, index * ulysses + u, t).token_index.numpy() for u in range(ulysses)]
    slots = np.concatenate(inner)
    return slots[slots >= 0]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.sampled_from([2, 3, 4, 8]))
@settings(max_examples=50, deadline=None)
def test_ring_ranks_have_the_same_causal_work_where_nothing_is_padded(multiples: list[int], ring: int) -> None:
    lengths = [2 * ring * m for m in multiples]
    work = [sum((layout.positions + 1).tolist()) for layout in layouts(lengths, 1, ring)]
    assert len(set(work)) == 1


def test_rank_0_of_a_ring_of_two_holds_the_outer_quarters() -> None:
    first, second = layouts([4, 4], 1, 2)
    assert first.positions.tolist() == [0, 3, 0, 3]
    assert second.positions.tolist() == [1, 2, 1, 2]


def test_inner_ranks_cut_the_ring_shard_into_equal_runs() -> None:
    assert [layout.token_index.tolist() for layout in layouts([5, 3], 4, 1)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_padding_comes_at_the_end_of_each_sequence_up_to_whole_chunks() -> None:
    ranks = layouts([9, 8, 8, 8, 12, 12], 1, 2)  # padded to [12, 8, 8, 8, 12, 12]
    assert [layout.tokens for layout in ranks] == [30, 30]
    assert ranks[0].positions[:6].tolist() == [0, 1, 2, 0, 0, 0]  # chunk 3 of the first sequence is all padding
    assert ranks[0].sequence[:6].tolist() == [0, 0, 0, -1, -1, -1]


def test_a_short_sequence_beside_a_long_one_costs_its_tokens_without_a_ring() -> None:
    assert ShardLayout([6300, 100], 64, 1, 0).total == 6400


@pytest.mark.parametrize(("ulysses", "ring", "t"), [(1, 1, 1), (4, 1, 2), (1, 2, 1), (2, 3, 4)])
def test_no_sequence_at_all_still_gives_every_rank_rows_of_padding(ulysses: int, ring: int, t: int) -> None:
    for layout in layouts([], ulysses, ring, t):
        assert layout.tokens >= t
        assert (layout.token_index == -1).all()
        assert len(layout.real_rows) == 0


def test_nonsense_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="sequence 1 of the group has 0 tokens"):
        ShardLayout([3, 0], 1, 1, 0)
    with pytest.raises(InvalidInputError, match="rank 4 of 2 × 2 ranks"):
        ShardLayout([3], 2, 2, 4)
    with pytest.raises(InvalidInputError, match="sequence parallelism 0"):
        ShardLayout([3], 1, 1, 0, 0)
    with pytest.raises(InvalidInputError, match="float64 values"):
        ShardLayout([1.5], 1, 1, 0)  # type: ignore[list-item]
    with pytest.raises(InvalidInputError, match="whole numbers of tokens"):
        ShardLayout(["3"], 1, 1, 0)  # type: ignore[list-item]
