"""Seconds of one layer, forward and backward: a rank's own part, and what its EP group does together.

A rank's own part (attention, projections, norms, whatever feed-forward network every token passes, and the exchanges
of its CP group and TP group) depends on its CP group alone: degree, tokens and Σ L². What follows in a layer with
experts is done by the EP group: dispatch, experts, combine.

Arrays of seconds have the shape (2, …): forward, backward. They are whole multiples of `RESOLUTION_S`, so that sums of
them are exact, whatever their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.simulation.cluster import Cluster, Engine, Recompute
from scheduler_service.simulation.collectives import (
    Transfer,
    all_to_all,
    message,
    no_transfer,
    ring_collective,
    team_of,
)
from scheduler_service.simulation.context_parallel import RING_BACKWARD, exchange_bytes
from scheduler_service.simulation.models import Part
from scheduler_service.simulation.operators import (
    BYTES,
    Documents,
    GroupCut,
    attention_backward_s,
    attention_forward_s,
    moving_s,
    product_s,
    products_s,
)

Seconds = npt.NDArray[np.float64]
Column = npt.NDArray[np.float64]

RESOLUTION_S = 2.0**-32
"""A quarter of a nanosecond."""

LONGEST_S = 2.0**21
"""24 days: up to here, sums of multiples of the resolution are exact in double precision."""

BACKWARD_PRODUCTS = 2
"""Products of a matrix product's backward: the gradients of its input and of its weights."""

BACKWARD_MOVES = 2
"""Memory traffic of a norm's or an activation's backward over its forward: reads its input and a gradient."""


def rounded(seconds: npt.ArrayLike, parts: int = 1) -> Column:
    """To whole multiples of the resolution, in `parts` that are whole multiples too."""
    unit = parts * RESOLUTION_S
    return np.round(np.asarray(seconds, np.float64) / unit) * unit


class Traffic(NamedTuple):
    """Bytes that a GPU sends in one layer's forward and backward, (groups,)."""

    node: Column
    network: Column


@dataclass(frozen=True, eq=False)
class OwnLayer:
    """A rank's own part of one layer, each (2, groups) in seconds."""

    attention: Seconds
    linear: Seconds
    """Matrix products, and what only moves memory."""
    context_parallel: Seconds
    """Exchanges of the CP group that nothing hides."""
    tensor_parallel: Seconds
    ulysses_traffic: Traffic
    ring_traffic: Traffic
    tensor_traffic: Traffic

    @property
    def seconds(self) -> Seconds:
        """All of it."""
        return self.attention + self.linear + self.context_parallel + self.tensor_parallel


@dataclass(frozen=True, eq=False)
class ExpertLayer:
    """What an EP group does together in one layer, each (2, …) in seconds."""

    exchange: Seconds
    """Dispatch and combine."""
    experts: Seconds
    traffic: Traffic
    """Bytes that the fullest GPU sends."""

    @property
    def seconds(self) -> Seconds:
        """All of it."""
        return self.exchange + self.experts


def own_layer(
    cluster: Cluster, degree: int, documents: Documents, tokens: Column, *, moe: bool, speed: Column | float = 1.0
) -> OwnLayer:
    """A layer of groups of this degree. `tokens`: on each rank, padding included; `speed`: of its slowest rank.

    What is computed takes 1/speed of the time; exchanges take as long as ever, and have more to hide behind.
    """
    shape = cluster.pool.shape(degree)
    cut = GroupCut(cluster.tp, shape.ulysses, shape.ring, launches=shape.ring)
    gpu, model = cluster.hardware, cluster.model
    forward = attention_forward_s(gpu, model.attention, documents, cut) / speed
    backward = attention_backward_s(gpu, model.attention, documents, cut) / speed
    ulysses, ulysses_exposed = _ulysses(cluster, shape.ulysses, tokens, speed)
    ring, ring_exposed = _ring(cluster, degree, cut, tokens, (forward, backward))
    tensor = ring_collective(gpu, BYTES * model.hidden * tokens, team_of(gpu, cluster.tp))
    collectives = 2 if moe else 4  # a gather and a scatter around attention, and around a dense feed-forward network
    passes = _passes(cluster)
    return OwnLayer(
        attention=_both(cluster, forward, backward),
        linear=_both(cluster, *(seconds / speed for seconds in _linear(cluster, tokens, moe=moe))),
        context_parallel=_both(cluster, *(u + r for u, r in zip(ulysses_exposed, ring_exposed, strict=True))),
        tensor_parallel=_both(cluster, *2 * (collectives * tensor.seconds,)),
        ulysses_traffic=_times(passes, ulysses),
        ring_traffic=_times(passes - 1 + RING_BACKWARD, ring),
        tensor_traffic=_times(passes * collectives, tensor),
    )


