"""How ranks decide together which plan an iteration runs by.

`decide` is pure: every rank calls it with what every rank has, and so comes to the same verdict, with the same
reason in words. `Peers` brings the ranks' records together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import HydraCpError, InvalidInputError, Pool, Reason

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Scalar = TypeVar("_Scalar", bound=np.generic)


class Status(IntEnum):
    """How a rank fares with the plan of an iteration. Values travel between ranks."""

    PLANNED = 0
    """It holds a plan."""
    UNREACHABLE = 1
    """No connection to the service."""
    UNANSWERED = 2
    """The service holds the connection but does not answer."""
    UNPLANNED = 3
    """The service answers, but had no plan within the time."""
    REFUSED = 4
    """The service, or the local planner, cannot plan this batch, or fails."""
    SKIPPED = 5
    """Not asked for: some rank still has no connection after an iteration without one."""
    FENCED = 6
    """A higher attempt of the job took over: this process is to stop."""
    MISCONFIGURED = 7
    """The service refuses the job's registration."""


_WORDS = {
    Status.UNREACHABLE: "cannot reach the scheduler",
    Status.UNANSWERED: "got no answer from the scheduler in time",
    Status.UNPLANNED: "got no plan from the scheduler in time",
    Status.REFUSED: "got the answer that this batch cannot be planned",
    Status.SKIPPED: "did not ask, since other ranks still cannot reach the scheduler",
    Status.FENCED: "was told that a higher attempt of the job has taken over",
    Status.MISCONFIGURED: "had the job's registration refused",
}

_STOPPING = {Status.FENCED: Reason.ATTEMPT_FENCED, Status.MISCONFIGURED: Reason.JOB_CONFLICT}

CONNECTION = frozenset({Status.UNREACHABLE, Status.UNANSWERED, Status.SKIPPED})
"""What trying again quickly does not mend."""


@dataclass(frozen=True)
class Outcome:
    """What one rank has: a plan by its digest, or a status that says why not."""

    status: Status
    digest: str = ""


class Verdict(Enum):
    """What all ranks do."""

    USE = "use the plan of the service"
    FALL_BACK = "plan locally, all of them"
    STOP = "stop, all of them"


@dataclass(frozen=True)
class Decision:
    """The verdict, and why."""

    verdict: Verdict
    why: str
    """In words; the same on every rank."""
    stop_reason: Reason | None = None
    """For programs, with STOP."""
    disconnected: bool = False
    """Whether the connection of any rank was the trouble."""


