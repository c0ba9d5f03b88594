"""Volumes of CP exchanges against the engine's formulas."""

from __future__ import annotations

import pytest

from scheduler_service.simulation.context_parallel import exchange_bytes
from scheduler_service.simulation.models import GroupedQuery, Latent

MLA = Latent(heads=128, q_lora=1536, kv_lora=512, nope=128, rope=64, v=128)


def test_ulysses_sends_queries_keys_values_and_outputs_of_other_heads() -> None:
    sent = exchange_bytes(GroupedQuery(heads=32, kv_heads=8, head_dim=128), tp=1, ulysses=4, ring=1)
    assert sent.ulysses == 3 / 4 * 2 * (32 * 128 + 8 * 256 + 32 * 128)
    assert sent.hop == 0


@pytest.mark.parametrize(("ulysses", "heads_sent"), [(1, 8), (8, 8), (16, 16), (32, 32)])
def test_kv_heads_are_repeated_once_there_are_more_ranks_than_heads(ulysses: int, heads_sent: int) -> None:
    sent = exchange_bytes(GroupedQuery(heads=32, kv_heads=8, head_dim=128), tp=1, ulysses=ulysses, ring=2)
    assert sent.hop == 2 * heads_sent * 256
    assert sent.key_value == pytest.approx(2 * (ulysses - 1) / ulysses * heads_sent * 256)


def test_the_latent_is_gathered_while_it_is_smaller_than_what_it_makes() -> None:
    eight, many = (exchange_bytes(MLA, tp=1, ulysses=ulysses, ring=1).key_value for ulysses in (8, 128))
    assert eight == 2 * 7 * (512 + 64)
    assert many == 2 * 127 / 128 * 128 * (192 + 128)
    assert 2 * 7 / 8 * 128 * 320 / eight == pytest.approx(8.9, abs=0.05)  # times fewer bytes


def test_tensor_parallelism_divides_the_heads() -> None:
    whole, half = (exchange_bytes(GroupedQuery(32, 8, 128), tp, ulysses=4, ring=2) for tp in (1, 2))
    assert half.ulysses == whole.ulysses / 2
    assert half.hop == whole.hop / 2
