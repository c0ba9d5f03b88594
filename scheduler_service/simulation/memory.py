"""GPU memory of a job, stage by stage, and the token budget that fits.

Weights, gradients and the optimizer's state are fixed; activations grow with the tokens of the microbatches that are in
flight. Counts the tensors that a backward needs, in BF16, and what the loss and a ring need beside them; what an
allocator loses is in the cluster's `reserved_bytes`. Not validated against a measured job: a first answer, not a limit
to run at.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, InfeasibleError, Plan, Reason
from scheduler_service.domain.pool import MAX_TOKEN_BUDGET
from scheduler_service.simulation.cluster import Cluster, Recompute, StageLayers
from scheduler_service.simulation.context_parallel import exchange_bytes
from scheduler_service.simulation.loads import rank_loads
from scheduler_service.simulation.operators import BYTES

OPTIMIZER_BYTES = 12
"""Of one parameter: weight and two moments in FP32."""

LOGIT_BYTES = BYTES + 4
"""Of one logit: itself in BF16, its gradient in FP32."""

RING_BUFFERS = 2 + 2 * 4 / BYTES
"""Sizes of a rank's keys and values: those at hand and those arriving, and both of their gradients in FP32."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on the fullest GPU of a stage."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Kept for the backward by all microbatches in flight, and a layer's that is being computed again."""
    logits: float
    buffers: float
    """Keys, values and gradients on their way round a ring."""
    reserved: float

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(astuple(self)))

    @property
    def largest(self) -> str:
        """Name of the largest term."""
        return max((field.name for field in fields(self)), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class TokenBudget:
    """The largest token budget that a cluster has memory for."""

    tokens: int
    """Tokens of a rank in one microbatch, B; a multiple of TP."""
    binding_stage: int
    """The stage that is full first."""
    stages: tuple[StageMemory, ...]
    """Memory of each stage at this budget."""


def in_flight(cluster: Cluster, stage: int) -> tuple[int, int]:
    """Most microbatches whose activations a stage holds, and in how many chunks each is divided.

    1F1B: p − i. Interleaved: its warm-up and one more, each a chunk of a microbatch.
    """
    behind = cluster.stages - stage - 1
    if cluster.chunks == 1:
        return behind + 1, 1
    return 2 * behind + (cluster.chunks - 1) * cluster.stages + 1, cluster.chunks


def largest_budget(cluster: Cluster) -> TokenBudget:
    """The largest B at which every stage fits with all its microbatches in flight full.

    Raises `InfeasibleError` if not even one token per TP rank fits; it names the stage, its largest term and the memory
    that there is.
    """
    capacity = cluster.hardware.memory_bytes
    empty, full = (stage_memory(cluster, tokens) for tokens in (0, cluster.tp))
    fits = [
        (capacity - fixed.total) / max(one.total - fixed.total, 1.0) * cluster.tp  # 0 beside very much that is fixed
        for fixed, one in zip(empty, full, strict=True)
    ]
    binding = int(np.argmin(fits))
    tokens = int(min(fits[binding], MAX_TOKEN_BUDGET)) // cluster.tp * cluster.tp
    if tokens < cluster.tp:
        need = empty[binding]
        raise InfeasibleError(
            Reason.INFEASIBLE,
            f"cluster {cluster.name}: stage {binding} needs {need.total / 1e9:.1f} GB without any token, a GPU has "
            f"{capacity / 1e9:.1f} GB; most of it are {need.largest}: use more stages, TP, EP or ranks",
        )
    return TokenBudget(tokens, binding, stage_memory(cluster, tokens))


def stage_memory(cluster: Cluster, tokens: float) -> tuple[StageMemory, ...]:
    """Memory of each stage where all microbatches in flight have `tokens` on each rank."""
    windows = [in_flight(cluster, stage) for stage in range(cluster.stages)]
    return _stages(cluster, [tokens * count / parts for count, parts in windows], tokens)


def plan_memory(plan: Plan, batch: Batch, cluster: Cluster) -> tuple[StageMemory, ...]:
    """Memory of each stage's fullest rank under a plan: by the largest window of microbatches that are in flight."""
    tokens = rank_loads(plan, batch).tokens
    sums = np.concatenate((np.zeros((len(tokens), 1)), np.cumsum(tokens, axis=1, dtype=float)), axis=1)
    held = []
    for stage in range(cluster.stages):
        count, parts = in_flight(cluster, stage)
        # A window of chunks covers ⌈count/v⌉ microbatches, of the outermost only a part: counted whole.
        held.append(_largest_window(sums, min(-(-count // parts), tokens.shape[1])))
    return _stages(cluster, held, float(tokens.max()))


def _largest_window(sums: npt.NDArray[np.float64], width: int) -> float:
    return float((sums[:, width:] - sums[:, :-width]).max())


def _stages(cluster: Cluster, held: list[float], microbatch: float) -> tuple[StageMemory, ...]:
    """`held`: tokens of a rank whose activations each stage keeps; `microbatch`: tokens of its largest microbatch."""
    model = cluster.model
    logits = LOGIT_BYTES * model.vocabulary / cluster.tp
    found = []
    for layers, parameters, tokens in zip(cluster.stage_layers, cluster.stage_parameters, held, strict=True):
        shards = (cluster.ranks, cluster.ranks // cluster.ep) if cluster.distributed_optimizer else (1, 1)
        whole, kept = (_stage_bytes(cluster, layers, recompute) for recompute in (Recompute.NONE, cluster.recompute))
        again = (whole - kept) / (layers.dense + layers.moe)  # one layer's of one microbatch at a time
        weights = parameters.shared + parameters.expert
        found.append(
            StageMemory(
                parameters=BYTES * weights,
                gradients=cluster.gradient_bytes * weights,
                optimizer=OPTIMIZER_BYTES * (parameters.shared / shards[0] + parameters.expert / shards[1]),
                activations=kept * tokens + again * microbatch,
                logits=layers.head * logits * microbatch,
                buffers=_ring_bytes(cluster) * microbatch,
                reserved=cluster.reserved_bytes,
            )
        )
    return tuple(found)


def _stage_bytes(cluster: Cluster, layers: StageLayers, recompute: Recompute) -> float:
    """Bytes that a GPU keeps of one token of its rank in all layers of a stage."""
    dense = layers.dense * _layer_numbers(cluster, recompute, moe=False) if layers.dense else 0.0
    moe = layers.moe * _layer_numbers(cluster, recompute, moe=True) if layers.moe else 0.0
    return BYTES * (dense + moe)


def _layer_numbers(cluster: Cluster, recompute: Recompute, *, moe: bool) -> float:
    """Numbers that a GPU keeps of one token of its rank, in one layer, for the backward.

    Inputs of both norms and of what follows them; queries, keys, values, output and its row sums; latents; the gate;
    what goes into and comes out of the activation; and of routed tokens, as many copies as experts, also what was sent
    and what came back. Selective recomputation makes again what follows norms and activations, and what latents are
    projected up to; full recomputation all but the input.
    """
    model, attention, tp = cluster.model, cluster.model.attention, cluster.tp
    if recompute is Recompute.FULL:
        return model.hidden / tp
    cheap = recompute is Recompute.SELECTIVE
    latent = attention.latent_width is not None
    heads = attention.heads * (attention.d_v + 2)  # row sums are FP32: two numbers
    if not (cheap and latent):
        heads += attention.heads * attention.d_qk + attention.kv_heads * (attention.d_qk + attention.d_v)
    if attention.gated:
        heads += (1 if cheap else 2) * attention.heads * attention.d_v
    numbers = ((2 if cheap else 4) * model.hidden + heads) / tp
    numbers += sum(matrix.inner for matrix in model.latent_matrices) / tp
    inner = (3 if model.gated_ffn else 2) - cheap
    if not moe:
        return numbers + inner * model.dense_width / tp
    assert model.experts is not None
    routed = model.experts.top_k * ((1 if cheap else 2) * model.hidden + inner * model.experts.width)
    return numbers + (routed + inner * model.experts.width * model.experts.shared) / tp


def _ring_bytes(cluster: Cluster) -> float:
    """Bytes per token of the largest group's ring buffers."""
    shape = cluster.pool.shape(cluster.pool.degrees[-1])
    return RING_BUFFERS * exchange_bytes(cluster.model.attention, cluster.tp, shape.ulysses, shape.ring).hop
