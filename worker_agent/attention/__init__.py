"""Hybrid context-parallel attention: inner Ulysses, outer ring, over packed sequences of any lengths.

layout → which token lies where; ulysses, overlap and ring → who sends what, and what runs meanwhile; kernels → one
adapter per attention library; merge → partial results; hybrid and latent → all of it as one differentiable call.
"""

from worker_agent.attention.hybrid import hybrid_attention
from worker_agent.attention.latent import latent_attention
from worker_agent.attention.layout import ShardLayout
from worker_agent.attention.overlap import gradient_anchor, start_exchange, start_gather
from worker_agent.attention.ring import ring_attention

__all__ = [
    "ShardLayout",
    "hybrid_attention",
    "latent_attention",
    "start_exchange",
    "start_gather",
    "ring_attention",
    "gradient_anchor",
]
