"""What context parallelism exchanges: an inner Ulysses over neighbours, an outer ring (engine design, section 5).

Bytes that one GPU sends for one layer, as numbers per token of its rank. The backward of an exchange by Ulysses sends
the same again; the ring's sends keys, values and their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from scheduler_service.simulation.models import Attention
from scheduler_service.simulation.operators import BYTES

RING_BACKWARD = 1 + 4 / BYTES
"""Bytes of the ring's backward over its forward: keys and values again, and their gradients in FP32."""


@dataclass(frozen=True)
class ExchangeBytes:
    """Bytes that a GPU sends per token of its rank, in one layer's forward."""

    query: float
    key_value: float
    """By all-to-all, or by gathering the latent where that is less."""
    output: float
    hop: float
    """One hop of the ring: all keys and values that the GPU holds."""

    @property
    def ulysses(self) -> float:
        """All that Ulysses sends."""
        return self.query + self.key_value + self.output


def exchange_bytes(attention: Attention, tp: int, ulysses: int, ring: int, *, latent: bool = True) -> ExchangeBytes:
    """Bytes per token for a group of ulysses × ring ranks, heads divided over `tp` GPUs.

    KV heads of a Ulysses rank: h' = h/gcd(h/h_kv, h/P_u) over all, so that each rank has those its query heads need.
    Keys and values travel whole, or, with `latent`, as the latent that they are made from where that is less:
    (P_u − 1)·width instead of (P_u − 1)/P_u·h'(d_qk + d_v).
    """
    heads = max(1, attention.heads // tp)
    kv_heads = max(1, attention.kv_heads // tp)
    travelling = heads / gcd(max(1, heads // kv_heads), max(1, heads // ulysses))
    width = attention.d_qk + attention.d_v
    away = (ulysses - 1) / ulysses
    key_value = away * travelling * width
    if latent and attention.latent_width is not None:
        key_value = min(key_value, (ulysses - 1) * attention.latent_width)
    return ExchangeBytes(
        query=BYTES * away * heads * attention.d_qk,
        key_value=BYTES * key_value,
        output=BYTES * away * heads * attention.d_v,
        # Ulysses has spread the heads, so what a rank holds in the ring is as much as its own tokens' keys and values.
        hop=BYTES * travelling * width if ring > 1 else 0.0,
    )
