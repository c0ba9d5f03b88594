"""A training job on a cluster: the model, the GPUs, and how they divide the work.

GPU order is TP, then pool ranks, then pipeline stages: a node holds neighbouring ranks of one stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import InvalidInputError, Pool, Reason
from scheduler_service.domain.pool import Speeds
from scheduler_service.simulation.hardware import Hardware
from scheduler_service.simulation.models import Matrix, Model, weights


class Engine(StrEnum):
    """How a CP group computes attention."""

    HYBRID = "hybrid"
    """Ulysses inside, up to the heads of a TP rank, beside the projections and with latents; a ring outside."""
    ULYSSES = "ulysses"
    """The same ranks, but exchanges are waited for, and latent attention sends whole keys and values."""
    RING = "ring"
    """A ring over all ranks of the group."""


class Recompute(StrEnum):
    """What the backward computes again instead of keeping it."""

    NONE = "none"
    SELECTIVE = "selective"
    """What is cheap: norms, activations, and what latents are projected up to."""
    FULL = "full"
    """The whole forward of each layer."""


LEAST = {"bucket_parameters": 1, "expert_load": 1, "reserved_bytes": 0, "dollars_per_gpu_hour": 0}
"""Smallest value of the cluster's other numbers."""

MOST = 1e15
"""Largest value of these. Keeps every prediction finite."""


@dataclass(frozen=True)
class StageLayers:
    """What one pipeline stage holds."""

    dense: int
    """Layers with a dense feed-forward network."""
    moe: int
    """Layers with experts."""
    head: int
    """1 where the output head is."""
    embedding: int
    """1 where the input embedding is."""


class StageParameters(NamedTuple):
    """Weights that one GPU of a stage holds."""

    shared: float
    """The same on all ranks of the pool."""
    expert: float
    """The same on all EP groups."""


@dataclass(frozen=True)
class Cluster:
    """One job. Raises `InvalidInputError` that names the field, its value and what it may be."""

    name: str
    model: Model
    hardware: Hardware
    ranks: int
    """Ranks of the pool (DP×CP), G."""
    token_budget: int
    """Most padded tokens that a rank may hold in one microbatch, B."""
    tp: int = 1
    """GPUs that share a rank's layers by tensor parallelism, with sequence parallelism."""
    stages: int = 1
    """Pipeline stages, p."""
    ep: int = 1
    """Ranks of an expert-parallel group, E; its experts are spread over E·tp GPUs."""
    chunks: int = 1
    """Chunks of the model on each stage; above 1 the pipeline is interleaved."""
    engine: Engine = Engine.HYBRID
    recompute: Recompute = Recompute.NONE
    exchange_overlap: bool = True
    """Whether the hybrid engine's exchanges run beside projections that do not need them (engine design, section 4)."""
    gradient_overlap: bool = True
    """Whether gradients and parameters are exchanged beside the last backward and the first forward."""
    distributed_optimizer: bool = True
    """Whether the optimizer's state is divided over the replicas."""
    gradient_bytes: int = 4
    """Of one gradient, kept and exchanged."""
    bucket_parameters: float = 1e6
    """Parameters per rank of a bucket of gradients. Megatron-Core's default: 40 million, or this times the ranks."""
    expert_load: float = 1.0
    """Tokens of the fullest GPU's experts over the mean."""
    reserved_bytes: float = 8e9
    """GPU memory that the model cannot have: NCCL, CUDA context, fragments (5…10 GB)."""
    dollars_per_gpu_hour: float = 2.0
    speeds: Speeds = ()
    """Slow ranks, and with speed 0 those that get no sequence, as in `Pool`. Of a rank, all its TP×PP GPUs."""

    def __post_init__(self) -> None:
        for name in ("tp", "stages", "chunks", "gradient_bytes"):
            if getattr(self, name) < 1:
                raise self._invalid(f"{name} is {getattr(self, name)}; give a whole number, 1 or more")
        for name, least in LEAST.items():
            if not least <= getattr(self, name) <= MOST:  # nor is NaN
                raise self._invalid(f"{name} is {getattr(self, name)}; give a number from {least:g} to {MOST:g}")
        layers = self.model.layers
        if self.stages * self.chunks > layers:
            raise self._invalid(
                f"{layers} layers cannot fill {self.stages} stages × {self.chunks} chunks; give at most {layers}"
            )
        if self.model.attention.heads % self.tp:
            raise self._invalid(f"tp {self.tp} does not divide {self.model.attention.heads} heads")
        if self.hardware.gpus_per_node % self.tp:
            raise self._invalid(f"tp {self.tp} does not divide the {self.hardware.gpus_per_node} GPUs of a node")
        object.__setattr__(self, "speeds", self.pool.speeds)  # checked there, like ranks, token_budget, ep

    def _invalid(self, message: str) -> InvalidInputError:
        return InvalidInputError(Reason.INVALID_ARGUMENT, f"cluster {self.name}: {message}")

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.ranks * self.tp * self.stages

    @cached_property
    def pool(self) -> Pool:
        """What the planner sees of it."""
        heads = self.model.attention.heads // self.tp
        return Pool(
            ranks=self.ranks,
            token_budget=self.token_budget,
            stages=self.stages,
            ep=self.ep,
            heads=heads,
            max_ulysses=1 if self.engine is Engine.RING else heads,
            node=self.hardware.gpus_per_node // self.tp,
            microbatch_multiple=self.stages if self.chunks > 1 else 1,
            sequence_parallel=self.tp,
            speeds=self.speeds,
        )

    @property
    def working_speeds(self) -> npt.NDArray[np.float64]:
        """Speed of each rank, (ranks,): 1 for those that are excluded, for it is not known how slow they are."""
        speeds = self.pool.group_speeds(1)
        return np.where(speeds > 0, speeds, 1.0)

    def with_engine(self, engine: Engine) -> Cluster:
        """The same job with another engine."""
        return replace(self, engine=engine)

    @cached_property
    def stage_layers(self) -> tuple[StageLayers, ...]:
        """Layers in order, as evenly as they go; the first stages take one more where they do not."""
        whole, more = divmod(self.model.layers, self.stages)
        stages, first = [], 0
        for stage in range(self.stages):
            layers = whole + (stage < more)
            dense = min(max(self.model.dense_layers - first, 0), layers)
            last = stage == self.stages - 1
            stages.append(StageLayers(dense, layers - dense, head=int(last), embedding=int(stage == 0)))
            first += layers
        return tuple(stages)

    @cached_property
    def stage_parameters(self) -> tuple[StageParameters, ...]:
        """Weights on one GPU of each stage: split matrices by TP, experts by EP and TP, the others whole."""
        model = self.model
        attention = self._parameters(model.attention_matrices)
        dense = attention + self._parameters(model.dense_matrices)
        moe = attention + self._parameters(model.router_matrices + model.shared_matrices)
        experts = weights(model.expert_matrices) * (model.experts.count if model.experts else 0) / (self.ep * self.tp)
        vocabulary = model.head_matrix.parameters / self.tp
        return tuple(
            StageParameters(
                shared=layers.dense * dense
                + layers.moe * moe
                + vocabulary * (1 if model.tied_embedding and self.stages == 1 else layers.head + layers.embedding),
                expert=layers.moe * experts,
            )
            for layers in self.stage_layers
        )

    def _parameters(self, matrices: tuple[Matrix, ...]) -> float:
        return sum(matrix.parameters / (self.tp if matrix.split else 1) for matrix in matrices)
