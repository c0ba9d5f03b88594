"""How far published numbers are met. A worse model fails here, a better one asks for tighter limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scheduler_service.simulation.validation import SECTIONS, Check, production_trace

TRACE = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces" / "straggler_SE.npz"

LIMITS = {
    "Parameters": (0.005, 0.02),
    "Work per token": (0.005, 0.01),
    "Bubbles of 1F1B": (0.0002, 0.0005),
    "Rings": (0.12, 0.35),
    "Attention (FlashAttention-2 on H100)": (0.065, 0.30),
}
"""Section → largest mean and single error."""


@pytest.mark.parametrize("section", LIMITS)
def test_published_numbers_are_met(section: str) -> None:
    errors = [abs(check.error) for check in SECTIONS[section]()]
    mean, single = LIMITS[section]
    assert np.mean(errors) <= mean
    assert max(errors) <= single


def test_whole_iterations_are_within_a_sixth_on_average_where_the_schedule_is_the_same() -> None:
    errors = [abs(check.error) for check in SECTIONS["Whole iterations"]()]
    assert len(errors) == 14
    assert np.mean(errors) < 1 / 6
    assert max(errors) < 0.45


def test_a_run_with_what_the_model_has_not_is_a_group_of_its_own_and_says_what() -> None:
    (check,) = SECTIONS["Whole iterations outside the model's scope"]()
    assert "DeepSeek-V3" in check.name
    assert check.name.endswith("FP8, DualPipe")


def test_errors_are_relative() -> None:
    assert Check("x", 3.0, 2.0, "s").error == 0.5


@pytest.mark.skipif(not TRACE.exists(), reason=f"needs the production trace {TRACE.name} beside the repository")
def test_a_recorded_job_s_span_is_within_a_per_cent_and_its_bubble_within_half_a_point() -> None:
    span, bubble = production_trace(TRACE)
    assert abs(span.error) < 0.01
    assert abs(bubble.predicted - bubble.published) < 0.005
