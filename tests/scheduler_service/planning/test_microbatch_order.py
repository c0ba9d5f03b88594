"""Exchanging microbatches shortens the pipeline and never lengthens it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.planning import microbatch_order
from scheduler_service.planning.microbatch_order import improved_order
from scheduler_service.simulation import pipeline_spans

seconds = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=12)


def span(times: np.ndarray, order: np.ndarray, stages: int) -> float:
    forward, backward = times[order].T
    return float(pipeline_spans(forward[None], backward[None], stages)[0])


@settings(max_examples=100, deadline=None)
@given(seconds, st.integers(1, 5), st.randoms(use_true_random=False))
def test_an_improved_order_is_a_permutation_that_no_exchange_makes_shorter(times, stages, random) -> None:
    times = np.array(times)
    order = np.array(random.sample(range(len(times)), len(times)))
    found = improved_order(times[:, 0], times[:, 1], stages, order)
    assert sorted(found) == list(range(len(times)))
    assert span(times, found, stages) <= span(times, order, stages)
    for i in range(len(times)):
        for j in range(i):
            exchanged = found.copy()
            exchanged[[i, j]] = found[[j, i]]
            assert span(times, exchanged, stages) >= span(times, found, stages) * (1 - 2e-9)


def test_a_long_microbatch_leaves_the_start_and_the_end() -> None:
    """Four stages, eight microbatches, the first of which is as long as four others."""
    times = np.array([[4.0, 8.0]] + [[1.0, 2.0]] * 7)
    found = improved_order(times[:, 0], times[:, 1], 4, np.arange(8))
    assert found[0] != 0
    assert found[-1] != 0
    assert span(times, found, 4) < span(times, np.arange(8), 4)


def test_the_order_it_was_given_stays_as_it_was() -> None:
    times, order = np.array([[4.0, 8.0]] + [[1.0, 2.0]] * 7), np.arange(8)
    improved_order(times[:, 0], times[:, 1], 4, order)
    assert order.tolist() == list(range(8))


@pytest.mark.parametrize("most", [0, 1, 500])
def test_it_stops_where_its_replays_are_used_up_and_is_not_worse(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatch_order, "MOST_OPERATIONS", most)
    times = np.random.default_rng(0).random((20, 2))
    found = improved_order(times[:, 0], times[:, 1], 4, np.arange(20))
    assert sorted(found) == list(range(20))
    assert span(times, found, 4) <= span(times, np.arange(20), 4)
