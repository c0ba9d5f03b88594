"""`hydra-cp simulate` as people run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from scheduler_service.cli import main
from scheduler_service.cli.simulate import Row, _systems
from scheduler_service.domain import Batch, Pool
from scheduler_service.planning import POLICIES, plan_iteration

SMALL = """
base: paper_2048_h800
name: small
"""


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, ["simulate", *arguments])


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([60_000, 30_000, *range(100, 4000, 20)]))
    return str(path)


@pytest.fixture
def preset(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL + "ranks: 8\n")
    return str(path)


def test_all_policies_are_compared_on_a_preset(preset: str, tmp_path: Path) -> None:
    Path(preset).write_text(SMALL + "ranks: 4\nep: 2\n")  # flexsp's solver takes a minute on larger ones
    few = tmp_path / "few.txt"
    few.write_text("20000\n" + "2500\n" * 6)
    result = run(str(few), "--preset", preset, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["gpus"] == 16
    assert found["policies"].keys() == POLICIES.keys()
    for row in found["policies"].values():
        assert row["tokens_per_s_per_gpu"] == pytest.approx(found["tokens"] / row["iteration_s"] / 16)
        assert sum(row["activity_s"].values()) == pytest.approx(row["iteration_s"])
        assert 0 <= row["dp_bubble"] <= row["dp_bubble_worst"] < 1 > row["pp_bubble"] >= 0
        assert row["microbatches"] > 0 < row["plan_s"]
    assert "Validated on" in found["validated"]


def test_tables_show_gain_share_and_money(lengths: str, preset: str) -> None:
    result = run(lengths, "--preset", preset, "--policy", "hydra", "--train-tokens", "1e12")
    assert result.exit_code == 0, result.output
    for shown in ("small (paper-MoE), 32 GPUs", "bubble", "dollars", "attention", "Validated on"):
        assert shown in result.stdout


def test_days_and_dollars_follow_from_the_speed(lengths: str, preset: str) -> None:
    found = json.loads(run(lengths, "--preset", preset, "--policy", "hydra", "--train-tokens", "1e12", "--json").stdout)
    row = found["policies"]["hydra"]
    assert row["days"] == pytest.approx(1e12 / (row["tokens_per_s_per_gpu"] * 32) / 86400)
    assert row["dollars"] == pytest.approx(row["days"] * 24 * 32 * 2)


def test_without_a_preset_the_simple_cost_model_predicts(lengths: str) -> None:
    options = ["--pool", "16", "--budget", "8192", "--stages", "4", "--ep", "4"]
    result = run(lengths, *options, "--policy", "hydra", "--json")
    assert result.exit_code == 0, result.output
    batch = Batch([60_000, 30_000, *range(100, 4000, 20)])
    plan = plan_iteration(batch, Pool(16, 8192, stages=4, ep=4), policy="hydra")
    assert json.loads(result.stdout)["policies"]["hydra"]["iteration_s"] == plan.header.predicted_s


def test_iterations_that_take_no_time_are_not_compared(lengths: str) -> None:
    options = ["--pool", "4", "--budget", "100000", "--theta", "0", "--tau", "0", "--overhead", "0"]
    result = run(lengths, *options)
    assert result.exit_code == 0, result.output
    assert "–" in result.stdout


def test_a_workload_is_drawn_for_the_preset(preset: str) -> None:
    found = json.loads(run("paper-32k", "--preset", preset, "--policy", "hydra", "--json").stdout)
    assert found["longest_tokens"] <= 32_768
    assert found["tokens"] >= 32 * 8 * 5000


def test_a_schedule_is_written_for_perfetto(lengths: str, preset: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = run(lengths, "--preset", preset, "--policy", "hydra", "--trace", str(trace))
    assert result.exit_code == 0, result.output
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == {"M", "X", "C", "s", "f"}


@pytest.mark.parametrize("policy", ["hydra", "hydra_search"])
def test_a_system_alone_is_not_put_beside_the_paper(policy: str, lengths: str) -> None:
    rows = {policy: Row(1.0, 0.1, 0.1, 100.0, 8, 0.1, 8)}
    shown = [str(column.header) for column in _systems(rows, {"megatron": 2.48}).columns]
    assert not {"hydra is ×", "paper: ×"} & set(shown)


@pytest.mark.parametrize(("recompute", "warns"), [("selective", True), ("full", False)])
def test_a_budget_over_what_memory_holds_is_warned_of(lengths: str, preset: str, recompute: str, warns: bool) -> None:
    Path(preset).write_text(SMALL + f"ranks: 64\nrecompute: {recompute}\n")
    result = run(lengths, "--preset", preset, "--policy", "hydra")
    assert result.exit_code == 0, result.output
    assert ("that fit with all microbatches in flight full" in result.stdout) is warns


PRESET_FIXES = [
    "pool",
    "budget",
    "stages",
    "ep",
    "heads",
    "max-ulysses",
    "max-degree",
    "cap",
    "theta",
    "tau",
    "overhead",
]


@pytest.mark.parametrize("option", PRESET_FIXES)
@pytest.mark.parametrize("name", ["paper_512_h20", "paper-512-h20"])
def test_what_a_preset_fixes_is_refused_beside_it_even_at_its_default(lengths: str, name: str, option: str) -> None:
    result = run(lengths, "--preset", name, f"--{option}", "1", "--policy", "hydra")
    assert result.exit_code == 2, result.output
    assert f"--preset {name} fixes what --{option} would say" in result.stderr
    assert f"`base: {name}`" in result.stderr


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "give either --preset, or --pool and --budget"),
        (["--pool", "16"], 2, "give either --preset, or --pool and --budget"),
        (["--engine", "ring", "--pool", "16", "--budget", "8192"], 2, "--engine belong to a cluster: give --preset"),
        (["--preset", "mine"], 2, "is not among the clusters"),
        (["--pool", "2", "--budget", "8192"], 4, "60,000 tokens"),
        (["--pool", "16", "--budget", "8192", "--policy", "best"], 2, "policy 'best' is unknown"),
        (["--pool", "16", "--budget", "8192", "--trace", "/nowhere/x.json"], 2, "the folder /nowhere does not exist"),
    ],
)
def test_wrong_use_says_what_is_wrong(lengths: str, options: list[str], code: int, message: str) -> None:
    result = run(lengths, *options, *([] if "--policy" in options else ["--policy", "hydra"]))
    assert result.exit_code == code, result.output
    assert message in result.stderr
