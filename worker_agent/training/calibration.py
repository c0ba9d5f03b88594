"""Constants of the simple cost model, measured on this machine with this model.

Every rank of the pool runs the same microbatches at degree 1 at the same time, so that workers which share cores
slow each other down as they do in training. The three constants are a least-squares fit, relative to each
measurement, of forward = θ·load + τ·tokens + overhead and backward = 2.5·θ·load + 2·τ·tokens + overhead.
Communication of context parallelism is not part of the simple model and is not measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from scheduler_service.domain import CostModel
from scheduler_service.domain.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR
from worker_agent.attention import ShardLayout
from worker_agent.training.trainer import Trainer

MICROBATCHES: tuple[tuple[int, ...], ...] = (
    (16,), (256,), (1024,), (2048,), (4096,), (64,) * 16, (256,) * 8, (512,) * 8, (1024, 1024, 512, 256, 256),
)  # fmt: skip
"""Lengths of each microbatch that is timed: loads and tokens that do not move together."""


def calibrate(trainer: Trainer, microbatches: Sequence[Sequence[int]] = MICROBATCHES, repeats: int = 3) -> CostModel:
    """Measure and fit; the same result on every rank. A collective over the pool; takes some ten seconds."""
    measured = [_measure(trainer, lengths, repeats) for lengths in microbatches]
    return fit_cost_model(microbatches, [forward for forward, _ in measured], [backward for _, backward in measured])


def fit_cost_model(
    microbatches: Sequence[Sequence[int]], forward_s: Sequence[float], backward_s: Sequence[float]
) -> CostModel:
    """The non-negative constants that fit the seconds best, each error relative to its measurement."""
    load = np.array([sum(length**2 for length in lengths) for lengths in microbatches], np.float64)
    tokens = np.array([sum(lengths) for lengths in microbatches], np.float64)
    ones = np.ones_like(load)
    rows = np.concatenate(
        (
            np.stack((load, tokens, ones), axis=1),
            np.stack((BACKWARD_ATTENTION * load, BACKWARD_LINEAR * tokens, ones), axis=1),
        )
    )
    seconds = np.concatenate((np.asarray(forward_s), np.asarray(backward_s)))
    theta, tau, overhead = _non_negative(rows / seconds[:, None]).tolist()
    return CostModel(theta=theta, tau=tau, overhead=overhead)


def _non_negative(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """x ≥ 0 with rows·x ≈ 1 in least squares, leaving out the most negative unknown until none is."""
    scale = np.abs(rows).max(axis=0)  # the unknowns differ by eight orders of magnitude
    kept = np.arange(rows.shape[1])
    solution = np.zeros(rows.shape[1])
    while len(kept):
        part = np.linalg.lstsq(rows[:, kept] / scale[kept], np.ones(len(rows)), rcond=None)[0]
        if part.min() >= 0:
            solution[kept] = part / scale[kept]
            break
        kept = np.delete(kept, part.argmin())
    return solution


def _measure(trainer: Trainer, lengths: Sequence[int], repeats: int) -> tuple[float, float]:
    """Seconds of forward and backward of one microbatch: the median of the repeats, the mean over the ranks."""
    topology, model = trainer.topology, trainer.model
    layout = ShardLayout(lengths, 1, 1, 0)
    group = topology.context.group(topology.rank, 1)
    generator = torch.Generator().manual_seed(topology.rank)
    tokens = torch.randint(model.config.vocabulary, (layout.tokens,), generator=generator)
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier(group=topology.pool)
        started = time.perf_counter()
        loss = model(tokens, tokens, layout, group)
        between = time.perf_counter()
        loss.backward()
        seconds.append((between - started, time.perf_counter() - between))
    model.zero_grad(set_to_none=True)
    median = torch.tensor(np.median(seconds[1:], axis=0))  # the first repeat warms up
    dist.all_reduce(median, group=topology.pool)
    forward, backward = (median / dist.get_world_size(topology.pool)).tolist()
    return forward, backward
