"""What one rank measured in one iteration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PlanOrigin(StrEnum):
    """Where the plan that ran came from."""

    SERVICE = "service"
    LOCAL = "local"


@dataclass(frozen=True)
class Timing:
    """What one rank measured in one training iteration: hydracp.v1.IterationTiming."""

    iteration: int
    rank: int
    iteration_s: float
    """From the start of the iteration to the end of its optimizer step."""
    plan_wait_s: float = 0.0
    """What the step waited for its plan."""
    origin: PlanOrigin = PlanOrigin.SERVICE
    fallback_reason: str = ""
    digest: str = ""
    """Digest of the plan that ran."""
    forward_s: tuple[float, ...] = ()
    """Forward seconds of each microbatch."""
    backward_s: tuple[float, ...] = ()
    """Backward seconds of each microbatch."""
    loss: float = 0.0
    """The iteration's loss, the same on every rank."""
    ulysses_bytes: int = 0
    ring_bytes: int = 0
    ep_bytes: int = 0
