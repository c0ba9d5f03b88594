"""Pipeline parallelism on one rank: one forward, one backward (1F1B), over microbatches of any shape.

Stage i of p runs p − 1 − i forwards ahead, then a forward and a backward in turn, then what backwards are left; a plan
with fewer microbatches than stages runs as well. Between two operations goes one batch of messages: what the last one
made, and what the next one needs. Both ends know every shape from the plan, so nothing is said about it.

All ranks of a stage run the same operations in the same order, so that the collectives of a stage (attention groups,
experts) meet. A pipeline of one stage runs the same code and sends nothing.

`torch.distributed.pipelining` (2.13) cannot be used here: a `PipelineStage` infers one shape from the first microbatch,
allocates the receive buffers of all others by it and refuses tensors of another, and its `Schedule1F1B` refuses fewer
microbatches than stages. Plans have microbatches of every size, dummies among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from worker_agent.communication import ByteCounters


class Operation(NamedTuple):
    """One pass of one microbatch through a stage."""

    microbatch: int
    backward: bool

    def __str__(self) -> str:
        return f"the {'backward' if self.backward else 'forward'} of microbatch {self.microbatch}"


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Operation]:
    """What `stage` of `stages` runs, in order (PipeDream-flush; Narayanan et al. 2021, arXiv 2104.04473)."""
    ahead = min(stages - 1 - stage, microbatches)
    order = [Operation(index, backward=False) for index in range(ahead)]
    for index in range(microbatches - ahead):
        order += [Operation(ahead + index, backward=False), Operation(index, backward=True)]
    return order + [Operation(index, backward=True) for index in range(microbatches - ahead, microbatches)]


@dataclass(frozen=True)
class PipelineTimes:
    """Seconds of each microbatch on this stage; waits for other ranks of the stage included, for other stages not."""

    forward_s: list[float]
    backward_s: list[float]


@dataclass(frozen=True)
class Pipeline:
    """This rank's place among the ranks of all stages that hold the same pool rank."""

    stage: int = 0
    stages: int = 1
    process_group: dist.ProcessGroup | None = None
    """These ranks, first stage first; None for one stage."""
    counters: ByteCounters | None = None

    @property
    def is_first(self) -> bool:
        """Whether tokens enter here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is taken here."""
        return self.stage == self.stages - 1

    def run(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        forward: Callable[[int, Tensor | None], Tensor],
    ) -> PipelineTimes:
        """Run all microbatches forward and backward; gradients add up in the parameters.

        `shapes[m]` is what microbatch m has between stages. `forward(m, x)` maps what came from the stage before
        (None on the first) to what goes to the next, or on the last stage to the scalar whose gradient is wanted.
        An error gets a note that says in which operation it came up.
        """
        times = PipelineTimes([0.0] * len(shapes), [0.0] * len(shapes))
        inputs: dict[int, Tensor | None] = {}
        outputs: dict[int, Tensor] = {}
        messages = _Messages(self, shapes, dtype, device)
        operations = one_forward_one_backward(self.stage, self.stages, len(shapes))
        arrived = messages.exchange(None, None, operations[0]) if operations else None
        for operation, following in zip_longest(operations, operations[1:]):
            index, began = operation.microbatch, time.perf_counter()
            result: Tensor | None
            try:
                if operation.backward:
                    torch.autograd.backward(outputs.pop(index), arrived)
                    entered = inputs.pop(index)
                    result = None if entered is None else entered.grad
                    times.backward_s[index] = time.perf_counter() - began
                else:
                    inputs[index] = None if arrived is None else arrived.requires_grad_()
                    result = outputs[index] = forward(index, inputs[index])
                    times.forward_s[index] = time.perf_counter() - began
                arrived = messages.exchange(operation, result, following)
            except Exception as error:
                error.add_note(f"in {operation}, {len(shapes)} microbatches, on stage {self.stage} of {self.stages}")
                raise
        messages.finish()
        return times


class _Messages:
    """Activations to the next stage, their gradients to the one before."""

    def __init__(
        self, pipeline: Pipeline, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._pipeline, self._shapes, self._dtype, self._device = pipeline, shapes, dtype, device
        self._leaving: list[dist.Work] = []
        self._kept: Tensor | None = None

    def exchange(self, done: Operation | None, result: Tensor | None, following: Operation | None) -> Tensor | None:
        """Send the `result` of `done` and wait for what `following` needs; None where that is nothing.

        One batch: the two stages that trade an activation for a gradient name both at once, in any order.
        """
        operations = []
        self.finish()
        receiver = None if done is None else self._peer(-1 if done.backward else 1)
        if receiver is not None:
            assert result is not None
            self._kept = result.detach().contiguous()  # until it has left
            operations.append(dist.P2POp(dist.isend, self._kept, receiver, self._pipeline.process_group))
            if self._pipeline.counters is not None:
                self._pipeline.counters.add("pipeline", self._kept.numel() * self._kept.element_size())
        sender = None if following is None else self._peer(1 if following.backward else -1)
        received = None
        if following is not None and sender is not None:
            received = torch.empty(self._shapes[following.microbatch], dtype=self._dtype, device=self._device)
            operations.append(dist.P2POp(dist.irecv, received, sender, self._pipeline.process_group))
        self._leaving = dist.batch_isend_irecv(operations) if operations else []
        if received is not None:
            self.finish()
        return received

    def finish(self) -> None:
        """Wait for what is under way."""
        for work in self._leaving:
            work.wait()
        self._leaving = []

    def _peer(self, stages_ahead: int) -> int | None:
        """Global rank of the neighbour; None beyond the ends."""
        neighbour = self._pipeline.stage + stages_ahead
        if self._pipeline.process_group is None or not 0 <= neighbour < self._pipeline.stages:
            return None
        return dist.get_global_rank(self._pipeline.process_group, neighbour)
