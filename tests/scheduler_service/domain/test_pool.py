import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.domain import GroupShape, InvalidInputError, Pool, Reason
from tests.support.strategies import pools


@pytest.mark.parametrize(
    ("ranks", "max_degree", "degrees"),
    [
        (1, None, (1,)),
        (8, None, (1, 2, 4, 8)),
        (6, None, (1, 2, 4, 6)),
        (24, None, (1, 2, 4, 8, 16, 24)),
        (48, 16, (1, 2, 4, 8, 16)),
        (48, 20, (1, 2, 4, 8, 16)),
        (48, 48, (1, 2, 4, 8, 16, 32, 48)),
        (48, 100, (1, 2, 4, 8, 16, 32, 48)),
    ],
)
def test_degrees_are_powers_of_two_and_the_full_pool(
    ranks: int, max_degree: int | None, degrees: tuple[int, ...]
) -> None:
    assert Pool(ranks, 10, max_degree=max_degree).degrees == degrees


@pytest.mark.parametrize(
    ("pool", "degree", "shape"),
    [
        (Pool(256, 10, heads=64), 256, GroupShape(64, 4)),  # beyond the heads the ring stays shallow
        (Pool(256, 10, heads=64), 64, GroupShape(64, 1)),
        (Pool(24, 10, heads=64), 24, GroupShape(8, 3)),  # an odd ring
        (Pool(64, 10, heads=64, max_ulysses=8), 64, GroupShape(8, 8)),
        (Pool(64, 10, heads=6), 64, GroupShape(2, 32)),
        (Pool(64, 10, heads=1), 64, GroupShape(1, 64)),
        (Pool(64, 10), 64, GroupShape(64, 1)),  # heads not known: any number
        (Pool(64, 10, max_ulysses=16), 64, GroupShape(16, 4)),
        (Pool(6, 10), 6, GroupShape(2, 3)),
    ],
)
def test_ulysses_takes_the_largest_power_of_two_and_the_ring_the_rest(
    pool: Pool, degree: int, shape: GroupShape
) -> None:
    assert pool.shape(degree) == shape


def test_pure_ulysses_pads_no_sequence() -> None:
    pool = Pool(64, 8192, heads=64)
    assert (pool.chunks(64), pool.padded(100, 64), pool.stream_multiple(64)) == (1, 100, 64)
    assert pool.capacity(64) == 64 * 8192


def test_a_ring_pads_each_sequence_to_two_chunks_a_rank_and_the_stream_to_both() -> None:
    pool = Pool(24, 100, heads=64)  # 8 × 3: 6 chunks; a stream of lcm(6, 24)
    assert (pool.chunks(24), pool.padded(698, 24), pool.stream_multiple(24)) == (6, 702, 24)
    pool = Pool(4, 8192, heads=1)  # 1 × 4: 8 chunks
    assert (pool.chunks(4), pool.padded(698, 4), pool.stream_multiple(4)) == (8, 704, 8)


def test_sequence_parallelism_pads_the_stream() -> None:
    assert Pool(6, 12, heads=2, sequence_parallel=4).stream_multiple(6) == 24
    assert Pool(6, 12, heads=1, sequence_parallel=4).stream_multiple(2) == 8


@given(pools(), st.data())
def test_capacity_is_the_largest_stream_within_the_budget(pool: Pool, data: st.DataObject) -> None:
    degree = data.draw(st.sampled_from(pool.degrees))
    capacity, multiple = pool.capacity(degree), pool.stream_multiple(degree)
    assert capacity % multiple == 0
    assert capacity <= degree * pool.token_budget < capacity + multiple
    assert multiple % pool.chunks(degree) == 0
    shape = pool.shape(degree)
    assert shape.ulysses * shape.ring == degree


def test_speeds_are_kept_by_rank_without_those_of_full_speed_however_they_are_given() -> None:
    pool = Pool(8, 16, speeds={5: 0.5, 2: 0, 3: 1})
    assert pool.speeds == ((2, 0.0), (5, 0.5))
    assert pool == Pool(8, 16, speeds=[[np.int64(5), np.float32(0.5)], (2, 0)])
    assert hash(pool) == hash(Pool(8, 16, speeds=((2, 0.0), (5, 0.5))))
    assert (pool.excluded, pool.total_speed) == ((2,), 6.5)
    assert Pool(8, 16, speeds={3: 1.0}) == Pool(8, 16)
    assert str(Pool(8, 16, speeds={2: -0.0}).speeds) == "((2, 0.0),)"


