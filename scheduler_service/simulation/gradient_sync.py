"""What follows the last backward: gradients to the replicas, the optimizer's step, parameters back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_service.simulation.cluster import Cluster
from scheduler_service.simulation.collectives import Transfer, ring_collective, team_of
from scheduler_service.simulation.operators import BYTES, moving_s

BUCKET_PARAMETERS = 40e6
"""Parameters of a bucket at least. Source: Megatron-Core's default, which grows with the ranks (see `Cluster`)."""

STEP_BYTES = 30
"""Per parameter that a GPU updates: reads gradient, weight and two moments in FP32 (16), writes three (12) and BF16."""


@dataclass(frozen=True, eq=False)
class GradientSync:
    """Seconds of each stage's exchanges, (stages,), the whole of them and their last bucket alone."""

    reduce_s: npt.NDArray[np.float64]
    gather_s: npt.NDArray[np.float64]
    bucket_reduce_s: npt.NDArray[np.float64]
    bucket_gather_s: npt.NDArray[np.float64]
    step_s: npt.NDArray[np.float64]
    """The optimizer's step."""
    node_bytes: float
    """Sent by all GPUs of the job, inside nodes."""
    network_bytes: float

    def exposed_reduce_s(self, last_backward_s: npt.NDArray[np.float64], overlap: bool) -> npt.NDArray[np.float64]:
        """Seconds after each stage's last backward: the last bucket at least, and what that backward did not hide."""
        return _exposed(self.reduce_s, self.bucket_reduce_s, last_backward_s, overlap)

    def exposed_gather_s(self, first_forward_s: npt.NDArray[np.float64], overlap: bool) -> npt.NDArray[np.float64]:
        """Seconds before each stage's first forward."""
        return _exposed(self.gather_s, self.bucket_gather_s, first_forward_s, overlap)


def gradient_sync(cluster: Cluster) -> GradientSync:
    """Exchanges and step of one iteration.

    With a distributed optimizer gradients are reduce-scattered and BF16 parameters gathered; without, gradients are
    all-reduced, which is a reduce-scatter and a gather of them.
    """
    gather_bytes = BYTES if cluster.distributed_optimizer else cluster.gradient_bytes
    zero = np.zeros(cluster.stages)
    reduce, gather = _Sum(zero.copy()), _Sum(zero.copy())
    bucket_reduce, bucket_gather, updated = zero.copy(), zero.copy(), zero.copy()
    replicas = {"shared": (cluster.ranks, 1), "expert": (cluster.ranks // cluster.ep, cluster.ep)}
    for kind, (size, apart) in replicas.items():
        team = team_of(cluster.hardware, size, stride=cluster.tp * apart)
        parameters = np.array([getattr(stage, kind) for stage in cluster.stage_parameters])
        buckets = np.maximum(1, np.ceil(parameters / max(BUCKET_PARAMETERS, cluster.bucket_parameters * size)))
        for total, bucket, each in (
            (reduce, bucket_reduce, cluster.gradient_bytes), (gather, bucket_gather, gather_bytes),
        ):  # fmt: skip
            one = ring_collective(cluster.hardware, each * parameters / buckets, team)
            one = one._replace(seconds=np.where(parameters > 0, one.seconds, 0.0))
            total.add(one, buckets)
            np.maximum(bucket, one.seconds, out=bucket)
        updated += parameters / (size if cluster.distributed_optimizer else 1)
    gpus = cluster.ranks * cluster.tp
    return GradientSync(
        reduce.seconds, gather.seconds, bucket_reduce, bucket_gather,
        step_s=moving_s(cluster.hardware, STEP_BYTES * updated, launches=4),
        node_bytes=gpus * (reduce.node_bytes + gather.node_bytes),
        network_bytes=gpus * (reduce.network_bytes + gather.network_bytes),
    )  # fmt: skip


@dataclass
class _Sum:
    seconds: npt.NDArray[np.float64]
    node_bytes: float = 0.0
    network_bytes: float = 0.0

    def add(self, one: Transfer, times: npt.NDArray[np.float64]) -> None:
        self.seconds += times * one.seconds
        self.node_bytes += float((times * one.node_bytes).sum())
        self.network_bytes += float((times * one.network_bytes).sum())


def _exposed(
    whole: npt.NDArray[np.float64], bucket: npt.NDArray[np.float64], cover: npt.NDArray[np.float64], overlap: bool
) -> npt.NDArray[np.float64]:
    return np.maximum(bucket, whole - cover) if overlap else whole
