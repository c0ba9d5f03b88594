"""Use cases: jobs, the life of their iterations, planning in worker processes, events, the verdict.

Everything here runs on one asyncio loop, except planning itself; clock and history are injected. It knows
neither protobuf nor HTTP nor SQL: transport, api and store come to it, never the reverse.
"""

from scheduler_service.app.records import (
    EventRecord,
    Failure,
    IterationRecord,
    IterationState,
    JobConfig,
    JobRecord,
    PlannedBatch,
    Stream,
)

__all__ = [
    "Stream",
    "EventRecord",
    "Failure",
    "IterationRecord",
    "IterationState",
    "JobConfig",
    "JobRecord",
    "PlannedBatch",
]
