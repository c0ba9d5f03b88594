"""What a rank says when a collective of the step fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler_service.domain import Batch, Pool, slice_plan
from scheduler_service.planning import plan_iteration
from tests.support.ranks import run_ranks
from worker_agent.data import shift_labels
from worker_agent.training.config import ModelConfig, OptimizerConfig
from worker_agent.training.model import LanguageModel
from worker_agent.training.topology import build_topology
from worker_agent.training.trainer import Trainer

LENGTHS = (40, 40, 40)
POOL = Pool(ranks=2, token_budget=20, heads=2)
PLAN = plan_iteration(Batch(LENGTHS), POOL, policy="static_cp")


def _dies_in_the_second_microbatch(rank: int, folder: str) -> None:
    topology = build_topology(POOL)
    model = LanguageModel(ModelConfig(vocabulary=7, hidden=8, layers=1), experts=topology.experts)
    trainer = Trainer(model, POOL, topology, OptimizerConfig())
    passes = 0

    def die(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if rank == 1 and passes == 2:
            os._exit(1)

    model.register_forward_pre_hook(die)
    sizes = [len(LENGTHS), 0]
    tokens = [torch.arange(length) % 7 for length in LENGTHS[: sizes[rank]]]
    piece = slice_plan(PLAN, Batch(LENGTHS), sizes, [rank])
    with pytest.raises(RuntimeError) as error:
        trainer.step(31, piece, tokens, [shift_labels(sequence) for sequence in tokens])
    Path(folder, "notes").write_text("\n".join(error.value.__notes__))


def test_a_step_that_fails_says_where_it_was_and_by_which_plan(tmp_path: Path):
    with pytest.raises((RuntimeError, AssertionError)):
        run_ranks(2, _dies_in_the_second_microbatch, str(tmp_path), timeout_s=60)
    assert (tmp_path / "notes").read_text().splitlines() == [
        "in the forward of microbatch 1, 3 microbatches, on stage 0 of 1",
        f"iteration 31, plan {PLAN.digest}, pool rank 0, on "
        "ranks 0–1 in microbatch 0, ranks 0–1 in microbatch 1, ranks 0–1 in microbatch 2",
    ]
