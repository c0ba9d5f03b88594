"""A training run on one rank: submit lengths ahead, take the plan, train, report.

Per iteration the rank submits the lengths of iteration t + lookahead, takes the plan of t (which the agent has
fetched meanwhile), runs it, and hands its timings to the agent. Rank 0 writes one JSON line per iteration
(`metrics.jsonl`, the fields of `IterationRecord`); every rank of the first stage writes which samples it has trained
(`ledger-<rank>.jsonl`), so that anyone can check that each was trained exactly once.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scheduler_service.domain import PlanSlice
from worker_agent.client import PlanAgent, PlanStep, Timing
from worker_agent.data import shift_labels
from worker_agent.training.checkpoint import load_checkpoint, save_checkpoint
from worker_agent.training.config import RunConfig
from worker_agent.training.documents import Documents
from worker_agent.training.sampler import Sampler
from worker_agent.training.topology import Topology
from worker_agent.training.trainer import StepResult, Trainer

BYTE_KINDS = ("ulysses", "ring", "ep", "reroute", "pipeline")


@dataclass(frozen=True)
class IterationRecord:
    """One iteration over the whole job: one line of `metrics.jsonl`."""

    iteration: int
    loss: float
    gradient_norm: float
    labels: int
    sequences: int
    tokens: int
    longest_tokens: int
    digest: str
    policy: str
    origin: str
    """"service", or "local" when the ranks planned for themselves."""
    reason: str
    """Why they did; empty otherwise."""
    microbatches: int
    microbatch_loads: list[float]
    """Attention load of the fullest rank in each microbatch, token²/degree."""
    degrees: dict[int, int]
    """Degree to number of sequences."""
    predicted_s: float
    wait_s: float
    """Longest wait of any rank for the plan."""
    iteration_s: float
    """Slowest rank, from asking for the plan to the end of the optimizer step."""
    bytes_sent: dict[str, int]
    """Bytes that all ranks sent, by kind."""


class Run:
    """The loop of one rank. `trainer` and `agent` are ready; `output` is a folder that exists."""

    def __init__(
        self, config: RunConfig, documents: Documents, trainer: Trainer, agent: PlanAgent, output: Path
    ) -> None:
        self.config, self.documents, self.trainer, self.agent, self.output = config, documents, trainer, agent, output
        self.topology: Topology = trainer.topology
        self.sampler = Sampler(len(documents), config.batch, config.pool.ranks, config.seed)

    def train(self, first: int = 0, checkpoint_every: int = 0) -> None:
        """Run iterations `first` … config.iterations − 1, from the checkpoint before `first` unless that is 0."""
        checkpoints = self.output / "checkpoints"
        if first:
            load_checkpoint(checkpoints, first, self.trainer)
        else:
            for stale in (*self.output.glob("ledger-*.jsonl"), self.output / "metrics.jsonl"):
                stale.unlink(missing_ok=True)
        dist.barrier(group=self.topology.job)
        for iteration in range(first, min(first + self.config.lookahead, self.config.iterations)):
            self._submit(iteration)
        for iteration in range(first, self.config.iterations):
            if iteration + self.config.lookahead < self.config.iterations:
                self._submit(iteration + self.config.lookahead)
            record, step = self._iterate(iteration)
            rank, is_first = self.topology.rank, self.topology.pipeline.is_first
            if is_first:
                _append_line(self.output / f"ledger-{rank}.jsonl", self._ledger_entry(iteration, step))
            if is_first and rank == 0:
                _append_line(self.output / "metrics.jsonl", asdict(record))
            if checkpoint_every and (iteration + 1) % checkpoint_every == 0:
                save_checkpoint(checkpoints, iteration + 1, self.trainer)

    def _submit(self, iteration: int) -> None:
        samples = self.sampler.shard(iteration, self.topology.rank)
        self.agent.submit(iteration, self.documents.lengths[samples.documents])

    def _iterate(self, iteration: int) -> tuple[IterationRecord, PlanStep]:
        started = time.perf_counter()
        before = self.topology.counters.snapshot()
        step = self.agent.plan(iteration)
        tokens = self._load(iteration)
        result = self.trainer.step(iteration, step.slice, tokens, [shift_labels(sequence) for sequence in tokens])
        elapsed = time.perf_counter() - started
        sent = {kind: n - before.get(kind, 0) for kind, n in self.topology.counters.snapshot().items()}
        self.agent.report(
            Timing(
                iteration=iteration,
                rank=self.topology.rank,
                iteration_s=elapsed,
                plan_wait_s=step.wait_s,
                origin=step.origin,
                fallback_reason=step.reason,
                digest=step.slice.digest,
                forward_s=tuple(result.forward_s),
                backward_s=tuple(result.backward_s),
                loss=result.loss,
                ulysses_bytes=sent.get("ulysses", 0),
                ring_bytes=sent.get("ring", 0),
                ep_bytes=sent.get("ep", 0),
            )
        )
        return self._record(iteration, step, result, elapsed, sent), step

    def _load(self, iteration: int) -> list[Tensor]:
        samples = self.sampler.shard(iteration, self.topology.rank)
        return [torch.from_numpy(self.documents[document]) for document in samples.documents.tolist()]

    def _record(
        self, iteration: int, step: PlanStep, result: StepResult, elapsed_s: float, sent: dict[str, int]
    ) -> IterationRecord:
        """The job's record, on every rank: two small all-reduces."""
        plan, degrees = step.slice, self.config.pool.degrees
        loaded = [len(plan.loaded), int(plan.loaded_lengths.sum())]
        loaded += [int((plan.loaded_degree == degree).sum()) for degree in degrees]
        if not self.topology.pipeline.is_first:
            loaded = [0] * len(loaded)  # every stage loads the same
        totals = torch.tensor(loaded + [sent.get(kind, 0) for kind in BYTE_KINDS])
        longest = int(plan.loaded_lengths.max(initial=0))
        largest = torch.tensor([longest, step.wait_s, elapsed_s, *_loads(plan)], dtype=torch.float64)
        dist.all_reduce(totals, group=self.topology.job)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.topology.job)
        sequences, tokens, *counts = totals.tolist()
        longest_tokens, wait_s, iteration_s, *loads = largest.tolist()
        return IterationRecord(
            iteration=iteration,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            labels=result.labels,
            sequences=sequences,
            tokens=tokens,
            longest_tokens=int(longest_tokens),
            digest=plan.digest,
            policy=plan.policy,
            origin=step.origin,
            reason=step.reason,
            microbatches=plan.microbatches,
            microbatch_loads=loads,
            degrees={degree: n for degree, n in zip(degrees, counts, strict=False) if n},
            predicted_s=plan.predicted_s,
            wait_s=wait_s,
            iteration_s=iteration_s,
            bytes_sent=dict(zip(BYTE_KINDS, counts[len(degrees) :], strict=True)),
        )

    def _ledger_entry(self, iteration: int, step: PlanStep) -> dict[str, Any]:
        """The samples of the groups that this rank is the first of: over all ranks, each sample once."""
        plan, first = step.slice, iteration * self.config.batch
        samples = [
            first + int(member)
            for k, start in enumerate(plan.group_start.tolist())
            if start == self.topology.rank
            for member in plan.members[plan.group_offset[k] : plan.group_offset[k + 1]]
        ]
        return {"iteration": iteration, "digest": plan.digest, "origin": step.origin, "samples": samples}


def _loads(plan: PlanSlice) -> list[float]:
    """Attention load of the fullest of the slice's ranks in each microbatch, token²/degree."""
    group = np.repeat(np.arange(len(plan.group_degree)), np.diff(plan.group_offset))
    squares = np.bincount(group, np.square(plan.member_lengths, dtype=np.float64), len(plan.group_degree))
    loads = np.zeros(plan.microbatches)
    np.maximum.at(loads, plan.group_microbatch, squares / plan.group_degree)
    return loads.tolist()


def _append_line(path: Path, values: dict[str, Any]) -> None:
    # Opened each time: a reader sees whole lines, and a resumed run goes on where the last one ended.
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")
