"""Seconds of one GPU's operators: attention on a rank's shard, matrix products, and what only moves memory.

Tokens and document sums are arrays, one entry for each CP group; everything else is a number. A group of no tokens
still pays for its launches, as a rank without a sequence does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.simulation.flops import attention_backward, attention_forward, causal_pairs
from scheduler_service.simulation.hardware import Hardware
from scheduler_service.simulation.models import Attention, Matrix

Column = npt.NDArray[np.float64]

BYTES = 2
"""Of a number in BF16."""


class Documents(NamedTuple):
    """The packed documents of a group: all that causal attention depends on."""

    tokens: Column
    """Σ L of each group."""
    squares: Column
    """Σ L² of each group."""


class GroupCut(NamedTuple):
    """How a group's attention is cut over GPUs, and into launches."""

    tp: int = 1
    ulysses: int = 1
    ring: int = 1
    launches: int = 1
    """Kernel launches of one pass: as many as ring steps, or one where all keys are gathered first."""


def attention_forward_s(hardware: Hardware, attention: Attention, documents: Documents, cut: GroupCut) -> Column:
    """Seconds in which one GPU attends: launches·t0 + Σ a·H·L_kv + W/TF.

    H = heads/(tp·P_u) is the GPU's share of query heads, L_kv = L·(1/2 + 1/(2·P_r)) the keys that it walks for a
    document of L tokens, W its causal work. Fitted on FlashAttention-2 on H100 (design of the simulation, section 2);
    the second term is what makes short shards slow, and a ring helps it less than Ulysses does.
    """
    kernel, work = hardware.attention, attention_forward(attention, causal_pairs(*documents))
    return (
        cut.launches * kernel.launch_s
        + _walk_s(hardware, attention, documents, cut)
        + _share(work, cut) / (kernel.forward_flops)
    )


def attention_backward_s(hardware: Hardware, attention: Attention, documents: Documents, cut: GroupCut) -> Column:
    """The same for the backward: five products at its own rate.

    Walking costs in proportion to the products of a step, 5/2 of the forward's: assumed, for want of measurements.
    """
    kernel, work = hardware.attention, attention_backward(attention, causal_pairs(*documents))
    walk = 2.5 * _walk_s(hardware, attention, documents, cut)
    return cut.launches * kernel.launch_s + walk + _share(work, cut) / kernel.backward_flops


def _walk_s(hardware: Hardware, attention: Attention, documents: Documents, cut: GroupCut) -> Column:
    heads = attention.heads / (cut.tp * cut.ulysses)
    return hardware.attention.walk_s * heads * documents.tokens * (0.5 + 0.5 / cut.ring)


def _share(work: Column, cut: GroupCut) -> Column:
    return work / (cut.tp * cut.ulysses * cut.ring)


def product_s(hardware: Hardware, rows: Column, inner: float, columns: float, experts: float = 0) -> Column:
    """Seconds of multiplying `rows` tokens with an (inner × columns) matrix, or with one of each of `experts`.

    The slower of FLOPs/(peak·η), η(M) = η∞·M/(M + half_rows) for M rows of one matrix, and of moving matrices, input
    and output through memory; plus one launch, for experts too (a grouped product).
    """
    matrices, efficiency = max(experts, 1), hardware.gemm_efficiency
    if experts:
        efficiency = hardware.grouped_gemm_efficiency
    # FLOPs/η with η put in: no division by rows, which may be none.
    work = 2 * inner * columns * (rows + matrices * hardware.gemm_half_rows) / (hardware.peak_flops * efficiency)
    moved = BYTES * (matrices * inner * columns + rows * (inner + columns))
    return np.maximum(work, moved / (hardware.memory_bandwidth * hardware.memory_efficiency)) + hardware.launch_s


def products_s(hardware: Hardware, matrices: tuple[Matrix, ...], rows: Column, tp: int) -> Column:
    """Seconds of multiplying a GPU's tokens with each of these.

    Tensor parallelism cuts the columns (or the rows, which is the same work), or else the tokens.
    """
    total = np.zeros_like(rows)
    for matrix in matrices:
        if matrix.split:
            total += product_s(hardware, rows, matrix.inner, matrix.columns / tp)
        else:
            total += product_s(hardware, rows / tp, matrix.inner, matrix.columns)
    return total


def moving_s(hardware: Hardware, moved_bytes: Column, launches: int) -> Column:
    """Seconds of operators that do little but read and write memory."""
    bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency
    return moved_bytes / bandwidth + launches * hardware.launch_s
