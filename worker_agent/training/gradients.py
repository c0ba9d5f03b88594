"""Gradients of one model that lives on many ranks: summed over every copy of a parameter, measured once.

A rank's gradients are those of its own token losses, already divided by the token count of the whole global
batch; so the sum over the ranks is the gradient of the mean loss, whatever the plan. Nothing is averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_ELEMENTS = 1 << 22
"""Most elements of one all-reduce, unless a single parameter is larger."""


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sum each parameter's gradient over `group`, in flat buckets; every parameter then has a gradient.

    `group` None means one rank. A parameter that got no gradient here counts as zero, so that ranks whose
    tokens missed an expert still join the same all-reduces.
    """
    for bucket in _buckets(parameters):
        pieces = [parameter.grad if parameter.grad is not None else torch.zeros_like(parameter) for parameter in bucket]
        if group is None:
            summed = pieces
        else:
            flat = torch.cat([piece.flatten() for piece in pieces])
            dist.all_reduce(flat, group=group)
            summed = list(flat.split([piece.numel() for piece in pieces]))
        for parameter, gradient in zip(bucket, summed, strict=True):
            parameter.grad = gradient.view_as(parameter)


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    elements = 0
    for parameter in parameters:
        if bucket and elements + parameter.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
        bucket.append(parameter)
        elements += parameter.numel()
    if bucket:
        yield bucket


@torch.no_grad()
def gradient_norm(
    dense: Iterable[nn.Parameter],
    experts: Iterable[nn.Parameter],
    expert_group: dist.ProcessGroup | None,
    stage_group: dist.ProcessGroup | None = None,
) -> float:
    """Euclidean norm of the whole model's gradient: dense parameters once, each expert on its own rank.

    Call after `sum_gradients`; the ranks of `expert_group` (None: one rank) hold one copy of every expert, those of
    `stage_group` (None: one stage) one copy of every layer.
    """
    squares = _squares(experts)
    if expert_group is not None:
        dist.all_reduce(squares, group=expert_group)
    squares += _squares(dense)
    if stage_group is not None:
        dist.all_reduce(squares, group=stage_group)
    return float(squares.sqrt())


def _squares(parameters: Iterable[nn.Parameter]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        if parameter.grad is not None:
            total += parameter.grad.to(torch.float64).square().sum()
    return total


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale the gradients so that a model-wide `norm` above `max_norm` becomes `max_norm`."""
    if norm > max_norm:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(max_norm / norm)
