"""The loss of an iteration: Σ of token losses over all valid tokens of the global batch, divided by their number.

It does not depend on the plan: no rank, microbatch or group divides by a count of its own, and a rank whose labels
are all masked adds 0. Two quantities, kept apart: `summed_loss` × `backward_scale` is what gradients come from;
`mean_loss` is what is reported.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import cross_entropy

from worker_agent.data.labels import IGNORE_INDEX


def count_valid(
    labels: Iterable[Tensor], process_group: ProcessGroup | None = None, *, ignore_index: int = IGNORE_INDEX
) -> int:
    """Valid tokens of the global batch, when `labels` are this rank's of all microbatches.

    One all-reduce over `process_group`, the pool's ranks; None: this rank holds everything. Synchronises with an
    accelerator: call it once per iteration, before the first microbatch.
    """
    counts = [(column != ignore_index).sum() for column in labels]
    return int(_summed(torch.stack(counts).sum(), process_group))


def summed_loss(logits: Tensor, labels: Tensor, *, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Σ of the cross entropies of (t, vocabulary) logits against (t,) labels, in fp32 or wider; 0 where none is valid.

    Always part of the graph, so that a dummy runs the same backward: its gradients are exactly 0.
    """
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return cross_entropy(wide, labels, ignore_index=ignore_index, reduction="sum")


def backward_scale(valid_tokens: int, gradient_copies: int = 1) -> float:
    """What a rank multiplies its summed loss by before backward.

    1/valid where gradients are summed over ranks. Wrappers that average gradients over n ranks (DDP, FSDP) take
    `gradient_copies` = n. 0 for a batch without a valid token, whose gradients are then 0 and not NaN.
    """
    return gradient_copies / valid_tokens if valid_tokens else 0.0


def mean_loss(summed: Tensor, valid_tokens: int, process_group: ProcessGroup | None = None) -> float:
    """The reported loss, the same on every rank, from each rank's Σ over its microbatches; 0 without a valid token.

    One all-reduce in fp64 over `process_group`.
    """
    total = float(_summed(summed.detach().double(), process_group))
    return total / valid_tokens if valid_tokens else 0.0


def _summed(value: Tensor, process_group: ProcessGroup | None) -> Tensor:
    if process_group is not None:
        dist.all_reduce(value, group=process_group)
    return value
