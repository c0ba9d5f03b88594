"""Mixture of experts: routing that drops nothing, experts spread over the EP group, one shared expert.

The experts of a layer are divided over the E ranks of an EP group; tokens travel to their experts and back by
two all-to-alls. Balance comes from a bias on the *selection* of experts that is updated once per iteration from
global counts (auxiliary-loss-free load balancing, Wang et al. 2024, arXiv 2408.15664). No loss term and no
capacity limit depends on which tokens share a microbatch, so the result does not depend on the plan.
Padding is never routed. A rank without tokens still takes part in every exchange, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from worker_agent.communication import ByteCounters, all_to_all, exchange
from worker_agent.training.config import ModelConfig
from worker_agent.training.initialisation import draw


@dataclass(frozen=True)
class ExpertGroup:
    """The E consecutive ranks that hold one copy of every expert: expert e lives on rank e div (experts/E)."""

    size: int = 1
    rank: int = 0
    process_group: dist.ProcessGroup | None = None
    """None for a group of one rank."""
    counters: ByteCounters = field(default_factory=ByteCounters)


def swiglu(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """silu(x·A)·(x·B)·W: x (t, d), w_in (d, 2·width) holds A and B, w_out (width, d)."""
    gate, up = (x @ w_in).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ w_out


class FeedForward(nn.Module):
    """A dense gated feed-forward layer."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(hidden, 2 * width))
        self.w_out = nn.Parameter(torch.empty(width, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(t, d) → (t, d)."""
        return swiglu(x, self.w_in, self.w_out)


class Experts(nn.Module):
    """This rank's part of a layer's routed experts, stacked: w_in (local, d, 2·width), w_out (local, width, d)."""

    def __init__(self, config: ModelConfig, group: ExpertGroup) -> None:
        super().__init__()
        self.local = config.local_experts(group.size)
        self.first = group.rank * self.local
        self.w_in = nn.Parameter(torch.empty(self.local, config.hidden, 2 * config.expert_width))
        self.w_out = nn.Parameter(torch.empty(self.local, config.expert_width, config.hidden))

    def draw(self, seed: int, name: str) -> None:
        """Initial weights by the expert's number in the whole layer, so that they do not depend on E."""
        for own, parameter in self.named_parameters():
            for index in range(self.local):
                draw(parameter.data[index], seed, f"{name}.{self.first + index}.{own}")

    def forward(self, rows: Tensor, per_expert: list[int]) -> Tensor:
        """Rows (n, d) sorted by local expert, `per_expert[i]` of them for expert i → (n, d)."""
        pieces = rows.split(per_expert)
        return torch.cat([swiglu(piece, self.w_in[i], self.w_out[i]) for i, piece in enumerate(pieces)])


class MixtureOfExperts(nn.Module):
    """Router, routed experts and a shared expert.

    `counts` (int64, one per expert) sums the tokens that this rank sent to each expert since the last
    `update_bias`; it is no parameter and takes no part in the gradient.
    """

    bias: Tensor
    counts: Tensor

    def __init__(self, config: ModelConfig, group: ExpertGroup) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.group = group
        self.router = nn.Parameter(torch.empty(config.hidden, config.experts))
        self.experts = Experts(config, group)
        self.shared = FeedForward(config.hidden, config.expert_width)
        self.register_buffer("bias", torch.zeros(config.experts))
        self.register_buffer("counts", torch.zeros(config.experts, dtype=torch.int64))

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """x (t, d), `valid` (v,) the slots that hold tokens → (t, d); padding passes the shared expert only."""
        tokens = x.index_select(0, valid)
        scores = torch.sigmoid(tokens @ self.router)
        chosen = (scores.detach() + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen_flat = chosen.flatten()
        self.counts += torch.bincount(chosen_flat, minlength=len(self.counts))

        by_expert = torch.argsort(chosen_flat, stable=True)
        source = by_expert.div(self.top_k, rounding_mode="floor")
        answers = self._apply_experts(tokens.index_select(0, source), chosen_flat[by_expert])
        answers = answers * weights.flatten().index_select(0, by_expert).unsqueeze(1)
        return self.shared(x).index_add(0, valid.index_select(0, source), answers)

    def _apply_experts(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Rows sorted by expert: to the ranks of their experts, through them, and back in the same order."""
        local, group = self.experts.local, self.group
        counts = torch.bincount(experts, minlength=group.size * local)
        even = [local] * group.size
        arriving = all_to_all(counts, even, even, group.process_group, group.counters, "ep").view(group.size, local)
        sent = counts.view(group.size, local).sum(1).tolist()
        received = arriving.sum(1).tolist()
        arrived = exchange(rows, received, sent, group.process_group, group.counters, "ep")

        # Arrived by (source rank, expert); the experts want (expert, source rank).
        expert_of = torch.arange(local).repeat(group.size).repeat_interleave(arriving.flatten())
        order = torch.argsort(expert_of, stable=True)
        answers = self.experts(arrived.index_select(0, order), arriving.sum(0).tolist())
        back = answers.index_select(0, torch.argsort(order))
        return exchange(back, sent, received, group.process_group, group.counters, "ep")

    def update_bias(self, counts: Tensor, step: float) -> None:
        """Move each expert's bias by `step` against its load; `counts` are global. Resets this rank's counts."""
        load = counts.to(self.bias.dtype)
        self.bias += step * torch.sign(load.mean() - load)
        self.counts.zero_()
