"""What the quick start says is what the workers recorded and the service predicted, and no more."""

from typing import Any

import pytest

from scheduler_service.cli.quickstart_report import UNKNOWN, IterationLine, Summary


def record(iteration: int, **changes: Any) -> dict[str, Any]:
    return {
        "iteration": iteration, "loss": 8.0 - iteration, "longest_tokens": 15_000, "microbatches": 3,
        "microbatch_loads": [9e7, 2.25e8, 1.5e5], "policy": "hydra", "degrees": {"1": 30, "4": 2}, "origin": "service",
        "wait_s": 1.0 if iteration == 0 else 0.1,
        "iteration_s": 2.0, "bytes_sent": {"ulysses": 10, "ring": 20, "ep": 30, "reroute": 40}, **changes,
    }  # fmt: skip


def summary(lines: list[IterationLine]) -> dict[str, Any]:
    return Summary(lines, dashboard="http://here", grpc="there", documents=7).as_json()


def test_a_gain_is_the_baselines_time_over_the_plans():
    line = IterationLine(record(0))
    assert not line.is_complete
    assert line.row().split()[-2:] == [UNKNOWN, UNKNOWN]
    line.add_predictions(2.0, {"static_cp": 3.0})
    assert line.row().split()[-2:] == ["1.50×", UNKNOWN]
    line.add_predictions(2.0, {"static_cp": 3.0, "megatron": 1.0})
    assert line.is_complete
    assert line.gain("megatron") == 0.5, "a plan that is predicted to be slower is shown as such"


def test_the_policy_in_force_gains_nothing_over_itself():
    line = IterationLine(record(0, policy="static_cp"))
    line.add_predictions(2.0, {"megatron": 3.0})
    assert line.row().split()[-2:] == ["1.00×", "1.50×"]
    assert line.is_complete


def test_loads_are_shown_per_microbatch_from_the_least_to_the_most():
    assert "1.5e+05…2.2e+08" in IterationLine(record(0)).row().split()


def test_rows_line_up_under_their_heading():
    first, second = IterationLine.heading()
    assert len(first) == len(second) == len(IterationLine(record(0)).row())


def test_the_summary_adds_up_and_leaves_the_first_iterations_out_of_the_steady_state():
    lines = [IterationLine(record(iteration)) for iteration in range(4)]
    lines[1].add_predictions(1.0, {"static_cp": 2.0, "megatron": 1.0})
    lines[3].add_predictions(1.0, {"static_cp": 1.0, "megatron": 1.0})
    values = summary(lines)
    assert values["wait_share"] == pytest.approx(0.05)
    assert values["bytes_sent"] == {"ulysses": 40, "ring": 80, "ep": 120, "reroute": 160}
    assert values["degrees"] == {"1": 120, "4": 8}
    assert (values["loss_first"], values["loss_last"], values["fallbacks"]) == (8.0, 5.0, 0)
    assert values["gain"] == {"static_cp": 1.5, "megatron": 1.0}


def test_without_predictions_no_gain_is_claimed():
    values = summary([IterationLine(record(0, origin="local"))])
    assert values["gain"] == {"static_cp": None, "megatron": None}
    assert values["fallbacks"] == 1
