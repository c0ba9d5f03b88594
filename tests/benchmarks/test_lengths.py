"""The lengths that benchmarks draw have the shares of what they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.lengths import LONGEST, distributions, paper_like, sequences, sequences_of
from tests.benchmarks.reporting import with_tables

PUBLISHED = {
    "by_quantiles": {"kind": "quantiles", "percent_and_length": [[0, 1], [50, 100], [90, 1000], [100, 1_000_000]]},
    "by_histogram": {"kind": "histogram", "upper_edge_and_count": [[10, 25], [1000, 50], [100_000, 25]]},
}


def test_paper_like_lengths_have_the_shares_of_the_papers_data_set() -> None:
    lengths = sequences(paper_like, 200_000)
    assert np.mean(lengths < 2048) == pytest.approx(0.85, abs=0.005)
    assert 0.005 < np.mean(lengths > 32_768) < 0.0065
    assert lengths.max() == LONGEST


def test_published_distributions_are_drawn_with_their_shares_and_cut_at_the_longest(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps(PUBLISHED))
    drawn = {name: sequences(draw, 100_000) for name, draw in distributions(file).items()}
    assert list(drawn) == ["paper_like", "by_quantiles", "by_histogram"]
    assert np.mean(drawn["by_quantiles"] <= 1000) == pytest.approx(0.9, abs=0.005)
    assert np.mean(drawn["by_histogram"] <= 1000) == pytest.approx(0.75, abs=0.005)
    assert drawn["by_quantiles"].max() == drawn["by_histogram"].max() == LONGEST


def test_a_batch_holds_the_tokens_asked_for_and_no_sequence_more() -> None:
    lengths = sequences_of(paper_like, 1_000_000)
    assert lengths[:-1].sum() < 1_000_000 <= lengths.sum()


def test_a_table_takes_the_place_of_the_old_one_and_nothing_else_changes() -> None:
    text = "a\n<!-- one: make -->\nold\n<!-- end -->\nb\n<!-- two: make -->\nkept\n<!-- end -->\n"
    assert with_tables(text, {"one": "new", "three": "?"}) == text.replace("old", "new")
