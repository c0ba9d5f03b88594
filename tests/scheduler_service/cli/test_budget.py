"""`hydra-cp budget` as people run it."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from scheduler_service.cli import main


def test_it_says_what_fits_and_what_binds() -> None:
    result = CliRunner().invoke(main, ["budget", "--preset", "paper_2048_h800", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["binding_term"] == "activations"
    assert max(stage["total"] for stage in found["stages"]) <= found["memory_bytes"] == 80e9
    again = CliRunner().invoke(main, ["budget", "--preset", "paper_2048_h800", "--recompute", "full", "--json"])
    assert json.loads(again.stdout)["token_budget"] > found["token_budget"]


def test_the_table_warns_where_the_preset_s_own_budget_does_not_fit() -> None:
    result = CliRunner().invoke(main, ["budget", "--preset", "paper_2048_h800"])
    assert "The preset's budget is 8,192: it fits only if" in " ".join(result.stdout.split())


def test_an_unknown_preset_names_the_known_ones() -> None:
    result = CliRunner().invoke(main, ["budget", "--preset", "mine"])
    assert result.exit_code == 2
    assert "paper_512_h20" in result.stderr
