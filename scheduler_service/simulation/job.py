"""One iteration of a job: a plan on a cluster, by the costs of its operators.

Every replica of an EP group shares one pipeline timeline, since each layer with experts is a barrier of the group; CP
groups that reach into several EP groups tie these for the microbatch. Times are exact sums (see `layer_times`), and
for every GPU they add up to the iteration to the last bit: that is checked on every run.

Approximations: routing is uniform; layers of a kind are alike, so the sum over layers of a maximum is layers ×
maximum; a dense layer ends with a barrier too; a microbatch's message between stages is as long as the mean one. A slow
rank computes slowly and exchanges at full speed; all ranks of its CP group run at its pace; without a sequence its
launches, and the experts of an excluded rank, are taken for fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, HydraCpError, InvalidInputError, Plan, Reason
from scheduler_service.simulation.cluster import Cluster
from scheduler_service.simulation.collectives import message
from scheduler_service.simulation.coupling import coupling_of
from scheduler_service.simulation.flops import model_flops
from scheduler_service.simulation.gradient_sync import GradientSync, gradient_sync
from scheduler_service.simulation.layer_times import (
    LONGEST_S,
    ExpertLayer,
    OwnLayer,
    Seconds,
    Traffic,
    expert_layer,
    head,
    own_layer,
    rounded,
)
from scheduler_service.simulation.loads import GroupLoads, group_loads
from scheduler_service.simulation.objective import Order
from scheduler_service.simulation.operators import BYTES, Documents
from scheduler_service.simulation.pipeline import PipelineReplay, replay_pipeline

KINDS = ("dense", "moe", "head")
"""What a stage is made of; `StageLayers` counts them."""


@dataclass(frozen=True, eq=False)
class RankTimes:
    """Where the time of every GPU column goes: seconds, (ranks, stages). They add up to the iteration."""

    busy: Seconds
    """Computing, and exchanging with those that are there."""
    ep_wait: Seconds
    """For the slowest rank of its EP group, in every layer."""
    cp_wait: Seconds
    """For other EP groups that a CP group ties to its own."""
    pp_wait: Seconds
    """For other stages of its pipeline."""
    dp_wait: Seconds
    """For the slowest pipeline."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """What an iteration takes, and why."""

    iteration_s: float
    scheduling_s: float
    """Planning on the critical path, as given."""
    gradient_sync_s: float
    """Exposed exchanges of gradients and parameters."""
    optimizer_s: float
    ranks: RankTimes = field(repr=False)
    replay: PipelineReplay = field(repr=False)
    """The whole schedule; replica e of it is EP group e."""
    tokens_per_s_per_gpu: float
    mfu: float
    """Model FLOPs utilisation: work that the model needs, over the peak of all GPUs."""
    activity_s: Mapping[str, float]
    """Seconds of each activity, mean over all GPUs."""
    traffic_bytes: Mapping[str, tuple[float, float]]
    """Bytes that a GPU sends, mean over all: purpose → inside nodes, over the network."""
    load_min: float
    """Attention load of a rank in a microbatch, token²/degree: least of the busy ones."""
    load_mean: float
    load_max: float
    degree_share: Mapping[int, float]
    """Degree → share of the GPUs' microbatches; 0 is idle."""
    padding: float
    """Padded tokens over tokens."""

    @property
    def pp_bubble(self) -> float:
        """1 − Σ busy/(p·span) of a pipeline, mean over pipelines; waits inside a microbatch count as busy here."""
        return float(self.replay.pp_bubble.mean())

    @cached_property
    def dp_bubbles(self) -> Seconds:
        """(latest end − its own end)/T of each replica, (EP groups,)."""
        spans = self.replay.span
        return (spans.max() - spans) / self.iteration_s

    @property
    def dp_bubble(self) -> float:
        """Mean over the replicas."""
        return float(self.dp_bubbles.mean())


