"""A simulated schedule as events of the Chrome trace format, which Perfetto and chrome://tracing show.

One process for each of three replicas (the fastest, the median and the slowest), one lane for each stage, arrows for
what stages send each other, and a counter of microbatches whose activations a stage holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from scheduler_service.simulation.pipeline import PipelineReplay

MICROSECONDS = 1e6


def trace_events(replay: PipelineReplay) -> dict[str, Any]:
    """The trace as JSON writes it: {"traceEvents": […]}, times in microseconds from the earliest start."""
    order = np.argsort(replay.span, kind="stable")
    chosen = {int(order[-1]): "slowest", int(order[len(order) // 2]): "median", int(order[0]): "fastest"}
    if len(order) == 1:
        chosen = {0: "only"}
    events: list[dict[str, Any]] = []
    for process, (replica, name) in enumerate(chosen.items()):
        events += _names(process, f"EP group {replica} ({name}, {replay.span[replica]:.3f} s)", replay.schedule.stages)
        events += _operations(replay, replica, process)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(process: int, name: str, stages: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for stage in range(stages):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": stage, "args": {"name": f"stage {stage}"}}


def _operations(replay: PipelineReplay, replica: int, process: int) -> Iterator[dict[str, Any]]:
    schedule, operations = replay.schedule, replay.operations(replica)
    held = [0] * schedule.stages
    start, end = operations.start_s * MICROSECONDS, operations.end_s * MICROSECONDS
    for i in range(len(schedule)):
        stage, backward = int(schedule.stage[i]), bool(schedule.backward[i])
        here = {"pid": process, "tid": stage}
        chunk = f".{schedule.chunk[i]}" if schedule.chunks > 1 else ""
        kind = "backward" if backward else "forward"
        yield {
            "ph": "X", "name": f"{kind[0].upper()}{schedule.microbatch[i]}{chunk}", "cat": kind, **here,
            "ts": start[i], "dur": end[i] - start[i], "args": {"microbatch": int(schedule.microbatch[i])},
        }  # fmt: skip
        held[stage] += -1 if backward else 1
        yield {
            "ph": "C", "name": f"in flight, stage {stage}", "pid": process,
            "ts": float(end[i] if backward else start[i]), "args": {"microbatches": held[stage]},
        }  # fmt: skip
        if schedule.hop[i]:
            source = int(schedule.source[i])
            arrow = {"name": "send", "cat": "p2p", "id": process * len(schedule) + i, "pid": process}
            yield {"ph": "s", **arrow, "tid": int(schedule.stage[source]), "ts": end[source]}
            yield {"ph": "f", "bp": "e", **arrow, "tid": stage, "ts": start[i]}
