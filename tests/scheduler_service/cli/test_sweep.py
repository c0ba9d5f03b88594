"""`hydra-cp sweep`: every combination once, kept, and taken up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from scheduler_service.cli import main, sweep

PRESET = "base: paper_2048_h800\nname: small\nranks: 8\n"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["sweep", *arguments])


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    (tmp_path / "small.yaml").write_text(PRESET)
    (tmp_path / "a.txt").write_text("3000\n" * 40)
    (tmp_path / "b.txt").write_text("900\n" * 40)
    files = [option for name in "ab" for option in ("--lengths", str(tmp_path / f"{name}.txt"))]
    systems = ["--policy", "hydra", "--policy", "megatron"]
    return ["--preset", str(tmp_path / "small.yaml"), *files, *systems, "--out", str(tmp_path / "out.jsonl")]


def rows(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_every_combination_is_simulated_in_parallel_and_kept(options: list[str], tmp_path: Path) -> None:
    result = run(*options, "--jobs", "2")
    assert result.exit_code == 0, result.output
    found = rows(tmp_path)
    assert len({(row["lengths"], row["policy"]) for row in found}) == len(found) == 4
    assert all(row["iteration_s"] > 0 and row["gpus"] == 32 for row in found)


def test_it_goes_on_after_an_interruption_with_what_is_missing(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated: list[str] = []
    run_case = sweep.run_case

    def interrupted(policy: str, job: sweep.Job) -> dict:
        if len(simulated) == 3:
            raise KeyboardInterrupt
        simulated.append(policy)
        return run_case(policy, job)

    monkeypatch.setattr(sweep, "run_case", interrupted)
    result = run(*options, "--jobs", "1")
    assert result.exit_code == 1
    assert "goes on from" in result.stderr
    assert len(rows(tmp_path)) == 3
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"preset": "sm')  # what a crash in the middle of a line leaves
    monkeypatch.setattr(sweep, "run_case", run_case)
    assert run(*options, "--jobs", "1").exit_code == 0
    assert len({(row["lengths"], row["policy"]) for row in rows(tmp_path)}) == len(rows(tmp_path)) == 4


def test_ctrl_c_at_a_terminal_ends_it_with_all_its_processes(options: list[str], tmp_path: Path) -> None:
    program = "from scheduler_service.cli import main; main()"
    command = [sys.executable, "-c", program, "sweep", *options, "--jobs", "2"]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's & has it ignored
    ) as process:
        while not (tmp_path / "out.jsonl").exists():  # simulations begin
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the same command goes on from" in told
    assert "Traceback" not in told
    with suppress(ProcessLookupError):
        while True:  # until none is left: what Python has beside its processes ends a moment later
            os.killpg(process.pid, 0)
            time.sleep(0.01)
    assert run(*options, "--jobs", "1").exit_code == 0
    assert len(rows(tmp_path)) == 4


def test_a_system_without_a_plan_is_kept_as_such(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("300000\n")
    assert run(*options, "--jobs", "1").exit_code == 0
    assert sum("error" in row for row in rows(tmp_path)) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--policy", "best"], "policy 'best' is unknown"),
        (["--preset", "mine"], "is not among the clusters"),
        (["--lengths", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_wrong_names_are_refused_before_anything_runs(
    options: list[str], tmp_path: Path, more: list[str], message: str
) -> None:
    result = run(*options, *more)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "content", [b"1\n2\n", b"notes\n", b"notes", b"\xff\xfe\x00", b'{"preset": [1], "lengths": "a", "policy": "b"}\n']
)
def test_another_file_is_not_taken_for_results_and_stays_as_it_is(
    options: list[str], tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "out.jsonl").write_bytes(content)
    result = run(*options)
    assert result.exit_code == 2
    assert "line 1 of" in result.stderr
    assert "is no result of a sweep; name another file" in result.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == content


def test_a_folder_is_refused_as_results(options: list[str], tmp_path: Path) -> None:
    result = run(*options[:-1], str(tmp_path))
    assert result.exit_code == 2
    assert f"--out {tmp_path}: cannot be read: Is a directory" in result.stderr


def test_a_result_whose_line_has_no_end_is_not_run_into_by_the_next(options: list[str], tmp_path: Path) -> None:
    assert run(*options, "--jobs", "1").exit_code == 0
    whole = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(whole[:-1])
    assert run(*options, "--jobs", "1").exit_code == 0
    assert len(rows(tmp_path)) == 4


@pytest.mark.parametrize("changed", ["small.yaml", "b.txt"])
def test_results_of_another_input_are_not_taken_for_those_of_this_one(
    options: list[str], tmp_path: Path, changed: str
) -> None:
    assert run(*options, "--jobs", "1").exit_code == 0
    (tmp_path / changed).write_text((tmp_path / changed).read_text() + ("900\n" if changed == "b.txt" else "tp: 2\n"))
    result = run(*options, "--jobs", "1")
    assert result.exit_code == 2
    assert "the cluster or the lengths have changed since: name another file" in result.stderr
    assert len(rows(tmp_path)) == 4


def test_a_cluster_s_slow_ranks_cost_systems_that_do_not_know_of_them_more(options: list[str], tmp_path: Path) -> None:
    assert run(*options, "--jobs", "1").exit_code == 0
    even = rows(tmp_path)
    (tmp_path / "small.yaml").write_text(PRESET + "speeds: {3: 0.5}\n")
    (tmp_path / "out.jsonl").unlink()
    assert run(*options, "--jobs", "1").exit_code == 0
    cost = {
        (now["lengths"], now["policy"]): now["iteration_s"] / before["iteration_s"]
        for now, before in zip(rows(tmp_path), even, strict=True)
    }
    assert all(cost[lengths, "megatron"] > cost[lengths, "hydra"] > 1 for lengths, policy in cost if policy == "hydra")


def test_a_ray_cluster_simulates_what_this_machine_would(options: list[str], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    assert run(*options, "--jobs", "1").exit_code == 0
    here = rows(tmp_path)
    (tmp_path / "out.jsonl").unlink()
    result = run(*options, "--ray", "local")
    assert result.exit_code == 0, result.output

    def told(found: list[dict]) -> set[str]:
        return {json.dumps({**row, "plan_s": 0}, sort_keys=True) for row in found}

    assert told(rows(tmp_path)) == told(here)


def test_a_ray_cluster_that_is_not_there_is_said_to_be_so(options: list[str]) -> None:
    pytest.importorskip("ray")
    result = run(*options, "--ray", "auto")
    assert result.exit_code == 1
    assert "--ray auto: cannot join this Ray cluster" in result.stderr


def test_a_ray_cluster_without_ray_says_what_to_install(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = run(*options, "--ray", "auto")
    assert result.exit_code == 2
    assert "pip install 'hydra-cp[ray]'" in result.stderr
