"""The agent's side of planning: it submits lengths, fetches plans ahead of time, and agrees with the other ranks.

`PlanAgent` is what a training loop uses; `PlannerClient` is the plain client under it. No torch is imported
until an agent meets other ranks, so that tools and relays run without it.
"""

import os

# Before grpc is imported: its fork handlers hang the children that a DataLoader forks while calls are in flight.
# A child never uses the channel of its parent (it gets ForkedProcessError), so there is nothing for them to save.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

from worker_agent.client.agent import AgentStatistics, PlanAgent, PlanStep
from worker_agent.client.config import AgentConfig
from worker_agent.client.planner_client import ForkedProcessError, PlannerClient
from worker_agent.client.timing import PlanOrigin, Timing

__all__ = [
    "PlanAgent",
    "PlanStep",
    "PlanOrigin",
    "AgentConfig",
    "AgentStatistics",
    "Timing",
    "PlannerClient",
    "ForkedProcessError",
]
