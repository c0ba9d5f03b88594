"""A decoder-only language model whose attention runs under hybrid context parallelism.

Pre-norm blocks of gated attention (multi-head latent attention as in DeepSeek-V2, arXiv 2405.04434, or grouped
queries) and a mixture of experts. It sees one microbatch at a time: the local slots of one group's packed
stream, described by a `ShardLayout`. Positions come from the layout. Everything but attention and the expert
exchange works on each token alone, so outputs and gradients do not depend on the plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker_agent.attention import ShardLayout, hybrid_attention
from worker_agent.data import IGNORE_INDEX, summed_loss
from worker_agent.groups import Group
from worker_agent.training.config import ModelConfig
from worker_agent.training.initialisation import draw
from worker_agent.training.mixture import ExpertGroup, Experts, FeedForward, MixtureOfExperts


class Norm(nn.Module):
    """Root-mean-square norm with a learned scale (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """(…, size) → (…, size)."""
        return F.rms_norm(x, self.scale.shape, self.scale, eps=1e-6)


class Linear(nn.Module):
    """x·W without a bias; `weight` is (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        return x @ self.weight


class Rotary:
    """Rotary embedding of one microbatch's positions (Su et al. 2021, arXiv 2104.09864), shared by the layers."""

    def __init__(self, positions: Tensor, elements: int, base: float, dtype: torch.dtype) -> None:
        rates = base ** (-torch.arange(0, elements, 2, dtype=torch.float64) / elements)
        angles = positions.to(torch.float64)[:, None, None] * rates
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x (t, heads, elements): element i of the first half pairs with element i of the second."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * self.cos - second * self.sin, first * self.sin + second * self.cos), dim=-1)


class LatentAttention(nn.Module):
    """Gated multi-head latent attention: keys and values come from one low-rank latent, d_qk ≠ d_v."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, heads = config.hidden, config.heads
        self.heads, self.nope, self.rope, self.value = heads, config.nope_dim, config.rope_dim, config.value_dim
        self.q_down = Linear(hidden, config.q_rank) if config.q_rank else nn.Identity()
        self.q_norm = Norm(config.q_rank) if config.q_rank else nn.Identity()
        self.q_up = Linear(config.q_rank or hidden, heads * (self.nope + self.rope))
        self.kv_down = Linear(hidden, config.kv_rank + self.rope)
        self.kv_norm = Norm(config.kv_rank)
        self.kv_up = Linear(config.kv_rank, heads * (self.nope + self.value))
        self.gate = Linear(hidden, heads * self.value)
        self.output = Linear(heads * self.value, hidden)

    def forward(self, x: Tensor, rotary: Rotary, layout: ShardLayout, group: Group) -> Tensor:
        """(t, hidden) → (t, hidden) for the local slots of `layout`."""
        tokens = len(x)
        q = self.q_up(self.q_norm(self.q_down(x))).view(tokens, self.heads, self.nope + self.rope)
        q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)
        latent, k_rope = self.kv_down(x).split((self.kv_norm.scale.shape[0], self.rope), dim=-1)
        k_nope, v = (
            self.kv_up(self.kv_norm(latent))
            .view(tokens, self.heads, self.nope + self.value)
            .split((self.nope, self.value), dim=-1)
        )
        q = torch.cat((q_nope, rotary(q_rope)), dim=-1)
        k = torch.cat((k_nope, rotary(k_rope.unsqueeze(1)).expand(-1, self.heads, -1)), dim=-1)
        attended = hybrid_attention(q, k, v.contiguous(), layout, group)
        return self.output(attended.flatten(1) * torch.sigmoid(self.gate(x)))


class GroupedQueryAttention(nn.Module):
    """Gated grouped-query attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.query = Linear(config.hidden, self.heads * self.head_dim)
        self.key = Linear(config.hidden, self.kv_heads * self.head_dim)
        self.values = Linear(config.hidden, self.kv_heads * self.head_dim)
        self.gate = Linear(config.hidden, self.heads * self.head_dim)
        self.output = Linear(self.heads * self.head_dim, config.hidden)

    def forward(self, x: Tensor, rotary: Rotary, layout: ShardLayout, group: Group) -> Tensor:
        """(t, hidden) → (t, hidden) for the local slots of `layout`."""
        tokens = len(x)
        q = rotary(self.query(x).view(tokens, self.heads, self.head_dim))
        k = rotary(self.key(x).view(tokens, self.kv_heads, self.head_dim))
        v = self.values(x).view(tokens, self.kv_heads, self.head_dim)
        attended = hybrid_attention(q, k, v, layout, group)
        return self.output(attended.flatten(1) * torch.sigmoid(self.gate(x)))


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