def expert_layer(
    cluster: Cluster, most_tokens: Column, mean_tokens: Column, speed: Column | float = 1.0
) -> ExpertLayer:
    """Dispatch, experts, combine of EP groups whose fullest rank has `most_tokens`, and whose ranks have `mean_tokens`.

    Routing is uniform: each GPU's experts get an equal share of the group's tokens, times the cluster's expert load. So
    the group waits for the experts of its slowest rank, whose `speed` this is, whether it has sequences or not.
    Dispatch and combine end when the fullest rank has sent, or received, all of its tokens.
    """
    gpu, model, experts = cluster.hardware, cluster.model, cluster.model.experts
    if experts is None:
        nothing = np.zeros((2, *most_tokens.shape))
        return ExpertLayer(nothing, nothing, Traffic(nothing[0], nothing[0]))
    gpus = cluster.ep * cluster.tp
    copies = most_tokens / cluster.tp * experts.top_k
    sent = all_to_all(gpu, BYTES * model.hidden * copies * (gpus - 1) / gpus, team_of(gpu, gpus))
    rows = mean_tokens * experts.top_k / cluster.tp * cluster.expert_load
    local = max(1.0, experts.count / gpus)
    split = max(1.0, gpus / experts.count)  # more GPUs than experts: each expert on several
    products = sum(
        product_s(gpu, rows * split, matrix.inner, matrix.columns / split, experts=local)
        for matrix in model.expert_matrices
    )
    # Tokens are gathered into the order of the experts and back, and the activation reads two halves and writes one.
    moved = moving_s(gpu, BYTES * rows * (4 * model.hidden + 3 * experts.width), launches=3)
    backward = BACKWARD_PRODUCTS * products + BACKWARD_MOVES * moved
    if cluster.recompute is Recompute.SELECTIVE:
        backward = backward + moving_s(gpu, BYTES * rows * 3 * experts.width, launches=1)
    return ExpertLayer(
        exchange=_both(cluster, 2 * sent.seconds, 2 * sent.seconds),
        experts=_both(cluster, (products + moved) / speed, backward / speed),
        traffic=_times(2 * _passes(cluster), sent),
    )


def head(cluster: Cluster, tokens: Column, speed: Column | float = 1.0) -> Seconds:
    """Output head and loss of one microbatch, (2, groups). The loss reads and writes logits in FP32."""
    gpu, columns = cluster.hardware, cluster.model.vocabulary / cluster.tp
    product = product_s(gpu, tokens, cluster.model.hidden, columns)
    loss = moving_s(gpu, tokens * columns * (BYTES + 2 * 4), launches=3)
    return rounded(np.stack((product + loss, BACKWARD_PRODUCTS * product + loss)) / speed, cluster.chunks)


