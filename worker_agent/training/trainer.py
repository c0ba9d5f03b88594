"""One training iteration, as a plan says.

Guarantees: loss, gradients and the updated weights are those of one process that runs the whole global batch,
whatever the plan (policy, degrees, microbatches) and the number of pipeline stages: the loss is the sum of all token
losses over the number of labels of the whole batch, every rank runs the same number of microbatches, and a rank
without a sequence runs a dummy that joins every expert exchange with weight zero. Does not decide anything and does
not wait for plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scheduler_service.domain import PlanSlice, Pool
from worker_agent.data import IGNORE_INDEX, Rerouter, backward_scale, count_valid, mean_loss
from worker_agent.training.config import OptimizerConfig
from worker_agent.training.gradients import clip_gradients, gradient_norm, sum_gradients
from worker_agent.training.model import LanguageModel
from worker_agent.training.topology import Topology


@dataclass(frozen=True)
class StepResult:
    """What one iteration gave: `loss`, `labels` and `gradient_norm` are the same on every rank, times are not."""

    loss: float
    """Mean loss over all labels of the global batch."""
    labels: int
    """Labels of the global batch that count."""
    gradient_norm: float
    """Norm of the whole model's gradient, before clipping."""
    forward_s: list[float]
    """Seconds of this rank's forward of each microbatch, waits for other ranks of the stage included."""
    backward_s: list[float]


class Trainer:
    """One stage of a model and its optimizer on one rank of a pool."""

    def __init__(self, model: LanguageModel, pool: Pool, topology: Topology, config: OptimizerConfig) -> None:
        self.model, self.pool, self.topology, self.config = model, pool, topology, config
        self.dense = list(model.dense_parameters())
        self.experts = list(model.expert_parameters())
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        decayed: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            decayed,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )

    def step(self, iteration: int, plan: PlanSlice, tokens: Sequence[Tensor], labels: Sequence[Tensor]) -> StepResult:
        """Run one iteration and update the weights.

        `tokens` and `labels` are the sequences that this rank loaded, in the order of `plan.loaded`; int64, shape
        (length,). Every stage loads the same; stages after the first read labels only. A collective over the job.
        Raises `FloatingPointError`, on every rank alike and before any weight has changed, when the gradient is not
        finite. Another error, as of a collective that timed out, gets notes that say what this rank was doing, so that
        the ranks' messages put side by side show where they parted.
        """
        try:
            result = self.compute_gradients(plan, tokens, labels)
        except Exception as error:
            error.add_note(
                f"iteration {iteration}, plan {plan.digest}, pool rank {self.topology.rank}, on {_runs(plan)}"
            )
            raise
        if not math.isfinite(result.gradient_norm):
            raise FloatingPointError(
                f"iteration {iteration}: the gradient's norm is {result.gradient_norm} and the loss {result.loss}; "
                "lower the learning rate"
            )
        clip_gradients(self.model.parameters(), result.gradient_norm, self.config.max_norm)
        for settings in self.optimizer.param_groups:
            settings["lr"] = self.config.learning_rate * min(1.0, (iteration + 1) / self.config.warmup)
        self.optimizer.step()
        self._balance_experts()
        return result

    def compute_gradients(self, plan: PlanSlice, tokens: Sequence[Tensor], labels: Sequence[Tensor]) -> StepResult:
        """Leave the gradient of the global batch's mean loss in the parameters. A collective over the job."""
        self.model.zero_grad(set_to_none=True)
        topology, pipeline = self.topology, self.topology.pipeline
        rerouter = Rerouter(plan, self.pool, topology.rank, topology.pool, topology.counters)
        parts = rerouter.microbatches
        token_shards = rerouter.route(tokens, 0) if pipeline.is_first else []
        label_shards = rerouter.route(labels, IGNORE_INDEX)
        count = count_valid(label_shards, topology.pool)
        scale = backward_scale(count)
        topology.context.warm((part.start, part.degree, part.ulysses) for part in parts)
        summed = torch.zeros((), dtype=torch.float64)

        def forward(index: int, arrived: Tensor | None) -> Tensor:
            part = parts[index]
            entering = token_shards[index] if arrived is None else arrived
            group = topology.context.group(part.start, part.degree, part.ulysses)
            leaving = self.model(entering, label_shards[index], part.layout, group)
            if not pipeline.is_last:
                return leaving
            summed.add_(leaving.detach())
            return leaving * scale

        shapes = [(part.layout.tokens, self.model.config.hidden) for part in parts]
        times = pipeline.run(shapes, self.dense[0].dtype, self.dense[0].device, forward)
        sum_gradients(self.dense, topology.pool)
        sum_gradients(self.experts, topology.replicas)
        return StepResult(
            loss=mean_loss(summed, count, topology.job),
            labels=count,
            gradient_norm=gradient_norm(
                self.dense, self.experts, topology.experts.process_group, pipeline.process_group
            ),
            forward_s=times.forward_s,
            backward_s=times.backward_s,
        )

    def _balance_experts(self) -> None:
        """One bias step per iteration, from the counts of the whole pool: every token passes every stage once."""
        for mixture in self.model.mixtures():
            counts = mixture.counts.clone()
            dist.all_reduce(counts, group=self.topology.pool)
            mixture.update_bias(counts, self.config.bias_step)


def _runs(plan: PlanSlice) -> str:
    """Where the slice's ranks run each microbatch, in words."""
    told = zip(plan.group_microbatch.tolist(), plan.group_start.tolist(), plan.group_degree.tolist(), strict=True)
    return (
        ", ".join(f"ranks {start}–{start + degree - 1} in microbatch {mb}" for mb, start, degree in told) or "dummies"
    )
