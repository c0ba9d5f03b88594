"""The interface that every scheduling system implements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, CostModel, InvalidInputError, Plan, PlanHeader, Pool, Reason
from scheduler_service.simulation.objective import Objective


@dataclass(frozen=True)
class PlanningConfig:
    """What a policy may look at besides the batch and the pool."""

    cost: CostModel = field(default_factory=CostModel)
    cap: int | None = None
    """Fixes the degree cap C; None lets the policy choose."""
    objective: Objective | None = None
    """What a policy that searches minimises; None: the iteration by the simple cost model."""

    def __post_init__(self) -> None:
        if self.cap is not None and (isinstance(self.cap, bool) or not isinstance(self.cap, int | np.integer)):
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT, f"cap is {self.cap!r}; give a degree of the pool, a whole number, or None"
            )


class Policy(Protocol):
    """A scheduling system: a pure function, deterministic to the byte."""

    def __call__(self, batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
        """Plan `batch` on `pool`. Raises `InfeasibleError` where no plan of this system can hold it."""
        ...


def new_plan(
    policy: str,
    batch: Batch,
    pool: Pool,
    config: PlanningConfig,
    columns: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    *,
    target: float = 0.0,
    cap: int = 0,
) -> Plan:
    """A plan from its columns (microbatch, start, degree); predictions are filled in by `plan_iteration`."""
    microbatch, start, degree = (np.asarray(column, np.int32) for column in columns)
    used = int(microbatch.max()) + 1
    header = PlanHeader(
        policy=policy,
        pool=pool,
        cost=config.cost,
        microbatches=-(-used // pool.microbatch_multiple) * pool.microbatch_multiple,
        sequences=len(batch),
        batch_digest=batch.digest,
        target=target,
        cap=cap,
    )
    return Plan(microbatch, start, degree, header)
