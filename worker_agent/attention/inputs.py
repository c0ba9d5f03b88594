"""What the engine is given, checked before anything is sent: a rank that fails later leaves the others waiting."""

from __future__ import annotations

import math

from torch import Tensor

from scheduler_service.domain import InvalidInputError, Reason
from worker_agent.attention.layout import ShardLayout
from worker_agent.groups import Group


def check_layout(layout: ShardLayout, group: Group) -> None:
    """Refuse a layout of another place or shape than the group's."""
    if (layout.ulysses, layout.ring, layout.rank) != (group.ulysses, group.ring, group.rank):
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"the layout is that of rank {layout.rank} of {layout.ulysses} × {layout.ring} ranks, the group that of "
            f"rank {group.rank} of {group.ulysses} × {group.ring}: make both from the same microbatch of the plan",
        )


def check_rows(x: Tensor, rows: int, dims: int) -> None:
    """Refuse what has not `rows` rows or not `dims` dimensions."""
    if x.dim() != dims or x.shape[0] != rows:
        shape = "(t, heads, width)" if dims == 3 else "(t, width)"
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"{described(x)} for a layout of {rows} slots: expected {shape} with t = {rows}, padding included",
        )


def check_attention(q: Tensor, k: Tensor, v: Tensor, slots: int) -> None:
    """Refuse what is not q (slots, h, d_qk), k (slots, h_kv, d_qk) and v (slots, h_kv, d_v) of one kind."""
    fits = (
        q.dim() == k.dim() == v.dim() == 3
        and q.shape[0] == k.shape[0] == v.shape[0] == slots
        and q.shape[2] == k.shape[2]
        and k.shape[1] == v.shape[1]
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and min(q.shape[1], k.shape[1], q.shape[2], v.shape[2]) > 0
    )
    if not fits:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"q {described(q)}, k {described(k)}, v {described(v)} for a layout of {slots} slots: expected "
            f"q (t, h, d_qk), k (t, h_kv, d_qk), v (t, h_kv, d_v) of one dtype on one device, with t = {slots} "
            "and heads and widths of 1 or more",
        )


def check_scale(softmax_scale: float | None) -> None:
    """Refuse a scale that turns the mask's −∞ into something else."""
    if softmax_scale is not None and not (math.isfinite(softmax_scale) and softmax_scale > 0):
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"softmax_scale is {softmax_scale}; give a finite number above 0: kernels scale the mask's −∞, too",
        )


def described(x: Tensor) -> str:
    """Shape, dtype and device, for a message."""
    return f"{tuple(x.shape)} {x.dtype} {x.device}"
