"""The replay against closed forms, published bubbles, a production trace, and an event-driven oracle."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import InvalidInputError, Reason
from scheduler_service.simulation import replay_pipeline

TRACE = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces" / "straggler_SE.npz"

Key = tuple[int, str, int, int]
"""Stage, kind, chunk, microbatch."""


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 7), (4, 1), (4, 2), (4, 4), (8, 24), (9, 72)])
def test_uniform_microbatches_leave_the_textbook_bubble(stages: int, microbatches: int) -> None:
    times = np.full((3, stages, microbatches), 0.25)
    replay = replay_pipeline(times, 2 * times)
    assert replay.pp_bubble == pytest.approx(np.full(3, (stages - 1) / (microbatches + stages - 1)), abs=1e-12)
    assert replay.span == pytest.approx(np.full(3, 0.75 * (microbatches + stages - 1)))
    assert replay.dp_bubble.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(4, 8, 2), (4, 4, 3), (2, 2, 5), (8, 32, 4), (1, 3, 2)])
def test_interleaving_divides_the_uniform_bubble_by_the_chunks(stages: int, microbatches: int, chunks: int) -> None:
    times = np.ones((1, stages, microbatches))
    replay = replay_pipeline(times, 2 * times, chunks=chunks)
    assert replay.pp_bubble[0] == pytest.approx((stages - 1) / (chunks * microbatches + stages - 1))
    assert replay.busy[0] == pytest.approx(np.full(stages, 3.0 * microbatches))


@pytest.mark.parametrize(
    ("stages", "microbatches", "forward", "backward_input", "backward_weight", "latency", "rate"),
    [
        (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431),
        (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240),
        (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898),
        (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552),
        (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251),
        (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646),
        (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352),
    ],
)
def test_agrees_with_published_1f1b_bubble_rates_to_four_decimals(
    stages: int,
    microbatches: int,
    forward: float,
    backward_input: float,
    backward_weight: float,
    latency: float,
    rate: float,
) -> None:
    """Rates that the zero-bubble pipeline authors published for 1F1B; times in milliseconds."""
    ones = np.ones((1, stages, microbatches))
    replay = replay_pipeline(forward * ones, (backward_input + backward_weight) * ones, p2p_latency=latency)
    assert round(float(replay.pp_bubble[0]), 4) == rate


@pytest.mark.skipif(not TRACE.exists(), reason=f"needs the production trace {TRACE.name} beside the repository")
def test_predicts_the_spans_and_dp_bubble_of_a_production_trace() -> None:
    """43 steps of a 128-GPU job (DP 32 × CP 2 × PP 2, 8 microbatches); see the README beside the trace."""
    trace = np.load(TRACE)
    for step in range(len(trace["steps"])):
        start = trace["first_fwd_start"][step].astype(float)
        replay = replay_pipeline(trace["F"][step], trace["B"][step], start=start)
        recorded_end = trace["last_bwd_end"][step].max(axis=1).astype(float)
        recorded_span = recorded_end - start
        assert replay.span.max() == pytest.approx(recorded_span.max(), rel=0.01)
        assert replay.span == pytest.approx(recorded_span, rel=0.016)  # of every single replica
        recorded_bubble = (recorded_end.max() - recorded_end) / (recorded_end.max() - start.min())
        assert replay.dp_bubble.mean() == pytest.approx(recorded_bubble.mean(), abs=0.005)


def stage_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Key]:
    """One stage's operations, literally as the schedule is described."""
    total = microbatches * chunks
    warm_up = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    warm_up = min(total, warm_up)

    def operation(kind: str, k: int) -> Key:
        chunk = (k % (stages * chunks)) // stages
        microbatch = (k // (stages * chunks)) * stages + k % stages
        return stage, kind, chunk if kind == "F" else chunks - 1 - chunk, microbatch

    order = [operation("F", k) for k in range(warm_up)]
    for k in range(total - warm_up):
        order += [operation("F", warm_up + k), operation("B", k)]
    return order + [operation("B", k) for k in range(total - warm_up, total)]


def source_of(key: Key, stages: int, chunks: int) -> Key | None:
    stage, kind, chunk, microbatch = key
    slice_of_model = chunk * stages + stage
    if kind == "B" and slice_of_model == stages * chunks - 1:
        return stage, "F", chunk, microbatch
    other = slice_of_model + (-1 if kind == "F" else 1)
    return (other % stages, kind, other // stages, microbatch) if other >= 0 else None


def simulate_events(
    forward: np.ndarray, backward: np.ndarray, start: float, latency: float, chunks: int
) -> dict[Key, tuple[float, float]]:
    """Again and again runs the operation that can start first of all stages' next ones."""
    stages, microbatches = forward.shape
    queues = [stage_order(i, stages, microbatches, chunks) for i in range(stages)]
    clock, times = [start] * stages, {}
    while any(queues):
        ready = []
        for stage, queue in enumerate(queues):
            source = source_of(queue[0], stages, chunks) if queue else None
            if queue and (source is None or source in times):
                arrival = start if source is None else times[source][1] + latency * (source[0] != stage)
                ready.append((max(clock[stage], arrival), stage))
        begin, stage = min(ready)
        key = queues[stage].pop(0)
        duration = (forward if key[1] == "F" else backward)[stage, key[3]] / chunks
        times[key] = begin, begin + duration
        clock[stage] = begin + duration
    return times


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, float, int]:
    chunks = draw(st.integers(1, 3))
    stages, replicas = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    microbatches = draw(st.integers(1, 9)) if chunks == 1 else stages * draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (replicas, stages, microbatches)
    forward = random.lognormal(size=shape) * (random.random(shape) > draw(st.sampled_from((0.0, 0.3))))
    return forward, random.lognormal(size=shape), random.random(replicas), draw(st.sampled_from((0.0, 0.4))), chunks


@settings(max_examples=120, deadline=None)
@given(pipelines())
def test_equals_an_event_driven_simulation(pipeline: tuple[np.ndarray, np.ndarray, np.ndarray, float, int]) -> None:
    forward, backward, start, latency, chunks = pipeline
    stages = forward.shape[1]
    replay = replay_pipeline(forward, backward, start, latency, chunks)
    ends = []
    for replica in range(len(forward)):
        expected = simulate_events(forward[replica], backward[replica], start[replica], latency, chunks)
        operations = replay.operations(replica)
        rows = zip(
            operations.stage, operations.backward, operations.chunk, operations.microbatch,
            operations.start_s, operations.end_s, strict=True,
        )  # fmt: skip
        found = {(int(i), "FB"[int(b)], int(c), int(m)): (s, e) for i, b, c, m, s, e in rows}
        assert found.keys() == expected.keys()
        for key, times in expected.items():
            assert found[key] == pytest.approx(times, rel=1e-12)
        for stage in range(stages):
            end = max(end for (i, *_), (_, end) in expected.items() if i == stage)
            assert replay.stage_end[replica, stage] == pytest.approx(end)
        ends.append(max(end for _, end in expected.values()))
    busy = forward.sum(axis=(1, 2)) + backward.sum(axis=(1, 2))
    assert replay.span == pytest.approx(np.array(ends) - start)
    assert replay.pp_bubble == pytest.approx(1 - busy / (stages * replay.span))
    assert replay.dp_bubble == pytest.approx((max(ends) - np.array(ends)) / (max(ends) - start.min()))


def test_replicas_do_not_touch_each_other() -> None:
    random = np.random.default_rng(3)
    forward, backward = random.random((2, 5, 4, 6))
    together = replay_pipeline(forward, backward)
    for replica in range(5):
        alone = replay_pipeline(forward[[replica]], backward[[replica]])
        assert np.array_equal(alone.end[:, 0], together.end[:, replica])


def test_times_that_are_broadcast_over_the_stages_give_the_same_replay() -> None:
    times = np.random.default_rng(4).random((3, 1, 5))
    view = np.broadcast_to(times, (3, 4, 5))
    assert np.array_equal(replay_pipeline(view, view).end, replay_pipeline(view.copy(), view.copy()).end)


def test_one_large_microbatch_costs_more_than_the_sum_and_the_largest_suggest() -> None:
    forward = np.ones((1, 4, 8))
    forward[:, :, 4] = 6.0
    replay = replay_pipeline(forward, 2 * forward)
    total, largest = 3 * forward[0, 0].sum(), 3 * forward.max()
    assert total < replay.span[0]
    assert replay.span[0] < total + 3 * largest  # Σt + (p − 1)·max t is no substitute


def test_a_pipeline_that_takes_no_time_has_no_bubble() -> None:
    replay = replay_pipeline(np.zeros((2, 2, 2)), np.zeros((2, 2, 2)))
    assert replay.pp_bubble.tolist() == [0, 0]
    assert replay.dp_bubble.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": np.ones((2, 2))}, "forward has shape (2, 2)"),
        ({"forward": np.ones((1, 2, 0))}, "forward has shape (1, 2, 0)"),
        ({"forward": np.ones((1, 2, 3))}, "give both the same"),
        ({"forward": "fast"}, "no array of numbers"),
        ({"backward": [[[1.0, math.nan], [1.0, 1.0]]]}, "backward[0, 0, 1] is nan"),
        ({"backward": [[[1.0, 1.0], [-1.0, 1.0]]]}, "backward[0, 1, 0] is -1.0"),
        ({"forward": [[[1.0, 1.0], [math.inf, 1.0]]]}, "forward[0, 1, 0] is inf"),
        ({"start": [0.0, 1.0]}, "start has shape (2,)"),
        ({"start": [math.nan]}, "start holds a time"),
        ({"start": [-1.0]}, "start holds a time"),
        ({"p2p_latency": -1.0}, "p2p_latency is -1.0"),
        ({"p2p_latency": math.nan}, "p2p_latency is nan"),
        ({"chunks": 0}, "chunks is 0"),
        ({"chunks": 1.5}, "chunks is 1.5"),
    ],
)
def test_refuses_input_without_meaning_and_names_it(arguments: dict[str, object], message: str) -> None:
    given_arguments = {"forward": np.ones((1, 2, 2)), "backward": np.ones((1, 2, 2))} | arguments
    with pytest.raises(InvalidInputError) as error:
        replay_pipeline(**given_arguments)  # type: ignore[arg-type]
    assert message in str(error.value)
    assert error.value.reason is Reason.INVALID_ARGUMENT


def test_interleaving_refuses_microbatches_that_are_no_multiple_of_the_stages() -> None:
    with pytest.raises(InvalidInputError, match="interleaving needs 8"):
        replay_pipeline(np.ones((1, 4, 6)), np.ones((1, 4, 6)), chunks=2)
