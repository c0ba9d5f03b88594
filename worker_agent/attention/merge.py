"""The merge of two partial attentions of the same queries over different keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys: outputs (t, h, d), log-sum-exps (h, t).

    lse = m + softplus(min − m) with m = max(lse_a, lse_b), and out = Σ exp(lse_i − lse)·out_i. A row without keys has
    LSE −∞ and output 0; two such rows merge to one (the sigmoid and logaddexp forms give NaN there). Computes in, and
    returns, the dtype of the LSEs. Commutative and associative up to rounding.
    """
    low, high = torch.minimum(lse_a, lse_b), torch.maximum(lse_a, lse_b)
    lse = high + softplus(_difference(low, high))
    weight_b = torch.exp(_difference(lse_b, lse)).T.unsqueeze(-1)  # that of a is what is left of 1
    return torch.lerp(out_a.to(lse.dtype), out_b.to(lse.dtype), weight_b), lse


def _difference(smaller: Tensor, larger: Tensor) -> Tensor:
    """smaller − larger, with (−∞) − (−∞) := −∞."""
    return torch.where(smaller == -torch.inf, smaller, smaller - larger)
