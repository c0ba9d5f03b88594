"""The paper-like lengths have the shares that the paper states."""

from __future__ import annotations

import numpy as np

from scheduler_service.simulation.presets import load_cluster
from scheduler_service.simulation.workloads import WORKLOADS, paper_batch


def test_lengths_have_the_shares_that_the_paper_states() -> None:
    lengths = paper_batch(load_cluster("hy3_8k")).lengths
    assert np.mean(lengths < 2048) > 0.84  # as drawn: a sample's shares are off by less than a hundredth
    assert np.mean(lengths > 32768) < 0.0065
    assert lengths.max() == 262_144


def test_a_batch_is_eight_microbatches_a_stage_of_five_thousand_tokens_a_rank() -> None:
    cluster = load_cluster("paper_512_h20")
    for longest in WORKLOADS.values():
        batch = paper_batch(cluster, longest)
        assert 0 <= batch.tokens - 32 * 128 * 5000 < longest
        assert batch.longest <= longest
        assert batch == paper_batch(cluster, longest)
        assert batch != paper_batch(cluster, longest, seed=1)