def decide(outcomes: Sequence[Outcome]) -> Decision:
    """What the ranks do, by what each has (`outcomes[rank]`): one plan on all of them, or none of the fetched ones."""
    for status, reason in _STOPPING.items():
        if any(outcome.status == status for outcome in outcomes):
            return Decision(Verdict.STOP, _complaints(outcomes), stop_reason=reason)
    if any(outcome.status != Status.PLANNED for outcome in outcomes):
        disconnected = any(outcome.status in CONNECTION for outcome in outcomes)
        return Decision(Verdict.FALL_BACK, _complaints(outcomes), disconnected=disconnected)
    ranks_of: dict[str, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        ranks_of.setdefault(outcome.digest, []).append(rank)
    if len(ranks_of) > 1:
        told = "; ".join(f"{digest} on {_ranks(ranks)}" for digest, ranks in ranks_of.items())
        return Decision(Verdict.FALL_BACK, f"the ranks hold different plans: {told}")
    return Decision(Verdict.USE, f"all ranks hold plan {outcomes[0].digest}")


def _complaints(outcomes: Sequence[Outcome]) -> str:
    """Who lacks a plan and why, one clause per status."""
    clauses = []
    for status, words in _WORDS.items():
        ranks = [rank for rank, outcome in enumerate(outcomes) if outcome.status == status]
        if ranks:
            clauses.append(f"{_ranks(ranks)} {words}")
    return "; ".join(clauses)


def _ranks(ranks: Sequence[int]) -> str:
    """'rank 3', 'ranks 0–7', or 'ranks 1, 5, 6 and 9 more'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}–{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


RECORD = np.dtype(
    [
        ("iteration", "<i8"),
        ("step", "<i4"),
        ("status", "<i4"),
        ("rank", "<i4"),
        ("sequences", "<i4"),
        ("digest", "u1", 16),
    ]
)
"""What ranks tell each other: 40 bytes. `step` counts the exchanges of one iteration, `rank` is the pool rank."""


def record(
    iteration: int, step: int, status: Status, rank: int, *, sequences: int = 0, digest: str = ""
) -> npt.NDArray[np.void]:
    """One rank's record, shape (1,)."""
    row = np.zeros(1, RECORD)
    row["iteration"], row["step"], row["status"] = iteration, step, status
    row["rank"], row["sequences"] = rank, sequences
    if digest:
        row["digest"] = np.frombuffer(bytes.fromhex(digest), np.uint8)
    return row


def outcomes(records: npt.NDArray[np.void]) -> list[Outcome]:
    """What the ranks' records say of their plans."""
    return [
        Outcome(Status(int(row["status"])), row["digest"].tobytes().hex() if row["status"] == Status.PLANNED else "")
        for row in records
    ]


class Peers:
    """All ranks of the job, on a process group that nothing else uses; without one, a job of one rank.

    With tensor or pipeline parallelism several ranks are the same rank of `pool`: they load the same sequences and run
    by the same plan, so all of them agree. `place` is this rank's among all. A collective that fails or times out
    leaves the group unusable: it is the end of the agent.
    """

    def __init__(self, process_group: ProcessGroup | None, pool: Pool, timeout_s: float) -> None:
        self.place, self._size = (0, 1) if process_group is None else (process_group.rank(), process_group.size())
        if self._size % (pool.ranks * pool.stages):
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT,
                f"agent: a pool of {pool.ranks} ranks × {pool.stages} stages was given a process group of "
                f"{self._size}; give a gloo group of all ranks of the job, of every stage and tensor-parallel rank",
            )
        self._group = process_group
        self._pool_ranks = pool.ranks
        self._timeout = timedelta(seconds=timeout_s)

    def gather(self, own: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
        """Every rank's array, in the order of the ranks, end to end; all have the same size and type.

        Raises `HydraCpError` (RANKS_DISAGREE) where a rank is gone or does not come within the time.
        """
        if self._group is None:
            return own
        import torch  # not before there are other ranks: tools and relays run without it
        import torch.distributed as dist

        mine = torch.from_numpy(np.ascontiguousarray(own).view(np.uint8).reshape(-1).copy())
        theirs = [torch.empty_like(mine) for _ in range(self._size)]
        try:
            dist.all_gather(theirs, mine, group=self._group, async_op=True).wait(self._timeout)
        except RuntimeError as error:
            seconds = self._timeout.total_seconds()
            raise HydraCpError(
                Reason.RANKS_DISAGREE, f"the other ranks did not all answer within {seconds:g} s, or died: {error}"
            ) from error
        return torch.cat(theirs).numpy().view(own.dtype)

    def gather_records(self, own: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Every rank's record, by place. Raises `HydraCpError` where ranks are apart, or are not the pool's."""
        records = self.gather(own)
        for name in ("iteration", "step"):
            if (records[name] != own[name]).any():
                where = "; ".join(
                    f"{value} on {_ranks(np.flatnonzero(records[name] == value).tolist())}"
                    for value in np.unique(records[name])[:8]
                )
                raise HydraCpError(
                    Reason.RANKS_DISAGREE,
                    f"ranks are not at the same {name} ({name} {where}); every rank submits the same iterations "
                    "in the same order",
                )
        found = np.bincount(records["rank"], minlength=self._pool_ranks)
        if (found != self._size // self._pool_ranks).any():
            raise HydraCpError(
                Reason.RANKS_DISAGREE,
                f"the job's {self._size} ranks say that they are pool ranks {records['rank'].tolist()[:64]}; each of "
                f"the {self._pool_ranks} has to come {self._size // self._pool_ranks} times",
            )
        return records

    def gather_lengths(self, own: npt.NDArray[np.int64], records: npt.NDArray[np.void]) -> list[npt.NDArray[np.int64]]:
        """The lengths by pool rank, when everybody holds what its record says; of the first that is this pool rank."""
        padded = np.zeros(max(1, int(records["sequences"].max())), np.int64)
        padded[: len(own)] = own
        rows = self.gather(padded).reshape(len(records), -1)
        _, firsts = np.unique(records["rank"], return_index=True)
        return [np.array(rows[place, : records["sequences"][place]], np.int64) for place in firsts]
