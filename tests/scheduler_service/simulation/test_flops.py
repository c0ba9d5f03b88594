"""Floating-point work against published figures, and against loops over tokens."""

from __future__ import annotations

import pytest

from scheduler_service.simulation.flops import attention_backward, attention_forward, causal_pairs, model_flops
from scheduler_service.simulation.models import GroupedQuery, Latent
from scheduler_service.simulation.presets import load_model

PUBLISHED = [
    ("llama3_8b", 8192, 51.5),
    ("llama3_70b", 8192, 448.8),
    ("llama3_405b", 8192, 2521.5),
    ("qwen3_30b_a3b", 4096, 23.0),
    ("qwen3_235b_a22b", 4096, 147.9),
    ("deepseek_v3", 4096, 249.7),
]
"""GFLOP of training per token at a sequence length."""


@pytest.mark.parametrize(("name", "length", "gflop"), PUBLISHED)
def test_training_work_per_token_is_the_published_one_within_a_per_cent(name: str, length: int, gflop: float) -> None:
    found = model_flops(load_model(name), length, length**2) / length / 1e9
    assert found == pytest.approx(gflop, rel=0.01)


def test_a_document_sees_itself_and_what_is_before_and_no_other_document() -> None:
    lengths = [1, 4, 7]
    pairs = sum(1 for length in lengths for query in range(length) for key in range(length) if key <= query)
    assert causal_pairs(float(sum(lengths)), float(sum(length**2 for length in lengths))) == pairs


@pytest.mark.parametrize(
    ("attention", "ratio"),
    [(GroupedQuery(8, 2, 128), 2.5), (Latent(8, q_lora=64, kv_lora=64, nope=128, rope=64, v=128), 2.6)],
)
def test_attention_s_backward_is_five_products_against_two(attention: GroupedQuery | Latent, ratio: float) -> None:
    assert attention_backward(attention, 1.0) / attention_forward(attention, 1.0) == pytest.approx(ratio)
