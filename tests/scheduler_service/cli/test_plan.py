import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from scheduler_service.cli import main
from scheduler_service.domain import Batch, CostModel, Plan, PlanHeader, Pool
from scheduler_service.planning import plan_iteration, verify_plan

BINARY = Path(sysconfig.get_path("scripts")) / "hydra-cp"
LENGTHS = [60_000, 9_000, *range(1, 3000, 37)]
POOL = ["--pool", "16", "--budget", "8192"]


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, LENGTHS)) + "\n")
    return str(path)


def hydra_cp(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """The real binary."""
    return subprocess.run([BINARY, *arguments], input=stdin, capture_output=True, text=True, timeout=240)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def test_plans_a_file_and_writes_npz(lengths: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.npz"
    result = hydra_cp("plan", lengths, *POOL, "--stages", "4", "--ep", "2", "--out", str(out))
    assert result.returncode == 0, result.stderr
    with np.load(out, allow_pickle=False) as written:
        assert set(written.files) == {"microbatch", "start", "degree", "header"}
        assert {written[name].dtype for name in ("microbatch", "start", "degree")} == {np.dtype(np.int32)}
        header = json.loads(str(written["header"]))
        columns = [written[name] for name in ("microbatch", "start", "degree")]
    batch, pool = Batch(LENGTHS), Pool(ranks=16, token_budget=8192, stages=4, ep=2)
    read = PlanHeader(
        header["policy"],
        pool,
        CostModel(),
        header["microbatches"],
        len(batch),
        batch.digest,
        header["target"],
        header["cap"],
    )
    plan = Plan(*columns, read)
    verify_plan(plan, batch)
    assert plan.digest == header["digest"] == plan_iteration(batch, pool).digest
    assert {
        "policy",
        "pool",
        "budget",
        "target",
        "cap",
        "microbatches",
        "digest",
        "lower_bound_s",
        "predicted_s",
        "plan_s",
    } <= set(header)
    assert (header["pool"], header["budget"]) == (16, 8192)
    assert header["digest"] in result.stdout
    assert list(tmp_path.glob(".plan*")) == []


def test_reads_lengths_from_standard_input_and_prints_json() -> None:
    result = hydra_cp("plan", "-", *POOL, "--json", stdin="100\n\n 200 \n300")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["microbatch"] == [0, 0, 0]
    assert document["statistics"]["tokens"] == 600
    assert document["digest"] == plan_iteration(Batch([100, 200, 300]), Pool(16, 8192)).digest


def test_infeasible_input_exits_with_4_and_names_the_sequence() -> None:
    result = hydra_cp("plan", "-", "--pool", "4", "--budget", "10", "--json", stdin="5\n41\n")
    assert result.returncode == 4
    message = (
        "sequence 1 has 41 tokens; pool 4 × budget 10 holds 40: raise the budget to 11 tokens or the pool to 5 ranks"
    )
    assert message in result.stderr
    error = json.loads(result.stdout)["error"]
    assert error["reason"] == "SEQUENCE_TOO_LONG"
    assert error["sequence"] == 1
    assert message in error["message"]


def test_a_line_that_is_no_number_exits_with_2_and_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("5\n6\nabc\n")
    result = hydra_cp("plan", str(path), *POOL)
    assert result.returncode == 2
    assert f"line 3 of {path}: 'abc' is no integer" in result.stderr
    assert "Traceback" not in result.stderr


def test_version_and_help_need_neither_torch_nor_the_service() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'fastapi', 'sqlalchemy', 'uvicorn', 'grpc'): sys.modules[name] = None\n"
        "from scheduler_service.cli import main\n"
        "main(sys.argv[1:])"
    )

    def without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, input="5\n")

    assert without_extras("version").stdout.strip() == version("hydra-cp")
    assert without_extras("plan", "-", *POOL).returncode == 0
    listed = without_extras("--help")
    assert listed.returncode == 0
    assert "serve" in listed.stdout
    refused = without_extras("serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--store", "off")
    assert refused.returncode == 1
    assert "pip install 'hydra-cp[service]'" in refused.stderr


