from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hydracp.v1 import planner_pb2

from tests.support.planner_client import TIMEOUT_S, fetch_request, planner, register, submit
from tests.support.rest import get, until
from tests.support.scheduler import Scheduler, scheduler

ITERATIONS = 6
SHARDS = ([100, 3000, 50, 900], [70, 2000, 4100])


@dataclass(frozen=True)
class LiveJob:
    service: Scheduler
    name: str
    epoch: str

    @property
    def path(self) -> str:
        return f"/api/v1/jobs/{self.name}"


def shards(iteration: int) -> list[list[int]]:
    """The lengths of an iteration; each has its own."""
    return [[*SHARDS[0], 10 + iteration], [*SHARDS[1], 500 * (iteration + 1)]]


@pytest.fixture(scope="session")
def service() -> Iterator[Scheduler]:
    with scheduler(environment={"HYDRACP_PLANNER_WORKERS": "1"}) as running:
        yield running


@pytest.fixture(scope="session")
def live(service: Scheduler) -> LiveJob:
    """A job with six iterations: 0 … 3 executed (2 by a fallback), 4 ready, 5 waiting for a shard."""
    with planner(service.grpc) as stub:
        job = LiveJob(service, "llm.sft-1", register(stub, "llm.sft-1"))
        for iteration in range(ITERATIONS - 1):
            submit(stub, job.name, job.epoch, iteration, shards(iteration))
            stub.FetchPlan(fetch_request(job.name, job.epoch, iteration, [0]), timeout=TIMEOUT_S)
        submit(stub, job.name, job.epoch, ITERATIONS - 1, shards(ITERATIONS - 1)[:1])
        for iteration in range(4):
            local = iteration == 2
            stub.ReportTimings(
                planner_pb2.ReportTimingsRequest(
                    job=job.name,
                    epoch=job.epoch,
                    timings=[
                        planner_pb2.IterationTiming(
                            iteration=iteration,
                            rank=rank,
                            iteration_s=1 + rank / 10,
                            plan_wait_s=0.25 if local else 0.0,
                            origin=planner_pb2.PLAN_ORIGIN_LOCAL if local else planner_pb2.PLAN_ORIGIN_SERVICE,
                            fallback_reason="no plan within 2 s" if local else "",
                            loss=5.0 - iteration,
                        )
                        for rank in range(4)
                    ],
                ),
                timeout=TIMEOUT_S,
            )
    # Baselines follow the plans.
    until(lambda: len(get(service, f"{job.path}/iterations/4")["baselines_s"]) == 2)
    return job
