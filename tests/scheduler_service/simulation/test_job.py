"""A plan on a cluster: against a loop over ranks, and by what must hold of every run."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.domain import Batch, InvalidInputError, Plan
from scheduler_service.planning import plan_iteration
from scheduler_service.planning.policy import PlanningConfig, new_plan
from scheduler_service.simulation import replay_pipeline
from scheduler_service.simulation.cluster import Cluster, Engine, Recompute
from scheduler_service.simulation.flops import model_flops
from scheduler_service.simulation.job import ClusterObjective, simulate
from scheduler_service.simulation.layer_times import expert_layer, head, own_layer
from scheduler_service.simulation.loads import group_loads, rank_loads
from scheduler_service.simulation.models import Experts, GroupedQuery, Latent, Model
from scheduler_service.simulation.operators import Documents
from scheduler_service.simulation.presets import load_cluster, load_hardware
from tests.support.strategies import batches, random_plan, slowed

MODEL = Model(
    name="small", layers=7, hidden=512, vocabulary=8192, dense_layers=2, dense_width=1536,
    attention=Latent(heads=8, q_lora=256, kv_lora=128, nope=64, rope=32, v=64, gated=True),
    experts=Experts(count=16, top_k=2, width=384, shared=1),
)  # fmt: skip
CLUSTER = Cluster("small", MODEL, load_hardware("h800"), ranks=12, token_budget=4096, stages=3, ep=3)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    ranks = draw(st.sampled_from((1, 2, 6, 8, 12, 16)))
    dense = Model("dense", 6, 256, 1024, GroupedQuery(8, 4, 32), dense_layers=6, dense_width=512)
    tp = draw(st.sampled_from((1, 2)))
    return Cluster(
        "drawn", draw(st.sampled_from((MODEL, dense))), load_hardware(draw(st.sampled_from(("h20", "h800")))),
        ranks=ranks, token_budget=tp * draw(st.integers(8, 300)), tp=tp, stages=draw(st.integers(1, 3)),
        ep=draw(st.sampled_from([e for e in range(1, ranks + 1) if ranks % e == 0])),
        chunks=draw(st.sampled_from((1, 1, 2))), engine=draw(st.sampled_from(list(Engine))),
        recompute=draw(st.sampled_from(list(Recompute))), gradient_overlap=draw(st.booleans()),
        distributed_optimizer=draw(st.booleans()), exchange_overlap=draw(st.booleans()),
    )  # fmt: skip


def loop_over_ranks(plan: Plan, batch: Batch, cluster: Cluster) -> np.ndarray:
    """Forward and backward seconds, (2, EP groups, stages, microbatches), by the words of the model, rank by rank."""
    loads, ep, speeds = rank_loads(plan, batch), cluster.ep, dict(cluster.speeds)
    microbatches, ep_groups = plan.header.microbatches, cluster.ranks // ep
    found = np.zeros((2, ep_groups, cluster.stages, microbatches))

    def own_of(rank: int, microbatch: int) -> tuple[int, np.ndarray, Documents, float]:
        degree, start = max(1, int(loads.degree[rank, microbatch])), int(loads.start[rank, microbatch])
        tokens = np.array([float(loads.tokens[rank, microbatch])])
        documents = Documents(tokens * degree, np.array([loads.load[rank, microbatch] * degree]))
        slowest = min((speeds.get(r, 1.0) for r in range(start, start + degree)), default=1.0) if start >= 0 else 1.0
        return degree, tokens, documents, slowest

    def own(rank: int, microbatch: int, moe: bool) -> np.ndarray:
        degree, tokens, documents, speed = own_of(rank, microbatch)
        return own_layer(cluster, degree, documents, tokens, moe=moe, speed=speed).seconds[:, 0]

    def own_head(rank: int, microbatch: int) -> np.ndarray:
        _, tokens, _, speed = own_of(rank, microbatch)
        return head(cluster, tokens, speed)[:, 0]

    for m in range(microbatches):
        here = np.flatnonzero(plan.microbatch == m)
        reach = [{int(r) // ep for r in range(plan.start[i], plan.start[i] + plan.degree[i])} for i in here]
        teams = [{e} for e in range(ep_groups)]
        for members in reach:
            joined = set().union(*(team for team in teams if team & members))
            teams = [team for team in teams if not team & members] + [joined]
        layer = {}
        for e in range(ep_groups):
            ranks = range(e * ep, (e + 1) * ep)
            tokens = loads.tokens[e * ep : (e + 1) * ep, m]
            most, mean = np.array([float(tokens.max())]), np.array([float(tokens.mean())])
            together = expert_layer(cluster, most, mean, min(speeds.get(rank, 1.0) or 1.0 for rank in ranks))
            for moe in (False, True):
                if (cluster.model.moe_layers if moe else cluster.model.dense_layers) == 0:
                    layer[e, moe] = np.zeros(2)
                    continue
                slowest = np.max([own(rank, m, moe) for rank in ranks], axis=0)
                layer[e, moe] = slowest + (together.seconds[:, 0] if moe else 0)
            layer[e, "head"] = np.max([own_head(rank, m) for rank in ranks], axis=0)
        for team in teams:
            for moe in (False, True):
                slowest = np.max([layer[e, moe] for e in team], axis=0)
                layer.update({(e, moe): slowest for e in team})
        for e in range(ep_groups):
            for stage, layers in enumerate(cluster.stage_layers):
                found[:, e, stage, m] = (
                    layers.dense * layer[e, False] + layers.moe * layer[e, True] + layers.head * layer[e, "head"]
                )
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_times_are_those_of_a_loop_over_ranks_and_every_gpu_s_time_adds_up_exactly(data: st.DataObject) -> None:
    random = Random(data.draw(st.integers(0, 999)))
    cluster = data.draw(clusters())
    cluster = replace(cluster, speeds=slowed(cluster.pool, random).speeds if data.draw(st.booleans()) else ())
    batch = data.draw(batches(cluster.pool, most_sequences=20))
    plan = random_plan(batch, cluster.pool, random, PlanningConfig())
    found = simulate(plan, batch, cluster, scheduling_s=0.123)
    forward, backward = loop_over_ranks(plan, batch, cluster)
    expected = replay_pipeline(forward, backward, p2p_latency=found.replay.p2p_latency, chunks=cluster.chunks)
    assert found.replay.span == pytest.approx(expected.span, rel=1e-12)

    r = found.ranks
    total = r.busy + r.ep_wait + r.cp_wait + r.pp_wait + r.dp_wait
    outside = found.scheduling_s + found.gradient_sync_s + found.optimizer_s
    assert (total + outside == found.iteration_s).all()  # to the last bit
    assert min(wait.min() for wait in (r.ep_wait, r.cp_wait, r.pp_wait, r.dp_wait)) >= 0
    assert sum(found.activity_s.values()) == pytest.approx(found.iteration_s)
    assert sum(found.degree_share.values()) == pytest.approx(1)


def plan_of(columns: tuple[list[int], list[int], list[int]], batch: Batch, cluster: Cluster) -> Plan:
    return new_plan("hand", batch, cluster.pool, PlanningConfig(), columns)


def test_ranks_wait_for_the_slowest_of_their_ep_group_and_no_other() -> None:
    batch = Batch([4000, 100, 100, 100])
    found = simulate(plan_of(([0] * 4, [0, 1, 2, 3], [1] * 4), batch, CLUSTER), batch, CLUSTER)
    waits = found.ranks.ep_wait.sum(axis=1)
    assert waits[0] == 0
    assert waits[1] == waits[2] > 0  # of the same EP group as rank 0
    assert waits[3] == 0 < waits[4] == waits[5]
    assert waits[4] < waits[1]
    assert (found.ranks.cp_wait == 0).all()
    assert found.ranks.dp_wait[0, 0] == 0 < found.ranks.dp_wait[3, 0]


def test_ep_groups_that_a_cp_group_ties_wait_for_the_slower_of_them() -> None:
    batch = Batch([4000, 2000])
    tied = simulate(plan_of(([0, 0], [0, 2], [1, 2]), batch, CLUSTER), batch, CLUSTER)  # ranks 2 and 3: two EP groups
    assert (tied.ranks.cp_wait[:3] == 0).all()
    assert (tied.ranks.cp_wait[3:6] > 0).all()
    assert (tied.ranks.cp_wait[6:] == 0).all()
    ends = tied.replay.stage_end[:, 0]
    assert ends[0] > ends[1] > ends[2]  # the head, in which nobody waits, is all that the second saves


def test_the_head_makes_the_last_stage_the_busiest_and_sizes_follow_the_layers() -> None:
    assert [(s.dense, s.moe, s.head) for s in CLUSTER.stage_layers] == [(2, 1, 0), (0, 2, 0), (0, 2, 1)]
    batch = Batch([3000] * 12)
    found = simulate(plan_of(([0] * 12, list(range(12)), [1] * 12), batch, CLUSTER), batch, CLUSTER)
    assert found.ranks.busy[0, 2] > found.ranks.busy[0, 1]
    assert found.dp_bubble == 0


def test_utilisation_is_needed_work_over_the_peak() -> None:
    batch = Batch([3000] * 12)
    found = simulate(plan_of(([0] * 12, list(range(12)), [1] * 12), batch, CLUSTER), batch, CLUSTER)
    peak = 36 * CLUSTER.hardware.peak_flops * found.iteration_s
    assert found.mfu == pytest.approx(model_flops(MODEL, 36000, 12 * 3000**2) / peak)
    assert found.tokens_per_s_per_gpu == pytest.approx(36000 / 36 / found.iteration_s)


def test_a_ring_pays_for_its_hops_ulysses_for_less_and_ulysses_that_overlaps_for_least() -> None:
    cluster = load_cluster("paper_512_h20")
    batch = Batch([262144] + [4000] * 96)
    both = {}
    for engine in Engine:
        job = cluster.with_engine(engine)
        both[engine] = simulate(plan_iteration(batch, job.pool, policy="hydra"), batch, job)
    assert both[Engine.RING].traffic_bytes["CP ring"][1] > both[Engine.HYBRID].traffic_bytes["CP ring"][1]
    assert both[Engine.RING].iteration_s > both[Engine.ULYSSES].iteration_s > both[Engine.HYBRID].iteration_s


def test_recomputation_costs_a_forward_and_overlap_saves_time() -> None:
    batch = Batch([4000] * 24)
    plan = plan_iteration(batch, CLUSTER.pool, policy="hydra")
    base = simulate(plan, batch, CLUSTER)
    again = simulate(plan, batch, replace(CLUSTER, recompute=Recompute.FULL))
    assert again.ranks.busy.sum() == pytest.approx(1.33 * base.ranks.busy.sum(), rel=0.1)
    selective = simulate(plan, batch, replace(CLUSTER, recompute=Recompute.SELECTIVE))
    assert base.ranks.busy.sum() < selective.ranks.busy.sum() < again.ranks.busy.sum()
    waiting = simulate(plan, batch, replace(CLUSTER, gradient_overlap=False, exchange_overlap=False))
    assert waiting.gradient_sync_s > base.gradient_sync_s


def test_gpus_send_what_their_parallelism_says() -> None:
    batch = Batch([4000] * 12)
    found = simulate(plan_of(([0] * 12, list(range(12)), [1] * 12), batch, CLUSTER), batch, CLUSTER).traffic_bytes
    assert found["CP Ulysses"] == found["CP ring"] == found["TP"] == (0, 0)
    inside, outside = found["EP"]
    assert outside == 0  # three ranks share a node
    # Five layers on three stages, two exchanges, twice: two copies of each token, two thirds of them to others.
    assert inside == pytest.approx(5 / 3 * 4 * 4000 * 2 * 512 * 2 * 2 / 3)
    assert found["PP"] == (0, pytest.approx(2 * 2 * 4000 * 512 * 2 / 3))


def test_a_slow_rank_holds_up_its_own_group_and_by_its_experts_its_whole_ep_group() -> None:
    batch = Batch([3000] * 6)
    plan = plan_of(([0] * 6, [0, 1, 2, 3, 4, 5], [1] * 6), batch, CLUSTER)
    slow = simulate(plan, batch, replace(CLUSTER, speeds={1: 0.5, 11: 0.5}))
    even = simulate(plan, batch, CLUSTER)
    busy = slow.ranks.busy.sum(axis=1) / even.ranks.busy.sum(axis=1)
    assert 1 < busy[0] == busy[2] < busy[1] < 2  # experts of all wait for rank 1, whose exchanges are as fast as ever
    assert (busy[3:9] == 1).all()
    assert (busy[9:] >= 1).all()  # no sequence is there, only what holds layers up without one
    assert slow.ranks.ep_wait[1].sum() == 0 < slow.ranks.ep_wait[0].sum()


def test_a_rank_alone_at_half_the_speed_takes_twice_as_long() -> None:
    dense = Model("dense", 6, 256, 1024, GroupedQuery(8, 4, 32), dense_layers=6, dense_width=512)
    alone, batch = Cluster("alone", dense, load_hardware("h800"), ranks=1, token_budget=4096), Batch([3000, 500])
    plan = plan_of(([0, 1], [0, 0], [1, 1]), batch, alone)
    half, whole = (simulate(plan, batch, replace(alone, speeds={0: speed})) for speed in (0.5, 1.0))
    assert half.ranks.busy == pytest.approx(2 * whole.ranks.busy, rel=1e-6)
    assert half.optimizer_s == pytest.approx(2 * whole.optimizer_s, rel=1e-3)
    assert half.gradient_sync_s == whole.gradient_sync_s


def test_a_plan_on_an_excluded_rank_is_refused() -> None:
    batch = Batch([4000, 100])
    plan = plan_of(([0, 0], [0, 2], [1, 2]), batch, CLUSTER)
    with pytest.raises(InvalidInputError, match=r"a group on ranks 2 … 3, of which cluster small excludes some"):
        simulate(plan, batch, replace(CLUSTER, speeds={3: 0}))
    assert simulate(plan, batch, replace(CLUSTER, speeds={4: 0})).iteration_s > 0


def test_an_iteration_that_takes_longer_than_times_are_exact_is_refused() -> None:
    batch = Batch([100])
    plan = plan_of(([0], [0], [1]), batch, CLUSTER)
    slow = replace(CLUSTER, hardware=replace(CLUSTER.hardware, peak_flops=1e3))
    with pytest.raises(InvalidInputError, match=r"an iteration takes .* on cluster small; .* 2,097,152 s, 24 days"):
        simulate(plan, batch, slow)


def test_a_plan_for_another_pool_is_refused() -> None:
    batch = Batch([100])
    plan = plan_of(([0], [0], [1]), batch, CLUSTER)
    with pytest.raises(InvalidInputError, match=r"12 ranks, ep 3, 3 stages; cluster small has 24"):
        simulate(plan, batch, replace(CLUSTER, ranks=24))


@settings(max_examples=40, deadline=None)
@given(clusters(), st.data())
def test_as_an_objective_it_says_what_a_simulation_says_of_the_plan_in_any_order(
    cluster: Cluster, data: st.DataObject
) -> None:
    batch = data.draw(batches(cluster.pool))
    random = data.draw(st.randoms(use_true_random=False))
    plan = random_plan(batch, cluster.pool, random, PlanningConfig())
    count = plan.header.microbatches
    order = np.array(data.draw(st.permutations(range(count))))
    times = ClusterObjective(cluster).times(group_loads(plan, batch), count)
    columns = (np.argsort(order)[plan.microbatch], plan.start, plan.degree)
    moved = new_plan("moved", batch, cluster.pool, PlanningConfig(), columns)
    if moved.header.microbatches == count:  # else the last of its microbatches is empty
        assert times.iteration_s(order) == simulate(moved, batch, cluster).iteration_s