def test_a_group_is_as_fast_as_its_slowest_rank() -> None:
    pool = Pool(6, 16, speeds={0: 0.5, 1: 0.9, 5: 0})
    assert pool.group_speeds(1).tolist() == [0.5, 0.9, 1, 1, 1, 0]
    assert pool.group_speeds(2).tolist() == [0.5, 1, 0]
    assert pool.group_speeds(4).tolist() == [0.5]
    assert (pool.fastest(2), pool.fastest(4), pool.pace(4)) == (1, 0.5, 2)


@pytest.mark.parametrize(
    ("ranks", "excluded", "degrees"),
    [
        (8, [0], (1, 2, 4)),
        (8, [0, 4], (1, 2)),
        (8, [1, 3, 4, 6], (1,)),
        (6, [5], (1, 2, 4)),  # not the full pool
        (6, [2], (1, 2)),
        (24, range(16, 24), (1, 2, 4, 8, 16)),
    ],
)
def test_degrees_are_those_of_groups_without_an_excluded_rank(ranks: int, excluded: list, degrees: tuple) -> None:
    assert Pool(ranks, 10, speeds=dict.fromkeys(excluded, 0)).degrees == degrees


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": 0}, "ranks is 0; give a whole number from 1 to 65,536"),
        ({"ranks": 70_000}, "ranks is 70000"),
        ({"ranks": True}, "ranks is True"),
        ({"token_budget": 0}, "token_budget is 0"),
        ({"token_budget": 1.5}, "token_budget is 1.5"),
        ({"token_budget": 10, "sequence_parallel": 4}, "no multiple of sequence_parallel 4; the nearest below is 8"),
        ({"stages": 0}, "stages is 0"),
        ({"ep": 3}, "ep 3 does not divide 8 ranks"),
        ({"ep": 16}, "ep is 16"),
        ({"heads": 0}, "heads is 0"),
        ({"max_ulysses": -1}, "max_ulysses is -1"),
        ({"max_degree": 0}, "max_degree is 0"),
        ({"microbatch_multiple": 0}, "microbatch_multiple is 0"),
        ({"speeds": {8: 0.5}}, r"names rank 8; the pool has ranks 0 … 7"),
        ({"speeds": {-1: 0.5}}, "names rank -1"),
        ({"speeds": {True: 0.5}}, "names rank True"),
        ({"speeds": [(1, 0.5), (1, 1)]}, r"names rank 1 twice \(0.5 and 1\)"),
        ({"speeds": {1: 1.5}}, "rank 1 has speed 1.5; give 0.01 to 1, the speed of the fastest, or 0 to exclude it"),
        ({"speeds": {1: -0.5}}, "rank 1 has speed -0.5"),
        ({"speeds": {1: 0.001}}, "rank 1 has speed 0.001"),
        ({"speeds": {1: float("nan")}}, "rank 1 has speed nan"),
        ({"speeds": {1: True}}, "rank 1 has speed True"),
        ({"speeds": {1: "fast"}}, "rank 1 has speed 'fast'"),
        ({"speeds": 0.5}, "speeds is 0.5; give pairs of a rank and its speed"),
        ({"speeds": dict.fromkeys(range(8), 0)}, "all 8 ranks are excluded"),
    ],
)
def test_a_wrong_field_is_named_with_what_it_may_be(fields: dict, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        Pool(**{"ranks": 8, "token_budget": 16, **fields})
    assert caught.value.reason == Reason.INVALID_POOL


def test_slow_ranks_can_be_taken_for_fast_or_left_out_and_excluded_ones_stay_excluded() -> None:
    pool = Pool(8, 10, speeds={1: 0.5, 4: 0.0})
    assert dict(pool.evened.speeds) == {4: 0.0}
    assert dict(pool.without_slow.speeds) == {1: 0.0, 4: 0.0}
    even, slow = Pool(2, 10), Pool(2, 10, speeds={0: 0.5, 1: 0.5})
    assert even.without_slow == even
    assert slow.without_slow == slow
