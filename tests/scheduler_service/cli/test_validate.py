"""`hydra-cp validate` as people run it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
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


def test_a_recorded_job_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["validate", "--trace", str(tmp_path / "none.npz")])
    assert result.exit_code == 2
    assert "none.npz: No such file or directory" in result.stderr


def test_a_file_that_is_no_recorded_job_is_refused_by_name(tmp_path: Path) -> None:
    text, array, damaged = tmp_path / "trace.npz", tmp_path / "trace.npy", tmp_path / "damaged.npz"
    text.write_text("nothing")
    damaged.write_bytes(b"PK\x03\x04 and no more")
    np.save(array, np.zeros(3))
    for wrong in (text, array, damaged):
        result = CliRunner().invoke(main, ["validate", "--trace", str(wrong)])
        assert result.exit_code == 2
        assert f"{wrong.name}: is no recorded job" in result.stderr
