"""The model's attention layers: gated multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) and grouped queries.

Both see the local slots of one group's packed stream, described by a `ShardLayout`, whose positions they rotate by.
Both launch each exchange as soon as its tensor is there, and wait where the tensor is needed, so that projections run
meanwhile; in backward the same projections hide the way back.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worker_agent.attention import ShardLayout, gradient_anchor, ring_attention, start_exchange, start_gather
from worker_agent.attention.latent import add_position, expand_gathered, expand_latent, latent_is_cheaper
from worker_agent.attention.overlap import PendingExchange
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
        anchor = gradient_anchor(x)
        if self.gathers_latent(group.ulysses):
            q, k, v = self._from_gathered_latents(x, rotary, layout, group, anchor)
            out = start_exchange(ring_attention(q, k, v, layout, group), layout, group, anchor, to="slots")
            gate = torch.sigmoid(self.gate(x))
        else:
            queries, keys, values = self._exchange_heads(x, rotary, layout, group, anchor)
            gate = torch.sigmoid(self.gate(x))  # beside the keys: in MLA they are wider than the outputs
            q, v, k = queries.wait(), values.wait(), keys.wait()
            out = start_exchange(ring_attention(q, k, v, layout, group), layout, group, anchor, to="slots")
        return self.output(out.wait().flatten(1) * gate)

    def gathers_latent(self, ulysses: int) -> bool:
        """Whether `ulysses` inner ranks exchange latents rather than keys and values."""
        latent = self.kv_up.weight.shape[0] + self.rope
        return latent_is_cheaper(ulysses, self.heads, latent, self.nope + self.rope, self.value)

    def _exchange_heads(
        self, x: Tensor, rotary: Rotary, layout: ShardLayout, group: Group, anchor: Tensor
    ) -> tuple[PendingExchange, PendingExchange, PendingExchange]:
        """Queries travel beside the projections of the latent, values beside the positions of the keys."""
        queries = start_exchange(self._queries(x, rotary), layout, group, anchor)
        c_kv, k_rope = self._latent(x)
        k_nope, v = expand_latent(c_kv, self.kv_up.weight, self.heads, self.nope)
        values = start_exchange(v, layout, group, anchor)
        k = add_position(k_nope, rotary(k_rope.unsqueeze(1)).squeeze(1))
        return queries, start_exchange(k, layout, group, anchor), values

    def _from_gathered_latents(
        self, x: Tensor, rotary: Rotary, layout: ShardLayout, group: Group, anchor: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Latents travel beside the queries' projections, queries beside the up-projection of this rank's heads."""
        c_kv, k_rope = self._latent(x)
        rotated = rotary(k_rope.unsqueeze(1)).squeeze(1)
        latents = start_gather(torch.cat((c_kv, rotated), dim=-1), layout, group, anchor)
        queries = start_exchange(self._queries(x, rotary), layout, group, anchor)
        k, v = expand_gathered(latents.wait(), self.kv_up.weight, self.heads, self.nope + self.rope, layout, group)
        return queries.wait(), k, v

    def _queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(1, (self.heads, -1))
        q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)
        return torch.cat((q_nope, rotary(q_rope)), dim=-1)

    def _latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What keys and values are made from (t, kv_rank), and the part of the keys that is rotated (t, rope)."""
        c_kv, k_rope = self.kv_down(x).split((self.kv_up.weight.shape[0], self.rope), dim=-1)
        return self.kv_norm(c_kv), k_rope


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
        anchor = gradient_anchor(x)

        def heads(projection: Linear) -> Tensor:
            return projection(x).unflatten(1, (-1, self.head_dim))

        queries = start_exchange(rotary(heads(self.query)), layout, group, anchor)
        values = start_exchange(heads(self.values), layout, group, anchor, query_heads=self.heads)
        keys = start_exchange(rotary(heads(self.key)), layout, group, anchor, query_heads=self.heads)
        q, v, k = queries.wait(), values.wait(), keys.wait()
        out = start_exchange(ring_attention(q, k, v, layout, group), layout, group, anchor, to="slots")
        gate = torch.sigmoid(self.gate(x))  # beside the outputs: of all exchanges the one that is never narrower
        return self.output(out.wait().flatten(1) * gate)
