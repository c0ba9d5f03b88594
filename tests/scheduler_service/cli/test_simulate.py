"""`hydra-cp simulate` as people run it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from scheduler_service.cli import main
from scheduler_service.cli.simulate_report import Report, Row, _systems
from scheduler_service.domain import Batch, Pool
from scheduler_service.planning import POLICIES, plan_iteration
from scheduler_service.simulation import forecast
from scheduler_service.simulation.memory import plan_memory
from scheduler_service.simulation.paper import PaperSetting
from scheduler_service.simulation.presets import load_cluster
from scheduler_service.simulation.simple_cost import simple_cost

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
    job = "H800; pool 8, tp 1, pp 4, ep 8, token budget 8,192, recompute selective"
    for shown in (
        "small (paper-MoE), 32 GPUs",
        job,
        "bubble",
        "dollars",
        "attention",
        "over the network",
        "Validated on",
    ):
        assert shown in result.stdout


def test_days_and_dollars_follow_from_the_speed(lengths: str, preset: str) -> None:
    found = json.loads(run(lengths, "--preset", preset, "--policy", "hydra", "--train-tokens", "1e12", "--json").stdout)
    row = found["policies"]["hydra"]
    assert row["days"] == pytest.approx(1e12 / (row["tokens_per_s_per_gpu"] * 32) / 86400)
    assert row["dollars"] == pytest.approx(row["days"] * 24 * 32 * 2)
    assert row["dollars"] == pytest.approx(1e6 * row["dollars_per_million_tokens"])


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
    report = Report({}, "", PaperSetting(gains={"megatron": 2.48}, pp={"megatron": 0.36}))
    report.rows[policy] = Row(1.0, 0.1, 0.1, 100.0, 8, 0.1, 8, {"microbatches": 1.0})
    shown = [str(column.header) for column in _systems(report).columns]
    assert not {"hydra is ×", "paper: ×"} & set(shown)


def test_bubbles_and_gains_stand_beside_the_paper_s() -> None:
    report = Report({}, "", PaperSetting(gains={"megatron": 2.48}, pp={"megatron": 0.36}))
    for policy, seconds in (("hydra", 1.0), ("megatron", 1.25)):
        report.rows[policy] = Row(seconds, 0.3, 0.1, 100.0, 8, 0.1, 8, {"microbatches": seconds})
    cells = {str(column.header): list(column.cells) for column in _systems(report).columns}
    assert cells["PP bubble"] == ["30.0%", "30.0% (paper: 36.0%)"]
    assert cells["hydra is ×"] == ["1.00", "1.25"]
    assert cells["paper: ×"] == ["", "2.48"]


@pytest.mark.parametrize(("recompute", "warns"), [("selective", True), ("full", False)])
def test_a_budget_over_what_memory_holds_is_warned_of(lengths: str, preset: str, recompute: str, warns: bool) -> None:
    Path(preset).write_text(SMALL + f"ranks: 64\nrecompute: {recompute}\n")
    result = run(lengths, "--preset", preset, "--policy", "hydra")
    assert result.exit_code == 0, result.output
    assert ("that fit with all microbatches in flight full" in result.stdout) is warns


def test_a_plan_s_memory_is_said_and_whether_a_gpu_has_it(lengths: str, preset: str) -> None:
    row = json.loads(run(lengths, "--preset", preset, "--policy", "hydra", "--json").stdout)["policies"]["hydra"]
    cluster, batch = load_cluster(preset), Batch(json.loads(Path(lengths).read_text()))
    plan = plan_iteration(batch, cluster.pool, policy="hydra", cost=simple_cost(cluster))
    stages = plan_memory(plan, batch, cluster)
    assert row["peak_memory_bytes"] == stages[row["fullest_stage"]].total == max(stage.total for stage in stages)
    assert row["memory_fits"] is (row["peak_memory_bytes"] <= 80e9) is False
    shown = run(lengths, "--preset", preset, "--policy", "hydra").stdout
    assert f"{row['peak_memory_bytes'] / 1e9:.0f} GB !" in shown
    assert "Too much (!): hydra." in shown


SLOW = ["--rank-speed", "5=0.5"]


@pytest.mark.parametrize("setting", ["simple", "preset"])
def test_a_slow_rank_costs_systems_that_take_all_for_equal_more(lengths: str, preset: str, setting: str) -> None:
    simple = ["--pool", "8", "--budget", "16384", "--stages", "4", "--ep", "4"]
    where = ["--preset", preset] if setting == "preset" else simple
    cost = {}
    for policy in ("hydra", "megatron"):
        even, slow = (
            json.loads(run(lengths, *where, "--policy", policy, "--json", *options).stdout) for options in ([], SLOW)
        )
        assert "speeds" not in even
        assert slow["speeds"] == {"5": 0.5}
        cost[policy] = slow["policies"][policy]["iteration_s"] / even["policies"][policy]["iteration_s"]
        activities = slow["policies"][policy]["activity_s"]
        assert sum(activities.values()) == pytest.approx(slow["policies"][policy]["iteration_s"])
    assert cost["megatron"] > cost["hydra"] > 1
    assert "Ranks: 1 slow, 0 excluded." in run(lengths, *where, "--policy", "megatron", *SLOW).stdout


def test_a_system_that_takes_all_ranks_for_equal_runs_its_plan_for_equal_ranks_on_the_slow_ones(lengths: str) -> None:
    result = run(lengths, "--pool", "16", "--budget", "8192", "--ep", "4", "--policy", "megatron", "--json", *SLOW)
    batch = Batch(json.loads(Path(lengths).read_text()))
    plan = plan_iteration(batch, Pool(16, 8192, ep=4), policy="megatron")
    slow = replace(plan, header=replace(plan.header, pool=Pool(16, 8192, ep=4, speeds={5: 0.5})))
    found = json.loads(result.stdout)["policies"]["megatron"]
    assert found["iteration_s"] == forecast(slow, batch).iteration_s > plan.header.predicted_s
    assert found["microbatches"] == plan.header.microbatches


@pytest.mark.parametrize("setting", ["simple", "preset"])
def test_with_excluded_ranks_only_systems_that_can_leave_them_out_have_a_plan(
    lengths: str, preset: str, setting: str
) -> None:
    where = ["--preset", preset] if setting == "preset" else ["--pool", "8", "--budget", "16384", "--ep", "4"]
    Path(preset).write_text(SMALL + "ranks: 16\n")  # eight ranks in a row are still there
    alone = run(lengths, *where, "--exclude", "5", "--policy", "megatron")
    assert alone.exit_code == 4
    assert "policy megatron takes all ranks for equally fast" in alone.stderr
    assert run(lengths, *where, "--exclude", "5", "--policy", "hydra").exit_code == 0


def test_a_speed_option_goes_over_the_cluster_file_s_and_the_others_stay(lengths: str, preset: str) -> None:
    Path(preset).write_text(SMALL + "ranks: 8\nspeeds: {3: 0.5, 5: 0.9}\n")
    found = json.loads(run(lengths, "--preset", preset, "--policy", "hydra", "--json", *SLOW).stdout)
    assert found["speeds"] == {"3": 0.5, "5": 0.5}


@pytest.mark.parametrize("setting", ["simple", "preset"])
def test_a_picture_of_where_the_time_goes_is_drawn(lengths: str, preset: str, setting: str, tmp_path: Path) -> None:
    where = ["--preset", preset] if setting == "preset" else ["--pool", "16", "--budget", "8192", "--stages", "4"]
    for name, begins in (("time.png", b"\x89PNG"), ("time.svg", b"<?xml")):
        result = run(lengths, *where, "--policy", "hydra", "--plot", str(tmp_path / name))
        assert result.exit_code == 0, result.output
        assert (tmp_path / name).read_bytes().startswith(begins)
        assert f"drawn in {tmp_path / name}" in result.stderr


def test_without_matplotlib_a_picture_is_refused_before_anything_runs(
    lengths: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(lengths, "--pool", "16", "--budget", "8192", "--plot", str(tmp_path / "time.png"))
    assert result.exit_code == 2
    assert "install hydra-cp[plots]" in result.stderr
    assert result.stdout == ""


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
        (["--pool", "16", "--budget", "8192", "--plot", "/nowhere/x.png"], 2, "the folder /nowhere does not exist"),
        (["--pool", "16", "--budget", "8192", "--plot", "x.txt"], 2, "--plot x.txt: name a .png, .svg, .pdf file"),
        (["--pool", "16", "--budget", "8192", "--rank-speed", "16=0.5"], 2, "the pool has ranks 0 … 15"),
        (["--preset", "hy3-8k", "--rank-speed", "3=fast"], 2, "--rank-speed 3=fast: give RANK=SPEED"),
        (["--preset", "hy3-8k", "--train-tokens", "nan"], 2, "--train-tokens is nan; give a number from 0 to 1e+18"),
        (["--pool", "16", "--budget", "8192", "--trace", "/"], 2, "--trace /: cannot be written; name a file that can"),
    ],
)
def test_wrong_use_says_what_is_wrong(lengths: str, options: list[str], code: int, message: str) -> None:
    result = run(lengths, *options, *([] if "--policy" in options else ["--policy", "hydra"]))
    assert result.exit_code == code, result.output
    assert message in result.stderr
