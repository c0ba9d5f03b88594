"""Operator times at their limits; measured attention is met in test_validation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_service.simulation.models import GroupedQuery, Matrix, Part
from scheduler_service.simulation.operators import (
    Documents,
    GroupCut,
    attention_backward_s,
    attention_forward_s,
    product_s,
    products_s,
)
from scheduler_service.simulation.presets import load_hardware
from scheduler_service.simulation.validation import FLASH_ATTENTION_2

FLASH_2 = replace(load_hardware("h100"), attention=FLASH_ATTENTION_2)
ATTENTION = GroupedQuery(heads=64, kv_heads=4, head_dim=128)


def one(length: float) -> Documents:
    return Documents(np.array([length]), np.array([length**2]))


@pytest.mark.parametrize(("length", "ring", "ulysses"), [(1024, 2.2, 3.9), (2048, 3.2, 5.8)])
def test_eight_ranks_speed_up_short_documents_less_and_a_ring_least(length: int, ring: float, ulysses: float) -> None:
    alone = attention_forward_s(FLASH_2, ATTENTION, one(length), GroupCut())
    for cut, gain in ((GroupCut(ring=8), ring), (GroupCut(ulysses=8), ulysses)):
        assert alone / attention_forward_s(FLASH_2, ATTENTION, one(length), cut) == pytest.approx([gain], rel=0.03)


def test_attention_of_long_documents_runs_at_the_kernel_s_rate_both_ways() -> None:
    length = 2.0**20
    work = 4 * 64 * 128 * length * (length + 1) / 2
    assert work / attention_forward_s(FLASH_2, ATTENTION, one(length), GroupCut())[0] == pytest.approx(344.8e12, 0.01)
    assert 2.5 * work / attention_backward_s(FLASH_2, ATTENTION, one(length), GroupCut())[0] == pytest.approx(
        327.6e12, 0.01
    )


def test_products_of_many_rows_run_at_their_share_of_the_peak_and_of_few_at_the_memory_s_speed() -> None:
    many, few = product_s(FLASH_2, np.array([1e7, 1.0]), 4096, 40960)
    assert 2 * 1e7 * 4096 * 40960 / many == pytest.approx(0.7 * 989e12, rel=0.01)
    assert few > 2 * 4096 * 40960 / (0.8 * 3.35e12)


def test_half_the_rate_is_reached_at_half_rows() -> None:
    rows = np.array([512.0])
    seconds = product_s(FLASH_2, rows, 8192, 65536)[0] - FLASH_2.launch_s
    assert 2 * 512 * 8192 * 65536 / seconds == pytest.approx(0.35 * 989e12, rel=0.01)


def test_experts_share_rows_and_so_reach_less_of_the_peak() -> None:
    rows = np.array([8192.0])
    assert product_s(FLASH_2, rows, 4096, 3072, experts=16) > product_s(FLASH_2, rows, 4096, 3072, experts=2)


def test_tensor_parallelism_cuts_a_split_matrix_and_the_tokens_of_another() -> None:
    rows = np.array([65536.0])
    for split in (True, False):
        matrix = (Matrix(Part.QUERY, 8192, 65536, split=split),)
        whole, quarter = (products_s(FLASH_2, matrix, rows, tp)[0] for tp in (1, 4))
        assert whole / quarter == pytest.approx(4, rel=0.05)
