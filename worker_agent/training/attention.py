"""The model's attention layers: gated multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) and grouped queries.

Both see the local slots of one group's packed stream, described by a `ShardLayout`, whose positions they rotate by.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worker_agent.attention import ShardLayout, hybrid_attention
from worker_agent.groups import Group
from worker_agent.training.config import ModelConfig
from worker_agent.training.layers import Linear, Norm


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
