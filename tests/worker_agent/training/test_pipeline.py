"""The order of 1F1B, and what a pipeline does with it. Gradients through stages are in test_gradients."""

from __future__ import annotations

import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scheduler_service.domain import InvalidInputError, Pool
from scheduler_service.simulation import replay_pipeline
from tests.support.ranks import run_ranks
from worker_agent.training.config import ModelConfig
from worker_agent.training.model import LanguageModel
from worker_agent.training.pipeline import Pipeline, one_forward_one_backward
from worker_agent.training.topology import build_topology


@given(stages=st.integers(1, 6), microbatches=st.integers(1, 9))
def test_the_order_is_the_one_that_the_simulator_replays(stages: int, microbatches: int):
    durations = [[[1.0] * microbatches] * stages]
    replayed = replay_pipeline(durations, durations).operations(0)
    for stage in range(stages):
        mine = replayed.stage == stage
        told = list(zip(replayed.microbatch[mine].tolist(), replayed.backward[mine].tolist(), strict=True))
        began = replayed.start_s[mine]
        assert sorted(began.tolist()) == began.tolist()
        assert one_forward_one_backward(stage, stages, microbatches) == told


SHAPES = [(5, 3), (1, 3), (64, 3), (2, 3), (17, 3), (9, 3)]


def _staggered(rank: int, seed: int) -> tuple[list[int], list[float], int]:
    """Stage s multiplies by its weight s + 2; every rank at its own pace."""
    pool = Pool(ranks=1, token_budget=64, stages=3)
    topology = build_topology(pool)
    pace, order = random.Random(seed + rank), []
    weight = torch.tensor(float(rank + 2), dtype=torch.float64, requires_grad=True)

    def forward(index: int, arrived: Tensor | None) -> Tensor:
        time.sleep(pace.choice((0, 0, 0.01)))
        order.append(index)
        entering = torch.full(SHAPES[index], index + 1.0, dtype=torch.float64) if arrived is None else arrived
        assert tuple(entering.shape) == SHAPES[index]
        leaving = entering * weight
        return leaving.sum() if topology.pipeline.is_last else leaving

    for count in (len(SHAPES), 1, 0, 2):  # fewer microbatches than stages, too
        topology.pipeline.run(SHAPES[:count], torch.float64, torch.device("cpu"), forward)
    assert weight.grad is not None
    return order, weight.grad.tolist(), topology.counters.snapshot()["pipeline"]


def test_microbatches_of_any_shape_and_number_pass_three_stages_at_different_paces():
    counts = (6, 1, 0, 2)
    total = sum((index + 1) * 3 * SHAPES[index][0] for count in counts for index in range(count))
    elements = sum(3 * SHAPES[index][0] for count in counts for index in range(count))
    told = run_ranks(3, _staggered, 11)
    for stage, (order, gradient, sent) in enumerate(told):
        assert order == [index for count in counts for index in range(count)]
        assert gradient == total * 2 * 3 * 4 / (stage + 2)
        assert sent == 8 * elements * (2 if stage == 1 else 1), "activations ahead, gradients back"


def test_one_stage_sends_nothing_and_needs_no_process_group():
    weight = torch.tensor(3.0, requires_grad=True)
    times = Pipeline().run([(2,), (4,)], torch.float32, torch.device("cpu"), lambda index, _: weight * (index + 1))
    assert weight.grad == 3.0
    assert len(times.forward_s) == len(times.backward_s) == 2


def test_stages_without_a_layer_are_refused():
    with pytest.raises(InvalidInputError, match="3 stages for a model of 2 layers"):
        LanguageModel(ModelConfig(layers=2), stage=0, stages=3)


def _parts(rank: int) -> dict[str, list[int]]:
    topology = build_topology(Pool(ranks=1, token_budget=64, stages=2))
    model = LanguageModel(ModelConfig(layers=3), seed=3, stage=topology.pipeline.stage, stages=2)
    return {name: weight.flatten()[:4].tolist() for name, weight in model.named_parameters()}


def test_weights_do_not_depend_on_the_number_of_stages():
    first, second = run_ranks(2, _parts)
    whole = {
        name: w.flatten()[:4].tolist() for name, w in LanguageModel(ModelConfig(layers=3), seed=3).named_parameters()
    }
    assert not first.keys() & second.keys()
    assert first | second == whole
