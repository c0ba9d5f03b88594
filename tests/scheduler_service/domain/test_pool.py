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
    ],
)
def test_a_wrong_field_is_named_with_what_it_may_be(fields: dict, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        Pool(**{"ranks": 8, "token_budget": 16, **fields})
    assert caught.value.reason == Reason.INVALID_POOL
