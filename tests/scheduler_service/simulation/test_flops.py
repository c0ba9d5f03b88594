"""Floating-point work against loops over tokens; published figures are met in test_validation."""

from __future__ import annotations

import pytest

from scheduler_service.simulation.flops import attention_backward, attention_forward, causal_pairs
from scheduler_service.simulation.models import GroupedQuery, Latent


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
