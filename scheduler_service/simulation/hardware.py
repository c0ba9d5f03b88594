"""A GPU and the links that it sits on: constants of operator times, in bytes, seconds and operations per second."""

from __future__ import annotations

from dataclasses import dataclass, fields

from scheduler_service.domain import InvalidInputError, Reason

LEAST, MOST = 1e-20, 1e20
"""What any constant lies between. Keeps every prediction finite."""


@dataclass(frozen=True)
class AttentionKernel:
    """How fast an attention kernel runs packed causal documents; see `operators.attention_forward_s`."""

    launch_s: float
    """Seconds of a launch, whatever it does."""
    walk_s: float
    """Seconds per query head and key that a document walks: what makes short shards slow."""
    forward_flops: float
    """Operations per second of long documents, forward."""
    backward_flops: float
    """The same, backward."""

    def __post_init__(self) -> None:
        _require_positive(self, "hardware: attention")


@dataclass(frozen=True)
class Hardware:
    """One GPU of a cluster. Raises `InvalidInputError` for a constant without meaning."""

    name: str
    peak_flops: float
    """Dense BF16 operations per second."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second of its memory."""
    node_bandwidth: float
    """Effective bytes per second, one way, to the other GPUs of its node."""
    network_bandwidth: float
    """Effective bytes per second, one way, of its network card."""
    attention: AttentionKernel
    gpus_per_node: int = 8
    gemm_efficiency: float = 0.7
    """Share of the peak that a dense matrix product of very many rows reaches, η∞."""
    grouped_gemm_efficiency: float = 0.4
    """The same for the experts' products."""
    gemm_half_rows: int = 512
    """Rows at which a product reaches half of that share: η(M) = η∞·M/(M + this)."""
    memory_efficiency: float = 0.8
    """Share of the memory bandwidth that operators reach."""
    launch_s: float = 5e-6
    """Seconds of any other operator's launch."""
    collective_launch_s: float = 8.4e-6
    """Seconds of a collective that moves nothing."""
    node_hop_s: float = 3.4e-6
    """Latency of one step of a ring inside a node."""
    network_hop_s: float = 14e-6
    """Latency of one step of a ring, or of one message, between nodes."""

    def __post_init__(self) -> None:
        _require_positive(self, f"hardware {self.name}")


def _require_positive(constants: Hardware | AttentionKernel, where: str) -> None:
    for field in fields(constants):
        value = getattr(constants, field.name)
        if isinstance(value, int | float) and not LEAST <= value <= MOST:
            raise InvalidInputError(
                Reason.INVALID_ARGUMENT,
                f"{where}: {field.name} is {value!r}; give a number above 0, from {LEAST:g} to {MOST:g}",
            )
