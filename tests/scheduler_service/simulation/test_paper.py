"""The paper's figures belong to settings that exist, and ours stand beside them."""

from __future__ import annotations

from importlib.resources import files

import pytest
import yaml

from scheduler_service.planning import POLICIES
from scheduler_service.planning.comparison import compare
from scheduler_service.simulation.paper import paper_setting
from scheduler_service.simulation.presets import load_cluster
from scheduler_service.simulation.workloads import WORKLOADS, paper_batch

ROWS = yaml.safe_load((files("scheduler_service.simulation.published") / "paper.yaml").read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['preset']}-{row['lengths']}")
def test_every_setting_names_a_preset_a_workload_and_systems(row: dict) -> None:
    load_cluster(row["preset"])
    assert row["lengths"] in WORKLOADS
    found = paper_setting(row["preset"].replace("_", "-"), row["lengths"])
    assert {*found.gains, *found.pp, *found.dp} <= POLICIES.keys()


def test_a_setting_that_is_not_the_paper_s_has_no_figures() -> None:
    assert paper_setting("paper_512_h20", "mine.txt").gains == {}


def test_on_2048_gpus_at_256k_gain_and_bubbles_are_near_the_paper_s() -> None:
    cluster = load_cluster("paper_2048_h800")
    batch = paper_batch(cluster)
    ours = {
        outcome.policy: outcome.simulation for outcome in compare(batch, cluster, ["hydra", "hydra_search", "megatron"])
    }
    hydra, search, megatron = (ours[name] for name in ("hydra", "hydra_search", "megatron"))
    assert search.iteration_s < hydra.iteration_s
    assert 1.1 < megatron.iteration_s / hydra.iteration_s < 1.5  # the paper: 1.10…1.43, 1.25 on average
    paper = paper_setting("paper_2048_h800", "paper-256k")
    assert abs(hydra.pp_bubble - paper.pp["hydra"]) < 0.05
    assert abs(megatron.pp_bubble - paper.pp["megatron"]) < 0.05
