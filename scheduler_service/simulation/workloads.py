"""Batches with the lengths of the HyDra paper's data set, for those who bring no file of their own.

The paper says of its 256K data: more than 85 % of the sequences below 2K tokens, fewer than 0.6 % above 32K, the
longest 256K. A log-normal of ln s with mean 5.679 and deviation 1.878, clipped to 16 … 262,144, has these shares. The
32K data are the same without the longer ones. A batch is as large as 8 microbatches per stage of 5K tokens a rank, the
paper's mean: a balanced pipeline then has a bubble of 10 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from scheduler_service.domain import Batch
from scheduler_service.simulation.cluster import Cluster

LOG_MEAN, LOG_DEVIATION = 5.679, 1.878
SHORTEST, LONGEST = 16, 262_144

WORKLOADS: Mapping[str, int] = MappingProxyType({"paper-256k": 262_144, "paper-32k": 32_768})
"""Name → longest sequence."""

MICROBATCHES_PER_STAGE = 8
TOKENS_PER_RANK = 5_000
"""Of a microbatch, mean."""


def paper_batch(cluster: Cluster, longest: int = LONGEST, seed: int = 0) -> Batch:
    """One iteration's batch for this cluster, the same for the same seed."""
    wanted = MICROBATCHES_PER_STAGE * cluster.stages * cluster.ranks * TOKENS_PER_RANK
    random, drawn, tokens = np.random.default_rng(seed), [], 0
    while tokens < wanted:
        lengths = np.clip(random.lognormal(LOG_MEAN, LOG_DEVIATION, 1 << 14), SHORTEST, LONGEST).astype(np.int64)
        drawn.append(lengths[lengths <= longest])
        tokens += int(drawn[-1].sum())
    lengths = np.concatenate(drawn)
    return Batch(lengths[: int(np.searchsorted(np.cumsum(lengths), wanted)) + 1])
