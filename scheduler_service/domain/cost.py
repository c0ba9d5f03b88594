"""The simple cost model: three constants per pipeline stage."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

from scheduler_service.domain.errors import InvalidInputError, Reason

BACKWARD_ATTENTION = 2.5
"""Backward over forward time of attention: five matrix products against two (02-simulation, section 1)."""

BACKWARD_LINEAR = 2.0
"""Backward over forward time of everything that is linear in tokens: gradients of inputs and of weights."""


MIN_SECONDS, MAX_SECONDS = 1e-30, 1e6
"""Least, but for 0, and most seconds that a constant may be. Keeps every prediction finite and rounded alike."""


@dataclass(frozen=True)
class CostModel:
    """Seconds of one stage in one microbatch, as f(attention load, tokens) of a rank.

    forward = theta·load + tau·tokens + overhead, backward = 2.5·theta·load + 2·tau·tokens + overhead.
    The defaults are those of a 256K-context job on H800-like GPUs: planning needs only their ratios.
    """

    theta: float = 2.6e-10
    """Seconds per unit of attention load (token²/degree)."""

    tau: float = 4.1e-5
    """Seconds per token of the rank."""

    overhead: float = 8e-3
    """Fixed seconds per microbatch and stage, forward and again backward."""

    def __post_init__(self) -> None:
        for name in ("theta", "tau", "overhead"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not (value == 0 or MIN_SECONDS <= value <= MAX_SECONDS):
                raise InvalidInputError(
                    Reason.INVALID_COST_MODEL,
                    f"cost model: {name} is {value!r}; give 0, or seconds from {MIN_SECONDS} to {MAX_SECONDS:,.0f}",
                )

    @property
    def theta_over_c(self) -> float:
        """θ/c of the closed form, forward plus backward; infinite without an overhead."""
        if self.overhead == 0:
            return math.inf if self.theta > 0 else 0.0
        return (1 + BACKWARD_ATTENTION) * self.theta / (2 * self.overhead)

    @property
    def digest(self) -> bytes:
        """BLAKE2b-128 of the three constants as little-endian doubles."""
        return hashlib.blake2b(struct.pack("<3d", self.theta, self.tau, self.overhead), digest_size=16).digest()
