"""Collectives that are recorded, held back or delayed, in the process that asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Start = Callable[[Tensor, Callable[[], dist.Work]], Any]
"""Given where rows will arrive, and what starts the collective: returns what is waited for."""


@dataclass
class Waited:
    """Stands for a collective: `wait` runs `action`."""

    action: Callable[[], object]

    def wait(self) -> None:
        self.action()


@contextmanager
def intercepted(start: Start) -> Iterator[None]:
    """Every all-to-all and all-gather of tensors is started by `start`."""

    def through(collective: Callable[..., Any], received: Tensor, *arguments: Any, **options: Any) -> Any:
        return start(received, partial(collective, received, *arguments, **options))

    with ExitStack() as patches:
        for name in ("all_to_all_single", "all_gather_single", "all_gather_into_tensor"):
            if collective := getattr(dist, name, None):  # the names differ between versions of torch
                patches.enter_context(patch.object(dist, name, partial(through, collective)))
        yield


def held_back(received: Tensor, collective: Callable[[], dist.Work]) -> Waited:
    """Nothing arrives before it is waited for: whoever reads earlier reads NaN."""
    received.fill_(torch.nan)
    return Waited(lambda: collective().wait())


def delayed(received: Tensor, collective: Callable[[], dist.Work], seconds: float) -> Waited:
    """A slow network: rows are here `seconds` after the launch at the earliest. Costs no processor."""
    due = time.monotonic() + seconds
    work = collective()

    def arrive() -> None:
        work.wait()
        time.sleep(max(0.0, due - time.monotonic()))

    return Waited(arrive)


class Recorder(TorchDispatchMode):
    """What ran, in order: "launch n" and "wait n" of the nth collective, and by name what worked with known tensors.

    A name stands for a matrix product, or a product of elements, with that tensor or a part of it, in forward or in
    backward; "attention" for the kernel. The same event twice in a row is one event.
    """

    def __init__(self, names: dict[str, Tensor]) -> None:
        super().__init__()
        self.events: list[str] = []
        self._names = {x.untyped_storage().data_ptr(): name for name, x in names.items()}
        self._launches = 0

    def take(self) -> list[str]:
        """The events since the last time; launches are numbered anew."""
        events, self.events, self._launches = self.events, [], 0
        return events

    def start(self, received: Tensor, collective: Callable[[], dist.Work]) -> Waited:
        """For `intercepted`."""
        self._launches += 1
        number = self._launches
        self._add(f"launch {number}")
        work = collective()

        def arrive() -> None:
            self._add(f"wait {number}")
            work.wait()

        return Waited(arrive)

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        kind = operator.overloadpacket.__name__
        if "flash_attention" in kind:
            self._add("attention")
        elif kind in ("mm", "mul"):
            for x in arguments:
                if isinstance(x, Tensor) and (name := self._names.get(x.untyped_storage().data_ptr())):
                    self._add(name)
        return operator(*arguments, **(options or {}))

    def _add(self, event: str) -> None:
        if not self.events or self.events[-1] != event:
            self.events.append(event)
