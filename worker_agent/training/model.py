"""A decoder-only language model whose attention runs under hybrid context parallelism.

Pre-norm blocks of gated attention and a mixture of experts. It sees one microbatch at a time: the local slots of one
group's packed stream, described by a `ShardLayout`. Positions come from the layout. Everything but attention and the
expert exchange works on each token alone, so outputs and gradients do not depend on the plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scheduler_service.domain import InvalidInputError, Reason
from worker_agent.attention import ShardLayout
from worker_agent.data import IGNORE_INDEX, summed_loss
from worker_agent.groups import Group
from worker_agent.training.attention import GroupedQueryAttention, LatentAttention, Rotary
from worker_agent.training.config import ModelConfig
from worker_agent.training.initialisation import draw
from worker_agent.training.layers import Linear, Norm
from worker_agent.training.mixture import ExpertGroup, Experts, FeedForward, MixtureOfExperts


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int, experts: ExpertGroup) -> None:
        super().__init__()
        self.attention_norm = Norm(config.hidden)
        self.attention = (LatentAttention if config.attention == "mla" else GroupedQueryAttention)(config)
        self.feed_forward_norm = Norm(config.hidden)
        self.feed_forward = (
            FeedForward(config.hidden, config.dense_width)
            if layer < config.dense_layers
            else MixtureOfExperts(config, experts)
        )

    def forward(self, x: Tensor, valid: Tensor, rotary: Rotary, layout: ShardLayout, group: Group) -> Tensor:
        """(t, hidden) → (t, hidden)."""
        x = x + self.attention(self.attention_norm(x), rotary, layout, group)
        y = self.feed_forward_norm(x)
        routed = isinstance(self.feed_forward, MixtureOfExperts)
        return x + (self.feed_forward(y, valid) if routed else self.feed_forward(y))


class LanguageModel(nn.Module):
    """The model, or one pipeline stage of it: the embedding is in the first, the head in the last.

    Weights depend on `seed` alone: the same for every pool, every EP size and every number of stages. Raises
    `InvalidInputError` where there are fewer layers than stages.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 0,
        experts: ExpertGroup | None = None,
        dtype: torch.dtype = torch.float32,
        stage: int = 0,
        stages: int = 1,
    ) -> None:
        super().__init__()
        if stages > config.layers:
            raise InvalidInputError(
                Reason.INVALID_POOL,
                f"pool: {stages} stages for a model of {config.layers} layers; give each stage at least one",
            )
        experts = experts or ExpertGroup()
        self.config, self.is_first, self.is_last = config, stage == 0, stage == stages - 1
        layers = range(stage * config.layers // stages, (stage + 1) * config.layers // stages)
        if self.is_first:
            self.embedding = nn.Parameter(torch.empty(config.vocabulary, config.hidden))
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer, experts) for layer in layers})
        if self.is_last:
            self.norm = Norm(config.hidden)
            self.head = Linear(config.hidden, config.vocabulary)
        self.to(dtype)
        self._draw(seed)

    @torch.no_grad()
    def _draw(self, seed: int) -> None:
        routed = {id(parameter) for parameter in self.expert_parameters()}
        for name, parameter in self.named_parameters():
            if id(parameter) not in routed:
                draw(parameter.data, seed, name)
        for name, module in self.named_modules():
            if isinstance(module, Experts):
                module.draw(seed, name)
        if self.is_first:
            self.embedding.mul_(self.config.vocabulary**0.5 * 0.5)  # rows of deviation 0.5, not 1/sqrt(vocabulary)

    def mixtures(self) -> list[MixtureOfExperts]:
        """The mixture layers, first to last."""
        return [module for module in self.modules() if isinstance(module, MixtureOfExperts)]

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that differ between the ranks of an EP group."""
        for mixture in self.mixtures():
            yield from mixture.experts.parameters()

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that every rank holds alike."""
        routed = {id(parameter) for parameter in self.expert_parameters()}
        yield from (parameter for parameter in self.parameters() if id(parameter) not in routed)

    def forward(self, x: Tensor, labels: Tensor, layout: ShardLayout, group: Group) -> Tensor:
        """One microbatch through the stage, in local slots: to (t, hidden), or on the last stage to the summed loss.

        `x`: tokens (t,), int64, on the first stage; what the stage before returned on the others. `labels` (t,) are
        read on the last alone; one of −100 (padding, masked, the end of a document) counts nothing. With no label at
        all the sum is 0 and still tied to every parameter and exchange.
        """
        config = self.config
        if self.is_first:
            x = F.embedding(x, self.embedding)
        elements = config.rope_dim if config.attention == "mla" else config.head_dim
        rotary = Rotary(layout.positions, elements, config.rope_base, x.dtype)
        valid = torch.nonzero(layout.token_index >= 0).flatten()
        for block in self.blocks.values():
            x = block(x, valid, rotary, layout, group)
        if not self.is_last:
            return x
        counted = torch.nonzero(labels != IGNORE_INDEX).flatten()
        logits = self.head(self.norm(x.index_select(0, counted)))
        return summed_loss(logits, labels.index_select(0, counted))
