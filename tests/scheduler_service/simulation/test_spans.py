"""Spans alone against the replay of every operation."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.simulation import pipeline_spans, replay_pipeline


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 9), st.integers(1, 25), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_spans_are_those_of_the_full_replay_to_the_last_bit(
    stages: int, microbatches: int, pipelines: int, seed: int
) -> None:
    times = np.random.default_rng(seed).lognormal(0, 1.5, (2, pipelines, microbatches))
    times *= np.random.default_rng(seed + 1).random(times.shape) > 0.2  # some take no time
    forward, backward = times
    shape = (pipelines, stages, microbatches)
    replay = replay_pipeline(*(np.broadcast_to(seconds[:, None], shape) for seconds in times))
    np.testing.assert_array_equal(pipeline_spans(forward, backward, stages), replay.span)
