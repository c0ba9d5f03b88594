"""`hydra-cp validate` as people run it."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from scheduler_service.cli import main
from scheduler_service.simulation.validation import SECTIONS


def test_it_prints_predicted_published_and_error_of_every_section() -> None:
    result = CliRunner().invoke(main, ["validate", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found.keys() == SECTIONS.keys()
    for checks in found.values():
        assert all(check["error"] == check["predicted"] / check["published"] - 1 for check in checks)


def test_a_file_that_is_no_recorded_job_is_refused_by_name(tmp_path: Path) -> None:
    wrong = tmp_path / "trace.npz"
    wrong.write_text("nothing")
    result = CliRunner().invoke(main, ["validate", "--trace", str(wrong)])
    assert result.exit_code == 2
    assert "trace.npz: is no recorded job" in result.stderr
