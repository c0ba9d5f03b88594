"""Slices of plans as they go over the wire: cut and serialised once per plan and set of ranks, sent many times."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

from hydracp.v1 import planner_pb2

from scheduler_service.app import PlannedBatch
from scheduler_service.domain import slice_plan
from scheduler_service.transport import codec

_THREADS = 2


class SliceCache:
    """Lives as long as the plans: when one leaves the window, its slices go too."""

    def __init__(self) -> None:
        self._slices: WeakKeyDictionary[PlannedBatch, dict[tuple[int, ...], asyncio.Future[bytes]]] = (
            WeakKeyDictionary()
        )
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="hydracp-slices")

    async def get(self, planned: PlannedBatch, ranks: tuple[int, ...]) -> bytes:
        """A FetchPlanResponse that holds only the slice of `ranks`. Raises `InvalidInputError` for wrong ranks."""
        known = self._slices.setdefault(planned, {})
        if ranks not in known:
            loop = asyncio.get_running_loop()
            known[ranks] = loop.run_in_executor(self._threads, _serialised, planned, ranks)
        made = known[ranks]
        try:
            return await asyncio.shield(made)  # a caller that goes away takes no one else's slice along
        except Exception:
            known.pop(ranks, None)
            raise

    def close(self) -> None:
        """Let go of the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _serialised(planned: PlannedBatch, ranks: tuple[int, ...]) -> bytes:
    part = slice_plan(planned.plan, planned.batch, planned.shard_sizes, ranks)
    return planner_pb2.FetchPlanResponse(slice=codec.slice_message(part)).SerializeToString()