def _linear(cluster: Cluster, tokens: Column, *, moe: bool) -> tuple[Column, Column]:
    gpu, model, tp = cluster.hardware, cluster.model, cluster.tp
    attention = model.attention
    ffn = model.router_matrices + model.shared_matrices if moe else model.dense_matrices
    products = products_s(gpu, model.attention_matrices + ffn, tokens, tp)
    heads = attention.heads * (attention.d_qk + attention.d_v) + attention.kv_heads * attention.d_qk
    shared = model.experts.width * model.experts.shared if model.experts else 0
    # Two norms and two residual sums: 4 + 6 hidden states; rotary positions, gate: each head in and out; activation.
    moved = BYTES * tokens / tp * (10 * model.hidden + 2 * heads + 3 * (shared if moe else model.dense_width))
    moves = moving_s(gpu, moved, launches=7)
    backward = BACKWARD_PRODUCTS * products + BACKWARD_MOVES * moves
    if cluster.recompute is Recompute.SELECTIVE:
        backward = backward + moves + products_s(gpu, model.latent_matrices, tokens, tp)
    return products + moves, backward


def _ulysses(
    cluster: Cluster, ulysses: int, tokens: Column, speed: Column | float
) -> tuple[Transfer, tuple[Column, Column]]:
    """All that Ulysses sends in a forward, and what of it is exposed, forward and backward.

    Overlapped, queries travel while keys and values are projected, and keys and values beside the gate's projection;
    the output is waited for.
    """
    gpu, model = cluster.hardware, cluster.model
    if ulysses == 1:
        nothing = no_transfer(tokens)
        return nothing, (nothing.seconds, nothing.seconds)
    team = team_of(gpu, ulysses, stride=cluster.tp)
    hybrid = cluster.engine is Engine.HYBRID
    volume = exchange_bytes(model.attention, cluster.tp, ulysses, 1, latent=hybrid)
    parts = [all_to_all(gpu, each * tokens, team) for each in (volume.query, volume.key_value, volume.output)]
    whole = Transfer(*(sum(columns) for columns in zip(*parts, strict=True)))
    if not (hybrid and cluster.exchange_overlap):
        return whole, (whole.seconds, whole.seconds)
    covers = [
        products_s(gpu, tuple(m for m in model.attention_matrices if m.part is part), tokens, cluster.tp) / speed
        for part in (Part.KEY_VALUE, Part.GATE)
    ]
    query, key_value, output = (part.seconds for part in parts)

    def exposed(passes: int) -> Column:
        hidden = (np.maximum(0, query - passes * covers[0]), np.maximum(0, key_value - passes * covers[1]))
        return sum(hidden, output)

    return whole, (exposed(1), exposed(BACKWARD_PRODUCTS))


def _ring(
    cluster: Cluster, degree: int, cut: GroupCut, tokens: Column, attention: tuple[Column, Column]
) -> tuple[Transfer, tuple[Column, Column]]:
    """All that the ring sends in a forward, and what its hops add to attention, forward and backward.

    A hop runs beside an attention step; all steps are as long as the others, the first on the rank's own keys too.
    """
    if cut.ring == 1:
        nothing = no_transfer(tokens)
        return nothing, (nothing.seconds, nothing.seconds)
    volume = exchange_bytes(cluster.model.attention, cluster.tp, cut.ulysses, cut.ring).hop * tokens
    crosses = degree * cluster.tp > cluster.hardware.gpus_per_node
    hops = cut.ring - 1
    hop = message(cluster.hardware, volume, crosses_nodes=crosses)
    back = message(cluster.hardware, RING_BACKWARD * volume, crosses_nodes=crosses)
    exposed = [
        hops * np.maximum(0, hop.seconds - seconds / cut.ring)
        for hop, seconds in zip((hop, back), attention, strict=True)
    ]
    return Transfer(*(hops * column for column in hop)), (exposed[0], exposed[1])


def _both(cluster: Cluster, forward: Column, backward: Column) -> Seconds:
    """(2, …): recomputation runs the forward again before the backward."""
    forward, backward = rounded(forward, cluster.chunks), rounded(backward, cluster.chunks)
    return np.stack((forward, backward + forward if cluster.recompute is Recompute.FULL else backward))


def _passes(cluster: Cluster) -> int:
    """How often a symmetric exchange of the forward is made: again in the backward, and in a recomputation."""
    return 3 if cluster.recompute is Recompute.FULL else 2


def _times(factor: float, transfer: Transfer) -> Traffic:
    return Traffic(factor * transfer.node_bytes, factor * transfer.network_bytes)