def test_json_output_holds_the_same_as_npz_in_lists(lengths: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = run(lengths, *POOL, "--out", str(out), "--json")
    assert result.exit_code == 0, result.output
    printed, written = json.loads(result.stdout), json.loads(out.read_text())
    plan = plan_iteration(Batch(LENGTHS), Pool(16, 8192))
    for name in ("microbatch", "start", "degree"):
        assert written[name] == getattr(plan, name).tolist()
        assert name not in printed  # the file has them
    assert written["header"]["digest"] == printed["digest"] == plan.digest


def test_every_option_reaches_the_plan(lengths: str) -> None:
    options = ["--stages", "3", "--ep", "4", "--heads", "6", "--max-ulysses", "2", "--max-degree", "8", "--cap", "8"]
    cost = ["--theta", "1e-8", "--tau", "2e-5", "--overhead", "3e-3", "--policy", "hydra"]
    result = run(lengths, "--pool", "16", "--budget", "8192", *options, *cost, "--json")
    pool = Pool(ranks=16, token_budget=8192, stages=3, ep=4, heads=6, max_ulysses=2, max_degree=8)
    expected = plan_iteration(Batch(LENGTHS), pool, policy="hydra", cost=CostModel(1e-8, 2e-5, 3e-3), cap=8)
    assert json.loads(result.stdout)["digest"] == expected.digest
    assert json.loads(result.stdout)["predicted_s"] == expected.header.predicted_s


def test_slow_and_excluded_ranks_reach_the_plan(lengths: str) -> None:
    options = ["--rank-speed", "3=0.5", "--rank-speed", "8-9=0.9", "--exclude", "12-13", "--microbatch-multiple", "2"]
    result = run(lengths, *POOL, *options, "--json")
    speeds = {3: 0.5, 8: 0.9, 9: 0.9, 12: 0, 13: 0}
    pool = Pool(ranks=16, token_budget=8192, microbatch_multiple=2, speeds=speeds)
    printed = json.loads(result.stdout)
    assert printed["digest"] == plan_iteration(Batch(LENGTHS), pool).digest
    assert printed["speeds"] == {str(rank): speed for rank, speed in speeds.items()}
    assert "3 slow, 2 excluded; worth 13.3 ranks of full speed" in run(lengths, *POOL, *options).stdout


def test_the_summary_shows_what_matters(lengths: str) -> None:
    result = run(lengths, *POOL, "--stages", "4")
    for shown in ("microbatches", "attention load", "predicted", "degree", "digest", "60,000"):
        assert shown in result.stdout


def test_the_summary_shows_a_load_target_only_where_the_policy_has_one_for_all_microbatches(lengths: str) -> None:
    assert "load target Λ" in run(lengths, *POOL, "--policy", "hydra").stdout
    assert "load target Λ" not in run(lengths, *POOL, "--policy", "static_cp").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "hydro"], "policy 'hydro' is unknown"),
        (["--ep", "3"], "pool: ep 3 does not divide 16 ranks"),
        (["--theta", "nan"], "cost model: theta is nan"),
        (["--cap", "3"], "cap 3 is no degree of this pool"),
        (["--rank-speed", "3"], "--rank-speed 3: give RANK=SPEED, for example 3=0.5"),
        (["--rank-speed", "3=fast"], "--rank-speed 3=fast: give RANK=SPEED"),
        (["--rank-speed", "3=1.5"], "pool: rank 3 has speed 1.5; give 0.01 to 1"),
        (["--rank-speed", "16=0.5"], "pool: speeds names rank 16; the pool has ranks 0 … 15"),
        (["--exclude", "8-"], "--exclude 8-: give ranks, for example 3,17 or 8-15"),
        (["--exclude", "9-8"], "--exclude 9-8: give ranks"),
        (["--exclude", "3", "--rank-speed", "3=0.5"], "pool: speeds names rank 3 twice"),
        (["--exclude", "0-15"], "pool: all 16 ranks are excluded"),
        (["--out", "plan.csv"], "--out plan.csv: name a .npz or a .json file"),
        (["--out", "/no/such/folder/plan.npz"], "the folder /no/such/folder does not exist"),
    ],
)
def test_wrong_options_exit_with_2_and_say_what_is_wrong(lengths: str, arguments: list[str], message: str) -> None:
    result = run(lengths, *POOL, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_terminal_that_lacks_letters_still_gets_the_figures(lengths: str) -> None:
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([BINARY, "plan", lengths, *POOL], capture_output=True, timeout=240, env=ascii_only)
    assert result.returncode == 0, result.stderr
    assert b"microbatches" in result.stdout


def test_a_missing_option_is_a_usage_error(lengths: str) -> None:
    assert run(lengths, "--pool", "4").exit_code == 2
    assert run(lengths, "--pool", "four", "--budget", "5").exit_code == 2


def test_a_wrong_output_name_is_refused_before_the_input_is_read() -> None:
    result = run("does-not-exist.txt", *POOL, "--out", "plan.xlsx")
    assert "plan.xlsx" in result.stderr
    assert "does-not-exist" not in result.stderr


def test_an_output_that_cannot_be_written_exits_with_1_and_leaves_the_old_one(lengths: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.npz"
    out.mkdir()
    result = run(lengths, *POOL, "--out", str(out))
    assert result.exit_code == 1
    assert f"cannot write {out}" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lengths.txt", "plan.npz"]
