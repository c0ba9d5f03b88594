"""Hops around the ring keep their order, whoever is late."""

from __future__ import annotations

import random
import time
from functools import partial

import torch.distributed as dist

from tests.support.attention import Case, worst_error
from tests.support.exchanges import Waited
from tests.support.ranks import run_ranks
from worker_agent.groups import GroupRegistry

STREAMS = ((1,), (1, 2, 3), (64, 9), (37, 5, 1, 20))
"""In the first ones some ranks have nothing to send, or nothing to receive."""


def late_hops(rank: int, seed: int) -> int:
    """Rings of four and of two beside each other; each rank posts its hops, and notices their end, at random times."""
    pace, hops = random.Random(seed + rank), 0
    post = dist.batch_isend_irecv

    def pause() -> None:
        time.sleep(pace.choice((0, 0, 0.003, 0.01)))

    def noticed_late(work: dist.Work) -> None:
        pause()
        work.wait()

    def posted_late(operations: list[dist.P2POp]) -> list[Waited]:
        nonlocal hops
        hops += 1
        pause()
        return [Waited(partial(noticed_late, work)) for work in post(operations)]

    dist.batch_isend_irecv = posted_late
    registry = GroupRegistry()
    for lengths in STREAMS:
        for start, degree, ulysses in ((0, 4, 1), (rank // 2 * 2, 2, 1), (0, 4, 2)):
            assert worst_error(Case(lengths, kv_heads=2), registry.group(start, degree, ulysses)) < 1e-12
    return hops


def test_hops_that_are_posted_and_noticed_late_deliver_the_right_keys_and_gradients() -> None:
    assert min(run_ranks(4, late_hops, 17)) > 0