def simulate(plan: Plan, batch: Batch, cluster: Cluster, *, scheduling_s: float = 0.0) -> Simulation:
    """Run `plan` on `cluster`. `scheduling_s`: seconds of planning that the iteration waits for.

    The ranks are as fast as the cluster says, whatever the plan took them for. Raises `InvalidInputError` where the
    plan was made for another pool, or has a group on a rank that the cluster excludes.

    Cost: O(N log N + M·G + p·M·G/E), memory O(N + M·G).
    """
    pool = plan.header.pool
    if (pool.ranks, pool.ep, pool.stages) != (cluster.ranks, cluster.ep, cluster.stages):
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"the plan is for {pool.ranks} ranks, ep {pool.ep}, {pool.stages} stages; cluster {cluster.name} has "
            f"{cluster.ranks}, {cluster.ep}, {cluster.stages}: plan for the cluster's own pool",
        )
    groups = group_loads(plan, batch)
    _require_no_excluded(groups, cluster)
    work = _Work.of(cluster, groups, plan.header.microbatches)
    layers = _layers(cluster)
    times = _stage_times(work, layers)
    latency, p2p = _messages(cluster, work)
    replay = _replay(cluster, times, latency)
    sync = gradient_sync(cluster)
    sync_s, step_s = _after(cluster, sync, replay, times)
    scheduling_s = float(rounded(scheduling_s))
    iteration_s = scheduling_s + float(replay.span.max()) + sync_s + step_s
    if not iteration_s <= LONGEST_S:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"simulation: an iteration takes {iteration_s:.3g} s on cluster {cluster.name}; times add up exactly to "
            f"{LONGEST_S:,.0f} s, 24 days: give it fewer tokens, more ranks or faster hardware",
        )
    ranks = _rank_times(cluster, work, layers, replay)
    _require_identity(ranks, iteration_s, scheduling_s + sync_s + step_s)
    gpus = cluster.gpus
    return Simulation(
        iteration_s=iteration_s,
        scheduling_s=scheduling_s,
        gradient_sync_s=sync_s,
        optimizer_s=step_s,
        ranks=ranks,
        replay=replay,
        tokens_per_s_per_gpu=batch.tokens / (iteration_s * gpus),
        mfu=model_flops(cluster.model, batch.tokens, batch.sum_of_squares)
        / (iteration_s * gpus * cluster.hardware.peak_flops),
        activity_s=_activities(work, layers, ranks, scheduling_s, sync_s, step_s),
        traffic_bytes=_traffic(cluster, work, layers, p2p, sync),
        load_min=float(groups.load.min()),
        load_mean=float((groups.load * groups.degree).sum() / groups.degree.sum()),
        load_max=float(groups.load.max()),
        degree_share=_degree_share(groups, plan.header.microbatches * cluster.ranks),
        padding=float((groups.tokens * groups.degree).sum() / batch.tokens),
    )


def _require_no_excluded(groups: GroupLoads, cluster: Cluster) -> None:
    speed = cluster.pool.speeds_of(groups.start, groups.degree)
    if not speed.all():
        start, degree = (int(column[speed.argmin()]) for column in (groups.start, groups.degree))
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"the plan has a group on ranks {start} … {start + degree - 1}, of which cluster {cluster.name} excludes "
            "some: plan for the cluster's own pool",
        )


@dataclass(frozen=True)
class ClusterObjective:
    """The iteration by the model of operators, for planners that search: what `simulate` says, to the last bit."""

    cluster: Cluster

    def times(self, groups: GroupLoads, microbatches: int) -> ClusterTimes:
        """See `Objective`."""
        _require_no_excluded(groups, self.cluster)
        work = _Work.of(self.cluster, groups, microbatches)
        latency, _ = _messages(self.cluster, work)
        return ClusterTimes(self.cluster, _stage_times(work, _layers(self.cluster)), latency)


@dataclass(frozen=True, eq=False)
class ClusterTimes:
    """Times of a packing on a cluster."""

    cluster: Cluster
    seconds: Seconds
    """(2, stages, microbatches, EP groups)."""
    latency: float

    def mean(self) -> tuple[Seconds, Seconds]:
        """See `MicrobatchTimes`."""
        forward, backward = self.seconds.mean(axis=(1, 3))
        return forward, backward

    def iteration_s(self, order: Order) -> float:
        """See `MicrobatchTimes`."""
        times = self.seconds[:, :, order]
        replay = _replay(self.cluster, times, self.latency)
        return float(replay.span.max()) + sum(_after(self.cluster, gradient_sync(self.cluster), replay, times))


