"""Memory by hand, and budgets that fit exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.domain import Batch, InfeasibleError
from scheduler_service.planning.policy import PlanningConfig, new_plan
from scheduler_service.simulation.cluster import Cluster, Recompute
from scheduler_service.simulation.memory import in_flight, largest_budget, plan_memory, stage_memory
from scheduler_service.simulation.models import GroupedQuery, Model
from scheduler_service.simulation.presets import load_cluster, load_hardware, preset_names

DENSE = Model("dense", 4, 256, 1000, GroupedQuery(8, 4, 32), dense_layers=4, dense_width=512)
CLUSTER = Cluster("small", DENSE, load_hardware("h800"), ranks=4, token_budget=64, stages=2, reserved_bytes=0)


def test_a_distributed_optimizer_takes_six_bytes_and_twelve_over_the_replicas() -> None:
    weights = 2 * (256 * 32 * (8 + 8) + 256 * 256 + 3 * 256 * 512) + 256_000  # two layers, and the embedding
    for distributed, each in ((True, 6 + 12 / 4), (False, 18)):
        found = stage_memory(replace(CLUSTER, distributed_optimizer=distributed), 0)[0]
        assert found.parameters + found.gradients + found.optimizer == pytest.approx(each * weights)
        assert found.activations == found.logits == 0


def test_early_stages_hold_more_microbatches_and_the_last_holds_logits() -> None:
    first, last = stage_memory(CLUSTER, 64)
    assert first.activations == 2 * last.activations
    assert first.logits == 0 < last.logits == 64 * 1000 * 6


def test_interleaving_holds_its_warm_up_and_one_chunk_more() -> None:
    assert [in_flight(CLUSTER, stage) for stage in (0, 1)] == [(2, 1), (1, 1)]
    assert [in_flight(replace(CLUSTER, chunks=2), stage) for stage in (0, 1)] == [(5, 2), (3, 2)]


def test_recomputation_keeps_less_and_fully_a_hidden_state_per_layer() -> None:
    none, selective, full = (
        stage_memory(replace(CLUSTER, recompute=recompute), 64)[0].activations for recompute in Recompute
    )
    assert full < selective < none
    hidden = 2 * 256 * 2 * 64 * 2  # bytes, width, layers, tokens, microbatches in flight
    assert full - hidden == pytest.approx((none - hidden) / 2 / 2)  # what is made again: a layer's of a microbatch


def test_selective_recomputation_drops_what_latents_are_projected_up_to() -> None:
    cluster = load_cluster("paper_2048_h800")
    budgets = [largest_budget(replace(cluster, recompute=recompute)).tokens for recompute in Recompute]
    assert budgets[1] > 1.8 * budgets[0]
    assert budgets[2] > budgets[1]


def test_a_plan_holds_its_largest_window_of_real_tokens() -> None:
    batch = Batch([10, 60, 50, 1])
    plan = new_plan("hand", batch, CLUSTER.pool, PlanningConfig(), ([0, 1, 2, 3], [0] * 4, [1] * 4))
    first, last = plan_memory(plan, batch, CLUSTER)
    assert first.activations == pytest.approx(stage_memory(CLUSTER, 55)[0].activations)  # 60 + 50
    assert last.activations == pytest.approx(stage_memory(CLUSTER, 60)[1].activations)


def test_a_gpu_that_is_full_without_any_token_has_no_budget_however_full_it_is() -> None:
    for reserved in (1e12, 1e15):
        with pytest.raises(InfeasibleError, match="without any token"):
            largest_budget(replace(CLUSTER, reserved_bytes=reserved))
    with pytest.raises(InfeasibleError, match="without any token"):  # a token more is lost in rounding
        largest_budget(replace(CLUSTER, model=replace(DENSE, vocabulary=10**30)))


@pytest.mark.parametrize("name", ["paper_2048_h800", "hy3_8k"])
def test_the_budget_is_the_last_that_fits(name: str) -> None:
    cluster = load_cluster(name)
    found, capacity = largest_budget(cluster), cluster.hardware.memory_bytes
    assert max(stage.total for stage in found.stages) <= capacity
    assert max(stage.total for stage in stage_memory(cluster, found.tokens + cluster.tp)) > capacity
    assert found.stages[found.binding_stage].total == max(stage.total for stage in found.stages)
    assert found.tokens % cluster.tp == 0


def test_a_model_that_does_not_fit_says_what_fills_the_memory() -> None:
    cluster = replace(load_cluster("dsv3_8k"), stages=2, tp=1)
    with pytest.raises(
        InfeasibleError,
        match=r"stage 1 needs 127\.0 GB without any token, a GPU has 80\.0 GB; most of it are gradients",
    ):
        largest_budget(cluster)


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_every_packaged_cluster_loads_and_says_how_many_gpus_it_has(name: str) -> None:
    gpus = {"512": 512, "2048": 2048, "11k": 11520}
    size = name.split("_")[1]
    assert load_cluster(name).gpus == (gpus[size] if size in gpus else int(size.removesuffix("k")) * 1024)
