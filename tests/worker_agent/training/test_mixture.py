"""Routing: no token is dropped, padding is never routed, and the bias moves against the load."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scheduler_service.domain import InvalidInputError
from worker_agent.training.config import ModelConfig
from worker_agent.training.mixture import ExpertGroup, MixtureOfExperts, swiglu

CONFIG = ModelConfig(hidden=12, experts=6, top_k=3, expert_width=5)


@pytest.fixture
def mixture() -> MixtureOfExperts:
    made = MixtureOfExperts(CONFIG, ExpertGroup()).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return made


def tokens(n: int) -> Tensor:
    return torch.randn(n, CONFIG.hidden, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def token_by_token(mixture: MixtureOfExperts, x: Tensor) -> Tensor:
    """The definition: each token through its top experts, weighted by their normalised scores, and the shared one."""
    rows = []
    for row in x:
        scores = torch.sigmoid(row @ mixture.router)
        chosen = sorted(range(CONFIG.experts), key=lambda e: -float(scores[e] + mixture.bias[e]))[: CONFIG.top_k]
        total = sum(scores[e] for e in chosen)
        routed = sum(scores[e] / total * swiglu(row, mixture.experts.w_in[e], mixture.experts.w_out[e]) for e in chosen)
        rows.append(routed + mixture.shared(row))
    return torch.stack(rows)


@torch.no_grad()
def test_every_token_reaches_its_experts_however_crowded_they_are(mixture: MixtureOfExperts):
    x = tokens(40)
    mixture.bias[2] = 100.0  # everyone wants expert 2
    assert torch.allclose(mixture(x, torch.arange(40)), token_by_token(mixture, x), rtol=1e-12, atol=1e-12)
    assert int(mixture.counts[2]) == 40
    assert int(mixture.counts.sum()) == 40 * CONFIG.top_k


@torch.no_grad()
def test_the_bias_chooses_experts_and_does_not_weigh_them(mixture: MixtureOfExperts):
    x = tokens(10)
    mixture.bias += 7.0  # the same for all: nothing changes
    shifted = mixture(x, torch.arange(10))
    mixture.bias.zero_()
    assert torch.allclose(shifted, mixture(x, torch.arange(10)))


def test_padding_is_not_routed_and_gives_the_experts_no_gradient(mixture: MixtureOfExperts):
    x = tokens(8)
    x[5:] = torch.nan  # what lies in the padding must not matter
    out = mixture(x, torch.arange(5))
    assert torch.isfinite(out[:5]).all()
    assert int(mixture.counts.sum()) == 5 * CONFIG.top_k
    out[:5].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in mixture.experts.parameters() if p.grad is not None)


def test_without_a_token_there_is_still_a_graph(mixture: MixtureOfExperts):
    x = tokens(1).requires_grad_()
    mixture(x, torch.empty(0, dtype=torch.int64)).sum().backward()
    assert x.grad is not None
    assert int(mixture.counts.sum()) == 0


def test_the_bias_moves_against_the_load_and_counting_starts_anew(mixture: MixtureOfExperts):
    mixture.counts += 1
    mixture.update_bias(torch.tensor([9, 1, 5, 5, 5, 5]), 0.5)
    assert mixture.bias.tolist() == [-0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert int(mixture.counts.sum()) == 0


def test_experts_that_cannot_be_shared_out_are_refused():
    with pytest.raises(InvalidInputError, match="ep 4 does not divide the model's 6 experts"):
        MixtureOfExperts(CONFIG, ExpertGroup(size=4))
