"""All ranks come to one verdict, and say why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from scheduler_service.domain import HydraCpError, InvalidInputError, Pool, Reason
from tests.support.ranks import run_ranks
from worker_agent.client.agreement import Outcome, Peers, Status, Verdict, decide, outcomes, record

ONE, OTHER = "11" * 16, "22" * 16
HAS = Outcome(Status.PLANNED, ONE)


@pytest.mark.parametrize(
    ("told", "verdict", "why"),
    [
        ([HAS], Verdict.USE, f"all ranks hold plan {ONE}"),
        ([HAS, HAS, HAS], Verdict.USE, f"all ranks hold plan {ONE}"),
        ([HAS, HAS, Outcome(Status.UNREACHABLE)], Verdict.FALL_BACK, "rank 2 cannot reach the scheduler"),
        ([Outcome(Status.UNPLANNED)] * 4, Verdict.FALL_BACK, "ranks 0–3 got no plan from the scheduler in time"),
        (
            [Outcome(Status.REFUSED), HAS, Outcome(Status.REFUSED), Outcome(Status.UNANSWERED)],
            Verdict.FALL_BACK,
            "rank 3 got no answer from the scheduler in time; "
            "ranks 0, 2 got the answer that this batch cannot be planned",
        ),
        (
            [HAS, Outcome(Status.PLANNED, OTHER), HAS],
            Verdict.FALL_BACK,
            f"the ranks hold different plans: {ONE} on ranks 0, 2; {OTHER} on rank 1",
        ),
        (
            [HAS, Outcome(Status.FENCED), Outcome(Status.UNREACHABLE)],
            Verdict.STOP,
            "rank 2 cannot reach the scheduler; rank 1 was told that a higher attempt of the job has taken over",
        ),
        ([Outcome(Status.MISCONFIGURED)] * 2, Verdict.STOP, "ranks 0–1 had the job's registration refused"),
    ],
)
def test_one_plan_on_all_ranks_or_none_of_the_fetched(told: list[Outcome], verdict: Verdict, why: str) -> None:
    decision = decide(told)
    assert decision.verdict is verdict
    assert decision.why == why


def test_only_trouble_with_the_connection_counts_as_disconnected() -> None:
    assert decide([HAS, Outcome(Status.UNREACHABLE)]).disconnected
    assert decide([Outcome(Status.SKIPPED), Outcome(Status.UNANSWERED)]).disconnected
    assert not decide([HAS, Outcome(Status.UNPLANNED)]).disconnected
    assert not decide([HAS, HAS]).disconnected


def test_every_status_that_is_no_plan_keeps_the_ranks_from_using_one() -> None:
    for status in Status:
        verdict = decide([HAS, Outcome(status, ONE if status is Status.PLANNED else "")]).verdict
        assert (verdict is Verdict.USE) == (status is Status.PLANNED)


def test_a_long_list_of_ranks_is_cut_short() -> None:
    told = [Outcome(Status.UNREACHABLE) if rank % 2 else HAS for rank in range(40)]
    assert decide(told).why == "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 12 more cannot reach the scheduler"


def _gather(rank: int) -> tuple[list[Outcome], list[list[int]], str]:
    peers = Peers(dist.group.WORLD, Pool(ranks=3, token_budget=8), timeout_s=30)
    digest = "00" * 15 + f"{rank:02x}"  # ends and begins with zero bytes
    size = (2, 0, 3)[rank]
    status = Status.PLANNED if rank else Status.FENCED
    records = peers.gather_records(record(5, 1, status, rank, sequences=size, digest=digest))
    shards = peers.gather_lengths(np.arange(size, dtype=np.int64) + 10 * rank, records)
    with pytest.raises(HydraCpError) as caught:
        peers.gather_records(record(6 + rank // 2, 0, Status.PLANNED, rank))
    assert caught.value.reason is Reason.RANKS_DISAGREE
    return outcomes(records), [shard.tolist() for shard in shards], str(caught.value)


def test_ranks_gather_records_and_ragged_lengths_and_notice_when_they_are_apart() -> None:
    for told, shards, apart in run_ranks(3, _gather):
        assert told == [Outcome(Status.FENCED), *(Outcome(Status.PLANNED, "00" * 15 + f"0{r}") for r in (1, 2))]
        assert shards == [[0, 1], [], [20, 21, 22]]
        assert "(iteration 6 on ranks 0–1; 7 on rank 2)" in apart
        assert "same order" in apart


def _peer_that_dies(rank: int, folder: str) -> Any:
    peers = Peers(dist.group.WORLD, Pool(ranks=2, token_budget=8), timeout_s=30)
    peers.gather_records(record(0, 0, Status.PLANNED, rank))
    if rank == 1:
        os._exit(1)
    with pytest.raises(HydraCpError) as caught:
        peers.gather_records(record(1, 0, Status.PLANNED, rank))
    Path(folder, "error").write_text(f"{caught.value.reason}: {caught.value}")


def test_the_death_of_a_rank_is_an_error_on_the_others(tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        run_ranks(2, _peer_that_dies, str(tmp_path), timeout_s=60)
    assert (tmp_path / "error").read_text().startswith("RANKS_DISAGREE: the other ranks did not all answer")


def _columns(rank: int) -> tuple[int, list[list[int]], str]:
    """Two tensor-parallel ranks beside each other × two pool ranks; then a rank that takes another's place."""
    peers = Peers(dist.group.WORLD, Pool(ranks=2, token_budget=8), timeout_s=30)
    lengths = np.array([[5, 6], [7]][rank // 2], np.int64)
    records = peers.gather_records(record(0, 0, Status.PLANNED, rank // 2, sequences=len(lengths)))
    shards = [shard.tolist() for shard in peers.gather_lengths(lengths, records)]
    with pytest.raises(HydraCpError) as caught:
        peers.gather_records(record(1, 0, Status.PLANNED, min(rank, 1)))
    assert caught.value.reason is Reason.RANKS_DISAGREE
    return peers.place, shards, str(caught.value)


def test_ranks_that_are_the_same_pool_rank_count_once_and_each_pool_rank_as_often_as_the_others() -> None:
    for rank, (place, shards, wrong) in enumerate(run_ranks(4, _columns)):
        assert place == rank
        assert shards == [[5, 6], [7]]
        assert "4 ranks say that they are pool ranks [0, 1, 1, 1]; each of the 2 has to come 2 times" in wrong


def test_a_process_group_that_no_job_of_the_pool_can_have_is_refused() -> None:
    for pool in (Pool(ranks=4, token_budget=8), Pool(ranks=1, token_budget=8, stages=4)):
        words = f"a pool of {pool.ranks} ranks × {pool.stages} stages was given a process group of 1"
        with pytest.raises(InvalidInputError, match=words):
            Peers(None, pool, 1.0)
