"""A training job as the scheduler sees it: registers, submits lengths, fetches plans and reports timings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration
from hydracp.v1 import plan_pb2, planner_pb2, planner_pb2_grpc

_TIMEOUT_S = 60.0


class TrainingJob:
    """One registered job. Lengths span three orders of magnitude and depend on the iteration's number alone."""

    def __init__(self, stub: planner_pb2_grpc.PlannerServiceStub, name: str, pool: plan_pb2.Pool) -> None:
        self._stub = stub
        self.name = name
        self.pool = pool
        answer = stub.RegisterJob(
            planner_pb2.RegisterJobRequest(
                job=name,
                pool=pool,
                cost=plan_pb2.CostModel(theta=2.6e-10, tau=4.1e-5, overhead=8e-3),
                loader_shards=2,
                plan_formats=[1],
            ),
            timeout=_TIMEOUT_S,
        )
        self._epoch = answer.epoch

    def submit(self, iteration: int, sequences: int, shards: int = 2) -> None:
        """Submit the lengths of an iteration, half of them from each of two loaders, or from the first alone."""
        longest = self.pool.token_budget * self.pool.ranks // 2
        random = np.random.default_rng(iteration)
        lengths = np.clip(random.lognormal(7.0, 1.5, sequences), 16, longest).astype(int)
        for shard, part in list(enumerate(np.array_split(lengths, 2)))[:shards]:
            self._stub.SubmitLengths(
                planner_pb2.SubmitLengthsRequest(
                    job=self.name, epoch=self._epoch, iteration=iteration, shard=shard, lengths=part.tolist()
                ),
                timeout=_TIMEOUT_S,
            )

    def fetch(self, iteration: int) -> plan_pb2.PlanSlice:
        """Wait for the plan of an iteration."""
        answer = self._stub.FetchPlan(
            planner_pb2.FetchPlanRequest(
                job=self.name, epoch=self._epoch, iteration=iteration, wait=Duration(seconds=int(_TIMEOUT_S))
            ),
            timeout=_TIMEOUT_S,
        )
        assert answer.HasField("slice"), f"iteration {iteration} has no plan after {_TIMEOUT_S} s"
        return answer.slice

    def report(self, iteration: int, plan: plan_pb2.PlanSlice, fallback_reason: str = "") -> None:
        """Report the iteration done by every rank, a little slower than predicted."""
        origin = planner_pb2.PLAN_ORIGIN_LOCAL if fallback_reason else planner_pb2.PLAN_ORIGIN_SERVICE
        timings = [
            planner_pb2.IterationTiming(
                iteration=iteration,
                rank=rank,
                iteration_s=plan.predicted_s * (1.02 + 0.001 * (rank % 8)),
                plan_wait_s=0.0002,
                origin=origin,
                fallback_reason=fallback_reason,
                digest=plan.digest,
                loss=2.0 + 8.0 * 0.9**iteration,
            )
            for rank in range(self.pool.ranks)
        ]
        self._stub.ReportTimings(
            planner_pb2.ReportTimingsRequest(job=self.name, epoch=self._epoch, timings=timings), timeout=_TIMEOUT_S
        )

    def run(self, first: int, last: int, sequences: int) -> None:
        """Run iterations `first` … `last`, each planned while the one before runs."""
        self.submit(first, sequences)
        for iteration in range(first, last + 1):
            if iteration < last:
                self.submit(iteration + 1, sequences)
            self.report(iteration, self.fetch(iteration))


@contextmanager
def training_job(target: str, name: str, **pool: int) -> Iterator[TrainingJob]:
    """Register the job `name` with a scheduler; `pool` are fields of hydracp.v1.Pool."""
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        yield TrainingJob(planner_pb2_grpc.PlannerServiceStub(channel), name, plan_pb2.Pool(**pool))
