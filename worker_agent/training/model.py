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
    """The model. Weights depend on `seed` alone: the same for every pool and every EP size."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 0,
        experts: ExpertGroup | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        experts = experts or ExpertGroup()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocabulary, config.hidden))
        self.blocks = nn.ModuleList(Block(config, layer, experts) for layer in range(config.layers))
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

    def forward(self, tokens: Tensor, labels: Tensor, layout: ShardLayout, group: Group) -> Tensor:
        """Sum of the token losses of one microbatch, a scalar.

        `tokens` and `labels` (t,) are int64 local slots; a label of −100 (padding, masked, the end of a document)
        counts nothing. With no label at all the sum is 0 and still tied to every parameter and exchange.
        """
        config = self.config
        elements = config.rope_dim if config.attention == "mla" else config.head_dim
        rotary = Rotary(layout.positions, elements, config.rope_base, self.embedding.dtype)
        valid = torch.nonzero(layout.token_index >= 0).flatten()
        x = F.embedding(tokens, self.embedding)
        for block in self.blocks:
            x = block(x, valid, rotary, layout, group)
        counted = torch.nonzero(labels != IGNORE_INDEX).flatten()
        logits = self.head(self.norm(x.index_select(0, counted)))
        return summed_loss(logits, labels.index_select(0, counted))
