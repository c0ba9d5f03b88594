import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.domain import MAX_LENGTH, Batch, InvalidInputError, Reason

INTEGERS = st.integers(1, MAX_LENGTH)


@given(st.lists(INTEGERS, min_size=1, max_size=30))
def test_summary_figures_are_exact(lengths: list[int]) -> None:
    batch = Batch(lengths)
    assert (len(batch), batch.longest, batch.tokens) == (len(lengths), max(lengths), sum(lengths))
    assert batch.sum_of_squares == float(sum(length**2 for length in lengths))


def test_a_sum_of_squares_past_64_bits_is_exact_and_rounded_once() -> None:
    lengths = np.full(300_000, MAX_LENGTH - 1)
    lengths[0] = 3
    assert Batch(lengths).sum_of_squares == float(299_999 * (MAX_LENGTH - 1) ** 2 + 9)


@pytest.mark.parametrize(
    "lengths",
    [
        [1, 2, 3],
        (1, 2, 3),
        [1.0, 2.0, 3.0],
        np.array([1, 2, 3], np.int32),
        np.array([1, 2, 3], np.uint8),
        np.array([1, 2, 3], np.float16),
    ],
)
def test_whole_numbers_of_any_type_are_the_same_batch(lengths: object) -> None:
    assert Batch(lengths) == Batch([1, 2, 3])  # type: ignore[arg-type]
    assert Batch(lengths).digest == Batch([1, 2, 3]).digest  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "shown"),
    [
        ([4, 0], "0"),
        ([4, -1], "-1"),
        ([4, MAX_LENGTH + 1], str(MAX_LENGTH + 1)),
        ([4, 1.5], "1.5"),
        ([4, float("nan")], "nan"),
        ([4, float("inf")], "inf"),
        ([4, 10**20], str(10**20)),
        ([4, 10**40], "of more than 128 bits"),
        ([4, 10**5000], "of more than 128 bits"),
        (np.array([4, math.inf], np.float16), "inf"),
        ([4, None], "None"),
        ([4, True], "True"),
        ([4, "5"], "'5'"),
        (np.array([4, 2**63], np.uint64), str(2**63)),
    ],
)
def test_a_length_that_is_none_is_refused_by_name(lengths: list, shown: str) -> None:
    with pytest.raises(InvalidInputError, match=f"sequence 1 has length {shown}") as caught:
        Batch(lengths)
    assert (caught.value.reason, caught.value.sequence) == (Reason.INVALID_LENGTH, 1)


def test_an_empty_batch_and_nested_lists_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="holds no sequence") as caught:
        Batch([])
    assert caught.value.reason == Reason.EMPTY_BATCH
    for nested in ([[1, 2], [3, 4]], [[1], [2, 3]], 5):
        with pytest.raises(InvalidInputError, match="flat list"):
            Batch(nested)  # type: ignore[arg-type]


def test_the_lengths_are_a_copy_that_cannot_change() -> None:
    given_lengths = np.array([1, 2])
    batch = Batch(given_lengths)
    given_lengths[0] = 9
    assert batch.lengths.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        batch.lengths[0] = 3


def test_order_changes_the_digest() -> None:
    assert Batch([1, 2]).digest != Batch([2, 1]).digest
