"""Between records and rows. Pure functions."""

from __future__ import annotations

import zlib
from dataclasses import asdict
from typing import Any

import numpy as np
from sqlalchemy import RowMapping

from scheduler_service.app import (
    EventRecord,
    Failure,
    IterationRecord,
    IterationState,
    JobConfig,
    JobRecord,
    PlannedBatch,
    Stream,
)
from scheduler_service.domain import Batch, CostModel, Plan, PlanHeader, Pool

Row = dict[str, Any]

_COMPRESSION = 1
"""zlib's fastest: the writer shares two cores with the planner, and lengths compress well at any level."""


def job_row(record: JobRecord) -> Row:
    """A job as a row."""
    return asdict(record)


def job_record(row: RowMapping) -> JobRecord:
    """A row as a job."""
    config = row["config"]
    return JobRecord(
        **{
            **row,
            "config": JobConfig(
                pool=Pool(**config["pool"]),
                policy=config["policy"],
                cost=CostModel(**config["cost"]),
                cap=config["cap"],
                loader_shards=config["loader_shards"],
            ),
        }
    )


def iteration_row(record: IterationRecord) -> Row:
    """An iteration as a row."""
    return asdict(record)


def iteration_record(row: RowMapping) -> IterationRecord:
    """A row as an iteration."""
    values = {name: value for name, value in row.items() if name != "id"}
    values["stream"] = Stream(row["stream"])
    values["state"] = IterationState(row["state"])
    values["failure"] = Failure(**row["failure"]) if row["failure"] else None
    for name in ("degree_share", "degree_sequences"):  # JSON has texts for keys
        values[name] = {int(degree): value for degree, value in row[name].items()}
    return IterationRecord(**values)


def plan_row(record: IterationRecord, planned: PlannedBatch) -> Row:
    """A plan as a row: the three columns and the lengths, little-endian, compressed together."""
    plan = planned.plan
    columns = (plan.microbatch, plan.start, plan.degree)
    content = b"".join(column.astype("<i4").tobytes() for column in columns)
    content += planned.batch.lengths.astype("<i4").tobytes()
    return {
        "job": record.job,
        "stream": record.stream,
        "iteration": record.iteration,
        "header": asdict(plan.header),
        "shard_sizes": list(planned.shard_sizes),
        "content": zlib.compress(content, _COMPRESSION),
    }


def planned_batch(row: RowMapping) -> PlannedBatch:
    """A row as a plan."""
    header = row["header"]
    columns = np.frombuffer(zlib.decompress(row["content"]), "<i4").reshape(4, header["sequences"])
    microbatch, start, degree, lengths = columns
    return PlannedBatch(
        plan=Plan(
            microbatch,
            start,
            degree,
            PlanHeader(**{**header, "pool": Pool(**header["pool"]), "cost": CostModel(**header["cost"])}),
        ),
        batch=Batch(lengths),
        shard_sizes=tuple(row["shard_sizes"]),
    )


def event_row(record: EventRecord) -> Row:
    """An event as a row."""
    return asdict(record)


def event_record(row: RowMapping) -> EventRecord:
    """A row as an event."""
    return EventRecord(**{**row, "stream": Stream(row["stream"]) if row["stream"] else None})
