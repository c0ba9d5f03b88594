"""Hybrid context-parallel attention: inner Ulysses, outer ring, over packed sequences of any lengths.

layout → which token lies where; ulysses and ring → who sends what; kernels → one adapter per attention library;
merge → partial results; hybrid → all of it as one differentiable call.
"""

from worker_agent.attention.hybrid import hybrid_attention
from worker_agent.attention.layout import ShardLayout

__all__ = ["ShardLayout", "hybrid_attention"]
