"""Hybrid context-parallel attention: inner Ulysses, outer ring, over packed sequences of any lengths."""

from worker_agent.attention.layout import ShardLayout

__all__ = ["ShardLayout"]