@dataclass(frozen=True, eq=False)
class _Work:
    """A plan's microbatches in seconds of one layer of each kind: arrays (kinds, 2, microbatches, …)."""

    own: Seconds
    """Each rank's own part, (…, ranks)."""
    exchanges: ExpertLayer
    """What each EP group does together in a layer with experts, (2, microbatches, EP groups)."""
    together: Seconds
    """Until every rank that they hang together with is through, (…, EP groups)."""
    alone: Seconds
    """Until every rank of the EP group is through."""
    tokens: npt.NDArray[np.float64]
    """Padded tokens of each rank, (microbatches, ranks)."""
    parts: dict[str, dict[str, float]]
    """Kind → activity → seconds of both directions, summed over ranks and microbatches."""
    traffic: dict[str, dict[str, npt.NDArray[np.float64]]]
    """Kind → purpose → bytes inside nodes and over the network, summed likewise."""

    @classmethod
    def of(cls, cluster: Cluster, groups: GroupLoads, microbatches: int) -> _Work:
        shape = microbatches, cluster.ranks
        of_group, parts, traffic = _group_columns(cluster, groups, microbatches)
        group = np.full(shape, len(groups.start), np.int32)  # a rank without one is in the last, which is empty
        each = np.repeat(np.arange(len(groups.start)), groups.degree)
        offset = np.arange(len(each)) - np.repeat(np.cumsum(groups.degree) - groups.degree, groups.degree)
        group[groups.microbatch[each], groups.start[each] + offset] = each
        own = of_group[:, :, group]
        tokens = np.append(groups.tokens, 0).astype(float)[group]

        by_ep_group = (microbatches, cluster.ranks // cluster.ep, cluster.ep)
        most = own.reshape(*own.shape[:2], *by_ep_group).max(axis=-1)
        exchanges = expert_layer(
            cluster,
            tokens.reshape(by_ep_group).max(axis=-1),
            tokens.reshape(by_ep_group).mean(axis=-1),
            cluster.working_speeds.reshape(-1, cluster.ep).min(axis=1),
        )
        alone = most.copy()
        alone[KINDS.index("moe")] += exchanges.seconds
        together = alone.copy()
        coupling = coupling_of(groups, microbatches, cluster.ranks, cluster.ep)
        for kind in ("dense", "moe"):  # no exchange of a CP group is in the head
            together[KINDS.index(kind)] = coupling.maximum(alone[KINDS.index(kind)])
        return cls(own, exchanges, together, alone, tokens, parts, traffic)


def _group_columns(
    cluster: Cluster, groups: GroupLoads, microbatches: int
) -> tuple[Seconds, dict[str, dict[str, float]], dict[str, dict[str, npt.NDArray[np.float64]]]]:
    """Own seconds of each group, (kinds, 2, groups + 1), and sums over all ranks; the last group is an empty rank."""
    degree = np.append(groups.degree, 1)
    tokens = np.append(groups.tokens, 0).astype(float)
    squares = np.append(groups.load * groups.degree, 0.0)
    speed = np.append(cluster.pool.speeds_of(groups.start, groups.degree), 1.0)
    # How many ranks each stands for: the empty one for all that have no sequence in a microbatch.
    ranks = np.append(groups.degree, microbatches * cluster.ranks - int(groups.degree.sum())).astype(float)
    of_group = np.zeros((len(KINDS), 2, len(degree)))
    of_group[KINDS.index("head")] = head(cluster, tokens, speed)
    parts: dict[str, dict[str, float]] = {"head": {"head and loss": float((of_group[-1] * ranks).sum())}}
    traffic: dict[str, dict[str, npt.NDArray[np.float64]]] = {"head": {}}
    present = {"dense": cluster.model.dense_layers > 0, "moe": cluster.model.moe_layers > 0}
    for kind in (kind for kind, there in present.items() if there):
        parts[kind], traffic[kind] = {}, {}
        for each in np.unique(degree).tolist():
            mine = np.flatnonzero(degree == each)
            documents = Documents(tokens[mine] * each, squares[mine])
            layer = own_layer(cluster, each, documents, tokens[mine], moe=kind == "moe", speed=speed[mine])
            of_group[KINDS.index(kind)][:, mine] = layer.seconds
            _add_layer(parts[kind], traffic[kind], layer, ranks[mine])
    return of_group, parts, traffic


def _add_layer(
    parts: dict[str, float],
    traffic: dict[str, npt.NDArray[np.float64]],
    layer: OwnLayer,
    ranks: npt.NDArray[np.float64],
) -> None:
    for name, seconds in (
        ("attention", layer.attention), ("linear", layer.linear), ("CP exchange", layer.context_parallel),
        ("TP exchange", layer.tensor_parallel),
    ):  # fmt: skip
        parts[name] = parts.get(name, 0.0) + float((seconds * ranks).sum())
    for name, sent in (
        ("CP Ulysses", layer.ulysses_traffic), ("CP ring", layer.ring_traffic), ("TP", layer.tensor_traffic),
    ):  # fmt: skip
        traffic[name] = traffic.get(name, np.zeros(2)) + _sent(sent, ranks)


def _sent(traffic: Traffic, ranks: npt.NDArray[np.float64] | float) -> npt.NDArray[np.float64]:
    return np.array([float((traffic.node * ranks).sum()), float((traffic.network * ranks).sum())])


def _layers(cluster: Cluster) -> Seconds:
    """Layers of each kind on each stage, (stages, kinds)."""
    return np.array([[getattr(stage, kind) for kind in KINDS] for stage in cluster.stage_layers], float)


def _stage_times(work: _Work, layers: Seconds) -> Seconds:
    """Every stage is a whole number of layers of each kind: (2, stages, microbatches, EP groups)."""
    return np.einsum("sk,kdme->dsme", layers, work.together)


def _replay(cluster: Cluster, times: Seconds, latency: float) -> PipelineReplay:
    forward, backward = np.moveaxis(times, -1, 1)
    return replay_pipeline(forward, backward, p2p_latency=latency, chunks=cluster.chunks)


def _messages(cluster: Cluster, work: _Work) -> tuple[float, npt.NDArray[np.float64]]:
    """Latency of a message between stages, and the bytes of all of them inside nodes and over the network."""
    if cluster.stages == 1:
        return 0.0, np.zeros(2)
    crosses = 2 * cluster.ranks * cluster.tp > cluster.hardware.gpus_per_node
    per_token = BYTES * cluster.model.hidden / cluster.tp
    by_ep_group = (*work.tokens.shape[:1], -1, cluster.ep)
    fullest = np.array([work.tokens.reshape(by_ep_group).max(axis=-1).mean()])
    latency = float(rounded(message(cluster.hardware, per_token * fullest, crosses_nodes=crosses).seconds)[0])
    sent = 2 * (cluster.stages * cluster.chunks - 1) * per_token * float(work.tokens.sum()) * cluster.tp
    return latency, np.array([0.0, sent] if crosses else [sent, 0.0])


def _after(cluster: Cluster, sync: GradientSync, replay: PipelineReplay, times: Seconds) -> tuple[float, float]:
    """Exposed gradient and parameter exchanges, and the optimizer's step. `times`: (2, stages, MBs, EP groups).

    A stage reduces once its slowest replica is done, so early stages are the last, and late ones finish beside them.
    """
    reduce_s = sync.exposed_reduce_s(times[1, :, -1].min(axis=-1), cluster.gradient_overlap)
    gather_s = sync.exposed_gather_s(times[0, :, 0].min(axis=-1), cluster.gradient_overlap)
    ends = replay.stage_end.max(axis=0) + reduce_s
    reduced_s = max(0.0, float(ends.max() - replay.span.max()))
    step_s = sync.step_s.max() / cluster.working_speeds.min()
    return float(rounded(reduced_s + gather_s.max())), float(rounded(step_s))


def _rank_times(cluster: Cluster, work: _Work, layers: Seconds, replay: PipelineReplay) -> RankTimes:
    """Sums over microbatches and directions, then over the layers of each stage."""
    ep = cluster.ep

    def by_stage(of_kinds: Seconds) -> Seconds:
        """(kinds, ranks) → (ranks, stages)."""
        return of_kinds.T @ layers.T

    own = work.own.sum(axis=(1, 2))
    alone, together = work.alone.sum(axis=(1, 2)), work.together.sum(axis=(1, 2))
    shared = np.zeros_like(alone)
    shared[KINDS.index("moe")] = work.exchanges.seconds.sum(axis=(0, 1))
    alone, together, shared = (np.repeat(each, ep, axis=1) for each in (alone, together, shared))
    span = np.repeat(replay.span, ep)[:, None]
    return RankTimes(
        busy=by_stage(own + shared),
        ep_wait=by_stage(alone - own - shared),
        cp_wait=by_stage(together - alone),
        pp_wait=span - by_stage(together),
        dp_wait=np.broadcast_to(span.max() - span, (cluster.ranks, cluster.stages)),
    )


def _require_identity(ranks: RankTimes, iteration_s: float, outside_s: float) -> None:
    """T = scheduling + busy + PP wait + EP wait + CP wait + DP wait + gradient sync + optimizer, for every GPU."""
    total = ranks.busy + ranks.ep_wait + ranks.cp_wait + ranks.pp_wait + ranks.dp_wait + outside_s
    waits = (ranks.ep_wait, ranks.cp_wait, ranks.pp_wait, ranks.dp_wait)
    if not (total == iteration_s).all() or any((wait < 0).any() for wait in waits):
        rank, stage = np.unravel_index(np.abs(total - iteration_s).argmax(), total.shape)
        raise HydraCpError(
            Reason.INTERNAL,
            f"simulation: the time of rank {rank} on stage {stage} adds up to {total[rank, stage]!r} s, the iteration "
            f"takes {iteration_s!r} s; report this with the plan",
        )


def _activities(
    work: _Work, layers: Seconds, ranks: RankTimes, scheduling_s: float, sync_s: float, step_s: float
) -> dict[str, float]:
    """Mean over ranks and stages; adds up to the iteration, up to rounding."""
    count = dict(zip(KINDS, layers.sum(axis=0).tolist(), strict=True))
    gpus = ranks.busy.size
    found: dict[str, float] = {}
    for kind, parts in work.parts.items():
        for name, seconds in parts.items():
            found[name] = found.get(name, 0.0) + count[kind] * seconds / gpus
    each = count["moe"] * ranks.busy.shape[0] / work.alone.shape[-1] / gpus
    found["experts"] = each * float(work.exchanges.experts.sum())
    found["EP exchange"] = each * float(work.exchanges.exchange.sum())
    waits = {f"{name.upper()} wait": float(getattr(ranks, f"{name}_wait").mean()) for name in ("ep", "cp", "pp", "dp")}
    return {**found, **waits, "gradient sync": sync_s, "optimizer": step_s, "scheduling": scheduling_s}


def _traffic(
    cluster: Cluster, work: _Work, layers: Seconds, p2p: npt.NDArray[np.float64], sync: GradientSync
) -> dict[str, tuple[float, float]]:
    count = dict(zip(KINDS, layers.sum(axis=0).tolist(), strict=True))
    found: dict[str, npt.NDArray[np.float64]] = {}
    for kind, purposes in work.traffic.items():
        for name, sent in purposes.items():
            found[name] = found.get(name, np.zeros(2)) + count[kind] * cluster.tp * sent
    found["EP"] = count["moe"] * cluster.tp * _sent(work.exchanges.traffic, cluster.ep)
    found["PP"] = p2p
    found["DP"] = np.array([sync.node_bytes, sync.network_bytes])
    return {name: (float(sent[0]), float(sent[1])) for name, sent in (
        (name, sent / cluster.gpus) for name, sent in found.items()
    )}  # fmt: skip


def _degree_share(groups: GroupLoads, slots: int) -> dict[int, float]:
    ranks = np.bincount(groups.degree, weights=groups.degree)
    share = {int(degree): float(ranks[degree] / slots) for degree in np.flatnonzero(ranks)}
    idle = 1 - float(groups.degree.sum()) / slots
    return {0: idle, **share} if idle > 0 else share
