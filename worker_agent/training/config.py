"""Settings of a training run: what the model is, what the pool is, how long to train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from scheduler_service.domain import CostModel, InvalidInputError, Pool, Reason


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the decoder. Sizes are in elements; `heads` is what Ulysses divides."""

    vocabulary: int = 2048
    hidden: int = 96
    layers: int = 2
    dense_layers: int = 0
    """First layers whose feed-forward part is dense."""
    heads: int = 2
    attention: Literal["mla", "gqa"] = "mla"

    q_rank: int | None = 48
    """Rank of the query's down-projection (MLA); None projects directly."""
    kv_rank: int = 32
    """Rank of the latent that keys and values share (MLA)."""
    nope_dim: int = 16
    """Query and key elements of a head without a position (MLA)."""
    rope_dim: int = 8
    """Query and key elements of a head that carry the position; shared by all heads' keys (MLA)."""
    value_dim: int = 16
    """Value elements of a head (MLA)."""

    kv_heads: int = 1
    """Key and value heads (GQA)."""
    head_dim: int = 24
    """Elements of a head (GQA)."""

    dense_width: int = 256
    """Inner width of a dense feed-forward layer."""
    experts: int = 8
    """Routed experts of a layer, over all EP ranks."""
    top_k: int = 2
    """Experts that a token goes to."""
    expert_width: int = 64
    """Inner width of one expert, and of the shared expert."""
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT, f"model: top_k is {self.top_k}; give 1 to {self.experts}, the experts"
            )
        if self.heads % self.kv_heads:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT, f"model: {self.kv_heads} kv_heads do not divide {self.heads} heads"
            )
        rotary = self.rope_dim if self.attention == "mla" else self.head_dim
        if rotary % 2:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT, f"model: {rotary} rotary elements of a head; give an even number"
            )

    def local_experts(self, ep: int) -> int:
        """Experts of a layer on one of `ep` ranks. Raises `InvalidInputError` when they cannot be shared out."""
        if self.experts % ep:
            raise InvalidInputError(
                Reason.INVALID_POOL, f"pool: ep {ep} does not divide the model's {self.experts} experts"
            )
        return self.experts // ep


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and a limit on the gradient's norm."""

    learning_rate: float = 6e-3
    warmup: int = 4
    """Iterations until the full learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    max_norm: float = 1.0
    bias_step: float = 1e-3
    """How far an expert's selection bias moves per iteration against its load."""


CPU_COST = CostModel(theta=1.1e-8, tau=5.6e-5, overhead=3e-2)
"""Four workers of the default model on two otherwise idle server cores: the middle of three fits, which lay within
25 % of it. Measure your own by `torchrun --nproc-per-node 4 -m worker_agent.training --calibrate`, and pass it as
--theta, --tau and --overhead."""


@dataclass(frozen=True)
class RunConfig:
    """One run: its pool, its data, its length. The defaults are those of `make run`."""

    pool: Pool = field(default_factory=lambda: Pool(ranks=4, token_budget=4608, stages=1, ep=2, heads=2, max_ulysses=2))
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    cost: CostModel = CPU_COST
    policy: str = ""
    """Scheduling policy; empty for the service's default."""
    iterations: int = 24
    batch: int = 32
    """Documents of one global batch."""
    lookahead: int = 2
    """Iterations between submitting a batch's lengths and running it."""
    seed: int = 0
    fetch_timeout_s: float = 10.0
    """Longest wait for a plan before the ranks plan for themselves."""
